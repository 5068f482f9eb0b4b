//! Events: each thing is told once, however often it is decided. Must never hold a duty up, nor decide anything.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, PoisonError};

use super::world::World;
use crate::cluster::events::{self, Told};

/// How many things are remembered as told. What falls out may be told again, and then stands there already.
const MOST_REMEMBERED: usize = 10_000;

/// What was told.
#[derive(Debug, Default)]
pub struct Teller(Mutex<Memory>);

#[derive(Debug, Default)]
struct Memory {
    names: BTreeSet<String>,
    order: VecDeque<String>,
}

impl Teller {
    /// Whether this is new; from now on it is not.
    fn is_new(&self, told: &Told) -> bool {
        let mut memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let name = told.name();
        if !memory.names.insert(name.clone()) {
            return false;
        }
        memory.order.push_back(name);
        if memory.order.len() > MOST_REMEMBERED
            && let Some(oldest) = memory.order.pop_front()
        {
            memory.names.remove(&oldest);
        }
        true
    }
}

impl World {
    /// Tells an event, unless it was told before.
    pub async fn tell(&self, told: Told) {
        if self.teller.is_new(&told) {
            events::tell(&mut self.hands.carrier(), &told).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_thing_is_told_once_and_memory_has_an_end() {
        let teller = Teller::default();
        let told = |message: String| Told {
            about: events::pod("db", "db-0", "u"),
            reason: "Test",
            message,
            warning: false,
        };
        assert!(teller.is_new(&told("a".into())));
        assert!(!teller.is_new(&told("a".into())));
        for n in 0..MOST_REMEMBERED {
            assert!(teller.is_new(&told(n.to_string())));
        }
        assert!(teller.is_new(&told("a".into())), "it was forgotten");
        assert_eq!(teller.0.lock().unwrap().names.len(), MOST_REMEMBERED);
    }
}
