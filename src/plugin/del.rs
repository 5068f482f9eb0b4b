//! DEL: the container's addresses go back, or are kept for their pod.
//!
//! By container, never by pod: a late or repeated DEL finds nothing of what a newer container has.

use super::{Scene, Story, attachment};
use crate::cni::{CniError, Request};
use crate::store::{Disk, Keep, Locked, Phase, Record, StoreError, Stored};

pub(super) fn run<D: Disk>(
    scene: &Scene<'_, D>,
    request: &Request,
    story: &mut Story,
) -> Result<(), CniError> {
    let attachment = attachment(request)?;
    let Some(mut locked) = scene.store.lock_existing()? else {
        story.tell(&[], "there is no store");
        return Ok(());
    };
    let Some(stored) = locked.of_attachment(attachment)? else {
        story.tell(&[], "this container has nothing");
        return Ok(());
    };
    let why = let_go(&mut locked, &stored, scene.store.now())?;
    story.tell(&stored.record.addresses, why);
    Ok(locked.commit()?)
}

/// Ends an attachment, and says what became of its addresses.
pub(super) fn let_go<D: Disk>(
    locked: &mut Locked<'_, D>,
    stored: &Stored,
    now: &crate::store::Moment,
) -> Result<&'static str, StoreError> {
    if stored.record.keep == Keep::No {
        locked.free(stored)?;
        return Ok("freed");
    }
    let kept = Record { phase: Phase::Kept, since: now.clone(), netns: None, ..stored.record.clone() };
    locked.put(&kept, Some(stored))?;
    Ok("kept for its pod")
}
