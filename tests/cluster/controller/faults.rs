//! A restart between any two writes, conflicts on each write, watches that break off, two controllers at once.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::{AddressClaim, StickyIP};
use sticky_ipam::controller::act::Overseer;
use sticky_ipam::controller::run;

use super::{Desk, HURRIED, until, while_at_work};
use crate::bench::access::Access;
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
