//! What to do next: a function from what the watches have told, what the store shows, what looked wrong before, and the
//! time. Must never look at anything itself, and never be the last word: every action looks again before it writes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use crate::agent::index::{Index, PodSeen, key_of};
use crate::agent::snapshot::{Netns, Snapshot, is_bound_to};
use crate::alloc::{Family, RangeSet};
use crate::cluster::cilium::barrier;
use crate::cluster::cilium::objects::{CiliumNode, PoolEntry};
use crate::cluster::cilium::pool;
use crate::cluster::cilium::pool::{Shape, Shown, single_routes};
use crate::cluster::objects::{ClaimPhase, Holder, StickyIP};
use crate::cluster::protocol::view::ClaimView;
use crate::cni::Attachment;
use crate::policy::selection::rules::{Reason, Rules};
use crate::store::{Decision, Note, Record, Told};
use debounce::{LONG, SHORT, Suspects};

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Tell the API server what a verb could not.
    Tell {
        /// The note's name.
        name: String,
        /// The note.
        note: Note,
    },
    /// Decide about a pod before its ADD comes.
    Prepare {
        /// Its namespace and name.
        pod: String,
        /// Its uid.
        uid: String,
    },
    /// Take a decision back.
    Withdraw {
        /// The pod's uid as the decision has it.
        uid: String,
    },
    /// Judge a pod anew that was found not to be sticky and still waits.
    Rejudge {
        /// Its namespace and name.
        pod: String,
        /// Its uid.
        uid: String,
        /// What the pod itself says by now: what is said for the first time is not paused for what was said before.
        said: String,
    },
    /// Answer a claim on an address of this node.
    Answer {
        /// The address.
        address: IpAddr,
        /// The pod that is said to have it is gone: what was put off as long as it lived is due at once.
        pod_is_gone: bool,
    },
    /// Have a claim forget the pod that had its address before it was claimed, and is gone.
    Forget {
        /// The address.
        address: IpAddr,
    },
    /// Have the CiliumNode show an attached StickyIP.
    Show {
        /// The StickyIP.
        key: Holder,
    },
    /// Have the CiliumNode show nothing of an address that nobody here has.
    Hide {
        /// The address.
        address: IpAddr,
    },
    /// Take the signs out of the pool by which grants learned what Cilium knows.
    Unsign,
    /// Attach a sandbox that lives, and of which the API server does not know.
    Attach {
        /// The StickyIP.
        key: Holder,
        /// The sandbox.
        attachment: Attachment,
    },
    /// Detach a StickyIP with which nobody on this node lives.
    Detach {
        /// The StickyIP.
        key: Holder,
        /// The container id under which it is attached.
        container: String,
    },
    /// Record the MAC of a living pod.
    Mac {
        /// The StickyIP.
        key: Holder,
    },
    /// End an attachment whose sandbox is gone.
    End {
        /// The record as it was seen.
        record: Record,
    },
    /// Forget a record that is kept for nobody, or those of its addresses that are.
    Free {
        /// The record as it was seen.
        record: Record,
    },
    /// Mark addresses that Cilium may give to anybody, and of which the store does not know.
    Mark {
        /// The addresses.
        addresses: Vec<IpAddr>,
    },
    /// Have the pool offer enough addresses to anybody.
    Offer,
}

impl Action {
    /// What it is about, for the log, the metrics and the pauses between tries.
    #[must_use]
    pub fn subject(&self) -> String {
        match self {
            Self::Tell { name, .. } => name.clone(),
            Self::Prepare { pod, uid } => format!("{pod} {uid}"),
            Self::Withdraw { uid } => uid.clone(),
            Self::Rejudge { pod, uid, said } => format!("{pod} {uid}: {said}"),
            Self::Answer { address, pod_is_gone: true } => format!("{address}, whose pod is gone"),
            Self::Answer { address, .. } | Self::Forget { address } | Self::Hide { address } => {
                address.to_string()
            }
            Self::Show { key } | Self::Mac { key } => key.to_string(),
            Self::Attach { key, attachment } => format!("{key} {attachment}"),
            Self::Detach { key, container } => format!("{key} {container}"),
            Self::End { record } | Self::Free { record } => {
                record.addresses.first().map(ToString::to_string).unwrap_or_default()
            }
            Self::Mark { .. } | Self::Offer | Self::Unsign => String::new(),
        }
    }

