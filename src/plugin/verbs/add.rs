//! ADD: an address for every range set, the same one that the pod had if it is sticky.

use std::fs;
use std::net::IpAddr;

use serde_json::Value;

use crate::alloc::RangeSet;
use crate::cni::{CniError, CniResult, Dns, IpConfig, IpamConf, OnExhaustion, code, parse_resolv_conf};
use crate::node::list;
use crate::plugin::cluster::add::{self, Resolved};
use crate::plugin::cluster::context::AddContext;
use crate::plugin::cluster::record::serving;
use crate::plugin::cluster::seed;
use crate::plugin::verbs::wait::OldPodWait;
use crate::plugin::{VerbContext, VerbLog};
use crate::store::{ClaimantKey, Disk, LockedStore, Record, RecordState, StoreError, StoredRecord};

pub(crate) fn run<D: Disk>(verb: &VerbContext<'_, D>, log: &mut VerbLog<'_>) -> Result<Value, CniError> {
    let dns = name_service(verb.ipam)?;
    let wanted = requested_by_set(verb.ipam)?;
    let addresses = addresses(verb, &wanted, log)?;
    let mut ours = CniResult { dns, routes: verb.ipam.routes.clone(), ..CniResult::default() };
    for (set, address) in verb.ipam.sets.iter().zip(serving(&verb.ipam.sets, &addresses)) {
        let Some(address) = address else { continue };
        // An address of another node is used in this node's own network: its gateway serves it too.
        if let Some(range) = set.contains(address).or_else(|| set.ranges().first()) {
            ours.ips.push(IpConfig::new(range.with_prefix(address), range.gateway()));
        }
    }
    let result = match verb.request.config.prev_result.clone() {
        Some(prev) => CniResult::merged(prev, ours),
        None => ours,
    };
    Ok(result.print_as(verb.request.config.version))
}

/// The addresses by range set: those that the cluster binds, or those that this node chooses alone.
fn addresses<D: Disk>(
    verb: &VerbContext<'_, D>,
    wanted: &[Option<IpAddr>],
    log: &mut VerbLog<'_>,
) -> Result<Vec<IpAddr>, CniError> {
    let _claimant_lock = match (&verb.sticky.cluster, &verb.request.pod) {
        (Some(conf), Some(pod)) if verb.sticky.selects(pod) => {
            let context = AddContext { verb, conf, pod, attachment: verb.attachment()? };
            match add::add(&context, wanted, log)? {
                Resolved::Sticky(bound) => return Ok(bound.addresses),
                Resolved::Plain(claimant_lock) => claimant_lock,
            }
        }
        _ => None,
    };
    reserve(verb, wanted, log)
}

/// Reserves the addresses, durably, and returns them in the order of the range sets.
fn reserve<D: Disk>(
    verb: &VerbContext<'_, D>,
    wanted: &[Option<IpAddr>],
    log: &mut VerbLog<'_>,
) -> Result<Vec<IpAddr>, CniError> {
    let attachment = verb.attachment()?;
    let mut old_pod = OldPodWait::new(verb.sticky.wait_for_old_pod);
    loop {
        let mut locked = verb.store.lock()?;
        let mut held = locked.find_by_attachment(attachment)?;
        if held.is_none() && seed::is_unseeded(verb, &locked)? {
            locked = seed::seed(verb, locked)?;
            held = locked.find_by_attachment(attachment)?;
        }
        if let Some(held) = held {
            let addresses = repeated_addresses(&held.record, verb.ipam, wanted)?;
            // The process that reserved it may have ended before it was on the disk.
            locked.sync_existing(&held)?;
            locked.commit()?;
            log.report(&addresses, "this container has it already");
            return Ok(addresses);
        }
        let claimed = match &verb.request.pod {
            Some(pod) if verb.retention().is_some() => {
                locked.find_by_claimant(&ClaimantKey::of_pod(pod, &attachment.interface))?
            }
            _ => None,
        };
        if let Some(claimed) = &claimed
            && let Some(holder) = OldPodWait::old_pod(verb.request, &claimed.record, verb.store.now())
        {
            drop(locked);
            old_pod.wait_for(&holder)?;
            continue;
        }
        return take(verb, wanted, locked, claimed.as_ref(), log);
    }
}

