//! The claimant: the name under which a pod keeps its address. Must never depend on a pod's random suffix if
//! its workload gives a name that outlives the pod.

use crate::policy::selection::facts::{Owner, PodFacts};

/// The label that Kubernetes puts on pods of a StatefulSet.
pub(crate) const POD_INDEX: &str = "apps.kubernetes.io/pod-index";
/// The label with the hash of a Deployment's template.
const TEMPLATE_HASH: &str = "pod-template-hash";
/// The label by which KubeVirt names the virtual machine of a launcher pod.
const VM_NAME: &str = "vm.kubevirt.io/name";
const KUBEVIRT_GROUP: &str = "kubevirt.io";

/// Who keeps an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claimant {
    /// The pod by its own name: StatefulSet pods (with their ordinal), bare pods, pods of Jobs. A pod that
    /// belongs to nothing is its own workload.
    Pod { name: String, ordinal: Option<u32>, workload: Owner },
    /// One of the numbered slots of a workload whose pods have random names; named after it, `web-0`.
    Slot { workload: Owner },
    /// A virtual machine, by its name.
    VirtualMachine { workload: Owner },
}

impl Claimant {
    /// Finds the claimant of a pod from its labels and owners.
    pub(crate) fn of(pod: &PodFacts) -> Self {
        if let Some(workload) = virtual_machine(pod) {
            return Self::VirtualMachine { workload };
        }
        let (name, uid) = (pod.name.clone(), pod.uid.clone());
        let ([owner, ..], Some(top)) = (pod.owners.as_slice(), pod.owners.last().cloned()) else {
            let itself = Owner { api_version: "v1".into(), kind: "Pod".into(), name: name.clone(), uid };
            return Self::Pod { name, ordinal: None, workload: itself };
        };
        // Any kind named StatefulSet numbers its pods, whatever its API group.
        if owner.kind == "StatefulSet" {
            return Self::Pod { name, ordinal: ordinal(pod, &owner.name), workload: top };
        }
        if owner.kind == "Job" || owner.kind == "Node" {
            return Self::Pod { name, ordinal: None, workload: top };
        }
        if let ([replica_set], Some(hash)) = (pod.owners.as_slice(), pod.labels.get(TEMPLATE_HASH))
            && replica_set.kind == "ReplicaSet"
            && let Some(name) = replica_set.name.strip_suffix(hash.as_str()).and_then(|n| n.strip_suffix('-'))
        {
            // The ReplicaSet was not looked up: its name contains the Deployment's, its uid does not.
            let (api_version, kind) = (replica_set.api_version.clone(), "Deployment".into());
            return Self::Slot {
                workload: Owner { api_version, kind, name: name.into(), uid: String::new() },
            };
        }
        Self::Slot { workload: top }
    }

    /// The workload that decides how long the address is kept.
    pub(crate) fn workload(&self) -> &Owner {
        match self {
            Self::Pod { workload: it, .. }
            | Self::Slot { workload: it }
            | Self::VirtualMachine { workload: it } => it,
        }
    }

    /// The StickyIP's name, if it does not depend on a slot.
    pub(crate) fn fixed_name(&self) -> Option<&str> {
        match self {
            Self::Pod { name, .. } => Some(name),
            Self::VirtualMachine { workload } => Some(&workload.name),
            Self::Slot { .. } => None,
        }
    }
}

fn virtual_machine(pod: &PodFacts) -> Option<Owner> {
    let mut chain = pod.owners.iter().filter(|owner| owner.group() == KUBEVIRT_GROUP);
    let instance = chain.next()?;
    if let Some(machine) = chain.find(|owner| owner.kind == "VirtualMachine") {
        return Some(machine.clone());
    }
    // A VirtualMachine's instance has the machine's name; the label wins where a machine was renamed by
    // clone.
    let name = pod.labels.get(VM_NAME).unwrap_or(&instance.name).clone();
    Some(Owner { name, ..instance.clone() })
}