    /// What is done, in a word.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Tell { .. } => "tell",
            Self::Prepare { .. } => "prepare",
            Self::Withdraw { .. } => "withdraw",
            Self::Rejudge { .. } => "rejudge",
            Self::Answer { .. } => "answer",
            Self::Forget { .. } => "forget",
            Self::Show { .. } => "show",
            Self::Hide { .. } => "hide",
            Self::Unsign => "unsign",
            Self::Attach { .. } => "attach",
            Self::Detach { .. } => "detach",
            Self::Mac { .. } => "mac",
            Self::End { .. } => "end",
            Self::Free { .. } => "free",
            Self::Mark { .. } => "mark",
            Self::Offer => "offer",
        }
    }
}

/// What the operator has set, as far as decisions need it.
#[derive(Debug, Clone)]
pub struct Terms {
    /// This node.
    pub node: String,
    /// What its CiliumNode shows.
    pub shape: Shape,
    /// The ranges of the node's own configuration.
    pub ranges: Vec<RangeSet>,
    /// Addresses a family that are free for anybody, at least.
    pub fewest_free: usize,
    /// Addresses a family in the pool, at most.
    pub most: usize,
    /// Who is sticky.
    pub rules: Rules,
}

/// Everything that one look rests on.
#[derive(Debug, Clone, Copy)]
pub struct Sight<'a> {
    /// What the operator has set.
    pub terms: &'a Terms,
    /// What the watches have told.
    pub index: &'a Index,
    /// What the store shows.
    pub store: &'a Snapshot,
    /// The time, of a clock that only goes forward.
    pub now: Duration,
}

/// Everything that is to be done, the most urgent first. Nothing that rests on lists before all of them are whole.
#[must_use]
pub fn plan(sight: &Sight<'_>, suspects: &mut Suspects) -> Vec<Action> {
    let mut actions = Vec::new();
    tell(sight, &mut actions);
    if sight.index.is_listed() {
        answer(sight, suspects, &mut actions);
        prepare(sight, &mut actions);
        withdraw(sight, suspects, &mut actions);
        mark_and_offer(sight, &mut actions);
        show_and_hide(sight, suspects, &mut actions);
        attachments(sight, suspects, &mut actions);
        records(sight, suspects, &mut actions);
        macs(sight, suspects, &mut actions);
    }
    suspects.end_look();
    actions
}

/// Notes of sandboxes that took another's place come first: what they say keeps an ended note from letting go.
fn tell(sight: &Sight<'_>, actions: &mut Vec<Action>) {
    let mut notes: Vec<&(String, Note)> = sight.store.notes.iter().collect();
    notes.sort_by_key(|(_, note)| note.what != Told::Attached);
    actions.extend(notes.into_iter().cloned().map(|(name, note)| Action::Tell { name, note }));
}

fn answer(sight: &Sight<'_>, suspects: &mut Suspects, actions: &mut Vec<Action>) {
    let Sight { terms, index, store, now } = sight;
    let ours = index.claims.iter().filter(|(_, claim)| claim.home_node.as_deref() == Some(&terms.node));
    for (name, claim) in ours {
        let known = store.held.iter().any(|held| held.record.addresses.contains(&claim.address));
        let due = match claim.phase {
            ClaimPhase::Requested => true,
            ClaimPhase::Refused => false,
            // The store was lost: whoever picks by it alone would give the address to anybody.
            ClaimPhase::Granted | ClaimPhase::Bound | ClaimPhase::Resting => {
                !known
                    && contains(&terms.shape.ranges, claim.address)
                    && suspects.ripe(format!("reserved {name}"), String::new(), SHORT, *now)
            }
        };
        if due {
            let pod_is_gone = claim.pod.as_ref().is_some_and(|pod| index.pod_of(&pod.uid).is_none());
            actions.push(Action::Answer { address: claim.address, pod_is_gone });
        }
        let granted = !matches!(claim.phase, ClaimPhase::Requested | ClaimPhase::Refused);
        if let Some(pod) = claim.pod.as_ref().filter(|_| granted)
            && index.pod_of(&pod.uid).is_none()
            && !store.attached().any(|held| {
                held.record.addresses.contains(&claim.address) && uid_of(&held.record) == Some(&pod.uid)
            })
            && suspects.ripe(format!("marked {name}"), pod.uid.clone(), LONG, *now)
        {
            actions.push(Action::Forget { address: claim.address });
        }
    }
}

