//! DEL: the container's addresses go back, or are kept for their pod.
//!
//! By container, never by pod: a late or repeated DEL finds nothing of what a newer container has.

use crate::cni::{Attachment, CniError, Request};
use crate::plugin::{Scene, Story, attachment};
#[cfg(feature = "cluster")]
use crate::store::Binding;
use crate::store::{Decision, Disk, Keep, Locked, Moment, Note, Phase, Record, StoreError, Stored, Told};

pub(crate) fn run<D: Disk>(
    scene: &Scene<'_, D>,
    request: &Request,
    story: &mut Story<'_>,
) -> Result<(), CniError> {
    let attachment = attachment(request)?;
    let stored = match scene.store.lock_existing()? {
        None => {
            story.tell(&[], "there is no store");
            None
        }
        Some(mut locked) => match locked.of_attachment(attachment)? {
            None => {
                locked.forget_draft(attachment)?;
                story.tell(&[], "this container has nothing");
                None
            }
            Some(stored) => {
                // A repeated DEL could not find it by its container id: somebody else must know how to.
                let known_as = stored.record.binding.as_ref().map(|binding| binding.container.as_str());
                if known_as.is_some_and(|known_as| known_as != attachment.container.as_str()) {
                    let note = ended_note(attachment, Some(&stored.record), scene.store.now());
                    locked.leave_note(attachment, &note)?;
                }
                let why = let_go(&mut locked, &stored, scene.store.now())?;
                story.tell(&stored.record.addresses, why);
                locked.commit()?;
                Some(stored)
            }
        },
    };
    tell_cluster(scene, request, stored.as_ref(), story)
}

/// Has the API server know that the sandbox has ended: at once, or by a note for the agent. An attachment of which this
/// node knows nothing may still stand there, if its ADD ended half way.
#[cfg(feature = "cluster")]
fn tell_cluster<D: Disk>(
    scene: &Scene<'_, D>,
    request: &Request,
    stored: Option<&Stored>,
    story: &mut Story<'_>,
) -> Result<(), CniError> {
    let attachment = attachment(request)?;
    let record = stored.map(|stored| &stored.record);
    if record.is_none() && is_not_sticky(scene, request, attachment)? {
        return Ok(());
    }
    let told = if record.is_none() { told_before(scene, attachment)? } else { None };
    let outcome = match (&scene.sticky.cluster, record.map(|record| &record.binding)) {
        (_, Some(None)) | (None, None) => return Ok(()),
        (None, Some(Some(_))) => Err("sticky.cluster is missing or cannot be read".to_owned()),
        (Some(conf), binding) => {
            let binding = binding.map_or(told.as_ref(), Option::as_ref);
            crate::plugin::cluster::del::detach(
                scene,
                conf,
                (request.pod.as_ref(), attachment),
                binding,
                story,
            )
        }
    };
    let Err(why) = outcome else {
        return match scene.store.lock_existing()? {
            Some(mut locked) => Ok(locked.forget_note(attachment)?),
            None => Ok(()),
        };
    };
    tracing::warn!(container = attachment.container.as_str(), why, "left a note for the agent");
    let mut locked = scene.store.lock()?;
    if told.is_some() {
        // The earlier DEL's note knows more than this one does.
        return Ok(());
    }
    Ok(locked.leave_note(attachment, &ended_note(attachment, record, scene.store.now()))?)
}

/// What an earlier DEL of this sandbox knew of its attachment and could not tell: it has freed the record since.
#[cfg(feature = "cluster")]
fn told_before<D: Disk>(scene: &Scene<'_, D>, attachment: &Attachment) -> Result<Option<Binding>, CniError> {
    let Some(mut locked) = scene.store.lock_existing()? else { return Ok(None) };
    let note = locked.note_of(attachment)?.filter(|note| note.what == Told::Ended);
    Ok(note.and_then(|note| {
        Some(Binding {
            namespace: note.namespace?,
            name: note.name?,
            container: note.known_as.unwrap_or(note.container),
        })
    }))
}

/// Whether this node knows, without asking anybody, that the pod has nothing in the cluster. Where Cilium picks the
/// addresses, pods that are not sticky leave no record, and there are many of them.
#[cfg(feature = "cluster")]
fn is_not_sticky<D: Disk>(
    scene: &Scene<'_, D>,
    request: &Request,
    attachment: &Attachment,
) -> Result<bool, CniError> {
    let Some(pod) = &request.pod else { return Ok(false) };
    if !scene.sticky.selects(pod) {
        return Ok(true);
    }
    let (Some(uid), Some(mut locked)) = (pod.uid(), scene.store.lock_existing()?) else { return Ok(false) };
    let decision = locked.prepared(uid, &attachment.interface)?;
    let is_decided =
        decision.is_some_and(|decision| decision.sticky.is_none() && decision.is_for(pod, scene.store.now()));
    // What was sticky once may have been attached by an ADD that ended before it read that the pod is not.
    let claimant = crate::store::Claimant::new(pod, &attachment.interface);
    Ok(is_decided && locked.of_claimant(&claimant)?.is_none())
}

/// Without the cluster's part only a note can be left, for one that has it.
#[cfg(not(feature = "cluster"))]
fn tell_cluster<D: Disk>(
    scene: &Scene<'_, D>,
    request: &Request,
    stored: Option<&Stored>,
    _: &mut Story<'_>,
) -> Result<(), CniError> {
    let attachment = attachment(request)?;
    if let Some(stored) = stored.filter(|stored| stored.record.binding.is_some()) {
        let mut locked = scene.store.lock()?;
        locked.leave_note(attachment, &ended_note(attachment, Some(&stored.record), scene.store.now()))?;
    }
    Ok(())
}

/// The note that this sandbox has ended.
pub(crate) fn ended_note(attachment: &Attachment, record: Option<&Record>, now: &Moment) -> Note {
    let binding = record.and_then(|record| record.binding.as_ref());
    let container = attachment.container.as_str();
    Note {
        what: Told::Ended,
        container: container.to_owned(),
        interface: attachment.interface.as_str().to_owned(),
        namespace: binding.map(|binding| binding.namespace.clone()),
        name: binding.map(|binding| binding.name.clone()),
        known_as: binding.map(|binding| binding.container.clone()).filter(|known| known != container),
        uid: record.and_then(|record| record.pod.as_ref()?.uid().map(str::to_owned)),
        at: now.clone(),
    }
}

/// Ends an attachment, and says what became of its addresses.
pub(crate) fn let_go<D: Disk>(
    locked: &mut Locked<'_, D>,
    stored: &Stored,
    now: &Moment,
) -> Result<&'static str, StoreError> {
    if let Some(uid) = stored.record.pod.as_ref().and_then(|pod| pod.uid())
        && stored.record.binding.as_ref().is_some_and(|known| known.container == Decision::known_as(uid))
    {
        // Used up; a crash may have left it.
        locked.forget_prepared(uid)?;
    }
    if stored.record.keep == Keep::No {
        locked.free(stored)?;
        return Ok("freed");
    }
    let kept = Record { phase: Phase::Kept, since: now.clone(), netns: None, ..stored.record.clone() };
    locked.put(&kept, Some(stored))?;
    Ok("kept for its pod")
}
