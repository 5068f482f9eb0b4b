//! What to do next: a function from what the watches have told, what the store shows, what looked wrong before, and the
//! time. Must never look at anything itself, and never be the last word: every action looks again before it writes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use crate::agent::index::{NodeIndex, NodePod, key_of};
use crate::agent::snapshot::{Netns, Snapshot, is_bound_to};
use crate::alloc::{Family, RangeSet};
use crate::cluster::cilium::barrier;
use crate::cluster::cilium::objects::{CiliumNode, PoolEntry};
use crate::cluster::cilium::pool;
use crate::cluster::cilium::pool::{Publication, PublishConfig, single_routes};
use crate::cluster::objects::{ClaimPhase, StickyIP, StickyKey};
use crate::cluster::protocol::view::ClaimView;
use crate::cni::Attachment;
use crate::policy::selection::rules::{Rules, StickyReason};
use crate::store::{Decision, PendingUpdate, Record, Told};
use debounce::{Debounce, LONG, SHORT};

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Tell the API server what a verb could not.
    SendUpdate {
        /// The note's name.
        name: String,
        /// The note.
        note: PendingUpdate,
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
    Reevaluate {
        /// Its namespace and name.
        pod: String,
        /// Its uid.
        uid: String,
        /// What the pod itself says by now: what is said for the first time is not paused for what was said before.
        said: String,
    },
    /// Answer a claim on an address of this node.
    Grant {
        /// The address.
        address: IpAddr,
        /// The pod that is said to have it is gone: what was put off as long as it lived is due at once.
        pod_is_gone: bool,
    },
    /// Have a claim forget the pod that had its address before it was claimed, and is gone.
    FinishAdoption {
        /// The address.
        address: IpAddr,
    },
    /// Have the CiliumNode show an attached StickyIP.
    Publish {
        /// The StickyIP.
        key: StickyKey,
    },
    /// Have the CiliumNode show nothing of an address that nobody here has.
    Unpublish {
        /// The address.
        address: IpAddr,
    },
    /// Take the signs out of the pool by which grants learned what Cilium knows.
    RemoveBarriers,
    /// Attach a sandbox that lives, and of which the API server does not know.
    Attach {
        /// The StickyIP.
        key: StickyKey,
        /// The sandbox.
        attachment: Attachment,
    },
    /// Detach a StickyIP with which nobody on this node lives.
    Detach {
        /// The StickyIP.
        key: StickyKey,
        /// The container id under which it is attached.
        container: String,
    },
    /// Record the MAC of a living pod.
    RecordMac {
        /// The StickyIP.
        key: StickyKey,
    },
    /// End an attachment whose sandbox is gone.
    EndAttachment {
        /// The record as it was seen.
        record: Record,
    },
    /// Forget a record that is kept for nobody, or those of its addresses that are.
    ReleaseRecord {
        /// The record as it was seen.
        record: Record,
    },
    /// Mark addresses that Cilium may give to anybody, and of which the store does not know.
    RecordUnowned {
        /// The addresses.
        addresses: Vec<IpAddr>,
    },
    /// Have the pool offer enough addresses to anybody.
    Refill,
}

impl Action {
    /// What it is about, for the log, the metrics and the pauses between tries.
    #[must_use]
    pub fn subject(&self) -> String {
        match self {
            Self::SendUpdate { name, .. } => name.clone(),
            Self::Prepare { pod, uid } => format!("{pod} {uid}"),
            Self::Withdraw { uid } => uid.clone(),
            Self::Reevaluate { pod, uid, said } => format!("{pod} {uid}: {said}"),
            Self::Grant { address, pod_is_gone: true } => format!("{address}, whose pod is gone"),
            Self::Grant { address, .. } | Self::FinishAdoption { address } | Self::Unpublish { address } => {
                address.to_string()
            }
            Self::Publish { key } | Self::RecordMac { key } => key.to_string(),
            Self::Attach { key, attachment } => format!("{key} {attachment}"),
            Self::Detach { key, container } => format!("{key} {container}"),
            Self::EndAttachment { record } | Self::ReleaseRecord { record } => {
                record.addresses.first().map(ToString::to_string).unwrap_or_default()
            }
            Self::RecordUnowned { .. } | Self::Refill | Self::RemoveBarriers => String::new(),
        }
    }

