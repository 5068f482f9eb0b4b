//! What the agent can do, one thing at a time. Each is performed in the file of its name in `actions`.

use std::net::IpAddr;

use crate::names::{Attachment, AttachmentId, StickyKey};
use crate::store::{PendingUpdate, Record};

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Send an update to the API server that a verb could not send.
    SendUpdate {
        /// The name of its file.
        name: String,
        update: PendingUpdate,
    },
    /// Decide about a pod before its ADD comes.
    Prepare {
        /// Its namespace and name.
        pod: String,
        uid: String,
    },
    /// Take a decision back.
    Withdraw {
        /// The pod's uid as the decision has it.
        uid: String,
    },
    /// Decide again about a pod that was found not to be sticky and still waits.
    Reevaluate {
        /// Its namespace and name.
        pod: String,
        uid: String,
        /// What the pod itself says by now: what is said for the first time is not paused for what was said
        /// before.
        said: String,
    },
    /// Grant or refuse a claim on an address of this node.
    Grant {
        address: IpAddr,
        /// The pod that is said to have it is gone: what was put off as long as it lived is due at once.
        pod_is_gone: bool,
    },
    /// Remove from a claim the pod that its address was adopted from, and that is gone.
    FinishAdoption { address: IpAddr },
    /// Publish an attached StickyIP in the CiliumNode.
    Publish {
        /// The StickyIP.
        key: StickyKey,
    },
    /// Remove an address from the CiliumNode that no sandbox of this node has.
    Unpublish { address: IpAddr },
    /// Remove the barrier entries by which grants learned what Cilium has seen.
    RemoveBarriers,
    /// Attach a StickyIP to a sandbox that runs, and of which the API server does not know.
    Attach {
        /// The StickyIP.
        key: StickyKey,
        /// The sandbox.
        attachment: Attachment,
    },
    /// Detach a StickyIP that no sandbox of this node has.
    Detach {
        /// The StickyIP.
        key: StickyKey,
        /// The id under which it is attached.
        id: AttachmentId,
    },
    /// Record the MAC address of a running pod.
    RecordMac {
        /// The StickyIP.
        key: StickyKey,
    },
    /// End an attachment whose sandbox is gone.
    EndAttachment {
        /// The record as it was seen.
        record: Record,
    },
    /// Release a record that is kept for no StickyIP any more, or those of its addresses that are not.
    ReleaseRecord {
        /// The record as it was seen.
        record: Record,
    },
    /// Record the unowned pool entries of which the store does not know: Cilium may give them to any pod.
    RecordUnowned { addresses: Vec<IpAddr> },
    /// Refill the pool with unowned entries.
    Refill,
}

impl Action {
    /// What it is about, for the log, the metrics and the pauses between tries.
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
            Self::Detach { key, id } => format!("{key} {id}"),
            Self::EndAttachment { record } | Self::ReleaseRecord { record } => {
                record.addresses.first().map(ToString::to_string).unwrap_or_default()
            }
            Self::RecordUnowned { .. } | Self::Refill | Self::RemoveBarriers => String::new(),
        }
    }

    /// The action in a word, for logs and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::SendUpdate { .. } => "send_update",
            Self::Prepare { .. } => "prepare",
            Self::Withdraw { .. } => "withdraw",
            Self::Reevaluate { .. } => "reevaluate",
            Self::Grant { .. } => "grant",
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
            Self::Refill => "refill",
        }
    }
}
