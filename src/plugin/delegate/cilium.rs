//! `crd` mode: Cilium's agent picks the address from the CiliumNode's pool, and this makes sure that a sticky pod gets its
//! own. The address is attached, written down on the node and shown in the pool with its owner; then cilium-cni runs, and
//! what it answers is looked at. What the agent has prepared is attached and shown already, and is written down while cilium-cni
//! runs.
//!
//! Must never let a sticky pod start with another address, never show an address before it is attached here, never
//! take it out of the pool before Cilium has let go of it, and never answer before the record is on the disk.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::alloc::range::Family;
use crate::cluster::cilium::socket::{EndpointAnswer, endpoint};
use crate::cni::{ClusterConf, CniError, CniResult, IpamConf, Request, Verb, code};
use crate::plugin::cluster::add;
use crate::plugin::cluster::add::{AddContext, Reserved, Resolved};
use crate::plugin::cluster::del as cluster_del;
use crate::plugin::delegate::Delegate;
use crate::plugin::verbs::{del, gc};
use crate::plugin::{VerbContext, VerbLog, attachment, boot_id_file, list};
use crate::policy::mode::PluginMode;
use crate::store::{Disk, NodeTime, Store};

/// Between two looks at Cilium, or two tries.
const PAUSE: Duration = Duration::from_millis(50);
/// What cilium-cni says, in parts of a sentence, while another sandbox still has the address, or while Cilium's agent has
/// not seen the pool's new key.
const TEMPORARY: &[&str] = &["already in use", "expiration timer", "ips available"];

/// Carries a verb out.
///
/// # Errors
/// Ours, or the delegate's.
pub(crate) fn run(
    request: &Request,
    conf: &ClusterConf,
    delegate: &Delegate<'_>,
    disk: impl Disk,
    story: &mut VerbLog<'_>,
) -> Result<Option<Value>, CniError> {
    let now = NodeTime::now(&boot_id_file(request))?;
    let ipam = store_location(request);
    let sticky = request.config.sticky().cloned().unwrap_or_default();
    let store = Store::new(disk, &ipam.data_dir, &request.config.name, now, sticky.lock_timeout);
    let scene = VerbContext { ipam: &ipam, sticky, store, mode: PluginMode::of_call(true) };
    match request.verb {
        Verb::Add => add(&scene, request, conf, delegate, story),
        Verb::Del => {
            // The endpoint goes first: a key must not leave the pool of an agent that still has the pod.
            let answer = delegate.ask(Verb::Del)?;
            del::run(&scene, request, story)?;
            Ok(answer)
        }
        Verb::Check => {
            let answer = delegate.pass(story)?;
            check(&scene, request, conf)?;
            Ok(answer)
        }
        Verb::Gc => {
            let answer = delegate.pass(story);
            gc::run(&scene, request, story)?;
            answer
        }
        Verb::Status => {
            scene.store.check_usable().map_err(|error| CniError::not_available(error.to_string()))?;
            cluster_del::is_ready(conf)?;
            delegate.pass(story)
        }
        Verb::Version => Err(CniError::internal("VERSION is answered by the protocol")),
    }
}

/// Only where the store is: this node's addresses are its CiliumNode's.
fn store_location(request: &Request) -> IpamConf {
    let of_ipam = request.config.ipam.as_ref().map(|ipam| ipam.data_dir.clone());
    let of_sticky = || request.config.sticky().cloned().unwrap_or_default().data_dir;
    IpamConf {
        data_dir: of_ipam.unwrap_or_else(of_sticky),
        sets: Vec::new(),
        routes: Vec::new(),
        resolv_conf: None,
        requested: Vec::new(),
        sticky: None,
    }
}

