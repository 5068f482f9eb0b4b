//! A restart between any two writes, conflicts on each write, watches that break off, two controllers at
//! once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use kube::api::{Api, ListParams, Patch, PatchParams, WatchEvent, WatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::cluster::objects::{AddressClaim, ClaimPhase, StickyIP, StickyPhase};
use sticky_ipam::cluster::writer::apply::{NoObserver, SentWrite, WriteObserver};
use sticky_ipam::controller::context::Context;
use sticky_ipam::controller::run;
use sticky_ipam::policy::lifetime::retention::Keep;

use crate::support::api_server::Weather;
use crate::support::api_server::access::Access;
use crate::support::api_server::proxy::Proxy;
use crate::support::controller::fleet;
use crate::support::controller::steal;
use crate::support::controller::{Desk, HURRIED, rounds, until, while_at_work};
use crate::support::duty::EndControllerAt;
use crate::support::node::{assert_in_step, ended_by_the_witness, sticky_pool};

fn set(name: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name})
}

/// One address to let go and one pod to mark.
async fn prepare(desk: &Desk, mark: &str, n: u8) {
    desk.retained(&format!("gone-{mark}"), &desk.address(2 * n), set("gone"), json!({})).await;
    desk.pod(&format!("new-{mark}"), "n1", None, json!({})).await;
    desk.runs(&format!("new-{mark}"), &desk.address(2 * n + 1)).await;
}

async fn is_done(desk: &Desk, mark: &str) -> bool {
    let names = desk.names().await;
    let attached = match desk.stickies().get_opt(&format!("new-{mark}")).await.unwrap() {
        Some(sticky) => sticky.status.is_some_and(|status| status.attachment.is_some()),
        None => false,
    };
    attached && !names.contains(&format!("gone-{mark}")) && desk.claims().await.len() == names.len()
}

