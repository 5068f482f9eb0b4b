//! Decides whether a pod may take over the address that another pod had last.
//!
//! Must never give up invariant 1 (no address with two live pods) for speed. A node that is NotReady may be
//! cut off and still run its pods. So NotReady alone proves nothing, nor does a missing Pod object (a forced
//! delete removes the object, not the process). Proof is one of these: the old node cleared the attachment
//! itself, its Node object was deleted, or it has the out-of-service taint.

use thiserror::Error;

use crate::names::AttachmentId;

/// An attached sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Attached {
    pub node: String,
    pub pod_uid: String,
    /// The id under which the API server knows it.
    pub attachment_id: AttachmentId,
}

/// The state of the node of the attachment, by a live read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum NodeState {
    Ready,
    /// It does not report, or reports that it is not ready.
    NotReady,
    /// It has the taint `node.kubernetes.io/out-of-service`: an operator or a tool confirms that it is off.
    OutOfService,
    /// Its Node object does not exist.
    Gone,
    /// The lookup failed.
    Unknown,
}

/// The state of the attached pod, found by its uid, by a live read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum OldPod {
    /// It exists and is not being deleted.
    Running,
    Terminating,
    /// It exists and its containers have ended for good.
    Finished,
    /// It does not exist: deleted, forcibly or not.
    Gone,
    Unknown,
}

/// What this node knows of an attachment that names this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum OldSandbox {
    /// Neither the runtime nor Cilium knows the old container id any more.
    Gone,
    /// One of them still does, or could not be asked.
    MayLive,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Situation<'a> {
    pub attached: Option<&'a Attached>,
    pub asker: &'a Attached,
    pub old_node: NodeState,
    pub(crate) old_pod: OldPod,
    /// What this node knows, if the attachment names it.
    pub old_sandbox: OldSandbox,
}

/// Why an attachment is taken over; recorded in the StickyIP's handovers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Takeover {
    /// The same pod has a new sandbox on the same node.
    SandboxReplaced,
    LocalSandboxGone,
    NodeGone,
    OutOfService,
}

/// Why a pod must wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Error)]
pub enum WaitReason {
    #[error("its sandbox on this node may still be alive")]
    LocalSandboxMayLive,
    #[error("that node is Ready, and detaches when the pod has ended")]
    OldNodeDetaches,
    #[error(
        "that node is NotReady, which does not prove that the pod has ended; delete the Node or taint it \
         out-of-service once it is off"
    )]
    NotReadyIsNoProof,
    #[error("the state of that node is unknown")]
    NodeUnknown,
}

/// Why a pod is refused at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum RefuseReason {
    /// A pod never moves: its uid is attached on another node, so one of the two reports is forged or broken.
    SameUidOnTwoNodes,
    /// Another live pod is attached, and it is not being deleted.
    HeldByLivePod,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Handover {
    /// Exactly this sandbox is attached already: nothing to write.
    AlreadyAttached,
    Attach,
    TakeOver(Takeover),
    /// Try again until the deadline.
    Wait(WaitReason),
    Refuse(RefuseReason),
}

impl NodeState {
    /// Whether this state proves that nothing on the node runs any more.
    pub(crate) fn proof_of_death(self) -> Option<Takeover> {
        match self {
            Self::Gone => Some(Takeover::NodeGone),
            Self::OutOfService => Some(Takeover::OutOfService),
            Self::Ready | Self::NotReady | Self::Unknown => None,
        }
    }
}

