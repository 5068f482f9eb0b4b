//! The attachment that is sent before anything was read: by the state in which this node's own DEL left the
//! StickyIP. The reads come beside it, and show whether it was right (docs/decisions/0028).
//!
//! Must never stay when they call for anything else: it is undone then, before the pod is bound.

use crate::cluster::api::cached;
use crate::cluster::api::client::ApiError;
use crate::cluster::objects::{StickyIP, Validate};
use crate::cluster::protocol::bind::after_sending;
use crate::cluster::protocol::sticky_identity::Stickiness;
use crate::cluster::protocol::{detach, step};
use crate::cluster::view::StickyView;
use crate::cluster::writer::apply::{ApiWriter, Applied};
use crate::cluster::writer::write::Write;
use crate::names::{Attachment, AttachmentId, StickyKey};
use crate::node::addresses::{AddressSource, NodeAddresses};
use crate::node::bind::PodToBind;
use crate::node::list;
use crate::plugin::cluster::context::{AddContext, AddError};
use crate::plugin::cluster::draft::RecordDraft;
use crate::plugin::cluster::reads::{self, AddReads, SideReads};
use crate::policy::handover::Attached;
use crate::policy::selection::claimant::Claimant;
use crate::store::{Disk, Draft};

pub(crate) struct OptimisticAttach {
    before: StickyIP,
    key: StickyKey,
    write: Write,
}

pub(crate) struct FirstReads {
    /// What was read beside it; the StickyIP as it was before.
    pub(crate) found: AddReads,
    /// The StickyIP with the attachment, if that exists and is what the reads call for.
    pub(crate) attached: Option<StickyIP>,
    /// The file of the record to be.
    pub(crate) draft: Option<Draft>,
    /// It was not seen, and may still come: the next write to the StickyIP rules that out.
    pub(crate) in_doubt: bool,
}

impl From<AddReads> for FirstReads {
    fn from(found: AddReads) -> Self {
        Self { found, attached: None, draft: None, in_doubt: false }
    }
}

impl OptimisticAttach {
    /// The attachment of this sandbox to the StickyIP of its pod's own name, by the snapshot of this node;
    /// none if there is no snapshot, or if its state does not allow it.
    pub(crate) fn of<D: Disk>(
        context: &AddContext<'_, D>,
        id: &AttachmentId,
        detached_snapshot: &[u8],
    ) -> Option<Self> {
        let AddContext { conf, pod, .. } = *context;
        let before: StickyIP = serde_json::from_slice(detached_snapshot).ok()?;
        let view = StickyView::from(&before);
        let is_its_own = view.key.namespace == pod.namespace() && view.key.name == pod.name();
        if !is_its_own || before.validation_error().is_some() {
            return None;
        }
        let asker =
            Attached { node: conf.node.clone(), pod_uid: pod.uid()?.to_owned(), attachment_id: id.clone() };
        let write = step::attach_again(&view, &asker)?;
        Some(Self { before, key: view.key, write })
    }

    /// Sends it while everything else is read.
    /// Errors: the server is unavailable, or what was read refuses the pod. Nothing is attached then; if that
    /// is not certain, it is [`AddError::WriteInDoubt`].
    pub(crate) async fn send<D: Disk>(
        self,
        api_writer: &mut ApiWriter<'_>,
        context: &AddContext<'_, D>,
        attachment: &Attachment,
    ) -> Result<FirstReads, AddError> {
        let AddContext { verb, pod, .. } = *context;
        let source = AddressSource::of_attached(verb.mode, &verb.ipam.sets);
        let node = NodeAddresses::new(context.node(&|_, _| {}), &source, self.key.clone(), pod, attachment);
        let draft = RecordDraft::new(context, None);
        let api = api_writer.api().clone();
        let name = context.pod.name();
        let addresses = self.before.spec.addresses.iter().copied().collect();
        let (sent, (), others) = tokio::join!(
            api_writer.apply(&self.write, Some(&self.before), name),
            after_sending(|| draft.write(&node, &self.before.spec.addresses)),
            reads::read_others(&api, context, &addresses),
        );
        let is_right = others.as_ref().is_ok_and(|others| self.is_right(others, context, attachment));
        let sent = match sent {
            Ok(Applied::Sticky(object)) if is_right => {
                let reads = FirstReads::from(others?.with(Some(self.before)));
                return Ok(FirstReads { attached: Some(*object), draft: draft.take(), ..reads });
            }
            sent => sent,
        };
        draft.discard();
        // A server that refuses the credentials may close the connection before it has read all of a write.
        let is_unauthorized = matches!(&others, Err(AddError::Unreachable(ApiError::Unauthorized { .. })));
        let (others, doubt) = match (sent, others) {
            (Err(error), Err(reason)) if is_unauthorized || !error.leaves_doubt() => return Err(reason),
            (Err(error), others) => (others, Some(error).filter(ApiError::leaves_doubt)),
            (Ok(_), others) => (others, None),
        };
        // Also where it was refused because the StickyIP has changed: the client sends again what was
        // answered with 5xx, so the first try may have changed it. What cannot be undone here the runtime's
        // DEL undoes.
        let container = attachment.container.as_str();
        let sticky = detach::detach_id(api_writer, &self.key, &attachment.id()).await;
        let sticky = sticky.map_err(AddError::WriteInDoubt)?;
        let (pod, addresses) = (context.pod, list(&self.before.spec.addresses));
        tracing::info!(
            %pod, sticky_ip = %self.key, addresses, container,
            "the optimistic attachment was undone: the reads do not call for it, or the StickyIP has changed"
        );
        let version = |sticky: &StickyIP| StickyView::from(sticky).resource_version;
        let is_as_before = sticky.as_ref().is_some_and(|sticky| version(sticky) == version(&self.before));
        let Some(error) = doubt.filter(|_| is_as_before) else {
            return Ok(others?.with(sticky).into());
        };
        // It may come late. If the pod is bound to this StickyIP, the next write rules that out; else nothing
        // would.
        match others {
            Ok(others) if self.is_for_pod(&others.stickiness) => {
                Ok(FirstReads { in_doubt: true, ..others.with(sticky).into() })
            }
            Ok(_) | Err(AddError::Unreachable(_)) => Err(AddError::WriteInDoubt(error)),
            Err(reason) => Err(reason),
        }
    }

    fn is_for_pod(&self, pod: &Stickiness) -> bool {
        matches!(pod, Stickiness::Sticky { facts, .. } if self.is_for(&Claimant::of(facts)))
    }

    fn is_for(&self, claimant: &Claimant) -> bool {
        claimant.fixed_name() == Some(&self.key.name)
    }

    /// Whether what was found calls for this very attachment.
    fn is_right<D: Disk>(
        &self,
        found: &SideReads,
        context: &AddContext<'_, D>,
        attachment: &Attachment,
    ) -> bool {
        let (Stickiness::Sticky { facts, .. }, Some(claims)) = (&found.stickiness, &found.claims) else {
            return false;
        };
        let claimant = Claimant::of(facts);
        let lacks_node = context.verb.mode.publishes_pool_entries() && found.node.is_none();
        if !cached::are_all(claims, &self.before) || lacks_node || !self.is_for(&claimant) {
            return false;
        }
        let patience = context.verb.sticky.wait_for_old_pod;
        let to_bind = PodToBind { facts, identity: context.pod, attachment, patience };
        let binder = to_bind.binder(&context.conf.node, &claimant, None);
        binder.is_ok_and(|binder| binder.would_start_with(&self.write, &self.before, claims))
    }
}
