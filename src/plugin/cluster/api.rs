//! An ADD by the API server: whether the pod is sticky, its binding by the protocol, the record on the node,
//! and what the node's CiliumNode publishes. Must never answer before all of them are written.

use std::net::IpAddr;

use crate::cluster::api::client::Connection;
use crate::cluster::cilium::pool::{PublishConfig, PublishError};
use crate::cluster::events::{self, NewEvent};
use crate::cluster::objects::{Attachment as AttachmentStatus, StickyIP};
use crate::cluster::protocol::bind::{BindError, StickyRead};
use crate::cluster::protocol::step::Refusal;
use crate::cluster::protocol::sticky_identity::Stickiness;
use crate::cluster::writer::apply::ApiWriter;
use crate::cni::{CniError, code};
use crate::names::{Attachment, PodIdentity, StickyKey};
use crate::node::addresses::{AddressSource, NodeAddresses};
use crate::node::bind::{BindPodError, BoundPod, PodToBind};
use crate::node::list;
use crate::node::publish::{self, Published};
use crate::plugin::VerbLog;
use crate::plugin::cluster::context::{AddContext, AddError, LastKnown};
use crate::plugin::cluster::draft::RecordDraft;
use crate::plugin::cluster::optimistic::{FirstReads, OptimisticAttach};
use crate::plugin::cluster::reads::{self, AddReads, SideReads};
use crate::plugin::cluster::record::{RecordSources, write_record};
use crate::policy::selection::rules::StickyReason;
use crate::store::{self, Disk};

/// What the API server says of a pod.
pub(crate) enum ApiAnswer {
    /// It is sticky, and has these addresses now.
    Bound(Vec<IpAddr>),
    NotSticky(StickyReason),
}

/// Whether the pod is sticky, and its addresses then. A refusal is an event on the pod, too.
pub(crate) async fn bind_by_api<D: Disk>(
    mut api: Connection,
    context: &AddContext<'_, D>,
    wanted: &[Option<IpAddr>],
    last_known: LastKnown,
    log: &mut VerbLog<'_>,
) -> Result<ApiAnswer, AddError> {
    // Waiting for a lock on this node was not the server's fault.
    api.restart_time();
    let mut api_writer = ApiWriter::new(api, log.observer);
    let answer = bind_or_doubt(&mut api_writer, context, wanted, last_known, log).await;
    if let Err(AddError::Rejected(error)) = &answer
        && error.code == code::REQUEST_REFUSED
    {
        let pod = context.pod;
        let event = NewEvent {
            about: events::pod(pod.namespace(), pod.name(), pod.uid().unwrap_or_default()),
            reason: "AddressRefused",
            message: error.msg.clone(),
            warning: true,
        };
        events::send(&mut api_writer, &event).await;
    }
    answer
}

async fn bind_or_doubt<D: Disk>(
    api_writer: &mut ApiWriter<'_>,
    context: &AddContext<'_, D>,
    wanted: &[Option<IpAddr>],
    last_known: LastKnown,
    log: &mut VerbLog<'_>,
) -> Result<ApiAnswer, AddError> {
    let sent = first_reads(api_writer, context, wanted, last_known).await?;
    // An optimistic attachment that was undone leaves nothing.
    let before = if sent.attached.is_some() || sent.in_doubt { 0 } else { api_writer.count() };
    match bind_pod(api_writer, context, wanted, sent, log).await {
        // What was written may exist.
        Err(AddError::Unreachable(error)) if api_writer.count() > before => {
            Err(AddError::WriteInDoubt(error))
        }
        answer => answer,
    }
}