/// In a hurry, but for claims, which may stand without their StickyIP for as long as a node takes to answer.
const PATIENT: &[&str] =
    &["--proof-gap=0s", "--quarantine=0s", r#"--label-selector={"matchLabels":{"sticky":"yes"}}"#];

/// What stands around all of the other duties' work: a node that lives, and what makes workloads.
async fn with_others() -> (Desk, Value) {
    let desk = Desk::take().await;
    sticky_pool(&desk.case, desk.case.range()).await;
    desk.node("alive").await;
    let (_, operator) = fleet(&desk, "red").await;
    (desk, operator)
}

/// One of each other duty: a time that runs, an annotation, an owner, a dead node's key and route, an
/// attachment to a node that is gone, and a pod to mark with an address that its node is to grant.
async fn prepare_others(desk: &Desk, operator: &Value, mark: &str, n: u8) {
    let address = |which: u8| desk.address(10 + 5 * n + which);
    let named = |what: &str| format!("{what}-{mark}");
    let own = set(&named("own"));
    desk.owned_set(&named("own"), 1, &[operator]).await;
    let nine_years = json!({"retention": {"keep": "TTL", "ttlSeconds": 9 * 365 * 86_400}});
    desk.retained(&named("waits"), &address(0), set("gone"), nine_years).await;
    let says = json!({"sticky-ipam.io/retention": "Forever"});
    let pod = desk.pod(&named("kept"), "alive", None, says).await;
    desk.retained(&named("kept"), &address(1), own.clone(), json!({})).await;
    desk.attached(&named("kept"), "alive", &pod.metadata.uid.unwrap()).await;
    let numbered = json!({"claimant": {"kind": "Pod", "ordinal": 0}});
    desk.retained(&named("owned"), &address(2), own.clone(), numbered).await;
    desk.retained(&named("moved"), &address(3), own.clone(), json!({})).await;
    desk.attached(&named("moved"), "alive", "u").await;
    let owner = format!("{}/{}", desk.case.namespace(), named("moved"));
    let shown = json!({"podCIDRs": [format!("{}/32", address(3))], "pool": {address(3): {"owner": owner}}});
    desk.make_cilium_node(&named("dead"), shown).await;
    desk.retained(&named("left"), &address(4), own, json!({})).await;
    desk.attached(&named("left"), "vanished", "u").await;
    desk.pod(&named("asked"), "alive", None, json!({})).await;
    desk.runs(&named("asked"), &of_a_block(n)).await;
}

/// An address of no pool, which a node of its own answers for.
fn of_a_block(n: u8) -> String {
    format!("10.251.{n}.7")
}

/// Answers as the home node's agent would, and looks.
async fn others_are_done(desk: &Desk, mark: &str, n: u8) -> bool {
    let asked = desk.claim(&of_a_block(n)).await;
    if asked.is_some_and(|claim| claim.spec.phase == ClaimPhase::Requested) {
        desk.answer(&of_a_block(n), json!({"phase": "Granted"})).await;
    }
    let get = async |what: &str| desk.stickies().get_opt(&format!("{what}-{mark}")).await.unwrap();
    let is_attached =
        |sticky: &StickyIP| sticky.status.as_ref().is_some_and(|status| status.attachment.is_some());
    let nodes: Api<CiliumNode> = Api::all(desk.case.client());
    let dead = nodes.get(&format!("dead-{mark}")).await.unwrap().spec.ipam;
    get("waits").await.unwrap().status.is_some_and(|status| !status.conditions.is_empty())
        && get("kept").await.unwrap().spec.retention.keep == Keep::Forever
        && !get("owned").await.unwrap().spec.owners.is_empty()
        && dead.pool.is_empty()
        && dead.pod_cidrs.is_empty()
        && !is_attached(&get("left").await.unwrap())
        && get("asked").await.as_ref().is_some_and(is_attached)
        && desk.claims().await.len() == desk.names().await.len()
}

/// Ends a controller at each of its writes, before and after; what is prepared for it must come to its end by
/// the next one.
async fn ends_at_any_write(
    desk: &Desk,
    flags: &[&str],
    least: usize,
    prepare: impl AsyncFn(&str, u8),
    is_done: impl AsyncFn(&str, u8) -> bool,
) {
    let mut round = 0;
    for after in [false, true] {
        let mut number = 1;
        loop {
            let mark = format!("{after}-{number}");
            prepare(&mark, round).await;
            let observer = EndControllerAt::boxed(number, after);
            let first = desk.context_with(desk.case.client(), flags, observer);
            let ended = ended_by_the_witness(async {
                while_at_work(&first, until("the end", || async { is_done(&mark, round).await })).await;
            })
            .await;
            let second = desk.context(flags);
            while_at_work(&second, until("the second's end", || async { is_done(&mark, round).await })).await;
            assert_in_step(&desk.case, &[]).await;
            if !ended {
                break;
            }
            number += 1;
            round += 1;
        }
        round += 1;
        assert!(number > least, "it wrote {number} times only");
    }
}

#[tokio::test]
async fn a_controller_that_ends_at_any_write_is_followed_by_one_that_finishes() {
    let desk = Desk::take().await;
    sticky_pool(&desk.case, desk.case.range()).await;
    // Delete, rest and delete the claim; claim, bind, seal, attach.
    let (prepare, is_done) = (
        async |mark: &str, n| prepare(&desk, mark, n).await,
        async |mark: &str, _| is_done(&desk, mark).await,
    );
    ends_at_any_write(&desk, HURRIED, 7, prepare, is_done).await;
}

#[tokio::test]
async fn one_that_ends_at_any_write_of_its_other_duties_is_followed_by_one_that_finishes() {
    let (desk, operator) = with_others().await;
    // Condition, retention, owners, key and route, detach; claim, bind, seal, attach.
    let prepare = async |mark: &str, n| prepare_others(&desk, &operator, mark, n).await;
    let is_done = async |mark: &str, n| others_are_done(&desk, mark, n).await;
    ends_at_any_write(&desk, PATIENT, 9, prepare, is_done).await;
}

/// The writes that rest on what was read: everything but creations, events and what is said of nodes and
/// pools.
const WITH_PRECONDITION: &[&str] = &[
    "delete StickyIP",
    "quarantine claim",
    "delete claim",
    "seal claim",
    "attach",
    "detach",
    "patch the conditions of StickyIP",
    "patch the retention of StickyIP",
    "patch the owners of StickyIP",
    "patch CiliumNode",
    MARK_CONFLICT,
];
/// Of two StickyIPs with one address, which do not come to rest: it has a test of its own.
const MARK_CONFLICT: &str = "mark conflict";
/// How often each of them meets a conflict.
const MEDDLED: usize = 3;

/// Writes the object that is about to be written, so that its precondition fails, the first times of each
/// kind of write.
struct Meddler {
    access: Access,
    namespace: String,
    met: Arc<Mutex<BTreeMap<&'static str, usize>>>,
}

impl Meddler {
    fn of(desk: &Desk) -> Self {
        let namespace = desk.case.namespace().to_owned();
        Self { access: desk.case.admin(), namespace, met: Arc::default() }
    }
}

impl WriteObserver for Meddler {
    fn before(&self, _: usize, write: SentWrite<'_>) {
        let what = write.description();
        let Some(kind) = WITH_PRECONDITION.iter().find(|kind| what.starts_with(**kind)) else { return };
        let times = {
            let mut met = self.met.lock().unwrap();
            let times = met.entry(kind).or_default();
            *times += 1;
            *times
        };
        if times > MEDDLED {
            return;
        }
        let (access, namespace) = (self.access.clone(), self.namespace.clone());
        let mark = json!({"metadata": {"annotations": {"meddled": format!("{what} {times}")}}});
        // On a thread of its own: the controller's runtime stands still here.
        let work = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let client = access.client().await;
                touch::<StickyIP>(Api::namespaced(client.clone(), &namespace), &mark).await;
                touch::<AddressClaim>(Api::all(client.clone()), &mark).await;
                touch::<CiliumNode>(Api::all(client), &mark).await;
            });
        });
        work.join().unwrap();
    }
}

