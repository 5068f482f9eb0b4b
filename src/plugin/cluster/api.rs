//! The API server's answer to "which address has this pod": who is sticky, the walk through the protocol, the record on
//! the node, and what the node's CiliumNode shows. Must never answer before all of them stand.

use std::net::IpAddr;

use crate::cluster::api::client::Connection;
use crate::cluster::api::events;
use crate::cluster::api::events::Told;
use crate::cluster::cilium::pool;
use crate::cluster::cilium::pool::{Publication, PublishError};
use crate::cluster::objects::{ClaimantRef, StickyIP, StickyKey};
use crate::cluster::protocol::apply::ApiWriter;
use crate::cluster::protocol::bind;
use crate::cluster::protocol::bind::{BindError, Binder, StickyRead};
use crate::cluster::protocol::step::Refusal;
use crate::cluster::protocol::sticky_identity;
use crate::cni::{Attachment, CniError, PodIdentity, code};
use crate::plugin::cluster::add::{AddContext, AddError, LastKnown};
use crate::plugin::cluster::addresses::{AddressSource, NodeAddresses};
use crate::plugin::cluster::optimistic::{AlreadyAttached, FirstReads, OptimisticAttach};
use crate::plugin::cluster::reads;
use crate::plugin::cluster::reads::AddReads;
use crate::plugin::{VerbLog, attachment};
use crate::policy::handover::Attached;
use crate::policy::lifetime::retention::asked_by;
use crate::policy::selection::claimant::Claimant;
use crate::policy::selection::facts::PodFacts;
use crate::policy::selection::pin::pin_of;
use crate::policy::selection::slot::{MAX_SLOT_TRIES, slot_name};
use crate::store;
use crate::store::Disk;

/// The addresses of a sticky pod; none if it is not sticky. A refusal is told to whoever looks at the pod, too.
pub(crate) async fn ask<D: Disk>(
    mut api: Connection,
    errand: &AddContext<'_, D>,
    wanted: &[Option<IpAddr>],
    remembered: LastKnown,
    story: &mut VerbLog<'_>,
) -> Result<Option<Vec<IpAddr>>, AddError> {
    // Waiting for a turn on this node was not the server's fault.
    api.restart_time();
    let mut api_writer = ApiWriter::new(api, story.observer);
    let answer = ask_through(&mut api_writer, errand, wanted, remembered, story).await;
    if let Err(AddError::Told(error)) = &answer
        && error.code == code::REQUEST_REFUSED
    {
        let pod = errand.pod;
        let told = Told {
            about: events::pod(pod.namespace(), pod.name(), pod.uid().unwrap_or_default()),
            reason: "AddressRefused",
            message: error.msg.clone(),
            warning: true,
        };
        events::tell(&mut api_writer, &told).await;
    }
    answer
}

async fn ask_through<D: Disk>(
    api_writer: &mut ApiWriter<'_>,
    errand: &AddContext<'_, D>,
    wanted: &[Option<IpAddr>],
    remembered: LastKnown,
    story: &mut VerbLog<'_>,
) -> Result<Option<Vec<IpAddr>>, AddError> {
    let sent = first_reads(api_writer, errand, wanted, remembered).await?;
    // Of what was sent ahead and does not stand, nothing is left.
    let before = if sent.standing.is_some() || sent.in_doubt { 0 } else { api_writer.count() };
    match bind_pod(api_writer, errand, wanted, sent, story).await {
        // What was written may stand.
        Err(AddError::Unreachable(error)) if api_writer.count() > before => {
            Err(AddError::WriteInDoubt(error))
        }
        answer => answer,
    }
}

