//! When something happened, in a form that can be compared later even if the clock was set.
//!
//! Within one boot the uptime counts, which cannot be set; across boots only the wall clock is left.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::store::Result;
use crate::store::error::cannot;

/// A moment: the wall clock for people, uptime and boot for arithmetic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeTime {
    #[serde(with = "rfc3339")]
    wall: u64,
    uptime: u64,
    boot: String,
}

impl NodeTime {
    /// From seconds of the wall clock, seconds since the boot, and which boot.
    pub fn new(wall: u64, uptime: u64, boot: impl Into<String>) -> Self {
        Self { wall, uptime, boot: boot.into() }
    }

    /// Now, with the boot id read from `boot_id_file`.
    /// Errors: the boot id is not to be had: without it a reboot looks like a restart.
    pub fn now(boot_id_file: &Path) -> Result<Self> {
        let failed = cannot("read the boot id", boot_id_file);
        let boot = fs::read_to_string(boot_id_file).map_err(&failed)?;
        let boot = boot.trim();
        if boot.is_empty() {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidData, "the file is empty")));
        }
        #[expect(clippy::disallowed_methods, reason = "the one place where the store reads the wall clock")]
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let uptime = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from);
        Ok(Self::new(wall, uptime.as_secs(), boot))
    }

    pub fn boot(&self) -> &str {
        &self.boot
    }

    /// Seconds of the wall clock since 1970.
    pub fn wall(&self) -> u64 {
        self.wall
    }

    /// How long ago `earlier` was. Never more than what has really passed because the clock was set back:
    /// then, and for a moment that seems to lie ahead, the answer is zero.
    pub fn since(&self, earlier: &NodeTime) -> Duration {
        let seconds = if self.boot == earlier.boot {
            self.uptime.saturating_sub(earlier.uptime)
        } else {
            self.wall.saturating_sub(earlier.wall)
        };
        Duration::from_secs(seconds)
    }

    pub(crate) fn to_rfc3339(&self) -> String {
        rfc3339::print(self.wall)
    }
}

mod rfc3339 {
    use super::{OffsetDateTime, Rfc3339};
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(super) fn print(wall: u64) -> String {
        i64::try_from(wall)
            .ok()
            .and_then(|wall| OffsetDateTime::from_unix_timestamp(wall).ok())
            .and_then(|date| date.format(&Rfc3339).ok())
            .unwrap_or_else(|| "1970-01-01T00:00:00Z".to_owned())
    }

    pub(super) fn serialize<S: Serializer>(wall: &u64, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&print(*wall))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
        let text = String::deserialize(from)?;
        let date = OffsetDateTime::parse(&text, &Rfc3339).map_err(de::Error::custom)?;
        u64::try_from(date.unix_timestamp()).map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn within_a_boot_a_clock_that_is_set_back_or_ahead_changes_nothing() {
        let then = NodeTime::new(1_000_000, 50, "a");
        assert_eq!(NodeTime::new(10, 80, "a").since(&then), Duration::from_secs(30));
        assert_eq!(NodeTime::new(9_000_000, 80, "a").since(&then), Duration::from_secs(30));
    }

    #[test]
    fn across_boots_a_clock_that_was_set_back_never_makes_it_longer() {
        let then = NodeTime::new(1_000_000, 50, "a");
        assert_eq!(NodeTime::new(999_000, 7, "b").since(&then), Duration::ZERO);
        assert_eq!(NodeTime::new(1_000_100, 7, "b").since(&then), Duration::from_secs(100));
    }

    #[test]
    fn a_moment_is_kept_in_a_form_that_people_read() {
        let moment = NodeTime::new(1_760_000_000, 9, "boot");
        let text = serde_json::to_string(&moment).unwrap();
        assert_eq!(text, r#"{"wall":"2025-10-09T08:53:20Z","uptime":9,"boot":"boot"}"#);
        assert_eq!(serde_json::from_str::<NodeTime>(&text).unwrap(), moment);
    }
}