    /// What is done, in a word.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::SendUpdate { .. } => "tell",
            Self::Prepare { .. } => "prepare",
            Self::Withdraw { .. } => "withdraw",
            Self::Reevaluate { .. } => "rejudge",
            Self::Grant { .. } => "answer",
            Self::FinishAdoption { .. } => "forget",
            Self::Publish { .. } => "show",
            Self::Unpublish { .. } => "hide",
            Self::RemoveBarriers => "unsign",
            Self::Attach { .. } => "attach",
            Self::Detach { .. } => "detach",
            Self::RecordMac { .. } => "mac",
            Self::EndAttachment { .. } => "end",
            Self::ReleaseRecord { .. } => "free",
            Self::RecordUnowned { .. } => "mark",
            Self::Refill => "offer",
        }
    }
}

/// What the operator has set, as far as decisions need it.
#[derive(Debug, Clone)]
pub struct PlanOptions {
    /// This node.
    pub node: String,
    /// What its CiliumNode shows.
    pub shape: PublishConfig,
    /// The ranges of the node's own configuration.
    pub ranges: Vec<RangeSet>,
    /// Addresses a family that are free for anybody, at least.
    pub min_free: usize,
    /// Addresses a family in the pool, at most.
    pub max_entries: usize,
    /// Who is sticky.
    pub rules: Rules,
}

/// Everything that one look rests on.
#[derive(Debug, Clone, Copy)]
pub struct PlanInput<'a> {
    /// What the operator has set.
    pub options: &'a PlanOptions,
    /// What the watches have told.
    pub index: &'a NodeIndex,
    /// What the store shows.
    pub store: &'a Snapshot,
    /// The time, of a clock that only goes forward.
    pub now: Duration,
}

/// Everything that is to be done, the most urgent first. Nothing that rests on lists before all of them are whole.
#[must_use]
pub fn plan(input: &PlanInput<'_>, debounce: &mut Debounce) -> Vec<Action> {
    let mut actions = Vec::new();
    tell(input, &mut actions);
    if input.index.is_synced() {
        answer(input, debounce, &mut actions);
        prepare(input, &mut actions);
        withdraw(input, debounce, &mut actions);
        mark_and_offer(input, &mut actions);
        show_and_hide(input, debounce, &mut actions);
        attachments(input, debounce, &mut actions);
        records(input, debounce, &mut actions);
        macs(input, debounce, &mut actions);
    }
    debounce.end_round();
    actions
}

/// Notes of sandboxes that took another's place come first: what they say keeps an ended note from letting go.
fn tell(input: &PlanInput<'_>, actions: &mut Vec<Action>) {
    let mut pending_updates: Vec<&(String, PendingUpdate)> = input.store.pending_updates.iter().collect();
    pending_updates.sort_by_key(|(_, note)| note.what != Told::Attached);
    actions
        .extend(pending_updates.into_iter().cloned().map(|(name, note)| Action::SendUpdate { name, note }));
}