/// Writes all of them.
async fn touch<K>(api: Api<K>, mark: &Value)
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    for object in api.list(&ListParams::default()).await.unwrap() {
        let name = object.meta().name.clone().unwrap();
        let _ = api.patch(&name, &PatchParams::default(), &Patch::Merge(mark)).await;
    }
}

#[tokio::test]
async fn conflicts_on_each_write_delay_and_change_nothing() {
    let (desk, operator) = with_others().await;
    prepare(&desk, "a", 0).await;
    prepare_others(&desk, &operator, "b", 0).await;
    let observer = Meddler::of(&desk);
    let met = Arc::clone(&observer.met);
    let context = desk.context_with(desk.case.client(), PATIENT, Box::new(observer));
    // `is_done` counts claims, among which are those of the others.
    let both = || async { others_are_done(&desk, "b", 0).await && is_done(&desk, "a").await };
    while_at_work(&context, until("the end in spite of it", both)).await;
    assert_in_step(&desk.case, &[]).await;
    let met = met.lock().unwrap().clone();
    for kind in WITH_PRECONDITION.iter().filter(|kind| **kind != MARK_CONFLICT) {
        // Each of the first tries met a conflict, or it would not have been tried again.
        assert!(met.get(kind).is_some_and(|times| *times > MEDDLED), "{kind}: {met:?}");
    }
}

#[tokio::test]
async fn a_stolen_address_is_reported_though_others_write_at_the_same_time() {
    let desk = Desk::take().await;
    steal(&desk).await;
    let observer = Meddler::of(&desk);
    let met = Arc::clone(&observer.met);
    let flags = [HURRIED, &["--adopt-running=false"]].concat();
    let context = desk.context_with(desk.case.client(), &flags, Box::new(observer));
    while_at_work(&context, async {
        until("the mark in spite of it", || async {
            desk.stickies().get("thief").await.unwrap().status.unwrap().phase == Some(StickyPhase::Conflict)
        })
        .await;
    })
    .await;
    let met = met.lock().unwrap().clone();
    assert!(met.get(MARK_CONFLICT).is_some_and(|times| *times > MEDDLED), "{met:?}");
}

#[tokio::test]
async fn watches_that_break_off_are_taken_up_again() {
    let desk = Desk::take().await;
    sticky_pool(&desk.case, desk.case.range()).await;
    let proxy = desk.case.proxy();
    let client = desk.case.admin().through(&proxy).client().await;
    let context = desk.context_with(client, HURRIED, Box::new(NoObserver));
    while_at_work(&context, async {
        for n in 0..3u8 {
            let mark = format!("r{n}");
            proxy.reset_connections();
            prepare(&desk, &mark, n).await;
            proxy.reset_connections();
            until("the end after a break", || is_done(&desk, &mark)).await;
        }
    })
    .await;
    assert_in_step(&desk.case, &[]).await;
}

/// Turns the weather when the next write is about to be sent.
struct Turns {
    proxy: Arc<Proxy>,
    to: Arc<Mutex<Option<Weather>>>,
}

impl WriteObserver for Turns {
    fn before(&self, _: usize, _: SentWrite<'_>) {
        if let Some(weather) = self.to.lock().unwrap().take() {
            self.proxy.set(weather);
        }
    }
}

