//! The API server's answer to "which address has this pod": who is sticky, the walk through the protocol, the record on
//! the node, and what the node's CiliumNode shows. Must never answer before all of them stand.

use std::net::IpAddr;

use crate::cluster::api::client::Connection;
use crate::cluster::api::events;
use crate::cluster::api::events::Told;
use crate::cluster::cilium::pool;
use crate::cluster::cilium::pool::{ProjectionError, Shown};
use crate::cluster::objects::{ClaimantRef, Holder, StickyIP};
use crate::cluster::protocol::apply::Carrier;
use crate::cluster::protocol::bind;
use crate::cluster::protocol::bind::{WalkError, Walker};
use crate::cluster::protocol::step::Refusal;
use crate::cluster::protocol::sticky_identity;
use crate::cni::{Attachment, CniError, PodIdentity, code};
use crate::plugin::cluster::add::{Errand, Remembered, Why};
use crate::plugin::cluster::addresses::{Here, Home};
use crate::plugin::cluster::optimistic::{Ahead, Sent, Standing};
use crate::plugin::cluster::reads;
use crate::plugin::cluster::reads::Found;
use crate::plugin::{Story, attachment};
use crate::policy::handover::Attached;
use crate::policy::lifetime::retention::asked_by;
use crate::policy::selection::claimant::{Claimant, slot_name};
use crate::policy::selection::facts::PodFacts;
use crate::policy::selection::pin::pin_of;
use crate::store;
use crate::store::Disk;

/// How often a pod of a Deployment chooses another slot because somebody was faster.
const MOST_SLOTS: usize = 16;

/// The addresses of a sticky pod; none if it is not sticky. A refusal is told to whoever looks at the pod, too.
pub(crate) async fn ask<D: Disk>(
    mut api: Connection,
    errand: &Errand<'_, D>,
    wanted: &[Option<IpAddr>],
    remembered: Remembered,
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
    remembered: Remembered,
    story: &mut Story<'_>,
) -> Result<Option<Vec<IpAddr>>, Why> {
    let sent = begin(carrier, errand, wanted, remembered).await?;
    // Of what was sent ahead and does not stand, nothing is left.
    let before = if sent.standing.is_some() || sent.in_doubt { 0 } else { carrier.count() };
    match go_on(carrier, errand, wanted, sent, story).await {
        // What was written may stand.
        Err(Why::Unasked(error)) if carrier.count() > before => Err(Why::Doubt(error)),
        answer => answer,
    }
}

/// Looks at everything, and attaches the pod ahead of that where the node remembers how, and there is a server to talk to.
async fn begin<D: Disk>(
    carrier: &mut Carrier<'_>,
    errand: &Errand<'_, D>,
    wanted: &[Option<IpAddr>],
    remembered: Remembered,
) -> Result<Sent, Why> {
    let attachment = attachment(errand.request)?;
    let Remembered { addresses, parting } = remembered;
    let is_called = carrier.api().settled().await;
    let parting = parting.filter(|_| is_called && wanted.iter().all(Option::is_none));
    match parting.and_then(|parting| Ahead::of(errand, attachment.container.as_str(), &parting)) {
        Some(ahead) => {
            let sent = ahead.send(carrier, errand, attachment).await;
            if let Err(Why::Doubt(_)) = &sent {
                // The next try reads first, so that a server of no help is one that was not asked.
                forget_parting(errand, attachment);
            }
            sent
        }
        None => {
            let found = reads::look(carrier.api(), errand, &addresses).await?;
            Ok(Sent { found, standing: None, in_doubt: false })
        }
    }
}

fn forget_parting<D: Disk>(errand: &Errand<'_, D>, attachment: &Attachment) {
    let (pod, claimant) = (errand.pod, store::Claimant::new(errand.pod, &attachment.interface));
    let locked = errand.scene.store.lock();
    if let Err(error) = locked.and_then(|mut locked| locked.forget_parting(&claimant)) {
        tracing::debug!(%pod, %error, "what this node remembers of the pod's StickyIP stays");
    }
}

