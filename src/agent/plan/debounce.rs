//! What looked wrong, since when, and in which state: nothing is released because it looked wrong once. Lost
//! with the process without harm: everything then takes longer. Time is an argument.

use std::collections::BTreeMap;
use std::time::Duration;

/// How long something must look wrong, unchanged, before it is wrong.
pub(crate) const LONG: Duration = Duration::from_secs(15);
/// The same where a running ADD or DEL is the only other reason, and acting early costs only a read.
pub(crate) const SHORT: Duration = Duration::from_secs(2);

/// Everything that looked wrong in the last round.
#[derive(Debug, Clone, Default)]
pub struct Debounce {
    before: BTreeMap<String, (String, Duration)>,
    seen: BTreeMap<String, (String, Duration)>,
}

impl Debounce {
    /// Whether `what` has looked wrong in exactly this state for `long`, in at least two rounds.
    pub(crate) fn stable_for(&mut self, what: String, state: String, long: Duration, now: Duration) -> bool {
        let since = match self.before.get(&what) {
            Some((before, since)) if *before == state => *since,
            _ => now,
        };
        self.seen.insert(what, (state, since));
        now.saturating_sub(since) >= long && now > since
    }

    /// Ends a round: what was not named in it does not look wrong any more.
    pub(crate) fn end_round(&mut self) {
        self.before = std::mem::take(&mut self.seen);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_looks_wrong_twice_unchanged_and_for_long_is_wrong() {
        let mut debounce = Debounce::default();
        let mut look = |state: Option<&str>, at: u64| {
            let stable_for = state.is_some_and(|state| {
                debounce.stable_for("a".into(), state.into(), LONG, Duration::from_secs(at))
            });
            debounce.end_round();
            stable_for
        };
        assert!(!look(Some("1"), 0));
        assert!(!look(Some("1"), 14));
        assert!(look(Some("1"), 15));
        assert!(!look(Some("2"), 30), "it changed");
        assert!(!look(None, 40));
        assert!(!look(Some("2"), 50), "it looked right in between");
        assert!(look(Some("2"), 65));
    }
}