/// Looks at everything, and attaches the pod ahead of that where the node remembers how, and there is a server to talk to.
async fn first_reads<D: Disk>(
    api_writer: &mut ApiWriter<'_>,
    errand: &AddContext<'_, D>,
    wanted: &[Option<IpAddr>],
    remembered: LastKnown,
) -> Result<FirstReads, AddError> {
    let attachment = attachment(errand.request)?;
    let LastKnown { addresses, detached_snapshot } = remembered;
    let is_called = api_writer.api().settled().await;
    let detached_snapshot = detached_snapshot.filter(|_| is_called && wanted.iter().all(Option::is_none));
    match detached_snapshot.and_then(|detached_snapshot| {
        OptimisticAttach::of(errand, attachment.container.as_str(), &detached_snapshot)
    }) {
        Some(ahead) => {
            let sent = ahead.send(api_writer, errand, attachment).await;
            if let Err(AddError::WriteInDoubt(_)) = &sent {
                // The next try reads first, so that a server of no help is one that was not asked.
                remove_detached_snapshot(errand, attachment);
            }
            sent
        }
        None => {
            let found = reads::look(api_writer.api(), errand, &addresses).await?;
            Ok(FirstReads { found, standing: None, in_doubt: false })
        }
    }
}

fn remove_detached_snapshot<D: Disk>(errand: &AddContext<'_, D>, attachment: &Attachment) {
    let (pod, claimant) = (errand.pod, store::Claimant::new(errand.pod, &attachment.interface));
    let locked = errand.scene.store.lock();
    if let Err(error) = locked.and_then(|mut locked| locked.remove_detached_snapshot(&claimant)) {
        tracing::debug!(%pod, %error, "what this node remembers of the pod's StickyIP stays");
    }
}

async fn bind_pod<D: Disk>(
    api_writer: &mut ApiWriter<'_>,
    errand: &AddContext<'_, D>,
    wanted: &[Option<IpAddr>],
    sent: FirstReads,
    story: &mut VerbLog<'_>,
) -> Result<Option<Vec<IpAddr>>, AddError> {
    let AddContext { request, scene, conf, pod } = *errand;
    let attachment = attachment(request)?;
    let itself = StickyKey { namespace: pod.namespace().to_owned(), name: pod.name().to_owned() };
    let FirstReads { found: AddReads { facts, sticky, claims, node }, mut standing, .. } = sent;
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
    if scene.mode.publishes_pool_entries() && node.is_none() {
        let missing = PublishError::Missing { node: conf.node.clone() };
        return Err(CniError::try_again(missing.to_string()).into());
    }
    let home = match &node {
        Some(node) => AddressSource::of_cilium_node(scene.mode, node, &itself.to_string()),
        None => AddressSource::of_ranges(scene.mode, &scene.ipam.sets),
    };
    let claimant = Claimant::of(&facts);
    // The uid that the runtime knows is the one that later DELs and other nodes can compare.
    let uid = pod.uid().unwrap_or(&facts.uid).to_owned();
    for _ in 0..MAX_SLOT_TRIES {
        let (key, reference, read) = match claimant.fixed_name() {
            Some(name) if name == itself.name => (
                itself.clone(),
                sticky_identity::reference(&claimant, None),
                StickyRead::of(sticky.clone()).with_claims(claims.clone()),
            ),
            Some(name) => (
                StickyKey { name: name.to_owned(), ..itself.clone() },
                sticky_identity::reference(&claimant, None),
                StickyRead::NotRead,
            ),
            None => {
                let slot = sticky_identity::choose(api_writer.api(), &claimant, &facts)
                    .await
                    .map_err(AddError::Unreachable)?;
                let name = slot_name(&claimant.workload().name, slot);
                (
                    StickyKey { name, ..itself.clone() },
                    sticky_identity::reference(&claimant, Some(slot)),
                    StickyRead::NotRead,
                )
            }
        };
        let walker = walker(errand, attachment, &facts, key.clone(), reference)?;
        let named = PodIdentity::new(pod.namespace(), pod.name(), Some(&uid))
            .map_err(|error| CniError::invalid_environment(format!("CNI_ARGS: {error}")))?;
        let mut here = NodeAddresses {
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
            Some(AlreadyAttached { object, draft }) => {
                here.draft = draft;
                Ok(object)
            }
            None => walker.bind(api_writer, &mut here, read).await,
        };
        if walked.is_err() {
            here.discard_draft();
        }
        match walked {
            Ok(object) => {
                let locked = scene.store.lock().map_err(CniError::from)?;
                let addresses = here.write_record(locked, &object.spec.addresses, None)?;
                story.tell(&addresses, format!("bound by StickyIP {}", walker.key));
                publish(api_writer, errand, &home, &walker, &object).await?;
                let before = sticky.as_ref().filter(|known| known.metadata.uid == object.metadata.uid);
                events::emit_move_events(api_writer, before, &object, &facts).await;
                return Ok(Some(addresses));
            }
            // Another pod was faster on this slot.
            Err(BindError::Refused(Refusal::Handover { .. })) if claimant.fixed_name().is_none() => {
                api_writer.api_mut().restart_time();
                unreserve(api_writer, &here).await?;
            }
            Err(BindError::Api(error)) => return Err(AddError::Unreachable(error)),
            Err(error) => {
                if matches!(error, BindError::Refused(_) | BindError::Waited { .. }) {
                    api_writer.api_mut().restart_time();
                    unreserve(api_writer, &here).await?;
                }
                return Err(AddError::Told(cni_error(&error)));
            }
        }
    }
    Err(CniError::try_again(format!("others took every slot that {pod} chose")).into())
}

