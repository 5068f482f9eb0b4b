//! What the agent can do, one thing at a time. Each is performed in the file of its name in `actions`.

use std::net::IpAddr;

use ipnet::IpNet;

use super::demand::PodDemand;
use crate::names::{Attachment, AttachmentId, StickyKey};
use crate::store::{PendingUpdate, Record};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send the update in the file of this name, which a verb could not send, to the API server.
    SendUpdate { name: String, update: PendingUpdate },
    /// Reserve what is claimed in a store that is new or was restored.
    Seed,
    /// Decide about a pod (namespace/name) before its ADD comes.
    Prepare { pod: String, uid: String },
    /// Decide about a running pod (namespace/name) that is not sticky, for its next sandbox.
    DecideRunning { pod: String, uid: String },
    /// Take a decision back, by the pod's uid that it has.
    Withdraw { uid: String },
    /// Decide again about a pod (namespace/name) that was found not to be sticky and still waits. `said` is
    /// what the pod itself says by now: what is said for the first time is not paused for what was said
    /// before.
    Reevaluate { pod: String, uid: String, said: String },
    /// Grant or refuse a claim on an address of this node. Once the pod that is said to have it is gone, what
    /// was put off as long as it lived is due at once.
    Grant { address: IpAddr, pod_is_gone: bool },
    /// Say on a claim who has the address on this node although it is claimed for another, or that this is
    /// over.
    ReportUse { address: IpAddr },
    /// Remove from a claim the pod that its address was adopted from, and that is gone.
    FinishAdoption { address: IpAddr },
    /// Publish an attached StickyIP in the CiliumNode.
    Publish { key: StickyKey },
    /// Remove an address from the CiliumNode that no sandbox of this node has.
    Unpublish { address: IpAddr },
    /// Remove the barrier entries by which grants learned what Cilium has seen.
    RemoveBarriers,
    /// Attach a StickyIP to a sandbox that runs, and of which the API server does not know.
    Attach { key: StickyKey, attachment: Attachment },
    /// Detach a StickyIP that no sandbox of this node has, from the id under which it is attached.
    Detach { key: StickyKey, id: AttachmentId },
    /// Record the MAC address of a running pod of a StickyIP.
    RecordMac { key: StickyKey },
    /// End an attachment whose sandbox is gone. The record is as it was seen.
    EndAttachment { record: Record },
    /// Release a record that is kept for no StickyIP any more, or those of its addresses that are not. The
    /// record is as it was seen.
    ReleaseRecord { record: Record },
    /// Record the unowned pool entries of which the store does not know: Cilium may give them to any pod.
    RecordUnowned { addresses: Vec<IpAddr> },
    /// Refill the pool with unowned entries for these pods.
    Refill { demand: PodDemand },
    /// Write unowned entries again that the pool had and that are in none of the node's blocks any more.
    RestoreUnowned { addresses: Vec<IpAddr> },
    /// Record the blocks that the CiliumNode has.
    RecordBlocks { blocks: Vec<IpNet> },
}

impl Action {
    /// What it is about, for the log, the metrics and the pauses between tries.
    pub fn subject(&self) -> String {
        match self {
            Self::SendUpdate { name, .. } => name.clone(),
            Self::Prepare { pod, uid } | Self::DecideRunning { pod, uid } => format!("{pod} {uid}"),
            Self::Withdraw { uid } => uid.clone(),
            Self::Reevaluate { pod, uid, said } => format!("{pod} {uid}: {said}"),
            Self::Grant { address, pod_is_gone: true } => format!("{address}, whose pod is gone"),
            Self::Grant { address, .. }
            | Self::ReportUse { address }
            | Self::FinishAdoption { address }
            | Self::Unpublish { address } => address.to_string(),
            Self::Publish { key } | Self::RecordMac { key } => key.to_string(),
            Self::Attach { key, attachment } => format!("{key} {attachment}"),
            Self::Detach { key, id } => format!("{key} {id}"),
            Self::EndAttachment { record } | Self::ReleaseRecord { record } => {
                record.addresses.first().map(ToString::to_string).unwrap_or_default()
            }
            // A pause that was due to fewer pods does not hold up more.
            Self::Refill { demand: PodDemand { waiting, .. } } => format!("{waiting} waiting pods"),
            Self::Seed
            | Self::RecordUnowned { .. }
            | Self::RestoreUnowned { .. }
            | Self::RecordBlocks { .. }
            | Self::RemoveBarriers => String::new(),
        }
    }

    /// Does it only end what a sandbox of this node has left? While everything is removed from the node,
    /// nothing else is done.
    pub(crate) fn is_ending(&self) -> bool {
        match self {
            Self::SendUpdate { .. }
            | Self::Withdraw { .. }
            | Self::Detach { .. }
            | Self::EndAttachment { .. } => true,
            Self::Prepare { .. }
            | Self::DecideRunning { .. }
            | Self::Reevaluate { .. }
            | Self::Grant { .. }
            | Self::FinishAdoption { .. }
            | Self::Publish { .. }
            | Self::Unpublish { .. }
            | Self::RemoveBarriers
            | Self::Attach { .. }
            | Self::RecordMac { .. }
            | Self::ReleaseRecord { .. }
            | Self::RecordUnowned { .. }
            | Self::Seed
            | Self::ReportUse { .. }
            | Self::RestoreUnowned { .. }
            | Self::RecordBlocks { .. }
            | Self::Refill { .. } => false,
        }
    }

    /// Whether nothing waits for it, so that the next step can do it as well.
    pub(crate) fn can_wait(&self) -> bool {
        matches!(self, Self::RecordMac { .. })
    }

    /// The action in a word, for logs and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::SendUpdate { .. } => "send_update",
            Self::Seed => "seed",
            Self::Prepare { .. } => "prepare",
            Self::DecideRunning { .. } => "decide_running",
            Self::Withdraw { .. } => "withdraw",
            Self::Reevaluate { .. } => "reevaluate",
            Self::Grant { .. } => "grant",
            Self::ReportUse { .. } => "report_use",
            Self::FinishAdoption { .. } => "finish_adoption",
            Self::Publish { .. } => "publish",
            Self::Unpublish { .. } => "unpublish",
            Self::RemoveBarriers => "remove_barriers",
            Self::Attach { .. } => "attach",
            Self::Detach { .. } => "detach",
            Self::RecordMac { .. } => "record_mac",
            Self::EndAttachment { .. } => "end_attachment",
            Self::ReleaseRecord { .. } => "release_record",
            Self::RecordUnowned { .. } => "record_unowned",
            Self::Refill { .. } => "refill",
            Self::RestoreUnowned { .. } => "restore_unowned",
            Self::RecordBlocks { .. } => "record_blocks",
        }
    }
}