fn ordinal(pod: &PodFacts, set: &str) -> Option<u32> {
    let by_label = pod.labels.get(POD_INDEX).and_then(|index| index.parse().ok());
    by_label.or_else(|| pod.name.strip_prefix(set)?.strip_prefix('-')?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::selection::facts::fixture::pod;

    #[test]
    fn a_statefulset_pod_claims_by_its_name_and_knows_its_ordinal() {
        for group in ["apps/v1", "apps.kruise.io/v1beta1"] {
            let claimant = Claimant::of(&pod("mysql-2").owned_by(group, "StatefulSet", "mysql"));
            assert_eq!(claimant.fixed_name(), Some("mysql-2"));
            assert!(matches!(claimant, Claimant::Pod { ordinal: Some(2), .. }), "{claimant:?}");
        }
        let labelled = pod("mysql-x").owned_by("apps/v1", "StatefulSet", "mysql").label(POD_INDEX, "7");
        assert!(matches!(Claimant::of(&labelled), Claimant::Pod { ordinal: Some(7), .. }));
    }

    #[test]
    fn bare_pods_and_jobs_claim_by_name() {
        let bare = Claimant::of(&pod("lonely"));
        assert_eq!((bare.fixed_name(), bare.workload().kind.as_str()), (Some("lonely"), "Pod"));
        let job = Claimant::of(&pod("import-x7k2p").owned_by("batch/v1", "Job", "import"));
        assert_eq!((job.fixed_name(), job.workload().name.as_str()), (Some("import-x7k2p"), "import"));
        let cron = Claimant::of(
            &pod("n-1-abc").owned_by("batch/v1", "Job", "n-1").owned_by("batch/v1", "CronJob", "n"),
        );
        assert_eq!(cron.workload().kind, "CronJob");
    }

    #[test]
    fn a_deployments_pod_takes_a_slot_of_the_deployment_looked_up_or_not() {
        let derived = pod("web-6d4cf56db6-x7k2p")
            .owned_by("apps/v1", "ReplicaSet", "web-6d4cf56db6")
            .label(TEMPLATE_HASH, "6d4cf56db6");
        let Claimant::Slot { workload } = Claimant::of(&derived) else { panic!("not a slot") };
        assert_eq!(
            (workload.kind.as_str(), workload.name.as_str(), workload.uid.as_str()),
            ("Deployment", "web", "")
        );
        let looked_up = derived.owned_by("apps/v1", "Deployment", "web");
        let Claimant::Slot { workload } = Claimant::of(&looked_up) else { panic!("not a slot") };
        assert_eq!((workload.name.as_str(), workload.uid.as_str()), ("web", "uid-Deployment-web"));
        let bare_set = Claimant::of(&pod("rs-abcde").owned_by("apps/v1", "ReplicaSet", "rs"));
        assert_eq!(bare_set.workload().name, "rs");
        let custom = Claimant::of(&pod("c-abcde").owned_by("apps.kruise.io/v1alpha1", "CloneSet", "c"));
        assert!(matches!(custom, Claimant::Slot { .. }));
    }

    #[test]
    fn a_launcher_pod_claims_by_its_machines_name() {
        let launcher =
            pod("virt-launcher-win-abcde").owned_by("kubevirt.io/v1", "VirtualMachineInstance", "win");
        assert_eq!(Claimant::of(&launcher).fixed_name(), Some("win"));
        assert_eq!(Claimant::of(&launcher.clone().label(VM_NAME, "win-2")).fixed_name(), Some("win-2"));
        let looked_up = launcher.owned_by("kubevirt.io/v1", "VirtualMachine", "win");
        assert_eq!(Claimant::of(&looked_up).workload().kind, "VirtualMachine");
        // The label alone is no proof: anyone may put it on a pod.
        assert_eq!(Claimant::of(&pod("thief").label(VM_NAME, "win")).fixed_name(), Some("thief"));
    }
}
