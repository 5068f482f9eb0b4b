//! One kind of object as a watch has told of it. Synchronous. Must never be taken for live: whatever is written rests on a
//! live read or a resourceVersion.

use std::collections::{BTreeMap, BTreeSet};

/// A change of one kind of object, as a watch tells it.
#[derive(Debug, Clone, PartialEq)]
pub enum Told<T> {
    /// A new list begins.
    Listing,
    /// An object of the new list.
    Listed(T),
    /// The list is whole: what it does not name is gone.
    Complete,
    /// An object is there, or changed.
    Here(T),
    /// An object is gone.
    Gone(String),
    /// An object of this name is there and cannot be read.
    Broken(String),
}

/// Every object of one kind, by name.
#[derive(Debug, Clone)]
pub struct Cache<T> {
    all: BTreeMap<String, T>,
    broken: BTreeSet<String>,
    fresh: Option<(BTreeMap<String, T>, BTreeSet<String>)>,
    listed: bool,
}

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self { all: BTreeMap::new(), broken: BTreeSet::new(), fresh: None, listed: false }
    }
}

impl<T: PartialEq> Cache<T> {
    /// Takes a change in. The names whose object is another one now: a list that repeats what is known names none.
    pub fn take(&mut self, told: Told<(String, T)>) -> Vec<String> {
        match told {
            Told::Listing => {
                self.fresh = Some(Default::default());
                Vec::new()
            }
            Told::Listed((name, object)) => {
                self.fresh.get_or_insert_default().0.insert(name, object);
                Vec::new()
            }
            Told::Complete => {
                let (all, broken) = self.fresh.take().unwrap_or_default();
                let before = std::mem::replace(&mut self.all, all);
                let broken_before = std::mem::replace(&mut self.broken, broken);
                self.listed = true;
                let gone = before.keys().filter(|name| !self.all.contains_key(*name)).cloned();
                let other = self.all.iter().filter(|(name, object)| before.get(*name) != Some(*object));
                let mut changed: Vec<String> = gone.chain(other.map(|(name, _)| name.clone())).collect();
                changed.extend(self.broken.symmetric_difference(&broken_before).cloned());
                changed
            }
            Told::Here((name, object)) => {
                let was_broken = self.broken.remove(&name);
                let same = self.all.get(&name) == Some(&object);
                self.all.insert(name.clone(), object);
                if same && !was_broken { Vec::new() } else { vec![name] }
            }
            Told::Gone(name) => {
                let known = self.broken.remove(&name) | self.all.remove(&name).is_some();
                if known { vec![name] } else { Vec::new() }
            }
            Told::Broken(name) => match &mut self.fresh {
                Some((_, broken)) => {
                    broken.insert(name);
                    Vec::new()
                }
                None => {
                    self.all.remove(&name);
                    self.broken.insert(name.clone());
                    vec![name]
                }
            },
        }
    }
}

impl<T: PartialEq> Cache<T> {
    /// There are none, as after an empty list.
    pub fn take_nothing(&mut self) -> Vec<String> {
        self.take(Told::Listing);
        self.take(Told::Complete)
    }
}

impl<T> Cache<T> {
    /// Whether a list was whole once.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.listed
    }

    /// Every object with its name.
    pub fn iter(&self) -> impl Iterator<Item = (&String, &T)> + Clone {
        self.all.iter()
    }

    /// Every object.
    pub fn values(&self) -> impl Iterator<Item = &T> + Clone {
        self.all.values()
    }

    /// Every object from this name on, in the order of names.
    pub fn from(&self, name: &str) -> impl Iterator<Item = (&String, &T)> {
        self.all.range::<str, _>((std::ops::Bound::Included(name), std::ops::Bound::Unbounded))
    }

    /// The object of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&T> {
        self.all.get(name)
    }

    /// Whether an object of this name is there, readable or not.
    #[must_use]
    pub fn is_there(&self, name: &str) -> bool {
        self.all.contains_key(name) || self.broken.contains(name)
    }

    /// The names of the objects that cannot be read.
    pub fn broken(&self) -> impl Iterator<Item = &String> {
        self.broken.iter()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_list_replaces_the_old_one_only_when_it_is_whole() {
        let mut known = Cache::default();
        known.take(Told::Listing);
        known.take(Told::Listed(("a".to_owned(), 1)));
        assert!(!known.is_synced() && known.get("a").is_none());
        assert_eq!(known.take(Told::Complete), ["a"]);
        assert!(known.is_synced() && known.get("a") == Some(&1));
        known.take(Told::Here(("b".to_owned(), 2)));
        known.take(Told::Listing);
        known.take(Told::Listed(("b".to_owned(), 3)));
        known.take(Told::Broken("c".to_owned()));
        assert_eq!((known.get("a"), known.get("b")), (Some(&1), Some(&2)), "as long as it is not whole");
        assert_eq!(known.take(Told::Complete), ["a", "b", "c"]);
        assert_eq!((known.get("a"), known.get("b"), known.is_there("c")), (None, Some(&3), true));
        known.take(Told::Gone("b".to_owned()));
        known.take(Told::Gone("c".to_owned()));
        assert!(!known.is_there("b") && !known.is_there("c"));
    }

    #[test]
    fn what_is_as_it_was_is_no_change() {
        let mut known = Cache::default();
        assert_eq!(known.take(Told::Here(("a".to_owned(), 1))), ["a"]);
        assert!(known.take(Told::Here(("a".to_owned(), 1))).is_empty());
        known.take(Told::Listing);
        known.take(Told::Listed(("a".to_owned(), 1)));
        assert!(known.take(Told::Complete).is_empty());
        assert!(known.take(Told::Gone("b".to_owned())).is_empty());
        assert_eq!(known.take(Told::Broken("a".to_owned())), ["a"]);
        assert_eq!(known.take(Told::Here(("a".to_owned(), 1))), ["a"], "it can be read again");
    }
}
