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
use crate::cluster::cilium::socket::{EndpointAnswer, EndpointInfo, endpoint};
use crate::cni::{ClusterConf, CniError, CniResult, IpamConf, Request, Verb, code};
use crate::names::{PodIdentity, StickyKey};
use crate::node::list;
use crate::plugin::cluster::add::{self, DeadSandbox, Reserved, Resolved};
use crate::plugin::cluster::bypass;
use crate::plugin::cluster::context::AddContext;
use crate::plugin::cluster::del as cluster_del;
use crate::plugin::delegate::Delegate;
use crate::plugin::verbs::{del, gc};
use crate::plugin::{VerbContext, VerbLog, sticky_of, version_is_answered};
use crate::policy::mode::PluginMode;
use crate::store::{Disk, NodeTime, StoreError};

/// Between two questions to cilium-agent, and before the second try.
const PAUSE: Duration = Duration::from_millis(50);
/// The longest pause between two tries. Each makes an endpoint and deletes it, and if cilium-agent does not
/// hear of the CiliumNode, all sticky pods that start on the node try at once.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// What cilium-cni says, in parts of a sentence, while another sandbox still has the address, or while
/// cilium-agent has not seen the new pool entry. Any failed allocation is such: the pod's own entry is in the
/// pool by then. The parts that name no address come from Cilium's client, which is generated and has said so
/// in every version; the texts of its allocator change.
const TEMPORARY: &[&str] = &["already in use", "expiration timer", "[post /ipam]", "postipamfailure"];

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
    let Reserved { addresses, mut pending_record, mut dead_sandbox } = match add::add(&context, &[], log)? {
        Resolved::Sticky(bound) => bound,
        // A pod that is not sticky has no record here. Until Cilium has it, only its claimant lock shows that
        // its ADD runs.
        Resolved::Plain(_claimant_lock) => return add_plain(&context, delegate, log),
    };
    let mut write_record = || pending_record.take().map_or(Ok(()), |pending| pending.write(&context));
    let container = context.attachment.container.as_str();
    let deadline = started + verb.sticky.wait_for_old_pod;
    let mut pause = PAUSE;
    loop {
        while let Some(InUse { address, by }) = with_another_sandbox(conf, &addresses, container) {
            // It may take long, and the claimant lock would be held as long.
            write_record()?;
            if let Some(dead) = dead_sandbox.take_if(|dead| dead.attachment.container.as_str() == by) {
                remove_stale_endpoint(delegate, &dead, address);
                continue;
            }
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
            Ok((given, answer)) if is_right(&addresses, &given) => {
                report_missing_families(pod, &addresses, &given);
                return Ok(answer);
            }
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
        let left = deadline.saturating_duration_since(Instant::now());
        if left <= PAUSE {
            let patience = verb.sticky.wait_for_old_pod.as_secs_f64();
            return Err(CniError::try_again(format!(
                "{pod} did not get its own address {own} from Cilium within {patience} s: {reason}"
            )));
        }
        std::thread::sleep(pause.min(left));
        pause = longer(pause);
    }
}

/// An ADD of a pod that is not sticky. Cilium gives it what the pool has for its name, if it has something: a
/// StickyIP's address whose entry could not be removed yet must not go to a pod that does not keep it.
fn add_plain<D: Disk>(
    context: &AddContext<'_, D>,
    delegate: &Delegate<'_>,
    log: &mut VerbLog<'_>,
) -> Result<Option<Value>, CniError> {
    let answer = delegate.pass(log)?;
    let given = given(context.verb.request, answer.as_ref());
    let error = match given.map(|given| kept(context, &given)) {
        Ok(None) => return Ok(answer),
        Ok(Some((address, key))) => CniError::try_again(format!(
            "Cilium gave {address} to {}, which is not sticky, and this node keeps it for StickyIP {key}; it \
             is free for it when the agent of this node has removed the pool entry",
            context.pod
        )),
        Err(error) => error,
    };
    delegate.clean_up();
    Err(error)
}

/// The first of these addresses that this node's store keeps for a StickyIP. An ordinary pod needs no store,
/// so one that is of no use does not stop it.
fn kept<D: Disk>(context: &AddContext<'_, D>, given: &[IpAddr]) -> Option<(IpAddr, StickyKey)> {
    let look = || -> Result<Option<(IpAddr, StickyKey)>, StoreError> {
        let Some(mut locked) = context.verb.store.lock_existing()? else { return Ok(None) };
        for address in given {
            let there = locked.find_by_address(*address)?;
            if let Some(binding) = there.and_then(|there| there.record.binding) {
                return Ok(Some((*address, binding.key)));
            }
        }
        Ok(None)
    };
    look().unwrap_or_else(|error| {
        tracing::warn!(pod = %context.pod, %error, "cannot look whether the pod's address is kept for another");
        None
    })
}

/// Has cilium-cni delete the endpoint of a sandbox that is dead, and whose DEL did not come or did not reach
/// cilium-agent: nothing else deletes it while its network namespace is left behind.
fn remove_stale_endpoint(delegate: &Delegate<'_>, dead: &DeadSandbox, address: IpAddr) {
    let (container, reason) = (dead.attachment.container.as_str(), dead.proof);
    tracing::warn!(
        container, %address, reason,
        "cilium-agent still has the endpoint of a sandbox that is dead; deleting it"
    );
    if let Err(error) = delegate.delete(dead) {
        tracing::warn!(container, %error, "cilium-cni could not delete the endpoint; waiting for its DEL");
    }
}