fn prepare(sight: &Sight<'_>, actions: &mut Vec<Action>) {
    let Sight { index, store, .. } = sight;
    for (name, pod) in index.pods.iter() {
        let uid = &pod.runtime_uid;
        if !pod.waits || pod.ends || pod.facts.host_network || uid.is_empty() {
            continue;
        }
        let decided = store.decisions.iter().any(|decision| decision.uid == *uid);
        let lives = store.attached().any(|held| uid_of(&held.record) == Some(uid));
        let attached = index.stickies.iter().find_map(|(_, sticky)| {
            let attachment = sticky.status.as_ref()?.attachment.as_ref()?;
            (attachment.pod_uid == pod.facts.uid).then_some(attachment.container_id.as_str())
        });
        // Attached by us, and ended before the decision was on the disk: go on. By the plugin: its business.
        let by_plugin = attached.is_some_and(|container| container != Decision::known_as(uid));
        if !decided && !lives && !by_plugin {
            actions.push(Action::Prepare { pod: name.clone(), uid: uid.clone() });
        }
    }
}

fn withdraw(sight: &Sight<'_>, suspects: &mut Suspects, actions: &mut Vec<Action>) {
    let Sight { index, store, now, .. } = sight;
    for decision in &store.decisions {
        let pod = index.pod_of(&decision.uid);
        let due = match &decision.sticky {
            // Its DEL still asks for it.
            None => {
                actions.extend(pod.and_then(|pod| rejudge(sight, suspects, decision, pod)));
                pod.is_none()
            }
            Some(_) if decision.at.boot() != store.now.boot() => true,
            // A pod that has ended, or that the kubelet turned away, may stand there for days.
            Some(_) if pod.is_none_or(|pod| pod.ends) => true,
            Some(sticky) => {
                let key = format!("{}/{}", sticky.namespace, sticky.name);
                let attachment =
                    index.stickies.get(&key).and_then(|found| found.status.as_ref()?.attachment.as_ref());
                let stands = attachment.is_some_and(|found| found.container_id == sticky.known_as);
                // The watch may lag behind what was attached a moment ago.
                !stands && suspects.ripe(format!("decided {}", decision.uid), String::new(), SHORT, *now)
            }
        };
        if due {
            actions.push(Action::Withdraw { uid: decision.uid.clone() });
        }
    }
}

/// A pod that was not sticky when it was decided about, and whose ADD has not come: if it says otherwise by now, or if its
/// namespace might. Nobody tells of namespaces, so those are asked for now and then, as long as the pod waits.
fn rejudge(sight: &Sight<'_>, suspects: &mut Suspects, decision: &Decision, pod: &PodSeen) -> Option<Action> {
    let Sight { terms, store, now, .. } = sight;
    let uid = &decision.uid;
    let lives = store.attached().any(|held| uid_of(&held.record) == Some(uid));
    if !pod.waits || pod.ends || lives {
        return None;
    }
    let (due, said) = match terms.rules.judge(&pod.facts) {
        Ok(verdict) => {
            let said = verdict.reason.to_string();
            let by_namespace = decision.reason == Reason::NamespaceAnnotation.to_string();
            let due = match verdict.reason {
                Reason::Selected if !by_namespace => true,
                Reason::NothingAsksForIt | Reason::Selected => {
                    suspects.ripe(format!("plain {uid}"), said.clone(), LONG, *now)
                }
                _ => verdict.sticky,
            };
            (due, said)
        }
        // Its ADD must say so.
        Err(error) => (true, error.to_string()),
    };
    let name = format!("{}/{}", pod.facts.namespace, pod.facts.name);
    due.then(|| Action::Rejudge { pod: name, uid: uid.clone(), said })
}

/// What stands in a node's pool, by family.
#[must_use]
pub fn count_pool(node: &CiliumNode) -> BTreeMap<Family, (usize, usize)> {
    let mut counts: BTreeMap<Family, (usize, usize)> = BTreeMap::new();
    for (address, entry) in node.spec.ipam.pool.iter().filter(|(_, entry)| !barrier::is_sign(entry)) {
        let Ok(ip) = address.parse::<IpAddr>() else { continue };
        let (total, free) = counts.entry(Family::of(ip)).or_default();
        *total += 1;
        *free += usize::from(entry.owner.is_empty() && !node.uses(address));
    }
    counts
}

/// The families of a node's blocks.
#[must_use]
pub fn families_of(blocks: &[IpNet]) -> Vec<Family> {
    let mut families: Vec<Family> = blocks.iter().map(|block| Family::of(block.addr())).collect();
    families.sort();
    families.dedup();
    families
}