/// Takes an address for each set, puts the record in place, and returns when it is on the disk.
fn take<D: Disk>(
    verb: &VerbContext<'_, D>,
    wanted: &[Option<IpAddr>],
    mut locked: LockedStore<'_, D>,
    claimed: Option<&StoredRecord>,
    log: &mut VerbLog<'_>,
) -> Result<Vec<IpAddr>, CniError> {
    let attachment = verb.attachment()?;
    let (addresses, reclaimed) = loop {
        let mut addresses = Vec::new();
        let mut reclaimed: Vec<StoredRecord> = Vec::new();
        for (index, set) in verb.ipam.sets.iter().enumerate() {
            let Choice { address, why, instead_of } =
                pick(&mut locked, verb, (index, set), wanted[index], claimed)?;
            locked.set_cursor(index, address);
            addresses.push(address);
            log.report(&addresses, why);
            if let Some(stored) = instead_of.filter(|stored| !reclaimed.contains(stored)) {
                reclaimed.push(stored);
            }
        }
        let record = Record {
            addresses: addresses.clone(),
            attachment: attachment.clone(),
            state: RecordState::Attached,
            netns: verb.request.netns.clone(),
            pod: verb.request.pod.clone(),
            retention: verb.retention(),
            binding: None,
            since: verb.store.now().clone(),
        };
        // In one change: a pod must not lose its address for an ADD that fails.
        match locked.put_reclaiming(&record, claimed, &reclaimed) {
            Ok(()) => break (addresses, reclaimed),
            // The store did not know the file of that name. It does now: pick again.
            Err(StoreError::Taken(address)) if !wanted.contains(&Some(address)) => {}
            Err(error) => return Err(error.into()),
        }
    };
    if let Err(error) = locked.commit() {
        // What is not on the disk is not answered: undo the change, as far as the disk allows.
        let undone = verb.store.lock().and_then(|mut locked| {
            let Some(stored) = locked.find_by_attachment(attachment)? else { return Ok(()) };
            let mut before = claimed.into_iter().chain(&reclaimed);
            match before.next() {
                Some(first) => locked.put(&first.record, Some(&stored))?,
                None => locked.release(&stored)?,
            }
            before.try_for_each(|other| locked.put(&other.record, None))
        });
        if let Err(again) = undone {
            let addresses = &log.addresses;
            tracing::error!(
                addresses, error = %again,
                "cannot undo the reservation; DEL or GC of the container does"
            );
        }
        return Err(error.into());
    }
    for stored in reclaimed {
        let (addresses, kept_for) = (list(&stored.record.addresses), stored.record.holder());
        tracing::warn!(addresses, kept_for, reason = log.reason, "released a kept address for another pod");
    }
    Ok(addresses)
}

/// An address for a range set, why it is that one, and the record that had it until now.
struct Choice {
    address: IpAddr,
    why: &'static str,
    instead_of: Option<StoredRecord>,
}

/// The address for one range set: the one asked for, else the one kept for this pod, else the next free one.
fn pick<D: Disk>(
    locked: &mut LockedStore<'_, D>,
    verb: &VerbContext<'_, D>,
    (index, set): (usize, &RangeSet),
    wanted: Option<IpAddr>,
    claimed: Option<&StoredRecord>,
) -> Result<Choice, CniError> {
    if let Some(address) = wanted {
        let instead_of = check_requested(locked, verb, address, claimed)?;
        return Ok(Choice { address, why: "requested", instead_of });
    }
    if let Some(address) = claimed.and_then(|stored| of_set(&stored.record, set)) {
        return Ok(Choice { address, why: "kept for this pod", instead_of: None });
    }
    if let Some(address) = locked.next_free(index, set)? {
        return Ok(Choice { address, why: "next free", instead_of: None });
    }
    reclaim(locked, verb, set, claimed)?.ok_or_else(|| {
        CniError::new(code::EXHAUSTED, format!("no IP addresses available in range set: {set}")).with_details(
            "every address is in use or kept for a pod that is away; widen ipam.ranges, shorten \
             sticky.retention, or set sticky.onExhaustion to reclaim",
        )
    })
}

/// The address of this set that a record has and a pod may have.
pub(crate) fn of_set(record: &Record, set: &RangeSet) -> Option<IpAddr> {
    let usable = |ip: &&IpAddr| set.contains(**ip).is_some_and(|range| range.usable(**ip));
    record.addresses.iter().find(usable).copied()
}