fn add<D: Disk>(
    scene: &VerbContext<'_, D>,
    request: &Request,
    conf: &ClusterConf,
    delegate: &Delegate<'_>,
    story: &mut VerbLog<'_>,
) -> Result<Option<Value>, CniError> {
    let started = Instant::now();
    let Some(pod) = request.pod.as_ref().filter(|pod| scene.sticky.selects(pod)) else {
        return delegate.pass(story);
    };
    let errand = AddContext { request, scene, conf, pod };
    let Reserved { addresses, mut pending_record } = match add::add(&errand, &[], story)? {
        Resolved::Sticky(bound) => bound,
        // A pod that is not sticky leaves no record here. Until Cilium has it, only its turn tells that its ADD is on its way.
        Resolved::Plain(_claimant_lock) => return delegate.pass(story),
    };
    let mut write_record =
        || pending_record.take().map_or(Ok(()), |pending_record| pending_record.write(&errand));
    let container = attachment(request)?.container.as_str();
    let deadline = started + scene.sticky.wait_for_old_pod;
    loop {
        while let Some(address) = with_another_sandbox(conf, &addresses, container) {
            // It may take long, and with it the pod's turn would.
            write_record()?;
            if Instant::now() + PAUSE >= deadline {
                return Err(CniError::try_again(format!(
                    "{address} is still with another sandbox, as Cilium's agent says; it is free when that is deleted"
                )));
            }
            std::thread::sleep(PAUSE);
        }
        let at_work = delegate.start(Verb::Add)?;
        let written = write_record();
        let answer = at_work.answer();
        let looked_at = written.and(answer).and_then(|answer| Ok((given(request, answer.as_ref())?, answer)));
        let why = match looked_at {
            Ok((given, answer)) if is_right(&addresses, &given) => return Ok(answer),
            other => {
                // Whatever it has done is taken back before anything else.
                delegate.clean_up();
                match other {
                    Ok((given, _)) => format!("Cilium gave [{}] instead", list(&given)),
                    Err(error) if is_temporary(&error) => error.to_string(),
                    Err(error) => return Err(error),
                }
            }
        };
        tracing::info!(addresses = list(&addresses), why, "not yet the pod's own address");
        if Instant::now() + PAUSE >= deadline {
            let message = format!(
                "{pod} did not get its own address {} from Cilium within {:?}: {why}",
                list(&addresses),
                scene.sticky.wait_for_old_pod
            );
            return Err(CniError::try_again(message));
        }
        std::thread::sleep(PAUSE);
    }
}

fn is_temporary(error: &CniError) -> bool {
    let told = error.to_string().to_lowercase();
    TEMPORARY.iter().any(|part| told.contains(part))
}

/// The address with which Cilium has an endpoint of another sandbox, if there is one. An agent that cannot be asked is not waited
/// for: cilium-cni knows how to.
fn with_another_sandbox(conf: &ClusterConf, addresses: &[IpAddr], container: &str) -> Option<IpAddr> {
    let is_elsewhere = |address: &&IpAddr| match endpoint(&conf.cilium_socket, **address) {
        Ok(EndpointAnswer::There(about)) => !about.contains(container),
        Ok(_) => false,
        Err(error) => {
            tracing::debug!(%error, "Cilium's agent cannot be asked");
            false
        }
    };
    addresses.iter().find(is_elsewhere).copied()
}

/// The addresses of the delegate's answer.
fn given(request: &Request, answer: Option<&Value>) -> Result<Vec<IpAddr>, CniError> {
    let Some(answer) = answer else { return Ok(Vec::new()) };
    let read = CniResult::from_json("the delegate's answer", answer, request.config.version);
    let read = read.map_err(|error| CniError::new(code::DELEGATE_FAILED, error.to_string()))?;
    Ok(read.ips.iter().map(|ip| ip.address.addr()).collect())
}

/// Whether the pod has its own addresses, and no other one of their families.
fn is_right(bound: &[IpAddr], given: &[IpAddr]) -> bool {
    let of_bound_family =
        |address: &&IpAddr| bound.iter().any(|own| Family::of(*own) == Family::of(**address));
    bound.iter().all(|own| given.contains(own))
        && given.iter().filter(of_bound_family).all(|given| bound.contains(given))
}

fn check<D: Disk>(scene: &VerbContext<'_, D>, request: &Request, conf: &ClusterConf) -> Result<(), CniError> {
    let attachment = attachment(request)?;
    let stored = match scene.store.lock_existing()? {
        Some(mut locked) => locked.find_by_attachment(attachment)?,
        None => None,
    };
    let Some(record) = stored.map(|stored| stored.record) else { return Ok(()) };
    let Some(binding) = &record.binding else { return Ok(()) };
    cluster_del::check(conf, binding, attachment)?;
    let Some(prev) = &request.config.prev_result else { return Ok(()) };
    let told: Vec<IpAddr> = prev.ips.iter().map(|ip| ip.address.addr()).collect();
    if is_right(&record.addresses, &told) {
        return Ok(());
    }
    let message = format!("prevResult has {}, and the pod's own is {}", list(&told), list(&record.addresses));
    Err(CniError::new(code::CHECK_FAILED, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_right_if_it_has_the_own_addresses_and_no_other_of_their_families() {
        let ips = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
        let own = ips(&["10.0.0.7"]);
        assert!(is_right(&own, &ips(&["10.0.0.7"])));
        assert!(is_right(&own, &ips(&["10.0.0.7", "fd00::1"])), "the other family is nobody's business");
        assert!(!is_right(&own, &ips(&["10.0.0.8"])));
        assert!(!is_right(&own, &ips(&["10.0.0.7", "10.0.0.8"])));
        assert!(!is_right(&own, &[]));
        assert!(!is_right(&ips(&["10.0.0.7", "fd00::7"]), &ips(&["10.0.0.7", "fd00::1"])));
    }
}
