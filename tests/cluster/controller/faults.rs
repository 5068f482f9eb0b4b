//! A restart between any two writes, conflicts on each write, watches that break off, two controllers at once.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use kube::api::{Api, ListParams, Patch, PatchParams, WatchEvent, WatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::{AddressClaim, StickyIP};
use sticky_ipam::controller::act::Overseer;
use sticky_ipam::controller::run;
use sticky_ipam::controller::world::World;

use super::{Desk, HURRIED, rounds, until, while_at_work};
use crate::bench::Weather;
use crate::bench::access::Access;
use crate::bench::proxy::Proxy;
use crate::node::{assert_in_step, ended_by, sticky_pool};

fn set(name: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name})
}

const ENDED: &str = "ended by the witness";

/// Ends the controller before its n-th write, or after the n-th that was sent.
struct EndAt {
    number: usize,
    after: bool,
    seen: AtomicUsize,
}

impl EndAt {
    fn count(&self) {
        if self.seen.fetch_add(1, Ordering::SeqCst) + 1 == self.number {
            std::panic::panic_any(ENDED);
        }
    }
}

impl Overseer for EndAt {
    fn before(&self, _: &str) {
        if !self.after {
            self.count();
        }
    }
    fn after(&self, _: &str) {
        if self.after {
            self.count();
        }
    }
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

#[tokio::test]
async fn a_controller_that_ends_at_any_write_is_followed_by_one_that_finishes() {
    let desk = Desk::take().await;
    sticky_pool(&desk.case, desk.case.range()).await;
    let mut round = 0;
    for after in [false, true] {
        let mut number = 1;
        loop {
            let mark = format!("{after}-{number}");
            prepare(&desk, &mark, round).await;
            round += 1;
            let overseer = Box::new(EndAt { number, after, seen: AtomicUsize::new(0) });
            let first = desk.world_of(desk.case.client(), HURRIED, overseer);
            let ended = ended_by(ENDED, async {
                while_at_work(&first, until("the end", || is_done(&desk, &mark))).await;
            })
            .await;
            let second = desk.world(HURRIED);
            while_at_work(&second, until("the second's end", || is_done(&desk, &mark))).await;
            assert_in_step(&desk.case, &[]).await;
            if !ended {
                break;
            }
            number += 1;
        }
        assert!(number > 7, "delete, rest and delete the claim; claim, bind, seal, attach: it was {number}");
    }
}

/// Writes the object that is about to be written, so that its precondition fails, the first three times of each write.
struct Meddler {
    access: Access,
    namespace: String,
    met: Mutex<BTreeMap<String, usize>>,
}

impl Overseer for Meddler {
    fn before(&self, what: &str) {
        let times = {
            let mut met = self.met.lock().unwrap();
            let times = met.entry(what.to_owned()).or_default();
            *times += 1;
            *times
        };
        if times > 3 {
            return;
        }
        let (access, namespace) = (self.access.clone(), self.namespace.clone());
        let mark = json!({"metadata": {"annotations": {"meddled": format!("{what} {times}")}}});
        // On a thread of its own: the controller's runtime stands still here.
        let work = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let client = access.client().await;
                let (params, mark) = (PatchParams::default(), Patch::Merge(&mark));
                let stickies: Api<StickyIP> = Api::namespaced(client.clone(), &namespace);
                for sticky in stickies.list(&ListParams::default()).await.unwrap() {
                    let _ = stickies.patch(&sticky.metadata.name.unwrap(), &params, &mark).await;
                }
                let claims: Api<AddressClaim> = Api::all(client);
                for claim in claims.list(&ListParams::default()).await.unwrap() {
                    let _ = claims.patch(&claim.metadata.name.unwrap(), &params, &mark).await;
                }
            });
        });
        work.join().unwrap();
    }
}

#[tokio::test]
async fn conflicts_on_each_write_delay_and_change_nothing() {
    let desk = Desk::take().await;
    sticky_pool(&desk.case, desk.case.range()).await;
    prepare(&desk, "a", 0).await;
    let overseer = Meddler {
        access: desk.case.admin(),
        namespace: desk.case.namespace().to_owned(),
        met: Mutex::default(),
    };
    let world = desk.world_of(desk.case.client(), HURRIED, Box::new(overseer));
    while_at_work(&world, until("the end in spite of it", || is_done(&desk, "a"))).await;
    assert_in_step(&desk.case, &[]).await;
}

#[tokio::test]
async fn watches_that_break_off_are_taken_up_again() {
    let desk = Desk::take().await;
    sticky_pool(&desk.case, desk.case.range()).await;
    let proxy = desk.case.proxy();
    let client = desk.case.admin().through(&proxy).client().await;
    let world = desk.world_of(client, HURRIED, Box::new(sticky_ipam::controller::act::Unwatched));
    while_at_work(&world, async {
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

impl Overseer for Turns {
    fn before(&self, _: &str) {
        if let Some(weather) = self.to.lock().unwrap().take() {
            self.proxy.set(weather);
        }
    }
}

/// How many steps of all duties failed.
fn failures(world: &World) -> u32 {
    let page = world.metrics.page();
    let lines = page.lines().filter(|line| line.starts_with("sticky_ipam_controller_errors_total{"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<u32>().ok()).sum()
}

#[tokio::test]
async fn a_server_that_does_not_answer_in_time_loses_and_doubles_nothing() {
    let desk = Desk::take().await;
    sticky_pool(&desk.case, desk.case.range()).await;
    let (proxy, to) = (Arc::new(desk.case.proxy()), Arc::new(Mutex::new(None)));
    let client = desk.case.admin().through(&proxy).client().await;
    let world = desk.world_of(client, HURRIED, Box::new(Turns { proxy: proxy.clone(), to: to.clone() }));
    while_at_work(&world, async {
        until("a first round", || async { rounds(&world, "repair") > 0 }).await;
        // Lost: the write happens, and its writer never knows. Held: it happens, and its writer waits until its time is over. Cut
        // off, politely or not: it does not happen.
        let all = [Weather::AnswersLost, Weather::AnswersHeld, Weather::Blackhole, Weather::Reset];
        for (n, weather) in (0u8..).zip(all) {
            let (mark, before) = (format!("w{n}"), failures(&world));
            *to.lock().unwrap() = Some(weather);
            prepare(&desk, &mark, n).await;
            until("a write that fails", || async { failures(&world) > before }).await;
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
    let unwatched = Box::new(sticky_ipam::controller::act::Unwatched);
    let world = desk.world_of(poor.client().await, HURRIED, unwatched);
    while_at_work(&world, async {
        until("two refusals", || async { failures(&world) > 1 }).await;
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
async fn a_server_that_has_lost_its_history_is_listed_anew() {
    let desk = Desk::take().await;
    let proxy = desk.case.proxy();
    let client = desk.case.admin().through(&proxy).client().await;
    let world = desk.world_of(client, HURRIED, Box::new(sticky_ipam::controller::act::Unwatched));
    while_at_work(&world, async {
        until("a first round", || async { rounds(&world, "repair") > 0 }).await;
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
    let (first, second) = (desk.world(HURRIED), desk.world(HURRIED));
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