/// Refuses a requested address that another container has. One whose retention has run out may be taken.
fn check_requested<D: Disk>(
    locked: &mut LockedStore<'_, D>,
    verb: &VerbContext<'_, D>,
    address: IpAddr,
    claimed: Option<&StoredRecord>,
) -> Result<Option<StoredRecord>, CniError> {
    let Some(there) = locked.find_by_address(address)? else { return Ok(None) };
    if claimed.is_some_and(|claimed| claimed.record.claimant() == there.record.claimant()) {
        return Ok(None);
    }
    if there.record.has_expired(verb.store.now(), locked.first_opened_at()) {
        return Ok(Some(there));
    }
    let how = if there.record.is_attached(verb.store.now()) { "held by" } else { "kept for" };
    let message = format!("the requested address {address} is {how} {}", there.record.holder());
    Err(CniError::new(code::REQUEST_REFUSED, message))
}

/// A kept address of this set when nothing else is free: one whose retention has run out, else, if the
/// operator allows it, the one that was kept longest.
fn reclaim<D: Disk>(
    locked: &mut LockedStore<'_, D>,
    verb: &VerbContext<'_, D>,
    set: &RangeSet,
    claimed: Option<&StoredRecord>,
) -> Result<Option<Choice>, CniError> {
    let mut kept: Vec<(StoredRecord, IpAddr)> = locked
        .kept_records()?
        .into_iter()
        .filter(|stored| Some(stored) != claimed && stored.record.binding.is_none())
        .filter_map(|stored| of_set(&stored.record, set).map(|address| (stored, address)))
        .collect();
    let (now, first_opened_at) = (verb.store.now(), locked.first_opened_at().clone());
    let expired = kept.iter().position(|(stored, _)| stored.record.has_expired(now, &first_opened_at));
    let (at, why) = match (expired, verb.sticky.on_exhaustion) {
        (Some(expired), _) => (expired, "its retention ran out"),
        (None, OnExhaustion::Reclaim) if !kept.is_empty() => (0, "reclaimed, nothing else was free"),
        (None, _) => return Ok(None),
    };
    let (stored, address) = kept.swap_remove(at);
    Ok(Some(Choice { address, why, instead_of: Some(stored) }))
}

fn repeated_addresses(
    held: &Record,
    ipam: &IpamConf,
    wanted: &[Option<IpAddr>],
) -> Result<Vec<IpAddr>, CniError> {
    let all = ipam.sets.iter().zip(wanted).map(|(set, wanted)| {
        let address = held.addresses.iter().find(|ip| set.contains(**ip).is_some()).copied();
        let refused = |why: String| CniError::new(code::REQUEST_REFUSED, why);
        match (address, wanted) {
            (Some(has), Some(wanted)) if has != *wanted => Err(refused(format!(
                "the address {wanted} is requested, but this container has {has} already; DEL it first"
            ))),
            (Some(has), _) => Ok(has),
            (None, _) => Err(refused(format!(
                "this container has an address already, but none of the range set {set}; DEL it first"
            ))),
        }
    });
    all.collect()
}

fn requested_by_set(ipam: &IpamConf) -> Result<Vec<Option<IpAddr>>, CniError> {
    let mut wanted = vec![None; ipam.sets.len()];
    for requested in &ipam.requested {
        let ip = requested.ip;
        let refused = |why: String| Err(CniError::new(code::REQUEST_REFUSED, why));
        let found = ipam.sets.iter().enumerate().find_map(|(index, set)| Some((index, set.contains(ip)?)));
        match found {
            None => return refused(format!("the requested address {ip} is in none of the range sets")),
            Some((_, range)) if !range.usable(ip) => {
                return refused(format!("the requested address {ip} is the gateway of {}", range.subnet()));
            }
            Some((index, _)) => match wanted[index] {
                None => wanted[index] = Some(ip),
                Some(other) if other == ip => {}
                Some(other) => {
                    let why = "are requested, but both are of one range set, which gives one address";
                    return refused(format!("{other} and {ip} {why}"));
                }
            },
        }
    }
    Ok(wanted)
}

fn name_service(ipam: &IpamConf) -> Result<Dns, CniError> {
    let Some(path) = &ipam.resolv_conf else { return Ok(Dns::default()) };
    let text = fs::read_to_string(path)
        .map_err(|error| CniError::io(format!("ipam.resolvConf: cannot read {}: {error}", path.display())))?;
    Ok(parse_resolv_conf(&text))
}