fn mark_and_offer(sight: &Sight<'_>, actions: &mut Vec<Action>) {
    let Sight { terms, index, store, .. } = sight;
    let Some(node) = index.cilium_node().filter(|_| terms.shape.pool) else { return };
    let blocks = index.blocks();
    let known = |address: &IpAddr| store.held.iter().any(|held| held.record.addresses.contains(address));
    let unknown: Vec<IpAddr> = node
        .spec
        .ipam
        .pool
        .iter()
        .filter(|(_, entry)| entry.owner.is_empty())
        .filter_map(|(address, _)| address.parse().ok())
        .filter(|address| contains(&blocks, *address) && !known(address))
        .collect();
    if !unknown.is_empty() {
        actions.push(Action::Mark { addresses: unknown });
    }
    let lost = store.held.iter().filter(|held| held.record.is_offered()).any(|held| {
        held.record.addresses.iter().any(|address| {
            contains(&blocks, *address) && !node.spec.ipam.pool.contains_key(&address.to_string())
        })
    });
    let counts = count_pool(node);
    let few = families_of(&blocks).into_iter().any(|family| {
        let (total, free) = counts.get(&family).copied().unwrap_or_default();
        free < terms.fewest_free && total < terms.most
    });
    if lost || few {
        actions.push(Action::Offer);
    }
}

/// How an attached StickyIP is shown.
#[must_use]
pub fn shown(sticky: &StickyIP) -> Option<Shown> {
    let attachment = sticky.status.as_ref()?.attachment.as_ref()?;
    let namespace = sticky.metadata.namespace.as_deref()?;
    Some(Shown {
        addresses: sticky.spec.addresses.clone(),
        owner: format!("{namespace}/{}", attachment.pod_name),
        resource: pool::resource(namespace, &sticky.spec.workload),
    })
}

fn show_and_hide(sight: &Sight<'_>, suspects: &mut Suspects, actions: &mut Vec<Action>) {
    let Sight { terms, index, store, now } = sight;
    let Some(node) = index.cilium_node() else { return };
    for (name, sticky) in index.stickies.iter() {
        let key = key_of(sticky);
        // Without a sandbox or a decision an ADD or DEL is on its way, or it is a leak.
        let lives = store.living(&key).is_some() || store.prepared(&key).is_some();
        let missing =
            lives && shown(sticky).is_some_and(|shown| pool::show(node, &terms.shape, &shown).is_some());
        let state = sticky.metadata.resource_version.clone().unwrap_or_default();
        if missing && suspects.ripe(format!("shown {name}"), state, SHORT, *now) {
            actions.push(Action::Show { key });
        }
    }
    let is_owned = |entry: &PoolEntry| !entry.owner.is_empty() && !barrier::is_sign(entry);
    let owned = node.spec.ipam.pool.iter().filter(|(_, entry)| terms.shape.pool && is_owned(entry));
    let mut shown: Vec<IpAddr> = owned.filter_map(|(address, _)| address.parse().ok()).collect();
    shown.extend(single_routes(node));
    shown.sort();
    shown.dedup();
    for address in shown {
        let attached = index.stickies.iter().any(|(_, sticky)| sticky.spec.addresses.contains(&address));
        if !attached
            && !store.uses(address)
            && suspects.ripe(format!("hidden {address}"), String::new(), LONG, *now)
        {
            actions.push(Action::Hide { address });
        }
    }
    let asked = |claim: &ClaimView| claim.phase == ClaimPhase::Requested && claim.pod.is_some();
    let signs: Vec<&str> = barrier::keys(node).map(String::as_str).collect();
    if !signs.is_empty()
        && !index.claims.values().any(asked)
        && suspects.ripe("signs".to_owned(), signs.join(" "), LONG, *now)
    {
        actions.push(Action::Unsign);
    }
}