/// The pod on its way to the StickyIP of this name.
pub(crate) fn walker<D: Disk>(
    errand: &AddContext<'_, D>,
    attachment: &Attachment,
    facts: &PodFacts,
    key: StickyKey,
    claimant: ClaimantRef,
) -> Result<Binder, CniError> {
    let AddContext { scene, conf, pod, .. } = *errand;
    let pin = pin_of(facts, claimant.ordinal)
        .map_err(|error| CniError::new(code::REQUEST_REFUSED, error.to_string()))?;
    Ok(Binder {
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
async fn unreserve<D: Disk>(api_writer: &ApiWriter<'_>, here: &NodeAddresses<'_, D>) -> Result<(), CniError> {
    match bind::is_any_claimed(api_writer, &here.reserved).await {
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
async fn publish<D: Disk>(
    api_writer: &mut ApiWriter<'_>,
    errand: &AddContext<'_, D>,
    home: &AddressSource,
    walker: &Binder,
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
    let _pool_lock = scene.store.pool_lock(&claimant, scene.sticky.lock_timeout)?;
    api_writer.api_mut().restart_time();
    // What the CiliumNode showed before is old: the one who was waited for may have taken it out since.
    let read = tokio::try_join!(
        bind::read_sticky(api_writer, &walker.key),
        pool::read_node(api_writer.api(), &errand.conf.node),
    );
    let (live, node) = read.map_err(|error| again(error.to_string()))?;
    let attached = live.and_then(|live| live.status?.attachment);
    if attached.is_none_or(|attached| attached.container_id != walker.asker.container_id) {
        return Err(again(format!("StickyIP {} was detached while its pod was being added", walker.key)));
    }
    let shown = Publication {
        addresses: addresses.clone(),
        owner: errand.pod.to_string(),
        resource: pool::resource(&walker.key.namespace, &object.spec.workload),
    };
    let put = pool::publish(api_writer, &errand.conf.node, &home.shape, &shown, node).await;
    put.map_err(|error| again(error.to_string()))
}

fn cni_error(error: &BindError) -> CniError {
    let message = error.to_string();
    match error {
        BindError::Refused(Refusal::Handover { .. } | Refusal::Conflict { .. }) => {
            CniError::try_again(message)
        }
        BindError::Refused(_) | BindError::HeldOnNode { .. } => CniError::new(code::REQUEST_REFUSED, message),
        BindError::Exhausted { .. } => CniError::new(code::EXHAUSTED, message),
        BindError::LocalNode(_) => CniError::io(message),
        BindError::Api(_)
        | BindError::Waited { .. }
        | BindError::TooManyConflicts { .. }
        | BindError::InvalidObject { .. } => CniError::try_again(message),
    }
}