/// Reads everything, and attaches the pod beside the reads where the node knows how, and the server is
/// connected.
async fn first_reads<D: Disk>(
    api_writer: &mut ApiWriter<'_>,
    context: &AddContext<'_, D>,
    wanted: &[Option<IpAddr>],
    last_known: LastKnown,
) -> Result<FirstReads, AddError> {
    let attachment = context.attachment;
    let LastKnown { addresses, detached_snapshot, .. } = last_known;
    let is_connected = api_writer.api().settled().await;
    let detached_snapshot = detached_snapshot.filter(|_| is_connected && wanted.iter().all(Option::is_none));
    let id = attachment.id();
    let Some(optimistic) =
        detached_snapshot.and_then(|snapshot| OptimisticAttach::of(context, &id, &snapshot))
    else {
        return Ok(reads::read_all(api_writer.api(), context, &addresses).await?.into());
    };
    let sent = optimistic.send(api_writer, context, attachment).await;
    if let Err(AddError::WriteInDoubt(_)) = &sent {
        // The next try reads first, so that its error proves that nothing was written.
        remove_detached_snapshot(context, attachment);
    }
    sent
}

fn remove_detached_snapshot<D: Disk>(context: &AddContext<'_, D>, attachment: &Attachment) {
    let (pod, claimant) = (context.pod, store::ClaimantKey::of_pod(context.pod, &attachment.interface));
    let locked = context.verb.store.lock();
    if let Err(error) = locked.and_then(|mut locked| locked.remove_detached_snapshot(&claimant)) {
        tracing::debug!(%pod, %error, "cannot remove the snapshot of the pod's StickyIP");
    }
}

async fn bind_pod<D: Disk>(
    api_writer: &mut ApiWriter<'_>,
    context: &AddContext<'_, D>,
    wanted: &[Option<IpAddr>],
    sent: FirstReads,
    log: &mut VerbLog<'_>,
) -> Result<ApiAnswer, AddError> {
    let AddContext { verb, conf, pod, attachment, .. } = *context;
    let own_key = StickyKey { namespace: pod.namespace().to_owned(), name: pod.name().to_owned() };
    let FirstReads { found: AddReads { sticky, others }, attached, draft, .. } = sent;
    let SideReads { stickiness, claims, node } = others;
    let facts = match stickiness {
        Stickiness::Sticky { facts, .. } => facts,
        Stickiness::NotSticky { reason } => {
            tracing::debug!(%pod, %reason, "the pod is not sticky");
            return Ok(ApiAnswer::NotSticky(reason));
        }
    };
    if let Some(address) = wanted.iter().flatten().next() {
        let message = format!(
            "{address} is requested for the sticky pod {pod}; ask for it by the annotation sticky-ipam.io/ips"
        );
        return Err(CniError::new(code::REQUEST_REFUSED, message).into());
    }
    if verb.mode.publishes_pool_entries() && node.is_none() {
        let missing = PublishError::Missing { node: conf.node.clone() };
        return Err(CniError::try_again(missing.to_string()).into());
    }
    let mut source = match &node {
        Some(node) => AddressSource::of_cilium_node(verb.mode, node, &own_key.to_string()),
        None => AddressSource::of_ranges(verb.mode, &verb.ipam.sets),
    };
    if source.sets.is_empty() {
        source.publish.known_blocks = verb.store.known_blocks().map_err(CniError::from)?;
    }
    // The uid that the runtime knows is the one that later DELs and other nodes can compare.
    let uid = pod.uid().unwrap_or(&facts.uid);
    let identity = PodIdentity::new(pod.namespace(), pod.name(), Some(uid))
        .map_err(|error| CniError::invalid_environment(format!("CNI_ARGS: {error}")))?;
    let before = sticky.clone();
    let draft = RecordDraft::new(context, draft);
    let on_attaching = |node: &NodeAddresses<'_, D>, addresses: &[IpAddr]| draft.write(node, addresses);
    let this_node = context.node(&on_attaching);
    let bound = match attached {
        Some(sticky) => {
            let addresses = NodeAddresses::new(this_node, &source, own_key.clone(), &identity, attachment);
            BoundPod { sticky, key: own_key, addresses, lock: () }
        }
        None => {
            let patience = verb.sticky.wait_for_old_pod;
            let to_bind = PodToBind { facts: &facts, identity: &identity, attachment, patience };
            let own = StickyRead::of(sticky).with_claims(claims);
            // The pool lock is taken to publish, not here: this may wait long for another sandbox.
            let bound = to_bind.bind(api_writer, this_node, &source, own, |_| Ok(Some(()))).await;
            if let Err(BindPodError::Bind(error @ BindError::Waited { agent_of: Some(_), .. })) = &bound {
                let about = events::pod(pod.namespace(), pod.name(), uid);
                let message = error.to_string();
                let event = NewEvent { about, reason: "WaitsForAgent", message, warning: true };
                events::send(api_writer, &event).await;
            }
            bound.inspect_err(|_| draft.discard())?
        }
    };
    let locked = verb.store.lock().map_err(CniError::from)?;
    let sources = RecordSources { draft: draft.take(), ..RecordSources::default() };
    let addresses = write_record(context, &bound.addresses, locked, &bound.sticky.spec.addresses, sources)?;
    log.report(&addresses, format!("bound by StickyIP {}", bound.key));
    publish_bound(api_writer, context, &source.publish, &bound.key, &bound.sticky).await?;
    let before = before.as_ref().filter(|known| known.metadata.uid == bound.sticky.metadata.uid);
    events::emit_move_events(api_writer, before, &bound.sticky, &facts).await;
    Ok(ApiAnswer::Bound(addresses))
}

