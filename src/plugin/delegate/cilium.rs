//! `crd` mode: cilium-agent picks the address from the pool of the CiliumNode, and this makes sure that a
//! sticky pod gets its own. The address is attached, recorded on the node and published in the pool with its
//! owner; then cilium-cni runs, and its answer is checked. What the agent has prepared is attached and
//! published already, and is recorded while cilium-cni runs.
//!
//! Must never let a sticky pod start with another address, never publish an address before it is attached
//! here, never unpublish it before Cilium has released it, and never answer before the record is on the disk.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::alloc::range::Family;
use crate::cluster::cilium::socket::{EndpointAnswer, endpoint};
use crate::cni::{ClusterConf, CniError, CniResult, IpamConf, Request, Verb, code};
use crate::node::list;
use crate::plugin::cluster::add::{self, Reserved, Resolved};
use crate::plugin::cluster::bypass;
use crate::plugin::cluster::context::AddContext;
use crate::plugin::cluster::del as cluster_del;
use crate::plugin::delegate::Delegate;
use crate::plugin::verbs::{del, gc};
use crate::plugin::{VerbContext, VerbLog, sticky_of, version_is_answered};
use crate::policy::mode::PluginMode;
use crate::store::{Disk, NodeTime};

/// Between two questions to cilium-agent, or two tries.
const PAUSE: Duration = Duration::from_millis(50);
/// What cilium-cni says, in parts of a sentence, while another sandbox still has the address, or while
/// cilium-agent has not seen the new pool entry.
const TEMPORARY: &[&str] = &["already in use", "expiration timer", "ips available"];

pub(crate) fn run(
    request: &Request,
    conf: &ClusterConf,
    delegate: &Delegate<'_>,
    disk: impl Disk,
    log: &mut VerbLog<'_>,
) -> Result<Option<Value>, CniError> {
    let sticky = sticky_of(request);
    let now = NodeTime::now(&sticky.boot_id_file)?;
    // Only where the store is: this node's addresses are its CiliumNode's.
    let of_ipam = request.config.ipam.as_ref().map(|ipam| ipam.data_dir.clone());
    let ipam = IpamConf { data_dir: of_ipam.unwrap_or(sticky.data_dir), ..IpamConf::default() };
    let verb = VerbContext::new(request, &ipam, PluginMode::of_call(true), disk, now);
    match request.verb {
        Verb::Add => add(&verb, conf, delegate, log),
        Verb::Del => {
            // The endpoint is removed first: a pool entry must stay while cilium-agent still has the pod.
            let answer = delegate.ask(Verb::Del)?;
            del::run(&verb, log)?;
            Ok(answer)
        }
        Verb::Check => {
            let answer = delegate.pass(log)?;
            check(&verb, conf)?;
            Ok(answer)
        }
        Verb::Gc => {
            let answer = delegate.pass(log);
            gc::run(&verb, log)?;
            answer
        }
        Verb::Status => {
            if !bypass::is_on(conf) {
                verb.store.check_usable().map_err(|error| CniError::not_available(error.to_string()))?;
                cluster_del::is_ready(conf)?;
            }
            delegate.pass(log)
        }
        Verb::Version => Err(version_is_answered()),
    }
}

