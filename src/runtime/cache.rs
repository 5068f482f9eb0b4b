//! The local cache of one kind of object, fed by a watch. Synchronous. May be stale: what is written must
//! rest on a live read or on a resourceVersion, never on the cache alone.

use std::collections::{BTreeMap, BTreeSet};

/// One event of a watch.
#[derive(Debug, Clone, PartialEq)]
pub enum CacheEvent<T> {
    ListStarted,
    /// An object of the new list.
    Listed(T),
    /// The list is complete: what it does not name is gone.
    ListComplete,
    /// An object was created or changed.
    Applied(T),
    /// The object of this name was deleted.
    Deleted(String),
    /// The object of this name exists and cannot be read.
    Unreadable(String),
}

/// Every object of one kind, by name.
#[derive(Debug, Clone)]
pub struct Cache<T> {
    objects: BTreeMap<String, T>,
    unreadable: BTreeSet<String>,
    /// The list that is being read: it replaces the other two once it is complete.
    new_list: Option<(BTreeMap<String, T>, BTreeSet<String>)>,
    synced: bool,
}

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), unreadable: BTreeSet::new(), new_list: None, synced: false }
    }
}

impl<T: PartialEq> Cache<T> {
    /// Applies an event. Returns the names whose object differs now: none for a list that repeats what is
    /// cached.
    pub fn apply(&mut self, event: CacheEvent<(String, T)>) -> Vec<String> {
        let changed = match event {
            CacheEvent::ListStarted => {
                self.new_list = Some(Default::default());
                None
            }
            CacheEvent::Listed((name, object)) => {
                self.new_list.get_or_insert_default().0.insert(name, object);
                None
            }
            CacheEvent::ListComplete => return self.replace(),
            CacheEvent::Applied((name, object)) => {
                let was_unreadable = self.unreadable.remove(&name);
                let same = self.objects.get(&name) == Some(&object);
                self.objects.insert(name.clone(), object);
                (!same || was_unreadable).then_some(name)
            }
            CacheEvent::Deleted(name) => {
                let existed = self.unreadable.remove(&name) | self.objects.remove(&name).is_some();
                existed.then_some(name)
            }
            CacheEvent::Unreadable(name) => match &mut self.new_list {
                Some((_, unreadable)) => {
                    unreadable.insert(name);
                    None
                }
                None => {
                    self.objects.remove(&name);
                    self.unreadable.insert(name.clone());
                    Some(name)
                }
            },
        };
        changed.into_iter().collect()
    }

    fn replace(&mut self) -> Vec<String> {
        let (objects, unreadable) = self.new_list.take().unwrap_or_default();
        let before = std::mem::replace(&mut self.objects, objects);
        let unreadable_before = std::mem::replace(&mut self.unreadable, unreadable);
        self.synced = true;
        let gone = before.keys().filter(|name| !self.objects.contains_key(*name));
        let other = self.objects.iter().filter(|(name, object)| before.get(*name) != Some(*object));
        let unreadable = self.unreadable.symmetric_difference(&unreadable_before);
        gone.chain(other.map(|(name, _)| name)).chain(unreadable).cloned().collect()
    }
}

impl<T> Cache<T> {
    /// Whether a list was complete once.
    pub fn is_synced(&self) -> bool {
        self.synced
    }

    pub fn iter(&self) -> impl Iterator<Item = (&String, &T)> + Clone {
        self.objects.iter()
    }

    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.objects.keys()
    }

    pub fn values(&self) -> impl Iterator<Item = &T> + Clone {
        self.objects.values()
    }

    /// Every object whose name starts with this, in the order of names.
    pub fn with_prefix<'a>(&'a self, prefix: &str) -> impl Iterator<Item = (&'a String, &'a T)> {
        self.objects.range(prefix.to_owned()..).take_while(move |(name, _)| name.starts_with(prefix))
    }

    /// The object of this name, if it can be read.
    pub fn get(&self, name: &str) -> Option<&T> {
        self.objects.get(name)
    }

    /// Whether an object of this name exists, readable or not.
    pub fn contains(&self, name: &str) -> bool {
        self.objects.contains_key(name) || self.unreadable.contains(name)
    }

    /// The names of the objects that cannot be read.
    pub fn unreadable(&self) -> impl Iterator<Item = &String> {
        self.unreadable.iter()
    }

    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_list_replaces_the_old_one_only_when_it_is_complete() {
        let mut cache = Cache::default();
        cache.apply(CacheEvent::ListStarted);
        cache.apply(CacheEvent::Listed(("a".to_owned(), 1)));
        assert!(!cache.is_synced() && cache.get("a").is_none());
        assert_eq!(cache.apply(CacheEvent::ListComplete), ["a"]);
        assert!(cache.is_synced() && cache.get("a") == Some(&1));
        cache.apply(CacheEvent::Applied(("b".to_owned(), 2)));
        cache.apply(CacheEvent::ListStarted);
        cache.apply(CacheEvent::Listed(("b".to_owned(), 3)));
        cache.apply(CacheEvent::Unreadable("c".to_owned()));
        assert_eq!((cache.get("a"), cache.get("b")), (Some(&1), Some(&2)), "as long as it is not complete");
        assert_eq!(cache.apply(CacheEvent::ListComplete), ["a", "b", "c"]);
        assert_eq!((cache.get("a"), cache.get("b"), cache.contains("c")), (None, Some(&3), true));
        cache.apply(CacheEvent::Deleted("b".to_owned()));
        cache.apply(CacheEvent::Deleted("c".to_owned()));
        assert!(!cache.contains("b") && !cache.contains("c"));
    }

    #[test]
    fn what_is_as_it_was_is_no_change() {
        let mut cache = Cache::default();
        assert_eq!(cache.apply(CacheEvent::Applied(("a".to_owned(), 1))), ["a"]);
        assert!(cache.apply(CacheEvent::Applied(("a".to_owned(), 1))).is_empty());
        cache.apply(CacheEvent::ListStarted);
        cache.apply(CacheEvent::Listed(("a".to_owned(), 1)));
        assert!(cache.apply(CacheEvent::ListComplete).is_empty());
        assert!(cache.apply(CacheEvent::Deleted("b".to_owned())).is_empty());
        assert_eq!(cache.apply(CacheEvent::Unreadable("a".to_owned())), ["a"]);
        assert_eq!(cache.apply(CacheEvent::Applied(("a".to_owned(), 1))), ["a"], "it can be read again");
    }
}
