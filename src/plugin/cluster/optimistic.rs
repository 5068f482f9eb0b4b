//! The attachment that is sent before anything was read: by the state in which this node's own DEL left the StickyIP. The reads come
//! beside it, and say whether it was right (docs/decisions/0028).
//!
//! Must never stand when they call for anything else: it is taken back then, before the pod's way begins.

use crate::cluster::api::cached;
use crate::cluster::api::client::ApiError;
use crate::cluster::objects::{StickyIP, StickyKey, Validate};
use crate::cluster::protocol::apply::{ApiWriter, Applied};
use crate::cluster::protocol::bind::{LocalNode, after_sending};
use crate::cluster::protocol::detach;
use crate::cluster::protocol::step;
use crate::cluster::protocol::sticky_identity::reference;
use crate::cluster::protocol::view::StickyView;
use crate::cluster::protocol::write::Write;
use crate::cni::Attachment;
use crate::plugin::cluster::add::{AddContext, AddError};
use crate::plugin::cluster::addresses::{AddressSource, NodeAddresses};
use crate::plugin::cluster::api::walker;
use crate::plugin::cluster::reads;
use crate::plugin::cluster::reads::{AddReads, SideReads};
use crate::policy::handover::Attached;
use crate::policy::selection::claimant::Claimant;
use crate::store::{Disk, Draft};

/// What is sent, and by which state.
pub(crate) struct OptimisticAttach {
    before: StickyIP,
    key: StickyKey,
    write: Write,
}

/// What came of it.
pub(crate) struct FirstReads {
    /// What was found beside it; the StickyIP as it stood before.
    pub(crate) found: AddReads,
    /// The attachment, if it stands.
    pub(crate) standing: Option<AlreadyAttached>,
    /// It does not, and still may: the next write to the StickyIP rules that out.
    pub(crate) in_doubt: bool,
}

/// An attachment that stands, and is what the reads call for.
pub(crate) struct AlreadyAttached {
    /// The StickyIP as it stands now.
    pub(crate) object: StickyIP,
    /// The file of the record to be.
    pub(crate) draft: Option<Draft>,
}

impl OptimisticAttach {
    /// The attachment of this sandbox to the StickyIP of its pod's own name, as the node remembers that; none if it does not, or if that
    /// state does not allow it.
    pub(crate) fn of<D: Disk>(
        errand: &AddContext<'_, D>,
        container: &str,
        detached_snapshot: &[u8],
    ) -> Option<Self> {
        let AddContext { conf, pod, .. } = *errand;
        let before: StickyIP = serde_json::from_slice(detached_snapshot).ok()?;
        let view = StickyView::from(&before);
        let is_its_own = view.key.namespace == pod.namespace() && view.key.name == pod.name();
        if !is_its_own || before.validation_error().is_some() {
            return None;
        }
        let asker = Attached {
            node: conf.node.clone(),
            pod_uid: pod.uid()?.to_owned(),
            container_id: container.to_owned(),
        };
        let write = step::attach_again(&view, &asker)?;
        Some(Self { before, key: view.key, write })
    }

    /// Sends it while all else is looked at.
    ///
    /// # Errors
    /// The server is of no help, or what was found refuses the pod. Nothing stands then; where that cannot be told it is [`AddError::WriteInDoubt`].
    pub(crate) async fn send<D: Disk>(
        self,
        api_writer: &mut ApiWriter<'_>,
        errand: &AddContext<'_, D>,
        attachment: &Attachment,
    ) -> Result<FirstReads, AddError> {
        let AddContext { request, scene, conf, pod } = *errand;
        let home = AddressSource::of_attached(scene.mode, &scene.ipam.sets);
        let (key, pod) = (self.key.clone(), pod.clone());
        let (reserved, draft) = (Vec::new(), None);
        let node = conf.node.as_str();
        let mut here =
            NodeAddresses { request, scene, home: &home, node, attachment, key, pod, reserved, draft };
        let api = api_writer.api().clone();
        let name = errand.pod.name();
        let addresses = self.before.spec.addresses.iter().copied().collect();
        let (sent, (), around) = tokio::join!(
            api_writer.apply(&self.write, Some(&self.before), name),
            after_sending(|| here.attaching(&self.before.spec.addresses)),
            reads::read_others(&api, errand, &addresses),
        );
        let is_right = around.as_ref().is_ok_and(|around| self.is_right(around, errand, attachment));
        let sent = match sent {
            Ok(Applied::Sticky(object)) if is_right => {
                let standing = Some(AlreadyAttached { object: *object, draft: here.draft.take() });
                return Ok(FirstReads { found: around?.with(Some(self.before)), standing, in_doubt: false });
            }
            sent => sent,
        };
        here.discard_draft();
        // A server that does not know us may hang up before it has read all of a write.
        let is_stranger = matches!(&around, Err(AddError::Unreachable(ApiError::Unauthorized { .. })));
        let (around, doubt) = match (sent, around) {
            (Err(error), Err(why)) if is_stranger || !error.leaves_doubt() => return Err(why),
            (Err(error), around) => (around, Some(error).filter(ApiError::leaves_doubt)),
            (Ok(_), around) => (around, None),
        };
        // Also where it was refused because that state is over: the client sends again what was answered with 5xx, so the first try may have
        // ended it.
        // What cannot be taken back the runtime's DEL takes back.
        let container = attachment.container.as_str();
        let sticky = detach::detach_container(api_writer, &self.key, container)
            .await
            .map_err(AddError::WriteInDoubt)?;
        let shown = crate::plugin::list(&self.before.spec.addresses);
        tracing::info!(pod = %errand.pod, sticky_ip = %self.key, addresses = shown, container, "not attached ahead of the reads: they do not call for it, or its state is over");
        let version = |sticky: &StickyIP| StickyView::from(sticky).resource_version;
        let is_as_before = sticky.as_ref().is_some_and(|sticky| version(sticky) == version(&self.before));
        let Some(error) = doubt.filter(|_| is_as_before) else {
            return Ok(FirstReads { found: around?.with(sticky), standing: None, in_doubt: false });
        };
        // It may come late. On the way to this StickyIP the next write rules that out; on another way nobody would.
        match around {
            Ok(around) if around.facts.as_ref().is_ok_and(|facts| self.is_for(&Claimant::of(facts))) => {
                Ok(FirstReads { found: around.with(sticky), standing: None, in_doubt: true })
            }
            Ok(_) | Err(AddError::Unreachable(_)) => Err(AddError::WriteInDoubt(error)),
            Err(why) => Err(why),
        }
    }

    fn is_for(&self, claimant: &Claimant) -> bool {
        claimant.fixed_name() == Some(&self.key.name)
    }

    /// Whether what was found calls for this very attachment.
    fn is_right<D: Disk>(
        &self,
        found: &SideReads,
        errand: &AddContext<'_, D>,
        attachment: &Attachment,
    ) -> bool {
        let (Ok(facts), Some(claims)) = (&found.facts, &found.claims) else { return false };
        if !cached::are_all(claims, &self.before)
            || (errand.scene.mode.publishes_pool_entries() && found.node.is_none())
        {
            return false;
        }
        let claimant = Claimant::of(facts);
        if !self.is_for(&claimant) {
            return false;
        }
        let walker = walker(errand, attachment, facts, self.key.clone(), reference(&claimant, None));
        walker.is_ok_and(|walker| walker.would_start_with(&self.write, &self.before, claims))
    }
}