fn answer(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { options, index, store, now } = input;
    let ours = index.claims.iter().filter(|(_, claim)| claim.home_node.as_deref() == Some(&options.node));
    for (name, claim) in ours {
        let known = store.held.iter().any(|held| held.record.addresses.contains(&claim.address));
        let due = match claim.phase {
            ClaimPhase::Requested => true,
            ClaimPhase::Refused => false,
            // The store was lost: whoever picks by it alone would give the address to anybody.
            ClaimPhase::Granted | ClaimPhase::Bound | ClaimPhase::Quarantined => {
                !known
                    && contains(&options.shape.ranges, claim.address)
                    && debounce.stable_for(format!("reserved {name}"), String::new(), SHORT, *now)
            }
        };
        if due {
            let pod_is_gone = claim.pod.as_ref().is_some_and(|pod| index.pod_of(&pod.uid).is_none());
            actions.push(Action::Grant { address: claim.address, pod_is_gone });
        }
        let granted = !matches!(claim.phase, ClaimPhase::Requested | ClaimPhase::Refused);
        if let Some(pod) = claim.pod.as_ref().filter(|_| granted)
            && index.pod_of(&pod.uid).is_none()
            && !store.attached().any(|held| {
                held.record.addresses.contains(&claim.address) && uid_of(&held.record) == Some(&pod.uid)
            })
            && debounce.stable_for(format!("marked {name}"), pod.uid.clone(), LONG, *now)
        {
            actions.push(Action::FinishAdoption { address: claim.address });
        }
    }
}

fn prepare(input: &PlanInput<'_>, actions: &mut Vec<Action>) {
    let PlanInput { index, store, .. } = input;
    for (name, pod) in index.pods.iter() {
        let uid = &pod.runtime_uid;
        if !pod.is_waiting || pod.is_ending || pod.facts.host_network || uid.is_empty() {
            continue;
        }
        let decided = store.decisions.iter().any(|decision| decision.uid == *uid);
        let lives = store.attached().any(|held| uid_of(&held.record) == Some(uid));
        let attached = index.stickies.iter().find_map(|(_, sticky)| {
            let attachment = sticky.status.as_ref()?.attachment.as_ref()?;
            (attachment.pod_uid == pod.facts.uid).then_some(attachment.container_id.as_str())
        });
        // Attached by us, and ended before the decision was on the disk: go on. By the plugin: its business.
        let by_plugin = attached.is_some_and(|container| container != Decision::attachment_id(uid));
        if !decided && !lives && !by_plugin {
            actions.push(Action::Prepare { pod: name.clone(), uid: uid.clone() });
        }
    }
}

fn withdraw(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { index, store, now, .. } = input;
    for decision in &store.decisions {
        let pod = index.pod_of(&decision.uid);
        let due = match &decision.sticky {
            // Its DEL still asks for it.
            None => {
                actions.extend(pod.and_then(|pod| reevaluate(input, debounce, decision, pod)));
                pod.is_none()
            }
            Some(_) if decision.at.boot() != store.now.boot() => true,
            // A pod that has ended, or that the kubelet turned away, may stand there for days.
            Some(_) if pod.is_none_or(|pod| pod.is_ending) => true,
            Some(sticky) => {
                let key = format!("{}/{}", sticky.namespace, sticky.name);
                let attachment =
                    index.stickies.get(&key).and_then(|found| found.status.as_ref()?.attachment.as_ref());
                let stands = attachment.is_some_and(|found| found.container_id == sticky.attachment_id);
                // The watch may lag behind what was attached a moment ago.
                !stands
                    && debounce.stable_for(format!("decided {}", decision.uid), String::new(), SHORT, *now)
            }
        };
        if due {
            actions.push(Action::Withdraw { uid: decision.uid.clone() });
        }
    }
}

/// A pod that was not sticky when it was decided about, and whose ADD has not come: if it says otherwise by now, or if its
/// namespace might. Nobody tells of namespaces, so those are asked for now and then, as long as the pod waits.
fn reevaluate(
    input: &PlanInput<'_>,
    debounce: &mut Debounce,
    decision: &Decision,
    pod: &NodePod,
) -> Option<Action> {
    let PlanInput { options, store, now, .. } = input;
    let uid = &decision.uid;
    let lives = store.attached().any(|held| uid_of(&held.record) == Some(uid));
    if !pod.is_waiting || pod.is_ending || lives {
        return None;
    }
    let (due, said) = match options.rules.judge(&pod.facts) {
        Ok(verdict) => {
            let said = verdict.reason.to_string();
            let by_namespace = decision.reason == StickyReason::NamespaceAnnotation.to_string();
            let due = match verdict.reason {
                StickyReason::Selected if !by_namespace => true,
                StickyReason::NothingAsksForIt | StickyReason::Selected => {
                    debounce.stable_for(format!("plain {uid}"), said.clone(), LONG, *now)
                }
                _ => verdict.sticky,
            };
            (due, said)
        }
        // Its ADD must say so.
        Err(error) => (true, error.to_string()),
    };
    let name = format!("{}/{}", pod.facts.namespace, pod.facts.name);
    due.then(|| Action::Reevaluate { pod: name, uid: uid.clone(), said })
}