/// Publishes the addresses in the node's CiliumNode, as long as they are attached to this sandbox.
async fn publish_bound<D: Disk>(
    api_writer: &mut ApiWriter<'_>,
    context: &AddContext<'_, D>,
    config: &PublishConfig,
    key: &StickyKey,
    sticky: &StickyIP,
) -> Result<(), CniError> {
    if config.is_silent_about(&sticky.spec.addresses) {
        return Ok(());
    }
    let AddContext { verb, conf, attachment, .. } = *context;
    let claimant = store::ClaimantKey::of_sticky(key, &attachment.interface);
    // A DEL of this very sandbox may come before this ADD has ended, and must not find its work undone
    // afterwards.
    let _pool_lock = verb.store.pool_lock(&claimant, verb.sticky.lock_timeout)?;
    api_writer.api_mut().restart_time();
    let is_ours = |held: &AttachmentStatus| held.attachment_id == attachment.id();
    match publish::publish(api_writer, &conf.node, config, key, is_ours).await {
        Ok(Published::NotAttached) => {
            Err(CniError::try_again(format!("StickyIP {key} was detached while its pod was being added")))
        }
        Ok(Published::Written(publication)) => {
            let addresses = list(&publication.addresses);
            tracing::debug!(addresses, owner = publication.owner, "published in the CiliumNode");
            Ok(())
        }
        Ok(Published::AlreadyThere | Published::NothingToShow) => Ok(()),
        Err(error) => Err(CniError::try_again(error.to_string())),
    }
}

impl From<BindPodError> for AddError {
    fn from(error: BindPodError) -> Self {
        match error {
            BindPodError::Api(error) => Self::Unreachable(error),
            BindPodError::Store(error) => Self::Rejected(error.into()),
            BindPodError::Pin(error) => CniError::new(code::REQUEST_REFUSED, error.to_string()).into(),
            BindPodError::Bind(error) => CniError::new(code_of(&error), error.to_string()).into(),
            BindPodError::PoolLocked(_) | BindPodError::SlotsTaken(_) => {
                CniError::try_again(error.to_string()).into()
            }
        }
    }
}

fn code_of(error: &BindError) -> u32 {
    match error {
        BindError::Refused(Refusal::Handover { .. } | Refusal::Conflict { .. } | Refusal::InUse { .. }) => {
            code::TRY_AGAIN
        }
        BindError::Refused(_) | BindError::HeldOnNode { .. } => code::REQUEST_REFUSED,
        BindError::Exhausted { .. } => code::EXHAUSTED,
        BindError::LocalNode(_) => code::IO_FAILURE,
        BindError::Api(_) | BindError::Waited { .. } | BindError::NoBlocks { .. } => code::TRY_AGAIN,
        BindError::TooManyConflicts { .. } | BindError::InvalidObject { .. } => code::TRY_AGAIN,
    }
}
