//! The verbs of the protocol and what each needs.

use std::fmt;

use crate::cni::version::CniVersion;

/// What a runtime may ask for in `CNI_COMMAND`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Verb {
    /// Give a container its address.
    Add,
    /// Take it away.
    Del,
    /// See that all is as ADD left it.
    Check,
    /// Free what no longer belongs to anyone.
    Gc,
    /// Tell whether ADD would be served.
    Status,
    /// Tell which versions are spoken.
    Version,
}

impl Verb {
    pub const ALL: [Self; 6] = [Self::Add, Self::Del, Self::Check, Self::Gc, Self::Status, Self::Version];

    /// Reads a verb; only capital letters will do.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|verb| verb.as_str() == text)
    }

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Gc => "GC",
            Self::Status => "STATUS",
            Self::Version => "VERSION",
        }
    }

    /// The first version of the specification that has the verb.
    pub const fn since(self) -> CniVersion {
        match self {
            Self::Add | Self::Del | Self::Version => CniVersion::V0_1_0,
            Self::Check => CniVersion::V0_4_0,
            Self::Gc | Self::Status => CniVersion::V1_1_0,
        }
    }

    /// The variables that must be there and not empty.
    pub(crate) const fn required(self) -> &'static [&'static str] {
        match self {
            Self::Add | Self::Check => &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"],
            Self::Del => &["CNI_CONTAINERID", "CNI_IFNAME"],
            Self::Gc => &["CNI_PATH"],
            Self::Status | Self::Version => &[],
        }
    }

    /// Whether the verb is about one container.
    pub(crate) const fn has_attachment(self) -> bool {
        matches!(self, Self::Add | Self::Del | Self::Check)
    }

    /// Whether the verb only frees, and so must not fail over settings that only ADD needs.
    pub(crate) const fn is_lenient(self) -> bool {
        matches!(self, Self::Del | Self::Gc)
    }
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
