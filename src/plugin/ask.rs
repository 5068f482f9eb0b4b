//! The API server's answer to "which address has this pod": who is sticky, the walk through the protocol, the record on
//! the node, and what the node's CiliumNode shows. Must never answer before all of them stand.

use std::collections::BTreeSet;
use std::net::IpAddr;

use super::bound::{Errand, Why};
use super::first_look::{self, Found};
use super::ground::{Here, Home};
use super::{Story, attachment};
use crate::cluster::claims::carry::Carrier;
use crate::cluster::claims::errand;
use crate::cluster::claims::step::Refusal;
use crate::cluster::claims::walk::{self, WalkError, Walker};
use crate::cluster::client::Connection;
use crate::cluster::events::{self, Told};
use crate::cluster::objects::{Holder, StickyIP};
use crate::cluster::projection::{self, ProjectionError, Shown};
use crate::cni::{CniError, PodIdentity, code};
use crate::policy::claimant::{Claimant, slot_name};
use crate::policy::handover::Attached;
use crate::policy::pin::pin_of;
use crate::policy::retention::asked_by;
use crate::store::{self, Disk};

/// How often a pod of a Deployment chooses another slot because somebody was faster.
const MOST_SLOTS: usize = 16;

/// The addresses of a sticky pod; none if it is not sticky. `remembered` are those that this node knows of it. A refusal is told to
/// whoever looks at the pod, too.
pub(super) async fn ask<D: Disk>(
    mut api: Connection,
    errand: &Errand<'_, D>,
    wanted: &[Option<IpAddr>],
    remembered: &BTreeSet<IpAddr>,
    story: &mut Story<'_>,
) -> Result<Option<Vec<IpAddr>>, Why> {
    // Waiting for a turn on this node was not the server's fault.
    api.restart_time();
    let mut carrier = Carrier::new(api, story.witness);
    let answer = ask_through(&mut carrier, errand, wanted, remembered, story).await;
    if let Err(Why::Told(error)) = &answer
        && error.code == code::REQUEST_REFUSED
    {
        let pod = errand.pod;
        let told = Told {
            about: events::pod(pod.namespace(), pod.name(), pod.uid().unwrap_or_default()),
            reason: "AddressRefused",
            message: error.msg.clone(),
            warning: true,
        };
        events::tell(&mut carrier, &told).await;
    }
    answer
}

async fn ask_through<D: Disk>(
    carrier: &mut Carrier<'_>,
    errand: &Errand<'_, D>,
    wanted: &[Option<IpAddr>],
    remembered: &BTreeSet<IpAddr>,
    story: &mut Story<'_>,
) -> Result<Option<Vec<IpAddr>>, Why> {
    let Errand { request, scene, conf, pod, crd } = *errand;
    let itself = Holder { namespace: pod.namespace().to_owned(), name: pod.name().to_owned() };
    let Found { facts, sticky, claims, node } = first_look::look(carrier, errand, remembered).await?;
    let facts = match facts {
        Ok(facts) => facts,
        Err(reason) => {
            tracing::debug!(%pod, %reason, "the pod is not sticky");
            return Ok(None);
        }
    };
    if let Some(address) = wanted.iter().flatten().next() {
        return Err(CniError::new(
            code::REQUEST_REFUSED,
            format!("{address} is requested for the sticky pod {pod}; ask for it by the annotation sticky-ipam.io/ips"),
        )
        .into());
    }
    if crd && node.is_none() {
        let missing = ProjectionError::Missing { node: conf.node.clone() };
        return Err(CniError::try_again(missing.to_string()).into());
    }
    let home = match &node {
        Some(node) => Home::of_cilium_node(node, &itself.to_string()),
        None => Home::of_ranges(&scene.ipam.sets),
    };
    let attachment = attachment(request)?;
    let claimant = Claimant::of(&facts);
    let refused = |error: crate::policy::PolicyError| CniError::new(code::REQUEST_REFUSED, error.to_string());
    // The uid that the runtime knows is the one that later DELs and other nodes can compare.
    let uid = pod.uid().unwrap_or(&facts.uid).to_owned();
    let asker = Attached {
        node: conf.node.clone(),
        pod_uid: facts.uid.clone(),
        container_id: attachment.container.as_str().to_owned(),
    };
    for _ in 0..MOST_SLOTS {
        let (key, reference, read) = match claimant.fixed_name() {
            Some(name) if name == itself.name => {
                (itself.clone(), errand::reference(&claimant, None), Some(sticky.clone()))
            }
            Some(name) => {
                (Holder { name: name.to_owned(), ..itself.clone() }, errand::reference(&claimant, None), None)
            }
            None => {
                let slot = match errand::choose(carrier.api(), &claimant, &facts).await {
                    Ok(slot) => slot,
                    // An attempt at another slot may have left something.
                    Err(error) if carrier.count() > 0 => return Err(Why::Doubt(error)),
                    Err(error) => return Err(Why::Unasked(error)),
                };
                let name = slot_name(&claimant.workload().name, slot);
                (Holder { name, ..itself.clone() }, errand::reference(&claimant, Some(slot)), None)
            }
        };
        let pin = pin_of(&facts, reference.ordinal).map_err(refused)?;
        let walker = Walker {
            asker: asker.clone(),
            pod: pod.name().to_owned(),
            key: key.clone(),
            claimant: reference,
            workload: errand::workload(&claimant),
            retention: asked_by(&facts),
            pinned: pin.map(|pin| pin.addresses).unwrap_or_default(),
            patience: scene.sticky.wait_for_old_pod,
        };
        let named = PodIdentity::new(pod.namespace(), pod.name(), Some(&uid))?;
        let mut here = Here {
            request,
            scene,
            home: &home,
            node: &conf.node,
            attachment,
            key,
            pod: named,
            reserved: Vec::new(),
            draft: None,
        };
        let read_claims = claims.clone().filter(|_| read.is_some());
        let walked = walker.walk_to(carrier, &mut here, read, read_claims).await;
        if walked.is_err() {
            here.discard_draft();
        }
        match walked {
            Ok(object) => {
                let locked = scene.store.lock().map_err(CniError::from)?;
                let addresses = here.settle(locked, &object.spec.addresses, None)?;
                story.tell(&addresses, format!("bound by StickyIP {}", walker.key));
                show(carrier, errand, &home, &walker, &object).await?;
                let before = sticky.as_ref().filter(|known| known.metadata.uid == object.metadata.uid);
                events::tell_of_the_move(carrier, before, &object, &facts).await;
                return Ok(Some(addresses));
            }
            // Another pod was faster on this slot.
            Err(WalkError::Refused(Refusal::Handover { .. })) if claimant.fixed_name().is_none() => {
                carrier.api_mut().restart_time();
                unreserve(carrier, &here).await?;
            }
            Err(WalkError::Api(error)) if carrier.count() == 0 => return Err(Why::Unasked(error)),
            Err(WalkError::Api(error)) => return Err(Why::Doubt(error)),
            Err(error) => {
                if matches!(error, WalkError::Refused(_) | WalkError::Waited { .. }) {
                    carrier.api_mut().restart_time();
                    unreserve(carrier, &here).await?;
                }
                return Err(Why::Told(to_cni(&error)));
            }
        }
    }
    Err(CniError::try_again(format!("others took every slot that {pod} chose")).into())
}