/// What stands in a node's pool, by family.
#[must_use]
pub fn count_pool(node: &CiliumNode) -> BTreeMap<Family, (usize, usize)> {
    let mut counts: BTreeMap<Family, (usize, usize)> = BTreeMap::new();
    for (address, entry) in node.spec.ipam.pool.iter().filter(|(_, entry)| !barrier::is_barrier(entry)) {
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

fn mark_and_offer(input: &PlanInput<'_>, actions: &mut Vec<Action>) {
    let PlanInput { options, index, store, .. } = input;
    let Some(node) = index.cilium_node().filter(|_| options.shape.mode.publishes_pool_entries()) else {
        return;
    };
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
        actions.push(Action::RecordUnowned { addresses: unknown });
    }
    let lost = store.held.iter().filter(|held| held.record.is_unowned()).any(|held| {
        held.record.addresses.iter().any(|address| {
            contains(&blocks, *address) && !node.spec.ipam.pool.contains_key(&address.to_string())
        })
    });
    let counts = count_pool(node);
    let few = families_of(&blocks).into_iter().any(|family| {
        let (total, free) = counts.get(&family).copied().unwrap_or_default();
        free < options.min_free && total < options.max_entries
    });
    if lost || few {
        actions.push(Action::Refill);
    }
}

/// How an attached StickyIP is shown.
#[must_use]
pub fn shown(sticky: &StickyIP) -> Option<Publication> {
    let attachment = sticky.status.as_ref()?.attachment.as_ref()?;
    let namespace = sticky.metadata.namespace.as_deref()?;
    Some(Publication {
        addresses: sticky.spec.addresses.clone(),
        owner: format!("{namespace}/{}", attachment.pod_name),
        resource: pool::resource(namespace, &sticky.spec.workload),
    })
}

fn show_and_hide(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { options, index, store, now } = input;
    let Some(node) = index.cilium_node() else { return };
    for (name, sticky) in index.stickies.iter() {
        let key = key_of(sticky);
        // Without a sandbox or a decision an ADD or DEL is on its way, or it is a leak.
        let lives = store.living(&key).is_some() || store.prepared(&key).is_some();
        let missing = lives
            && shown(sticky).is_some_and(|shown| pool::publish_patch(node, &options.shape, &shown).is_some());
        let state = sticky.metadata.resource_version.clone().unwrap_or_default();
        if missing && debounce.stable_for(format!("shown {name}"), state, SHORT, *now) {
            actions.push(Action::Publish { key });
        }
    }
    let is_owned = |entry: &PoolEntry| !entry.owner.is_empty() && !barrier::is_barrier(entry);
    let owned = node
        .spec
        .ipam
        .pool
        .iter()
        .filter(|(_, entry)| options.shape.mode.publishes_pool_entries() && is_owned(entry));
    let mut shown: Vec<IpAddr> = owned.filter_map(|(address, _)| address.parse().ok()).collect();
    shown.extend(single_routes(node));
    shown.sort();
    shown.dedup();
    for address in shown {
        let attached = index.stickies.iter().any(|(_, sticky)| sticky.spec.addresses.contains(&address));
        if !attached
            && !store.uses(address)
            && debounce.stable_for(format!("hidden {address}"), String::new(), LONG, *now)
        {
            actions.push(Action::Unpublish { address });
        }
    }
    let asked = |claim: &ClaimView| claim.phase == ClaimPhase::Requested && claim.pod.is_some();
    let signs: Vec<&str> = barrier::keys(node).map(String::as_str).collect();
    if !signs.is_empty()
        && !index.claims.values().any(asked)
        && debounce.stable_for("signs".to_owned(), signs.join(" "), LONG, *now)
    {
        actions.push(Action::RemoveBarriers);
    }
}

fn attachments(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { index, store, now, .. } = input;
    for (name, sticky) in index.stickies.iter() {
        let attachment = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
        let Some(attachment) = attachment else { continue };
        let key = key_of(sticky);
        let used = store.living(&key).is_some() || store.prepared(&key).is_some();
        let pod_is_there = index.pod_of(&attachment.pod_uid).is_some();
        let state = sticky.metadata.resource_version.clone().unwrap_or_default();
        if !used && !pod_is_there && debounce.stable_for(format!("attached {name}"), state, LONG, *now) {
            actions.push(Action::Detach { key, container: attachment.container_id.clone() });
        }
    }
    for held in store.attached() {
        let record = &held.record;
        let Some(binding) = &record.binding else { continue };
        let key = StickyKey { namespace: binding.namespace.clone(), name: binding.name.clone() };
        let containers = [record.attachment.container.as_str(), binding.container.as_str()];
        let known = index.stickies.get(&key.to_string()).is_some_and(|sticky| {
            let attachment = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
            attachment.is_some_and(|attachment| containers.contains(&attachment.container_id.as_str()))
        });
        let what = format!("known {}", record.attachment);
        if !known && held.netns != Netns::Gone && debounce.stable_for(what, format!("{record:?}"), LONG, *now)
        {
            actions.push(Action::Attach { key, attachment: record.attachment.clone() });
        }
    }
}

fn records(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { options, index, store, now } = input;
    let home: Vec<IpNet> = [index.blocks(), options.shape.ranges.clone()].concat();
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
            let unknown = options.shape.mode.cilium_picks_the_address() && record.netns.is_none();
            if (held.netns == Netns::Gone || unknown)
                && (!pod_is_there || replaced)
                && debounce.stable_for(what, state, LONG, *now)
            {
                actions.push(Action::EndAttachment { record: record.clone() });
            }
            continue;
        }
        // Where home is not known, nothing can be said of what is kept.
        let Some(binding) = record.binding.as_ref().filter(|_| !home.is_empty()) else { continue };
        let key = StickyKey { namespace: binding.namespace.clone(), name: binding.name.clone() };
        let addresses = || record.addresses.iter().copied();
        let is_of_home = |address| contains(&home, address);
        let is_claimed = |address| index.claim_on(address).is_some_and(|claim| claim.sticky_ref == key);
        let claimed = addresses().any(is_claimed);
        // One that served a range set for which the StickyIP has none, for example.
        let stray = addresses().any(|address| is_of_home(address) && !is_claimed(address));
        // An address from elsewhere is remembered for its own pod's next sandbox, and for nobody else; so is what stands beside one
        // that is wanted.
        let remembered = pod_is_there && (claimed || !addresses().all(is_of_home));
        let wanted = (claimed && !stray) || remembered || store.prepared(&key).is_some();
        let what = format!("kept {:?}", record.addresses);
        if !wanted && is_bound_to(record, &key) && debounce.stable_for(what, state, LONG, *now) {
            actions.push(Action::ReleaseRecord { record: record.clone() });
        }
    }
}

/// Last, because nothing rests on it, and not while the pod still starts: the node is busy enough then. What is recorded already
/// costs a question to Cilium, less and less often.
fn macs(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { index, store, now, .. } = input;
    for key in index.stickies.values().map(key_of) {
        let Some(living) = store.living(&key) else { continue };
        let sandbox = living.attachment.to_string();
        if debounce.stable_for(format!("mac {key}"), sandbox, SHORT, *now) {
            actions.push(Action::RecordMac { key });
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
