//! STATUS: whether an ADD could succeed. A look, whatever the number of addresses.

use super::{Scene, Story};
use crate::cni::{CniError, OnExhaustion, Request, StatusWhenExhausted};

pub(super) fn run(request: &Request, story: &mut Story) -> Result<(), CniError> {
    let scene = Scene::of(request)?;
    scene.store.is_usable().map_err(|error| CniError::not_available(error.to_string()))?;
    story.tell(&[], "ready");
    // Without our settings the specification decides: an ADD that cannot succeed is not ready.
    let full_is_ready = request
        .config
        .sticky()
        .is_some_and(|sticky| sticky.status_when_exhausted == StatusWhenExhausted::Ready);
    if full_is_ready {
        return Ok(());
    }
    for set in &scene.ipam.sets {
        if scene.store.count_free(set, 1)? == 0 && !could_reclaim(&scene)? {
            return Err(CniError::not_available(format!("no IP addresses available in range set: {set}")));
        }
    }
    Ok(())
}

/// Whether an ADD could take a kept address instead. Looked at only when nothing is free.
fn could_reclaim(scene: &Scene<'_>) -> Result<bool, CniError> {
    let Some(mut locked) = scene.store.lock_existing()? else { return Ok(true) };
    let first_look = locked.first_look().clone();
    let kept = locked.kept()?;
    let may_go = scene.sticky.on_exhaustion == OnExhaustion::Reclaim;
    Ok(kept.iter().any(|stored| may_go || stored.record.has_expired(scene.store.now(), &first_look)))
}
