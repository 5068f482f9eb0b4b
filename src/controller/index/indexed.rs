//! A cache of one kind of object that is also found by values in it, not by its name alone. Every event
//! updates both, so that a search does not visit all objects. Synchronous. Must never be taken for live, as
//! [`Cache`].

use std::collections::BTreeSet;
use std::ops::Deref;

use crate::runtime::cache::{Cache, CacheEvent};

pub trait IndexKeys {
    type IndexKey: Ord + Clone;

    /// The values by which this object is found, in any order; one that is there twice counts once.
    fn index_keys(&self) -> Vec<Self::IndexKey>;
}

/// Every object of one kind, by name and by its index keys.
#[derive(Debug)]
pub struct IndexedCache<T: IndexKeys> {
    cache: Cache<T>,
    by: BTreeSet<(T::IndexKey, String)>,
}

impl<T: IndexKeys> Default for IndexedCache<T> {
    fn default() -> Self {
        Self { cache: Cache::default(), by: BTreeSet::new() }
    }
}

impl<T: IndexKeys> Deref for IndexedCache<T> {
    type Target = Cache<T>;

    fn deref(&self) -> &Cache<T> {
        &self.cache
    }
}

impl<T: IndexKeys + PartialEq> IndexedCache<T> {
    /// Applies an event, as [`Cache::apply`].
    pub fn apply(&mut self, event: CacheEvent<(String, T)>) -> Vec<String> {
        let is_complete = matches!(event, CacheEvent::ListComplete);
        let touched = match &event {
            CacheEvent::Applied((name, _)) | CacheEvent::Deleted(name) | CacheEvent::Unreadable(name) => {
                Some(name.clone())
            }
            CacheEvent::ListStarted | CacheEvent::Listed(_) | CacheEvent::ListComplete => None,
        };
        for pair in touched.iter().flat_map(|name| of(&self.cache, name)) {
            self.by.remove(&pair);
        }
        let changed = self.cache.apply(event);
        if is_complete {
            self.by = self.cache.iter().flat_map(|(name, object)| pairs(name, object)).collect();
        }
        self.by.extend(touched.iter().flat_map(|name| of(&self.cache, name)));
        changed
    }

    /// There are none, as after an empty list.
    pub(crate) fn apply_empty_list(&mut self) -> Vec<String> {
        self.apply(CacheEvent::ListStarted);
        self.apply(CacheEvent::ListComplete)
    }
}

impl<T: IndexKeys> IndexedCache<T> {
    /// The names of those with this index key.
    pub(crate) fn with<'a>(&'a self, by: &'a T::IndexKey) -> impl Iterator<Item = &'a String> {
        let from = self.by.range((by.clone(), String::new())..);
        from.take_while(move |(key, _)| key == by).map(|(_, name)| name)
    }
}

fn pairs<T: IndexKeys>(name: &str, object: &T) -> impl Iterator<Item = (T::IndexKey, String)> {
    object.index_keys().into_iter().map(move |by| (by, name.to_owned()))
}

fn of<T: IndexKeys>(cache: &Cache<T>, name: &str) -> Vec<(T::IndexKey, String)> {
    cache.get(name).into_iter().flat_map(|object| pairs(name, object)).collect()
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
            let (mut indexed, mut plain) = (IndexedCache::default(), Cache::default());
            for event in changes {
                prop_assert_eq!(indexed.apply(event.clone()), plain.apply(event));
                for by in 0..4 {
                    let says = |(_, object): &(&String, &Vec<u8>)| object.contains(&by);
                    let expected: Vec<&String> = plain.iter().filter(says).map(|(name, _)| name).collect();
                    prop_assert_eq!(indexed.with(&by).collect::<Vec<_>>(), expected);
                }
            }
        }
    }
}
