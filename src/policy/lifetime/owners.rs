//! The chain of owners above a workload: its owner, the owner of that, and so on. Must never loop, and never
//! report a chain that is known in part as the whole one.

use crate::policy::selection::facts::Owner;

/// How many owners above a workload are recorded. Real chains have one or two.
pub(crate) const MAX_OWNERS: usize = 8;

/// The result of looking up one object of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OwnerLookup {
    /// Its kind has not been listed yet: try again.
    Unlisted,
    /// Its kind cannot be read: unknown to the API server, or forbidden.
    Hidden,
    /// It does not exist.
    Absent,
    /// It exists. With its controlling owner.
    There { uid: String, owner: Option<Owner> },
}

/// The owners above an existing workload, nearest first. None if they are not known: the workload does not
/// exist or cannot be read, or an object of the chain has not been listed yet. An owner that is gone or
/// cannot be read ends the chain, and is part of it.
pub fn above(workload: &Owner, mut look: impl FnMut(&Owner) -> OwnerLookup) -> Option<Vec<Owner>> {
    let OwnerLookup::There { owner: mut next, .. } = look(workload) else { return None };
    let mut chain: Vec<Owner> = Vec::new();
    while let Some(owner) = next.take() {
        let known = |other: &Owner| {
            (other.group(), &other.kind, &other.name) == (owner.group(), &owner.kind, &owner.name)
        };
        if chain.len() == MAX_OWNERS || known(workload) || chain.iter().any(known) {
            break;
        }
        next = match look(&owner) {
            OwnerLookup::Unlisted => return None,
            // Another object of the same name is not the owner of what is below.
            OwnerLookup::There { uid, owner: above } if uid == owner.uid => above,
            OwnerLookup::There { .. } | OwnerLookup::Hidden | OwnerLookup::Absent => None,
        };
        chain.push(owner);
    }
    Some(chain)
}

/// Whether a claimant of this name can return when its workload is created again. `named_by_workload`: its
/// name is the workload's name and a number, not a random one. Some kinds get a new name each time, so no pod
/// asks for the old name again.
pub(crate) fn can_return(named_by_workload: bool, workload_kind: &str) -> bool {
    named_by_workload && workload_kind != "ReplicaSet" && workload_kind != "Job"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::selection::facts::fixture::owner;
    use std::collections::BTreeMap;

    /// Owners by name; every kind is listed.
    fn world(links: &[(&str, Option<&str>)]) -> impl Fn(&Owner) -> OwnerLookup {
        let links: BTreeMap<String, Option<String>> =
            links.iter().map(|(name, above)| ((*name).to_owned(), above.map(str::to_owned))).collect();
        move |asked| match links.get(&asked.name) {
            None => OwnerLookup::Absent,
            Some(above) => OwnerLookup::There {
                uid: asked.uid.clone(),
                owner: above.as_ref().map(|name| owner("x.example/v1", "Thing", name)),
            },
        }
    }

    fn names(links: &[(&str, Option<&str>)]) -> Option<Vec<String>> {
        let chain = above(&owner("x.example/v1", "Thing", "set"), world(links))?;
        Some(chain.into_iter().map(|owner| owner.name).collect())
    }

    #[test]
    fn a_chain_is_followed_to_its_top_and_what_is_gone_ends_it() {
        assert_eq!(names(&[("set", None)]), Some(vec![]));
        let whole = [("set", Some("a")), ("a", Some("b")), ("b", None)];
        assert_eq!(names(&whole), Some(vec!["a".into(), "b".into()]));
        assert_eq!(names(&whole[..2]), Some(vec!["a".into(), "b".into()]), "b is gone, and was named");
        assert_eq!(names(&[("a", None)]), None, "of a workload that is gone nothing is known");
    }

    #[test]
    fn circles_and_long_chains_end() {
        assert_eq!(names(&[("set", Some("set"))]), Some(vec![]));
        assert_eq!(
            names(&[("set", Some("a")), ("a", Some("b")), ("b", Some("a"))]),
            Some(vec!["a".into(), "b".into()])
        );
        assert_eq!(names(&[("set", Some("a")), ("a", Some("set"))]), Some(vec!["a".into()]));
        let endless = |asked: &Owner| OwnerLookup::There {
            uid: asked.uid.clone(),
            owner: Some(owner("x.example/v1", "Thing", &format!("{}x", asked.name))),
        };
        assert_eq!(above(&owner("v1", "Thing", "set"), endless).unwrap().len(), MAX_OWNERS);
    }

    #[test]
    fn a_kind_that_is_not_listed_yet_leaves_the_chain_open_and_a_hidden_one_ends_it() {
        let made_by = |link: OwnerLookup| {
            let set = owner("apps/v1", "StatefulSet", "set");
            let look = |asked: &Owner| match asked.kind.as_str() {
                "StatefulSet" => OwnerLookup::There {
                    uid: asked.uid.clone(),
                    owner: Some(owner("x.example/v1", "Cluster", "c")),
                },
                _ => link.clone(),
            };
            above(&set, look).map(|chain| chain.len())
        };
        assert_eq!(made_by(OwnerLookup::Unlisted), None);
        assert_eq!(made_by(OwnerLookup::Hidden), Some(1));
        let other = OwnerLookup::There {
            uid: "another".into(),
            owner: Some(owner("x.example/v1", "Cluster", "top")),
        };
        assert_eq!(made_by(other), Some(1), "another of the name is not what made it");
    }

    #[test]
    fn only_names_that_can_be_asked_for_again_come_again() {
        assert!(can_return(true, "StatefulSet") && can_return(true, "CloneSet"));
        assert!(!can_return(false, "StatefulSet"), "a pod of a random name");
        assert!(!can_return(true, "ReplicaSet") && !can_return(true, "Job"));
    }
}