fn attachments(sight: &Sight<'_>, suspects: &mut Suspects, actions: &mut Vec<Action>) {
    let Sight { index, store, now, .. } = sight;
    for (name, sticky) in index.stickies.iter() {
        let attachment = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
        let Some(attachment) = attachment else { continue };
        let key = key_of(sticky);
        let used = store.living(&key).is_some() || store.prepared(&key).is_some();
        let pod_is_there = index.pod_of(&attachment.pod_uid).is_some();
        let state = sticky.metadata.resource_version.clone().unwrap_or_default();
        if !used && !pod_is_there && suspects.ripe(format!("attached {name}"), state, LONG, *now) {
            actions.push(Action::Detach { key, container: attachment.container_id.clone() });
        }
    }
    for held in store.attached() {
        let record = &held.record;
        let Some(binding) = &record.binding else { continue };
        let key = Holder { namespace: binding.namespace.clone(), name: binding.name.clone() };
        let containers = [record.attachment.container.as_str(), binding.container.as_str()];
        let known = index.stickies.get(&key.to_string()).is_some_and(|sticky| {
            let attachment = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
            attachment.is_some_and(|attachment| containers.contains(&attachment.container_id.as_str()))
        });
        let what = format!("known {}", record.attachment);
        if !known && held.netns != Netns::Gone && suspects.ripe(what, format!("{record:?}"), LONG, *now) {
            actions.push(Action::Attach { key, attachment: record.attachment.clone() });
        }
    }
}

fn records(sight: &Sight<'_>, suspects: &mut Suspects, actions: &mut Vec<Action>) {
    let Sight { terms, index, store, now } = sight;
    let home: Vec<IpNet> = [index.blocks(), terms.shape.ranges.clone()].concat();
    for held in &store.held {
        let record = &held.record;
        let pod_is_there = uid_of(record).is_some_and(|uid| index.pod_of(uid).is_some());
        let state = format!("{record:?}");
        if record.is_attached(&store.now) {
            // While its pod exists the runtime may still come with a DEL; a newer sandbox of the pod says it will not count.
            let replaced = store.attached().any(|other| {
                other.record.attachment != record.attachment
                    && uid_of(&other.record).is_some()
                    && uid_of(&other.record) == uid_of(record)
                    && other.netns != Netns::Gone
            });
            let what = format!("lives {}", record.attachment);
            // A pod that was marked where Cilium picks the addresses: Cilium is asked for its sandbox.
            let unknown = terms.shape.pool && record.netns.is_none();
            if (held.netns == Netns::Gone || unknown)
                && (!pod_is_there || replaced)
                && suspects.ripe(what, state, LONG, *now)
            {
                actions.push(Action::End { record: record.clone() });
            }
            continue;
        }
        // Where home is not known, nothing can be said of what is kept.
        let Some(binding) = record.binding.as_ref().filter(|_| !home.is_empty()) else { continue };
        let key = Holder { namespace: binding.namespace.clone(), name: binding.name.clone() };
        let addresses = || record.addresses.iter().copied();
        let is_of_home = |address| contains(&home, address);
        let is_claimed = |address| index.claim_on(address).is_some_and(|claim| claim.holder == key);
        let claimed = addresses().any(is_claimed);
        // One that served a range set for which the StickyIP has none, for example.
        let stray = addresses().any(|address| is_of_home(address) && !is_claimed(address));
        // An address from elsewhere is remembered for its own pod's next sandbox, and for nobody else; so is what stands beside one
        // that is wanted.
        let remembered = pod_is_there && (claimed || !addresses().all(is_of_home));
        let wanted = (claimed && !stray) || remembered || store.prepared(&key).is_some();
        let what = format!("kept {:?}", record.addresses);
        if !wanted && is_bound_to(record, &key) && suspects.ripe(what, state, LONG, *now) {
            actions.push(Action::Free { record: record.clone() });
        }
    }
}

/// Last, because nothing rests on it, and not while the pod still starts: the node is busy enough then. What is recorded already
/// costs a question to Cilium, less and less often.
fn macs(sight: &Sight<'_>, suspects: &mut Suspects, actions: &mut Vec<Action>) {
    let Sight { index, store, now, .. } = sight;
    for key in index.stickies.values().map(key_of) {
        let Some(living) = store.living(&key) else { continue };
        let sandbox = living.attachment.to_string();
        if suspects.ripe(format!("mac {key}"), sandbox, SHORT, *now) {
            actions.push(Action::Mac { key });
        }
    }
}

/// The uid of a record's pod.
#[must_use]
pub fn uid_of(record: &Record) -> Option<&str> {
    record.pod.as_ref().and_then(|pod| pod.uid())
}

/// Whether a range holds the address.
#[must_use]
pub fn contains(ranges: &[IpNet], address: IpAddr) -> bool {
    ranges.iter().any(|range| range.contains(&address))
}

pub mod debounce;
#[cfg(test)]
mod tests;
