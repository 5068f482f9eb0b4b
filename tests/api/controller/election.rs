//! The election on a real API server, with short times.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use sticky_ipam::cluster::api::lease::{LeaderElection, Leadership, LeaseLost, LeaseTimes};

use crate::support::api_server::{ApiServer, Weather};
use crate::support::controller::{DEADLINE, Desk, until};

const TERMS: LeaseTimes = LeaseTimes {
    lease_duration: Duration::from_secs(3),
    renew_deadline: Duration::from_secs(2),
    retry_period: Duration::from_millis(300),
};

fn election(client: kube::Client, namespace: &str, me: &str) -> LeaderElection {
    LeaderElection::new(client, namespace, "lead", me, TERMS)
}

/// Leads until the lease is lost; a leader that never sees it fails the test.
async fn hold(
    election: &mut LeaderElection,
    term: Leadership,
    work: impl Future<Output = ()>,
) -> Result<(), LeaseLost> {
    tokio::time::timeout(DEADLINE, election.hold(term, work)).await.expect("it went on")
}

async fn holder(desk: &Desk) -> Option<String> {
    let leases: Api<Lease> = Api::namespaced(desk.case.client(), desk.case.namespace());
    leases.get_opt("lead").await.unwrap()?.spec?.holder_identity
}

#[tokio::test]
async fn the_loser_waits_without_a_write_and_follows_at_once_when_the_lease_is_released() {
    let desk = Desk::take().await;
    let ns = desk.case.namespace();
    let stop = tokio::sync::Notify::new();
    let leads = AtomicBool::new(false);
    let mut first = election(desk.case.client(), ns, "first");
    let term = first.win().await;
    let ended = async { first.hold(term, stop.notified()).await };
    let mut second = election(desk.case.client(), ns, "second");
    let follows = async {
        let term = second.win().await;
        leads.store(true, Ordering::SeqCst);
        second.hold(term, async {}).await
    };
    let watch = async {
        let leases: Api<Lease> = Api::namespaced(desk.case.client(), ns);
        let renewals = async || leases.get("lead").await.unwrap().spec.unwrap();
        let before = renewals().await;
        // Longer than the lease lasts: it is renewed, and nobody takes it.
        let until_renewed = before.renew_time.clone().unwrap().0.as_second() + 5;
        until("renewals", || async { renewals().await.renew_time.unwrap().0.as_second() >= until_renewed })
            .await;
        assert_eq!(renewals().await.holder_identity.as_deref(), Some("first"));
        assert_eq!(renewals().await.lease_transitions, before.lease_transitions);
        assert!(!leads.load(Ordering::SeqCst));
        stop.notify_one();
    };
    let (first, second, ()) = tokio::join!(ended, follows, watch);
    first.unwrap();
    second.unwrap();
    assert_eq!(holder(&desk).await.as_deref(), Some(""), "the second gave it back too");
}

#[tokio::test]
async fn after_a_crash_another_follows_when_the_lease_has_run_out() {
    let desk = Desk::take().await;
    let ns = desk.case.namespace();
    let mut first = election(desk.case.client(), ns, "first");
    // It crashes: neither renewed nor given back.
    let _ = first.win().await;
    drop(first);
    let mut second = election(desk.case.client(), ns, "second");
    let term = tokio::time::timeout(DEADLINE, second.win()).await.expect("nobody followed");
    assert_eq!(holder(&desk).await.as_deref(), Some("second"));
    second.hold(term, async {}).await.unwrap();
}

#[tokio::test]
async fn a_lease_given_to_another_by_hand_ends_the_leader() {
    let desk = Desk::take().await;
    let ns = desk.case.namespace();
    let leases: Api<Lease> = Api::namespaced(desk.case.client(), ns);
    let mut first = election(desk.case.client(), ns, "first");
    let term = first.win().await;
    let edit = async {
        // An edit that does not concern it is written over at the next renewal.
        let odd = json!({"metadata": {"annotations": {"note": "x"}}, "spec": {"leaseDurationSeconds": 9999}});
        leases.patch("lead", &PatchParams::default(), &Patch::Merge(odd)).await.unwrap();
        until("the renewal", || async {
            leases.get("lead").await.unwrap().spec.unwrap().lease_duration_seconds == Some(3)
        })
        .await;
        let other = json!({"spec": {"holderIdentity": "person"}});
        leases.patch("lead", &PatchParams::default(), &Patch::Merge(other)).await.unwrap();
        std::future::pending::<()>().await;
    };
    let Err(LeaseLost::Lost { lease, why }) = hold(&mut first, term, edit).await else {
        panic!("it went on")
    };
    assert!(lease.ends_with("/lead") && why.contains("another"), "{lease}: {why}");
    assert_eq!(holder(&desk).await.as_deref(), Some("person"), "what is another's is not given back");
}

#[tokio::test]
async fn a_leader_that_cannot_renew_ends_before_its_lease_does() {
    let desk = Desk::take().await;
    let proxy = desk.case.proxy();
    for weather in [Weather::Blackhole, Weather::Reset] {
        let client = desk.case.admin().through(&proxy).client().await;
        let mut first = election(client, desk.case.namespace(), "cut-off");
        let term = first.win().await;
        proxy.set(weather);
        let began = tokio::time::Instant::now();
        let ended = hold(&mut first, term, std::future::pending()).await;
        assert!(matches!(ended, Err(LeaseLost::Lost { .. })), "{weather:?}: {ended:?}");
        // Not a matter of speed: nobody else may lead before the lease's duration is over.
        assert!(began.elapsed() < TERMS.lease_duration, "{weather:?}: it went on for {:?}", began.elapsed());
        proxy.heal();
    }
}

#[tokio::test]
async fn a_paused_api_server_ends_the_leader() {
    let server = ApiServer::start().await;
    let case = server.case().await;
    let mut first = election(case.client(), case.namespace(), "first");
    let term = first.win().await;
    server.pause();
    let ended = hold(&mut first, term, std::future::pending()).await;
    server.resume();
    assert!(matches!(ended, Err(LeaseLost::Lost { .. })), "{ended:?}");
}