/// Lets go of what was reserved for a walk that was refused, if nobody claims it. The StickyIP that this walk made may have been
/// attached by a faster pod of another node: then the address lives there, and this node, its home, must keep it from others.
async fn unreserve<D: Disk>(carrier: &Carrier<'_>, here: &Here<'_, D>) -> Result<(), CniError> {
    match walk::is_any_claimed(carrier, &here.reserved).await {
        Ok(false) => Ok(here.unreserve()?),
        Ok(true) => Ok(()),
        Err(error) => {
            let addresses = super::list(&here.reserved);
            tracing::warn!(pod = %here.pod, addresses, %error, "cannot tell whether an address is claimed; it stays reserved");
            Ok(())
        }
    }
}

/// Has the node's CiliumNode show the addresses, as long as they are attached to this sandbox.
async fn show<D: Disk>(
    carrier: &mut Carrier<'_>,
    errand: &Errand<'_, D>,
    home: &Home,
    walker: &Walker,
    object: &StickyIP,
) -> Result<(), CniError> {
    let addresses = &object.spec.addresses;
    if home.shape.is_silent_about(addresses) {
        return Ok(());
    }
    let again = |why: String| CniError::try_again(why);
    let scene = errand.scene;
    let interface = &attachment(errand.request)?.interface;
    let claimant = store::Claimant::bound(&walker.key.namespace, &walker.key.name, interface);
    // A DEL of this very sandbox may come before this ADD has ended, and must find nothing left behind its back.
    let _turn = scene.store.pool_turn(&claimant, scene.sticky.lock_timeout)?;
    carrier.api_mut().restart_time();
    // What the CiliumNode showed before is old: the one who was waited for may have taken it out since.
    let read = tokio::try_join!(
        walk::read_sticky(carrier, &walker.key),
        projection::read_node(carrier.api(), &errand.conf.node),
    );
    let (live, node) = read.map_err(|error| again(error.to_string()))?;
    let attached = live.and_then(|live| live.status?.attachment);
    if attached.is_none_or(|attached| attached.container_id != walker.asker.container_id) {
        return Err(again(format!("StickyIP {} was detached while its pod was being added", walker.key)));
    }
    let shown = Shown {
        addresses: addresses.clone(),
        owner: errand.pod.to_string(),
        resource: projection::resource(&walker.key.namespace, &object.spec.workload),
    };
    let put = projection::put(carrier, &errand.conf.node, &home.shape, &shown, node).await;
    put.map_err(|error| again(error.to_string()))
}

fn to_cni(error: &WalkError) -> CniError {
    let message = error.to_string();
    match error {
        WalkError::Refused(Refusal::Handover { .. } | Refusal::Conflict { .. }) => {
            CniError::try_again(message)
        }
        WalkError::Refused(_) | WalkError::HeldHere { .. } => CniError::new(code::REQUEST_REFUSED, message),
        WalkError::Exhausted { .. } => CniError::new(code::EXHAUSTED, message),
        WalkError::Ground(_) => CniError::io(message),
        WalkError::Api(_)
        | WalkError::Waited { .. }
        | WalkError::Outrun { .. }
        | WalkError::Unsound { .. } => CniError::try_again(message),
    }
}
