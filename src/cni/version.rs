//! The versions of the CNI specification that are spoken.

use std::fmt;

/// A version of the specification. The order is the order of their publication.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CniVersion {
    /// 0.1.0, also meant when a configuration names no version.
    V0_1_0,
    V0_2_0,
    /// 0.3.0: results with lists of addresses and interfaces.
    V0_3_0,
    V0_3_1,
    /// 0.4.0: CHECK.
    V0_4_0,
    /// 1.0.0: no family marker in results.
    V1_0_0,
    /// 1.1.0: GC and STATUS.
    V1_1_0,
}

impl CniVersion {
    /// Every version that is spoken, oldest first.
    pub(crate) const SUPPORTED: [Self; 7] =
        [Self::V0_1_0, Self::V0_2_0, Self::V0_3_0, Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];

    /// The newest version, used where the caller's is not known.
    pub(crate) const LATEST: Self = Self::V1_1_0;

    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::V0_1_0 => "0.1.0",
            Self::V0_2_0 => "0.2.0",
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    /// Reads a version; an empty text is 0.1.0, from the time when configurations had none.
    pub(crate) fn parse(text: &str) -> Result<Self, UnknownVersion> {
        if text.is_empty() {
            return Ok(Self::V0_1_0);
        }
        match Self::SUPPORTED.into_iter().find(|v| v.as_str() == text) {
            Some(version) => Ok(version),
            None if is_well_formed(text) => Err(UnknownVersion::Unsupported),
            None => Err(UnknownVersion::Malformed),
        }
    }

    pub(crate) fn supported_list() -> String {
        Self::SUPPORTED.map(Self::as_str).join(", ")
    }
}

impl fmt::Display for CniVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What is wrong with a version that is not spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnknownVersion {
    /// A version, but none of ours.
    Unsupported,
    /// Not one to three numbers with dots between them.
    Malformed,
}

/// Whether the text is one to three numbers with dots between them.
pub(crate) fn is_well_formed(text: &str) -> bool {
    let is_number = |part: &str| (1..=9).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
    text.split('.').count() <= 3 && text.split('.').all(is_number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_supported_version_reads_back_as_itself_and_they_stand_in_order() {
        for version in CniVersion::SUPPORTED {
            assert_eq!(CniVersion::parse(&version.to_string()), Ok(version));
        }
        assert!(CniVersion::SUPPORTED.is_sorted());
        assert_eq!(CniVersion::SUPPORTED.last(), Some(&CniVersion::LATEST));
    }

    #[test]
    fn no_version_means_the_first_one() {
        assert_eq!(CniVersion::parse(""), Ok(CniVersion::V0_1_0));
    }

    #[test]
    fn an_unsupported_version_is_distinguished_from_an_invalid_one() {
        for text in ["9.9.9", "1.1", "0.5.0", "2"] {
            assert_eq!(CniVersion::parse(text), Err(UnknownVersion::Unsupported), "{text}");
        }
        for text in ["abc", "1.1.0.0", "1..0", "v1.0.0", " 1.0.0", "99999999999999.0.0"] {
            assert_eq!(CniVersion::parse(text), Err(UnknownVersion::Malformed), "{text}");
        }
    }
}