/// Decides. The caller attaches with the StickyIP's resourceVersion, so a decision on stale facts writes
/// nothing.
pub fn decide(situation: &Situation<'_>) -> Handover {
    let Situation { attached, asker, old_node, old_pod, old_sandbox } = situation;
    let Some(attached) = attached else { return Handover::Attach };
    if attached == asker {
        return Handover::AlreadyAttached;
    }
    match (attached.pod_uid == asker.pod_uid, attached.node == asker.node) {
        // The kubelet creates a new sandbox for a pod only after the old one has stopped.
        (true, true) => Handover::TakeOver(Takeover::SandboxReplaced),
        (true, false) => Handover::Refuse(RefuseReason::SameUidOnTwoNodes),
        (false, true) => match (old_sandbox, old_pod) {
            (OldSandbox::Gone, _) => Handover::TakeOver(Takeover::LocalSandboxGone),
            (OldSandbox::MayLive, OldPod::Running) => Handover::Refuse(RefuseReason::HeldByLivePod),
            (OldSandbox::MayLive, _) => Handover::Wait(WaitReason::LocalSandboxMayLive),
        },
        (false, false) => match (old_node.proof_of_death(), old_node, old_pod) {
            (Some(proof), ..) => Handover::TakeOver(proof),
            (None, NodeState::Ready, OldPod::Running) => Handover::Refuse(RefuseReason::HeldByLivePod),
            (None, NodeState::Ready, _) => Handover::Wait(WaitReason::OldNodeDetaches),
            (None, NodeState::NotReady, _) => Handover::Wait(WaitReason::NotReadyIsNoProof),
            (None, ..) => Handover::Wait(WaitReason::NodeUnknown),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODES: [NodeState; 5] =
        [NodeState::Ready, NodeState::NotReady, NodeState::OutOfService, NodeState::Gone, NodeState::Unknown];
    const PODS: [OldPod; 5] =
        [OldPod::Running, OldPod::Terminating, OldPod::Finished, OldPod::Gone, OldPod::Unknown];

    fn on(node: &str, pod: &str, container: &str) -> Attached {
        Attached { node: node.into(), pod_uid: pod.into(), attachment_id: container.into() }
    }

    fn judge(
        attached: Option<&Attached>,
        asker: &Attached,
        old_node: NodeState,
        old_pod: OldPod,
    ) -> Handover {
        decide(&Situation { attached, asker, old_node, old_pod, old_sandbox: OldSandbox::MayLive })
    }

    #[test]
    fn a_free_address_is_attached_and_a_repeated_add_writes_nothing() {
        let me = on("n2", "new", "c2");
        for node in NODES {
            for pod in PODS {
                assert_eq!(judge(None, &me, node, pod), Handover::Attach);
                assert_eq!(judge(Some(&me), &me, node, pod), Handover::AlreadyAttached);
            }
        }
    }

    #[test]
    fn from_another_node_only_a_dead_node_lets_a_pod_take_over() {
        let (old, me) = (on("n1", "old", "c1"), on("n2", "new", "c2"));
        for node in NODES {
            for pod in PODS {
                let decision = judge(Some(&old), &me, node, pod);
                let proven = matches!(node, NodeState::Gone | NodeState::OutOfService);
                assert_eq!(
                    matches!(decision, Handover::TakeOver(_)),
                    proven,
                    "{node:?} {pod:?}: {decision:?}"
                );
                assert_ne!(decision, Handover::Attach);
            }
        }
    }

    #[test]
    fn a_force_deleted_pod_on_a_cut_off_node_keeps_its_address() {
        let (old, me) = (on("n1", "old", "c1"), on("n2", "new", "c2"));
        let decision = judge(Some(&old), &me, NodeState::NotReady, OldPod::Gone);
        assert_eq!(decision, Handover::Wait(WaitReason::NotReadyIsNoProof));
    }

    #[test]
    fn a_live_claimant_means_refusal_and_a_terminating_one_a_wait() {
        let (old, me) = (on("n1", "old", "c1"), on("n2", "new", "c2"));
        assert_eq!(
            judge(Some(&old), &me, NodeState::Ready, OldPod::Running),
            Handover::Refuse(RefuseReason::HeldByLivePod)
        );
        for pod in [OldPod::Terminating, OldPod::Finished, OldPod::Gone, OldPod::Unknown] {
            assert_eq!(
                judge(Some(&old), &me, NodeState::Ready, pod),
                Handover::Wait(WaitReason::OldNodeDetaches)
            );
        }
    }

    #[test]
    fn on_the_same_node_the_runtime_is_the_witness() {
        let (old, me) = (on("n1", "old", "c1"), on("n1", "new", "c2"));
        for node in NODES {
            for pod in PODS {
                let gone = decide(&Situation {
                    attached: Some(&old),
                    asker: &me,
                    old_node: node,
                    old_pod: pod,
                    old_sandbox: OldSandbox::Gone,
                });
                assert_eq!(gone, Handover::TakeOver(Takeover::LocalSandboxGone));
                assert!(!matches!(
                    judge(Some(&old), &me, node, pod),
                    Handover::TakeOver(_) | Handover::Attach
                ));
            }
        }
        let again = on("n1", "old", "c9");
        assert_eq!(
            judge(Some(&old), &again, NodeState::Ready, OldPod::Running),
            Handover::TakeOver(Takeover::SandboxReplaced)
        );
    }

    #[test]
    fn one_uid_on_two_nodes_is_refused_even_when_the_old_node_is_gone() {
        let (old, me) = (on("n1", "pod", "c1"), on("n2", "pod", "c2"));
        for node in NODES {
            assert_eq!(
                judge(Some(&old), &me, node, OldPod::Gone),
                Handover::Refuse(RefuseReason::SameUidOnTwoNodes)
            );
        }
    }
}
