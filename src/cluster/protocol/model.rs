//! A small world: an API server with resourceVersions, pods that come and go, a repairer and a recycler, all
//! of which may read stale, lose races and crash between any two steps. Every reachable state is visited.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;

use crate::cluster::objects::{ClaimPhase, ClaimantKind, ClaimantRef, WorkloadRef};
use crate::cluster::protocol::faults::{RepairFacts, RepairTimes, find_faults};
use crate::cluster::protocol::step::{BindInput, Candidate, LiveState, NextStep, attach_again, detach, next};
use crate::cluster::view::{ClaimView, Origin, StickyView};
use crate::cluster::writer::write::{Precondition, Write};
use crate::names::StickyKey;
use crate::policy::handover::{Attached, NodeState, OldPod, OldSandbox};

pub(crate) fn address(last: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, last])
}

pub(crate) fn sticky_pool() -> Origin {
    Origin::StickyPool { range: "10.0.0.0/24".parse().unwrap() }
}

fn foreign() -> Origin {
    Origin::ForeignBlock { home: "home".into(), block: "10.0.0.0/24".parse().unwrap() }
}

/// The API server: objects by name, versions by object, uids never used twice.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct ModelServer {
    pub(crate) stickies: BTreeMap<StickyKey, StickyView>,
    pub(crate) claims: BTreeMap<IpAddr, ClaimView>,
    births: BTreeMap<String, u32>,
}

impl ModelServer {
    fn uid(&mut self, name: &str) -> String {
        let births = self.births.entry(name.into()).or_default();
        *births += 1;
        format!("{name}#{births}")
    }

    fn claim_at(&mut self, address: IpAddr, write: &Write) -> Option<&mut ClaimView> {
        let at = precondition(write)?;
        self.claims
            .get_mut(&address)
            .filter(|claim| claim.uid == at.uid && claim.resource_version == at.resource_version)
    }

    fn sticky_at(&mut self, key: &StickyKey, write: &Write) -> Option<&mut StickyView> {
        let at = precondition(write)?;
        self.stickies
            .get_mut(key)
            .filter(|sticky| sticky.uid == at.uid && sticky.resource_version == at.resource_version)
    }

    pub(crate) fn is_gone(&self, key: &StickyKey, uid: &str) -> bool {
        self.stickies.get(key).is_none_or(|sticky| sticky.uid != uid)
    }