/// A family that Cilium has disabled is missing in its answer: it gives an address of each enabled family, or
/// an error.
fn report_missing_families(pod: &PodIdentity, own: &[IpAddr], given: &[IpAddr]) {
    let missing: Vec<IpAddr> = own.iter().filter(|own| !given.contains(own)).copied().collect();
    if !missing.is_empty() {
        let addresses = list(&missing);
        tracing::warn!(%pod, addresses, "the pod starts without these addresses: Cilium has their family off");
    }
}

fn longer(pause: Duration) -> Duration {
    (pause * 2).min(LONGEST_PAUSE)
}

fn is_temporary(error: &CniError) -> bool {
    let message = error.to_string().to_lowercase();
    TEMPORARY.iter().any(|part| message.contains(part))
}

struct InUse {
    address: IpAddr,
    /// The container of the endpoint. Empty if cilium-agent does not name it.
    by: String,
}

/// The address with which cilium-agent has an endpoint of another sandbox, if there is one. If cilium-agent
/// cannot be asked, this does not wait for it: cilium-cni does.
fn with_another_sandbox(conf: &ClusterConf, addresses: &[IpAddr], container: &str) -> Option<InUse> {
    let in_use = |address: &IpAddr| match endpoint(&conf.cilium_socket, *address) {
        Ok(EndpointAnswer::There(about)) if !about.contains(container) => {
            Some(InUse { address: *address, by: EndpointInfo::parse(&about).container })
        }
        Ok(_) => None,
        Err(error) => {
            tracing::debug!(%error, "cannot ask cilium-agent for an endpoint");
            None
        }
    };
    addresses.iter().find_map(in_use)
}

fn given(request: &Request, answer: Option<&Value>) -> Result<Vec<IpAddr>, CniError> {
    let Some(answer) = answer else { return Ok(Vec::new()) };
    let read = CniResult::from_json("the delegate's answer", answer, request.config.version);
    let read = read.map_err(|error| CniError::new(code::DELEGATE_FAILED, error.to_string()))?;
    Ok(read.addresses())
}

/// Whether the pod has an address of its own, and no other one of their families. One whose family Cilium has
/// disabled may be missing.
fn is_right(bound: &[IpAddr], given: &[IpAddr]) -> bool {
    let of_bound_family =
        |address: &&IpAddr| bound.iter().any(|own| Family::of(*own) == Family::of(**address));
    bound.iter().any(|own| given.contains(own))
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
        let both = ips(&["10.0.0.7", "fd00::7"]);
        assert!(is_right(&both, &ips(&["10.0.0.7"])), "Cilium has IPv6 disabled");
        assert!(is_right(&both, &ips(&["fd00::7"])), "Cilium has IPv4 disabled");
        assert!(!is_right(&both, &ips(&["10.0.0.7", "fd00::1"])));
        assert!(!is_right(&both, &ips(&["fd00::1"])));
        assert!(!is_right(&both, &[]));
    }

    #[test]
    fn every_failed_allocation_of_ciliums_versions_is_temporary_and_nothing_else_is() {
        let client = |operation: &str, text: &str| {
            format!("unable to allocate IP via local cilium agent: [POST /ipam][502] {operation} {text:?}")
        };
        // pkg/ipam/crd.go and allocator.go of 1.17 and 1.18, then of 1.19 and 1.20.
        let none_left = "no IPs currently available on the node, allocation will be retried once IPs are \
                         added to CiliumNode spec.ipam.pool";
        for text in [
            client("postIpamFailure", "No more IPs available"),
            client("postIpamFailure", none_left),
            client("postIpamFailure", "IP 10.0.0.7 is already in use"),
            client("postIpamFailure", "expiration timer already registered"),
            client("postIpamFailure", "CiliumNode for own node is not available"),
            // daemon/cmd/endpoint.go, since 1.18 pkg/endpoint/api.
            "Unable to create endpoint: [PUT /endpoint/{id}][400] putEndpointIdInvalid \"IP 10.0.0.7 is \
             already in use\""
                .to_owned(),
        ] {
            assert!(is_temporary(&CniError::new(999, text.clone())), "{text}");
        }
        for text in [
            "unable to connect to Cilium agent: failed to create cilium agent client after 30.0 seconds timeout",
            "failed to find plugin \"x\" in path [/opt/cni/bin]",
            "Unable to create endpoint: [PUT /endpoint/{id}][429] putEndpointIdTooManyRequests",
        ] {
            assert!(!is_temporary(&CniError::new(999, text)), "{text}");
        }
    }

    #[test]
    fn the_pause_between_two_tries_doubles_up_to_two_seconds() {
        let pauses: Vec<u128> = std::iter::successors(Some(PAUSE), |pause| Some(longer(*pause)))
            .take(8)
            .map(|pause| pause.as_millis())
            .collect();
        assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 2000, 2000]);
    }
}
