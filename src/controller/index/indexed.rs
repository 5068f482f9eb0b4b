//! One kind of object that is found by something it says, too, and not by its name alone. Kept in step with every change, so
//! that a search does not walk all of them. Synchronous. Must never be taken for live, as [`Cache`].

use std::collections::BTreeSet;
use std::ops::Deref;

use crate::runtime::cache::{Cache, CacheEvent};

/// What objects of a kind are looked for by.
pub trait IndexKeys {
    /// What they say.
    type IndexKey: Ord + Clone;

    /// What this one says, in any order; what it says twice counts once.
    fn index_keys(&self) -> Vec<Self::IndexKey>;
}

/// Every object of one kind, by name and by what it says.
#[derive(Debug)]
pub struct IndexedCache<T: IndexKeys> {
    known: Cache<T>,
    by: BTreeSet<(T::IndexKey, String)>,
}

impl<T: IndexKeys> Default for IndexedCache<T> {
    fn default() -> Self {
        Self { known: Cache::default(), by: BTreeSet::new() }
    }
}

impl<T: IndexKeys> Deref for IndexedCache<T> {
    type Target = Cache<T>;

    fn deref(&self) -> &Cache<T> {
        &self.known
    }
}

impl<T: IndexKeys> From<Cache<T>> for IndexedCache<T> {
    fn from(known: Cache<T>) -> Self {
        let by = known.iter().flat_map(|(name, object)| pairs(name, object)).collect();
        Self { known, by }
    }
}

impl<T: IndexKeys + PartialEq> IndexedCache<T> {
    /// Applies an event, as [`Cache::apply`].
    pub fn apply(&mut self, event: CacheEvent<(String, T)>) -> Vec<String> {
        let is_whole = matches!(event, CacheEvent::ListComplete);
        let touched = match &event {
            CacheEvent::Applied((name, _)) | CacheEvent::Deleted(name) | CacheEvent::Unreadable(name) => {
                Some(name.clone())
            }
            CacheEvent::ListStarted | CacheEvent::Listed(_) | CacheEvent::ListComplete => None,
        };
        for pair in touched.iter().flat_map(|name| of(&self.known, name)).collect::<Vec<_>>() {
            self.by.remove(&pair);
        }
        let changed = self.known.apply(event);
        if is_whole {
            self.by = self.known.iter().flat_map(|(name, object)| pairs(name, object)).collect();
        }
        self.by.extend(touched.iter().flat_map(|name| of(&self.known, name)));
        changed
    }

    /// There are none, as after an empty list.
    pub fn apply_empty_list(&mut self) -> Vec<String> {
        self.apply(CacheEvent::ListStarted);
        self.apply(CacheEvent::ListComplete)
    }
}

impl<T: IndexKeys> IndexedCache<T> {
    /// The names of those that say this.
    pub fn with<'a>(&'a self, by: &'a T::IndexKey) -> impl Iterator<Item = &'a String> {
        let from = self.by.range((by.clone(), String::new())..);
        from.take_while(move |(said, _)| said == by).map(|(_, name)| name)
    }

    /// Everything that is said, with who says it, in order.
    pub fn all_said(&self) -> impl Iterator<Item = &(T::IndexKey, String)> {
        self.by.iter()
    }
}

fn pairs<T: IndexKeys>(name: &str, object: &T) -> impl Iterator<Item = (T::IndexKey, String)> {
    object.index_keys().into_iter().map(move |by| (by, name.to_owned()))
}

fn of<T: IndexKeys>(known: &Cache<T>, name: &str) -> Vec<(T::IndexKey, String)> {
    known.get(name).into_iter().flat_map(|object| pairs(name, object)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl IndexKeys for Vec<u8> {
        type IndexKey = u8;

        fn index_keys(&self) -> Vec<u8> {
            self.clone()
        }
    }

    fn any_change() -> impl Strategy<Value = CacheEvent<(String, Vec<u8>)>> {
        let name = || (0u8..4).prop_map(|n| n.to_string());
        let object = || (name(), proptest::collection::vec(0u8..4, 0..3));
        prop_oneof![
            Just(CacheEvent::ListStarted),
            Just(CacheEvent::ListComplete),
            object().prop_map(CacheEvent::Listed),
            object().prop_map(CacheEvent::Applied),
            name().prop_map(CacheEvent::Deleted),
            name().prop_map(CacheEvent::Unreadable),
        ]
    }

    proptest! {
        #[test]
        fn objects_are_found_by_what_they_name_and_no_others(changes in proptest::collection::vec(any_change(), 0..40)) {
            let (mut sorted, mut plain) = (IndexedCache::default(), Cache::default());
            for told in changes {
                prop_assert_eq!(sorted.apply(told.clone()), plain.apply(told));
                for by in 0..4 {
                    let says = |(_, object): &(&String, &Vec<u8>)| object.contains(&by);
                    let expected: Vec<&String> = plain.iter().filter(says).map(|(name, _)| name).collect();
                    prop_assert_eq!(sorted.with(&by).collect::<Vec<_>>(), expected);
                }
            }
        }
    }
}