async fn go_on<D: Disk>(
    carrier: &mut Carrier<'_>,
    errand: &Errand<'_, D>,
    wanted: &[Option<IpAddr>],
    sent: Sent,
    story: &mut Story<'_>,
) -> Result<Option<Vec<IpAddr>>, Why> {
    let Errand { request, scene, conf, pod, crd } = *errand;
    let attachment = attachment(request)?;
    let itself = Holder { namespace: pod.namespace().to_owned(), name: pod.name().to_owned() };
    let Sent { found: Found { facts, sticky, claims, node }, mut standing, .. } = sent;
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
    let claimant = Claimant::of(&facts);
    // The uid that the runtime knows is the one that later DELs and other nodes can compare.
    let uid = pod.uid().unwrap_or(&facts.uid).to_owned();
    for _ in 0..MOST_SLOTS {
        let (key, reference, read) = match claimant.fixed_name() {
            Some(name) if name == itself.name => {
                (itself.clone(), sticky_identity::reference(&claimant, None), Some(sticky.clone()))
            }
            Some(name) => (
                Holder { name: name.to_owned(), ..itself.clone() },
                sticky_identity::reference(&claimant, None),
                None,
            ),
            None => {
                let slot =
                    sticky_identity::choose(carrier.api(), &claimant, &facts).await.map_err(Why::Unasked)?;
                let name = slot_name(&claimant.workload().name, slot);
                (Holder { name, ..itself.clone() }, sticky_identity::reference(&claimant, Some(slot)), None)
            }
        };
        let walker = walker(errand, attachment, &facts, key.clone(), reference)?;
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
        let walked = match standing.take() {
            Some(Standing { object, draft }) => {
                here.draft = draft;
                Ok(object)
            }
            None => {
                let read_claims = claims.clone().filter(|_| read.is_some());
                walker.walk_to(carrier, &mut here, read, read_claims).await
            }
        };
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
            Err(WalkError::Api(error)) => return Err(Why::Unasked(error)),
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

/// The pod on its way to the StickyIP of this name.
pub(crate) fn walker<D: Disk>(
    errand: &Errand<'_, D>,
    attachment: &Attachment,
    facts: &PodFacts,
    key: Holder,
    claimant: ClaimantRef,
) -> Result<Walker, CniError> {
    let Errand { scene, conf, pod, .. } = *errand;
    let pin = pin_of(facts, claimant.ordinal)
        .map_err(|error| CniError::new(code::REQUEST_REFUSED, error.to_string()))?;
    Ok(Walker {
        asker: Attached {
            node: conf.node.clone(),
            pod_uid: facts.uid.clone(),
            container_id: attachment.container.as_str().to_owned(),
        },
        pod: pod.name().to_owned(),
        key,
        claimant,
        workload: sticky_identity::workload(&Claimant::of(facts)),
        retention: asked_by(facts),
        pinned: pin.map(|pin| pin.addresses).unwrap_or_default(),
        patience: scene.sticky.wait_for_old_pod,
    })
}

/// Lets go of what was reserved for a walk that was refused, if nobody claims it. The StickyIP that this walk made may have been
/// attached by a faster pod of another node: then the address lives there, and this node, its home, must keep it from others.
async fn unreserve<D: Disk>(carrier: &Carrier<'_>, here: &Here<'_, D>) -> Result<(), CniError> {
    match bind::is_any_claimed(carrier, &here.reserved).await {
        Ok(false) => Ok(here.unreserve()?),
        Ok(true) => Ok(()),
        Err(error) => {
            let addresses = crate::plugin::list(&here.reserved);
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
        bind::read_sticky(carrier, &walker.key),
        pool::read_node(carrier.api(), &errand.conf.node),
    );
    let (live, node) = read.map_err(|error| again(error.to_string()))?;
    let attached = live.and_then(|live| live.status?.attachment);
    if attached.is_none_or(|attached| attached.container_id != walker.asker.container_id) {
        return Err(again(format!("StickyIP {} was detached while its pod was being added", walker.key)));
    }
    let shown = Shown {
        addresses: addresses.clone(),
        owner: errand.pod.to_string(),
        resource: pool::resource(&walker.key.namespace, &object.spec.workload),
    };
    let put = pool::put(carrier, &errand.conf.node, &home.shape, &shown, node).await;
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