fn add<D: Disk>(
    verb: &VerbContext<'_, D>,
    conf: &ClusterConf,
    delegate: &Delegate<'_>,
    log: &mut VerbLog<'_>,
) -> Result<Option<Value>, CniError> {
    let started = Instant::now();
    let Some(pod) = verb.request.pod.as_ref().filter(|pod| verb.sticky.selects(pod)) else {
        return delegate.pass(log);
    };
    let context = AddContext { verb, conf, pod, attachment: verb.attachment()? };
    let Reserved { addresses, mut pending_record } = match add::add(&context, &[], log)? {
        Resolved::Sticky(bound) => bound,
        // A pod that is not sticky has no record here. Until Cilium has it, only its claimant lock shows that
        // its ADD runs.
        Resolved::Plain(_claimant_lock) => return delegate.pass(log),
    };
    let mut write_record = || pending_record.take().map_or(Ok(()), |pending| pending.write(&context));
    let container = context.attachment.container.as_str();
    let deadline = started + verb.sticky.wait_for_old_pod;
    loop {
        while let Some(address) = with_another_sandbox(conf, &addresses, container) {
            // It may take long, and the claimant lock would be held as long.
            write_record()?;
            if Instant::now() + PAUSE >= deadline {
                return Err(CniError::try_again(format!(
                    "cilium-agent still has {address} for another sandbox; it is free when that is deleted"
                )));
            }
            std::thread::sleep(PAUSE);
        }
        let running = delegate.start(Verb::Add)?;
        let written = write_record();
        let answer = running.answer();
        let checked =
            written.and(answer).and_then(|answer| Ok((given(verb.request, answer.as_ref())?, answer)));
        let reason = match checked {
            Ok((given, answer)) if is_right(&addresses, &given) => return Ok(answer),
            other => {
                // What it has done is undone before anything else.
                delegate.clean_up();
                match other {
                    Ok((given, _)) => format!("Cilium gave [{}] instead", list(&given)),
                    Err(error) if is_temporary(&error) => error.to_string(),
                    Err(error) => return Err(error),
                }
            }
        };
        let own = list(&addresses);
        tracing::info!(
            %pod, addresses = own, reason,
            "cilium-cni did not give the pod's address; trying again"
        );
        if Instant::now() + PAUSE >= deadline {
            let patience = verb.sticky.wait_for_old_pod.as_secs_f64();
            return Err(CniError::try_again(format!(
                "{pod} did not get its own address {own} from Cilium within {patience} s: {reason}"
            )));
        }
        std::thread::sleep(PAUSE);
    }
}

fn is_temporary(error: &CniError) -> bool {
    let message = error.to_string().to_lowercase();
    TEMPORARY.iter().any(|part| message.contains(part))
}

/// The address with which cilium-agent has an endpoint of another sandbox, if there is one. If cilium-agent
/// cannot be asked, this does not wait for it: cilium-cni does.
fn with_another_sandbox(conf: &ClusterConf, addresses: &[IpAddr], container: &str) -> Option<IpAddr> {
    let is_in_use = |address: &&IpAddr| match endpoint(&conf.cilium_socket, **address) {
        Ok(EndpointAnswer::There(about)) => !about.contains(container),
        Ok(_) => false,
        Err(error) => {
            tracing::debug!(%error, "cannot ask cilium-agent for an endpoint");
            false
        }
    };
    addresses.iter().find(is_in_use).copied()
}

fn given(request: &Request, answer: Option<&Value>) -> Result<Vec<IpAddr>, CniError> {
    let Some(answer) = answer else { return Ok(Vec::new()) };
    let read = CniResult::from_json("the delegate's answer", answer, request.config.version);
    let read = read.map_err(|error| CniError::new(code::DELEGATE_FAILED, error.to_string()))?;
    Ok(read.addresses())
}

/// Whether the pod has its own addresses, and no other one of their families.
fn is_right(bound: &[IpAddr], given: &[IpAddr]) -> bool {
    let of_bound_family =
        |address: &&IpAddr| bound.iter().any(|own| Family::of(*own) == Family::of(**address));
    bound.iter().all(|own| given.contains(own))
        && given.iter().filter(of_bound_family).all(|given| bound.contains(given))
}

fn check<D: Disk>(verb: &VerbContext<'_, D>, conf: &ClusterConf) -> Result<(), CniError> {
    let Some(record) = verb.record()? else { return Ok(()) };
    let Some(binding) = &record.binding else { return Ok(()) };
    cluster_del::check(conf, binding, verb.attachment()?)?;
    let Some(prev) = &verb.request.config.prev_result else { return Ok(()) };
    let previous = prev.addresses();
    if is_right(&record.addresses, &previous) {
        return Ok(());
    }
    let message =
        format!("prevResult has {}, and the pod's own is {}", list(&previous), list(&record.addresses));
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
        assert!(is_right(&own, &ips(&["10.0.0.7", "fd00::1"])), "the other family does not matter");
        assert!(!is_right(&own, &ips(&["10.0.0.8"])));
        assert!(!is_right(&own, &ips(&["10.0.0.7", "10.0.0.8"])));
        assert!(!is_right(&own, &[]));
        assert!(!is_right(&ips(&["10.0.0.7", "fd00::7"]), &ips(&["10.0.0.7", "fd00::1"])));
    }
}