    /// Carries a write out; none if its precondition does not hold.
    pub(crate) fn apply(&mut self, write: &Write) -> Option<()> {
        match write {
            Write::CreateClaim { address, sticky_ref, phase, sticky_uid, origin, pod } => {
                assert_eq!(
                    *phase == ClaimPhase::Bound,
                    sticky_uid.is_some(),
                    "the API server refuses {write:?}"
                );
                if self.claims.contains_key(address) {
                    return None;
                }
                let claim = ClaimView {
                    address: *address,
                    uid: self.uid(&address.to_string()),
                    resource_version: "1".into(),
                    phase: *phase,
                    sticky_ref: sticky_ref.clone(),
                    sticky_uid: sticky_uid.clone(),
                    home_node: origin.home_and_block().0.map(Into::into),
                    reason: None,
                    pod: pod.clone(),
                    released: false,
                    in_use_by: None,
                };
                self.claims.insert(*address, claim);
            }
            Write::AnswerClaim { address, refused, .. } => {
                let claim = self.claim_at(*address, write)?;
                claim.phase = if refused.is_some() { ClaimPhase::Refused } else { ClaimPhase::Granted };
                claim.reason.clone_from(refused);
                bump(&mut claim.resource_version);
            }
            Write::SealClaim { address, sticky_uid, .. } => {
                let claim = self.claim_at(*address, write)?;
                assert_ne!(claim.phase, ClaimPhase::Bound, "a seal is replaced");
                claim.phase = ClaimPhase::Bound;
                claim.sticky_uid = Some(sticky_uid.clone());
                claim.released = false;
                bump(&mut claim.resource_version);
            }
            Write::QuarantineClaim { address, released, .. } => {
                let claim = self.claim_at(*address, write)?;
                claim.phase = ClaimPhase::Quarantined;
                claim.released = *released;
                bump(&mut claim.resource_version);
            }
            Write::RecordMac { key, .. } => bump(&mut self.sticky_at(key, write)?.resource_version),
            Write::ClearPod { address, .. } => {
                let claim = self.claim_at(*address, write)?;
                claim.pod = None;
                bump(&mut claim.resource_version);
            }
            Write::ReportUse { address, in_use_by, .. } => {
                let claim = self.claim_at(*address, write)?;
                claim.in_use_by.clone_from(in_use_by);
                bump(&mut claim.resource_version);
            }
            Write::DeleteClaim { address, .. } => {
                self.claim_at(*address, write)?;
                self.claims.remove(address);
            }
            Write::CreateSticky { key, addresses, claimant, workload, .. } => {
                if self.stickies.contains_key(key) {
                    return None;
                }
                let sticky = StickyView {
                    key: key.clone(),
                    uid: self.uid(&key.to_string()),
                    resource_version: "1".into(),
                    addresses: addresses.clone(),
                    claimant: claimant.kind,
                    workload: workload.clone(),
                    attached: None,
                    was_attached: false,
                    in_conflict: false,
                    deleting: false,
                };
                self.stickies.insert(key.clone(), sticky);
            }
            Write::DeleteSticky { key, .. } => {
                assert!(
                    self.sticky_at(key, write)?.attached.is_none(),
                    "an attached StickyIP is deleted: {self:?}"
                );
                self.stickies.remove(key);
            }
            Write::Attach { key, attached, .. } => {
                let sticky = self.sticky_at(key, write)?;
                sticky.attached = Some(attached.clone());
                sticky.was_attached = true;
                bump(&mut sticky.resource_version);
            }
            Write::Detach { key, .. } => {
                let sticky = self.sticky_at(key, write)?;
                sticky.attached = None;
                bump(&mut sticky.resource_version);
            }
            Write::MarkConflict { key, .. } => {
                let sticky = self.sticky_at(key, write)?;
                sticky.in_conflict = true;
                bump(&mut sticky.resource_version);
            }
        }
        Some(())
    }
}

/// What must not have changed; none for creations, whose precondition is that the name is free.
fn precondition(write: &Write) -> Option<&Precondition> {
    match write {
        Write::CreateClaim { .. } | Write::CreateSticky { .. } => None,
        Write::AnswerClaim { at, .. }
        | Write::SealClaim { at, .. }
        | Write::QuarantineClaim { at, .. }
        | Write::ClearPod { at, .. }
        | Write::ReportUse { at, .. }
        | Write::DeleteClaim { at, .. }
        | Write::DeleteSticky { at, .. }
        | Write::Attach { at, .. }
        | Write::Detach { at, .. }
        | Write::RecordMac { at, .. }
        | Write::MarkConflict { at, .. } => Some(at),
    }
}

fn bump(version: &mut String) {
    *version = (version.parse::<u32>().unwrap() + 1).to_string();
}