/// How many steps of all duties failed.
fn failures(context: &Context) -> u32 {
    let page = context.metrics.page();
    let lines = page.lines().filter(|line| line.starts_with("sticky_ipam_controller_errors_total{"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u32>().ok()).sum()
}

#[tokio::test]
async fn a_server_that_does_not_answer_in_time_loses_and_duplicates_nothing() {
    let desk = Desk::take().await;
    sticky_pool(&desk.case, desk.case.range()).await;
    let (proxy, to) = (Arc::new(desk.case.proxy()), Arc::new(Mutex::new(None)));
    let client = desk.case.admin().through(&proxy).client().await;
    let context =
        desk.context_with(client, HURRIED, Box::new(Turns { proxy: proxy.clone(), to: to.clone() }));
    while_at_work(&context, async {
        until("a first round", || async { rounds(&context, "repair") > 0 }).await;
        // Lost: the write happens, and its writer never knows. Held: it happens, and its writer waits until
        // its time is over. Cut off, politely or not: it does not happen.
        let all = [Weather::AnswersLost, Weather::AnswersHeld, Weather::Blackhole, Weather::Reset];
        for (n, weather) in (0u8..).zip(all) {
            let (mark, before) = (format!("w{n}"), failures(&context));
            *to.lock().unwrap() = Some(weather);
            prepare(&desk, &mark, n).await;
            until("a write that fails", || async { failures(&context) > before }).await;
            proxy.heal();
            until("the end in spite of it", || is_done(&desk, &mark)).await;
        }
    })
    .await;
    assert_in_step(&desk.case, &[]).await;
    let told = desk.told("Released").await;
    let mut once = told.clone();
    once.sort();
    once.dedup();
    assert_eq!(told.len(), once.len(), "something was let go twice: {told:?}");
}

#[tokio::test]
async fn refused_writes_are_tried_again_until_they_are_allowed() {
    let desk = Desk::take().await;
    let ns = desk.case.namespace();
    desk.retained("gone-0", &desk.address(1), set("gone"), json!({})).await;
    // Everything but the deletion of StickyIPs.
    let rules = json!([
        {"apiGroups": ["", "apps", "cilium.io", "sticky-ipam.io", "coordination.k8s.io"], "resources": ["*"],
         "verbs": ["get", "list", "watch", "create", "patch", "update"]},
    ]);
    let poor = desk.case.service_account("poor", serde_json::from_value(rules).unwrap()).await;
    let observer = Box::new(NoObserver);
    let context = desk.context_with(poor.client().await, HURRIED, observer);
    while_at_work(&context, async {
        until("two refusals", || async { failures(&context) > 1 }).await;
        assert_eq!(desk.names().await, ["gone-0"]);
        let may = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
            "metadata": {"name": "may-delete"}, "rules": [
                {"apiGroups": ["sticky-ipam.io"], "resources": ["stickyips"], "verbs": ["delete"]}]});
        let bound = json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": {"name": "may-delete"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "may-delete"},
            "subjects": [{"kind": "Group", "name": format!("system:serviceaccounts:{ns}"),
                          "apiGroup": "rbac.authorization.k8s.io"}]});
        let client = desk.case.client();
        let roles: Api<k8s_openapi::api::rbac::v1::Role> = Api::namespaced(client.clone(), ns);
        roles.create(&Default::default(), &serde_json::from_value(may).unwrap()).await.unwrap();
        let bindings: Api<k8s_openapi::api::rbac::v1::RoleBinding> = Api::namespaced(client, ns);
        bindings.create(&Default::default(), &serde_json::from_value(bound).unwrap()).await.unwrap();
        until("the release once it is allowed", || async { desk.names().await.is_empty() }).await;
    })
    .await;
}

#[tokio::test]
async fn a_server_that_has_lost_its_history_is_listed_again() {
    let desk = Desk::take().await;
    let proxy = desk.case.proxy();
    let client = desk.case.admin().through(&proxy).client().await;
    let context = desk.context_with(client, HURRIED, Box::new(NoObserver));
    while_at_work(&context, async {
        until("a first round", || async { rounds(&context, "repair") > 0 }).await;
        let known = desk.stickies().list(&ListParams::default()).await.unwrap().metadata.resource_version;
        proxy.set(Weather::Reset);
        desk.retained("gone-0", &desk.address(1), set("gone"), json!({})).await;
        // A server that starts anew keeps no history from before.
        desk.server().restart().await;
        let api = desk.stickies();
        let watched = api.watch(&WatchParams::default(), &known.unwrap()).await.unwrap();
        let first = std::pin::pin!(watched).next().await;
        assert!(matches!(&first, Some(Ok(WatchEvent::Error(error))) if error.code == 410), "{first:?}");
        proxy.heal();
        until("the work on what it had not seen", || async { desk.names().await.is_empty() }).await;
        until("the claim's end", || async { desk.claims().await.is_empty() }).await;
    })
    .await;
}

#[tokio::test]
async fn two_controllers_at_once_come_to_the_same_end() {
    let desk = Desk::take().await;
    sticky_pool(&desk.case, desk.case.range()).await;
    let (first, second) = (desk.context(HURRIED), desk.context(HURRIED));
    tokio::select! {
        () = run::work(&first) => panic!("it ended"),
        () = run::work(&second) => panic!("it ended"),
        () = async {
            for n in 0..5u8 {
                prepare(&desk, &format!("t{n}"), n).await;
            }
            for n in 0..5u8 {
                let mark = format!("t{n}");
                until("the end", || is_done(&desk, &mark)).await;
            }
        } => {}
    }
    assert_in_step(&desk.case, &[]).await;
}
