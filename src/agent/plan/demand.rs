//! What the pods of the node need of its pool (mode `crd`). Must never read anything itself.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::input::PlanInput;
use crate::agent::index::NodePod;
use crate::agent::snapshot::uid_of;
use crate::cluster::objects::cilium::CiliumNode;

/// What the node's pods need of its pool, by what the watches and the store show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodDemand {
    /// Pods that wait for an address of Cilium's own choice.
    pub waiting: usize,
    /// Addresses that pods have. Cilium's own list of them is written every 15 s at most.
    pub in_use: BTreeSet<IpAddr>,
}

impl PodDemand {
    /// A pod that is sticky, or surely will be, has an entry of its own. One that is named in Cilium's list
    /// of used addresses has its address already, and the kubelet has not said so yet.
    pub(super) fn of(input: &PlanInput<'_>, node: &CiliumNode) -> Self {
        let PlanInput { options, index, store, .. } = input;
        let decided: BTreeMap<&str, bool> = store
            .decisions
            .iter()
            .map(|decision| (decision.uid.as_str(), decision.sticky.is_some()))
            .collect();
        let with_record: BTreeSet<&str> =
            store.attached().filter_map(|found| uid_of(&found.record)).collect();
        let served = node.users();
        let waits = |(name, pod): &(&String, &NodePod)| {
            let uid = pod.runtime_uid.as_str();
            let is_sticky = || match decided.get(uid) {
                Some(sticky) => *sticky,
                None => options.rules.judge(&pod.facts).is_ok_and(|verdict| verdict.sticky),
            };
            pod.is_waiting
                && !pod.is_ending
                && !pod.facts.host_network
                && !served.contains(name.as_str())
                && !with_record.contains(uid)
                && !is_sticky()
        };
        Self { waiting: index.pods.iter().filter(waits).count(), in_use: index.addresses_in_use() }
    }
}