/// How far an actor has come; each variant is a place where others may act in between, or where it may crash.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Pc {
    Idle,
    /// Has read the StickyIP (or all of them), not yet the claims.
    ReadStickies(Vec<StickyView>),
    /// About to attach by the state in which a DEL left the StickyIP, with nothing read.
    Ahead(StickyView),
    /// Has sent it; whether it stands. The claims are read next.
    Sent(StickyView, bool),
    /// Has decided; the live check of the write, if it needs one, comes next.
    Decided(Vec<Write>, After),
    /// The live check held; the write comes next.
    Checked(Vec<Write>, After),
    /// ADD has answered: the pod speaks through these addresses.
    Live(Vec<IpAddr>),
    /// The pod is gone; DEL has yet to detach.
    Leaving,
    Ended(&'static str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum After {
    ReadAgain,
    NextCandidate,
    End(&'static str),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Role {
    /// It tries the candidates in turn, each of them one address a family.
    Pod {
        key: StickyKey,
        candidates: Vec<Vec<u8>>,
        next: usize,
        pinned: bool,
        leaves: bool,
    },
    Repairer,
    Recycler,
    HomeNode,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Actor {
    name: String,
    role: Role,
    pc: Pc,
    /// Reads that it may still begin: its deadline.
    patience: u8,
    /// It may still attach ahead of its reads.
    ahead: bool,
}

/// One run's starting point.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ModelState {
    pub(crate) server: ModelServer,
    actors: Vec<Actor>,
    crashes: u8,
    foreign: bool,
    for_good: bool,
    /// How each StickyIP stood after its last DEL, for the next reader: harsher than each node's own memory.
    detached_snapshots: BTreeMap<StickyKey, StickyView>,
}

impl ModelState {
    pub(crate) fn new(crashes: u8) -> Self {
        Self {
            server: ModelServer::default(),
            actors: Vec::new(),
            crashes,
            foreign: false,
            for_good: false,
            detached_snapshots: BTreeMap::new(),
        }
    }

    /// The harshest repairer: it takes everything for old enough at once.
    fn repair_facts(&self, stickies: &[StickyView]) -> RepairFacts {
        let origin = || if self.foreign { foreign() } else { sticky_pool() };
        let addresses = stickies.iter().flat_map(|sticky| &sticky.addresses);
        RepairFacts {
            times: RepairTimes { orphan: 0, quarantine: 0 },
            in_use: self.live().into_iter().map(|(_, address)| address).collect(),
            origins: addresses.map(|address| (*address, origin())).collect(),
            release_for_good: self.for_good,
            ..RepairFacts::default()
        }
    }

    /// All addresses are of another node's block; a home node that grants is among the actors.
    pub(crate) fn of_foreign_block(mut self) -> Self {
        self.foreign = true;
        self.actor("home", Role::HomeNode, 3)
    }

    /// What was let go is let go for good: its former holder does not get it back while it rests.
    pub(crate) fn for_good(mut self) -> Self {
        self.for_good = true;
        self
    }

    fn actor(mut self, name: &str, role: Role, patience: u8) -> Self {
        self.actors.push(Actor { name: name.into(), role, pc: Pc::Idle, patience, ahead: false });
        self
    }

    /// The pod that was named last may attach ahead of its reads.
    pub(crate) fn ahead(mut self) -> Self {
        self.actors.last_mut().unwrap().ahead = true;
        self
    }

    /// A pod `name` that comes up as claimant `sticky`, trying these addresses in turn.
    pub(crate) fn pod(self, name: &str, sticky: &str, candidates: &[u8], leaves: bool) -> Self {
        let candidates: Vec<[u8; 1]> = candidates.iter().map(|last| [*last]).collect();
        self.pod_of_families(name, sticky, &candidates, leaves, 6)
    }

    /// A pod that has as many addresses as each of these candidates, and so much patience.
    pub(crate) fn pod_of_families<const FAMILIES: usize>(
        self,
        name: &str,
        sticky: &str,
        candidates: &[[u8; FAMILIES]],
        leaves: bool,
        patience: u8,
    ) -> Self {
        let key = StickyKey { namespace: "ns".into(), name: sticky.into() };
        let pinned = candidates.len() == 1;
        let candidates = candidates.iter().map(|one| one.to_vec()).collect();
        let role = Role::Pod { key, candidates, next: 0, pinned, leaves };
        self.actor(name, role, patience)
    }

    pub(crate) fn repairer(self, rounds: u8) -> Self {
        self.actor("repairer", Role::Repairer, rounds)
    }

    pub(crate) fn recycler(self, rounds: u8) -> Self {
        self.actor("recycler", Role::Recycler, rounds)
    }

    fn live(&self) -> Vec<(&Actor, IpAddr)> {
        self.actors
            .iter()
            .flat_map(|actor| {
                let addresses = if let Pc::Live(addresses) = &actor.pc { addresses.as_slice() } else { &[] };
                addresses.iter().map(move |address| (actor, *address))
            })
            .collect()
    }

    /// Invariant 1, and the chain that gives a live pod its right: pod, attachment, seal.
    fn check(&self) {
        let live = self.live();
        let distinct: BTreeSet<IpAddr> = live.iter().map(|(_, address)| *address).collect();
        assert_eq!(distinct.len(), live.len(), "one address with two live pods: {self:#?}");
        for (actor, address) in live {
            let claim = self.server.claims.get(&address);
            let sticky = claim.and_then(|claim| self.server.stickies.get(&claim.sticky_ref));
            let rightful = sticky.is_some_and(|sticky| {
                sticky.attached.as_ref().is_some_and(|attached| attached.pod_uid == actor.name)
                    && claim.is_some_and(|claim| claim.sealed_to(&sticky.uid))
            });
            assert!(rightful, "{} lives with {address} and has no right to it: {self:#?}", actor.name);
        }
    }

    /// Invariant 3, once no part acts any more and the repairer has had its time.
    fn check_at_rest(mut self) {
        for round in 0.. {
            assert!(round < 30, "repair does not come to rest: {self:#?}");
            for claim in self.server.claims.clone().values() {
                if let Some(write) = crate::cluster::protocol::step::answer("home", claim, Ok(())) {
                    self.server.apply(&write);
                }
            }
            let stickies: Vec<_> = self.server.stickies.values().cloned().collect();
            let claims: Vec<_> = self.server.claims.values().cloned().collect();
            let findings = find_faults(&stickies, &claims, &self.repair_facts(&stickies));
            if findings.is_empty() {
                break;
            }
            for write in findings.into_iter().filter_map(|finding| finding.fix) {
                if write.must_be_gone().is_none_or(|(key, uid)| self.server.is_gone(key, uid)) {
                    self.server.apply(&write);
                }
            }
            self.check();
        }
        let mut claimed = BTreeSet::new();
        for sticky in self.server.stickies.values() {
            for address in &sticky.addresses {
                assert!(claimed.insert(*address), "{address} is with two StickyIPs: {self:#?}");
                let claim = self.server.claims.get(address);
                assert!(
                    claim.is_some_and(|claim| claim.sealed_to(&sticky.uid)),
                    "no seal on {address}: {self:#?}"
                );
            }
        }
        assert!(
            self.server.claims.keys().all(|address| claimed.contains(address)),
            "a claim leaks: {self:#?}"
        );
    }

    /// Everything that can happen next.
    fn successors(&self) -> Vec<ModelState> {
        let mut worlds = Vec::new();
        for index in 0..self.actors.len() {
            if matches!(self.actors[index].pc, Pc::Ended(_)) {
                continue;
            }
            worlds.extend(self.act(index));
            // A pod that lives is not an actor that can crash: its node is, and that is what `Leaving` is
            // for.
            if self.crashes > 0 && !matches!(self.actors[index].pc, Pc::Idle | Pc::Live(_)) {
                let mut world = self.clone();
                world.crashes -= 1;
                world.actors[index].pc = Pc::Ended("crashed");
                worlds.push(world);
            }
        }
        worlds
    }

    fn with_pc(&self, index: usize, pc: Pc) -> ModelState {
        let mut world = self.clone();
        world.actors[index].pc = pc;
        world
    }

    fn act(&self, index: usize) -> Vec<ModelState> {
        let actor = &self.actors[index];
        match &actor.pc {
            Pc::Idle if actor.patience == 0 => vec![self.with_pc(index, Pc::Ended("deadline"))],
            Pc::Idle if actor.ahead => {
                let Role::Pod { key, .. } = &actor.role else { unreachable!() };
                let mut without = self.clone();
                without.actors[index].ahead = false;
                let with = self
                    .detached_snapshots
                    .get(key)
                    .map(|detached| without.with_pc(index, Pc::Ahead(detached.clone())));
                with.into_iter().chain([without]).collect()
            }
            Pc::Ahead(detached) => {
                let mut world = self.clone();
                let sent = attach_again(detached, &self.asked(index).asker);
                let stands = sent.is_some_and(|write| world.server.apply(&write).is_some());
                vec![world.with_pc(index, Pc::Sent(detached.clone(), stands))]
            }
            Pc::Sent(detached, stands) => {
                let ask = self.asked(index);
                let claims = self.claims_for(&ask, Some(detached));
                let sent = attach_again(detached, &ask.asker).map(NextStep::Do);
                let pc = if *stands && sent == Some(next(&ask, &seen(Some(detached), &claims))) {
                    Pc::Live(detached.addresses.clone())
                } else {
                    let sticky = self.server.stickies.get(&ask.key);
                    let undo = sticky
                        .and_then(|sticky| detach(sticky, &actor.name.as_str().into()))
                        .filter(|_| *stands);
                    Pc::Decided(undo.into_iter().collect(), After::ReadAgain)
                };
                vec![self.with_pc(index, pc)]
            }
            Pc::Idle => {
                let seen = match &actor.role {
                    Role::Pod { key, .. } => self.server.stickies.get(key).cloned().into_iter().collect(),
                    _ => self.server.stickies.values().cloned().collect(),
                };
                let mut world = self.with_pc(index, Pc::ReadStickies(seen));
                world.actors[index].patience -= 1;
                vec![world]
            }
            Pc::ReadStickies(stickies) => self.decide(index, stickies),
            Pc::Decided(writes, after) => {
                let Some(write) = writes.first() else { return vec![self.after(index, *after)] };
                // Only a write with a live check has a gap between check and write.
                match write.must_be_gone() {
                    None => vec![self.carry_out(index, writes, *after)],
                    Some((key, uid)) if self.server.is_gone(key, uid) => {
                        vec![self.with_pc(index, Pc::Checked(writes.clone(), *after))]
                    }
                    Some(_) => vec![self.with_pc(index, Pc::Idle)],
                }
            }
            Pc::Checked(writes, after) => vec![self.carry_out(index, writes, *after)],
            Pc::Live(_) => {
                let Role::Pod { leaves, .. } = &actor.role else { unreachable!() };
                if *leaves { vec![self.with_pc(index, Pc::Leaving)] } else { Vec::new() }
            }
            Pc::Leaving => {
                let Role::Pod { key, .. } = &actor.role else { unreachable!() };
                let sticky = self.server.stickies.get(key);
                let writes = sticky
                    .and_then(|sticky| detach(sticky, &actor.name.as_str().into()))
                    .into_iter()
                    .collect();
                vec![self.with_pc(index, Pc::Decided(writes, After::End("left")))]
            }
            Pc::Ended(_) => Vec::new(),
        }
    }

    fn carry_out(&self, index: usize, writes: &[Write], after: After) -> ModelState {
        let (write, rest) = writes.split_first().unwrap();
        let mut world = self.clone();
        let applied = world.server.apply(write);
        if let (Some(()), Write::Detach { key, .. }) = (applied, write) {
            world.detached_snapshots.insert(key.clone(), world.server.stickies[key].clone());
        }
        if rest.is_empty() {
            return world.after(index, after);
        }
        world.with_pc(index, Pc::Decided(rest.to_vec(), after))
    }

    fn after(&self, index: usize, after: After) -> ModelState {
        let mut world =
            self.with_pc(index, if let After::End(why) = after { Pc::Ended(why) } else { Pc::Idle });
        if let (After::NextCandidate, Role::Pod { candidates, next, .. }) =
            (after, &mut world.actors[index].role)
        {
            *next += 1;
            if *next >= candidates.len() {
                world.actors[index].pc = Pc::Ended("no address left");
            }
        }
        world
    }

    fn decide(&self, index: usize, stickies: &[StickyView]) -> Vec<ModelState> {
        let actor = &self.actors[index];
        let one = |write| self.with_pc(index, Pc::Decided(vec![write], After::ReadAgain));
        let idle = || vec![self.with_pc(index, Pc::Idle)];
        match &actor.role {
            Role::Repairer => {
                let claims: Vec<_> = self.server.claims.values().cloned().collect();
                let fixes = find_faults(stickies, &claims, &self.repair_facts(stickies))
                    .into_iter()
                    .filter_map(|finding| finding.fix);
                let worlds: Vec<ModelState> = fixes.map(one).collect();
                if worlds.is_empty() { idle() } else { worlds }
            }
            Role::Recycler => {
                let free = stickies.iter().filter(|sticky| sticky.attached.is_none());
                let worlds: Vec<ModelState> = free
                    .map(|sticky| {
                        one(Write::DeleteSticky {
                            key: sticky.key.clone(),
                            at: crate::cluster::protocol::step::at_sticky(sticky),
                        })
                    })
                    .collect();
                if worlds.is_empty() { idle() } else { worlds }
            }
            Role::HomeNode => {
                let answers = self
                    .server
                    .claims
                    .values()
                    .filter_map(|claim| crate::cluster::protocol::step::answer("home", claim, Ok(())));
                let worlds: Vec<ModelState> = answers.map(one).collect();
                if worlds.is_empty() { idle() } else { worlds }
            }
            Role::Pod { .. } => {
                let ask = self.asked(index);
                let sticky = stickies.first();
                let claims = self.claims_for(&ask, sticky);
                let pc = match next(&ask, &seen(sticky, &claims)) {
                    NextStep::Do(write) => Pc::Decided(vec![write], After::ReadAgain),
                    NextStep::Done(addresses) => Pc::Live(addresses),
                    NextStep::Wait(_) => Pc::Idle,
                    NextStep::TryAnother { undo, .. } => Pc::Decided(undo, After::NextCandidate),
                    NextStep::Refuse { undo, .. } => Pc::Decided(undo, After::End("refused")),
                };
                vec![self.with_pc(index, pc)]
            }
        }
    }

    /// What the pod asks for now.
    fn asked(&self, index: usize) -> BindInput {
        let actor = &self.actors[index];
        let Role::Pod { key, candidates, next, pinned, .. } = &actor.role else { unreachable!() };
        let origin = if self.foreign { foreign() } else { sticky_pool() };
        ask(&actor.name, key, &candidates[*next], *pinned, &origin)
    }

    fn claims_for(&self, ask: &BindInput, sticky: Option<&StickyView>) -> BTreeMap<IpAddr, ClaimView> {
        let wanted = ask.claims_to_read(sticky);
        let claims = self.server.claims.clone().into_iter();
        claims.filter(|(address, _)| wanted.contains(address)).collect()
    }

    /// Visits every reachable state and checks each; returns how many there are.
    pub(crate) fn explore(self) -> usize {
        let mut seen = HashSet::new();
        let mut at_rest = HashSet::new();
        let mut open = vec![self];
        while let Some(world) = open.pop() {
            if !seen.insert(fingerprint(&world)) {
                continue;
            }
            world.check();
            let next = world.successors();
            if next.is_empty() && at_rest.insert(fingerprint(&world)) {
                world.clone().check_at_rest();
            }
            open.extend(next);
        }
        assert!(!at_rest.is_empty(), "no run ever ends");
        seen.len()
    }
}

fn seen<'a>(sticky: Option<&'a StickyView>, claims: &'a BTreeMap<IpAddr, ClaimView>) -> LiveState<'a> {
    LiveState {
        sticky,
        claims,
        old_node: NodeState::Ready,
        old_pod: OldPod::Terminating,
        old_sandbox: OldSandbox::MayLive,
        home_node: NodeState::Ready,
    }
}

fn fingerprint(world: &ModelState) -> u64 {
    let mut hasher = DefaultHasher::new();
    world.hash(&mut hasher);
    hasher.finish()
}

pub(crate) fn ask(pod: &str, key: &StickyKey, candidates: &[u8], pinned: bool, origin: &Origin) -> BindInput {
    let workload = WorkloadRef {
        api_version: "apps/v1".into(),
        kind: "StatefulSet".into(),
        name: "set".into(),
        uid: String::new(),
    };
    BindInput {
        asker: Attached { node: format!("node-{pod}"), pod_uid: pod.into(), attachment_id: pod.into() },
        key: key.clone(),
        claimant: ClaimantRef { kind: ClaimantKind::Pod, ordinal: None },
        workload,
        retention: Default::default(),
        candidates: candidates
            .iter()
            .map(|last| Candidate { address: address(*last), origin: origin.clone() })
            .collect(),
        pinned,
        origins: (0..=9).map(|last| (address(last), origin.clone())).collect(),
        running: None,
    }
}
