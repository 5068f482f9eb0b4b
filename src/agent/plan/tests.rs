use std::path::PathBuf;

use serde_json::{Value, json};

use std::time::Duration;

use super::debounce::Debounce;
use super::{Action, PlanInput, PlanOptions, plan};
use crate::agent::index::CacheEvent;
use crate::agent::index::NodeIndex;
use crate::agent::snapshot::NodeRecord;
use crate::agent::snapshot::{Netns, Snapshot};
use crate::agent::watch::IndexUpdate;
use crate::cluster::cilium::pool::PublishConfig;
use crate::cluster::objects::ClaimPhase;
use crate::names::{Attachment, AttachmentId, ContainerId, IfName, PodIdentity, StickyKey};
use crate::policy::lifetime::retention::Retention;
use crate::policy::mode::PluginMode;
use crate::policy::pool_size::PoolLimits;
use crate::policy::selection::rules::Rules;
use crate::policy::selection::selector::Selector;
use crate::store::{Decision, PendingUpdate, PendingUpdateKind, Record};
use crate::store::{NodeTime, PreparedSticky, RecordState, StickyBinding};

fn options(mode: PluginMode) -> PlanOptions {
    let (ranges, known_blocks) = (vec!["10.0.0.0/24".parse().unwrap()], Vec::new());
    let shape = PublishConfig { mode, ranges, known_blocks };
    PlanOptions {
        node: "n1".into(),
        shape,
        ranges: Vec::new(),
        pool_limits: PoolLimits { min_free: 2, max_entries: 4 },
        rules: Rules::default(),
    }
}

/// Every kind is listed, and nothing is there.
fn listed() -> NodeIndex {
    let mut index = NodeIndex::default();
    for update in [
        IndexUpdate::Pod(CacheEvent::ListComplete),
        IndexUpdate::Sticky(CacheEvent::ListComplete),
        IndexUpdate::Claim(CacheEvent::ListComplete),
        IndexUpdate::Node(CacheEvent::ListComplete),
    ] {
        index.apply(update);
    }
    index
}

fn store() -> Snapshot {
    Snapshot {
        records: Vec::new(),
        decisions: Vec::new(),
        pending_updates: Vec::new(),
        is_seeded: true,
        blocks: vec!["10.0.0.0/24".parse().unwrap()],
        now: now(),
    }
}

fn now() -> NodeTime {
    NodeTime::new(100, 100, "boot")
}

fn look(
    options: &PlanOptions,
    index: &NodeIndex,
    store: &Snapshot,
    debounce: &mut Debounce,
    at: u64,
) -> Vec<&'static str> {
    let input = PlanInput { options, index, store, now: Duration::from_secs(at) };
    // Of every living pod, and no concern of these tests.
    let of_every_pod = ["record_mac", "decide_running"];
    plan(&input, debounce).iter().map(Action::name).filter(|name| !of_every_pod.contains(name)).collect()
}

/// What is planned at a first look, and at one long after it.
fn twice(
    options: &PlanOptions,
    index: &NodeIndex,
    store: &Snapshot,
) -> (Vec<&'static str>, Vec<&'static str>) {
    let mut debounce = Debounce::default();
    (look(options, index, store, &mut debounce, 0), look(options, index, store, &mut debounce, 60))
}

fn put_pod(index: &mut NodeIndex, name: &str, uid: &str, status: Value) {
    let pod = json!({"metadata": {"name": name, "namespace": "db", "uid": uid}, "status": status});
    let seen = super::super::index::NodePod::from(&serde_json::from_value(pod).unwrap());
    index.apply(IndexUpdate::Pod(CacheEvent::Applied((format!("db/{name}"), seen))));
}

fn put_sticky(index: &mut NodeIndex, name: &str, address: &str, uid: &str, container: &str) {
    let sticky = json!({"metadata": {"name": name, "namespace": "db", "uid": "s", "resourceVersion": "1"},
        "spec": {"addresses": [address], "claimant": {"kind": "Pod"},
                 "workload": {"apiVersion": "v1", "kind": "Pod", "name": name}},
        "status": {"attachment": {"node": "n1", "podName": name, "podUid": uid, "attachmentId": container,
                                  "since": "2026-01-01T00:00:00Z"}}});
    index.apply(IndexUpdate::Sticky(CacheEvent::Applied((
        format!("db/{name}"),
        serde_json::from_value(sticky).unwrap(),
    ))));
}

fn put_node(index: &mut NodeIndex, pool: Value, pod_cidrs: Value) {
    let node = json!({"metadata": {"name": "n1"}, "spec": {"ipam": {"pool": pool, "podCIDRs": pod_cidrs}}});
    index.apply(IndexUpdate::Node(CacheEvent::Applied(("n1".into(), serde_json::from_value(node).unwrap()))));
}

fn record(address: &str, container: &str, uid: &str, state: RecordState, sticky: Option<&str>) -> Record {
    Record {
        addresses: vec![address.parse().unwrap()],
        attachment: Attachment {
            container: ContainerId::new(container).unwrap(),
            interface: IfName::new("eth0").unwrap(),
        },
        state,
        netns: Some(PathBuf::from("/run/netns/x")),
        pod: Some(PodIdentity::new("db", "db-0", Some(uid)).unwrap()),
        retention: sticky.map(|_| Retention::FOREVER),
        binding: sticky.map(|name| StickyBinding {
            key: StickyKey { namespace: "db".into(), name: name.into() },
            attachment_id: Some(container.into()),
        }),
        since: now(),
    }
}

#[test]
fn before_the_initial_sync_only_pending_updates_are_written() {
    let mut index = NodeIndex::default();
    put_pod(&mut index, "db-0", "u1", json!({}));
    let mut store = store();
    let leak = record("10.0.0.5", "c1", "u9", RecordState::Attached, Some("db-9"));
    store.records.push(NodeRecord { record: leak, netns: Netns::Gone });
    store.pending_updates.push(("n".into(), update(PendingUpdateKind::Ended)));
    assert_eq!(twice(&options(PluginMode::Crd), &index, &store), (vec!["send_update"], vec!["send_update"]));
}

fn update(kind: PendingUpdateKind) -> PendingUpdate {
    PendingUpdate {
        kind,
        container: "c".into(),
        interface: "eth0".into(),
        namespace: Some("db".into()),
        name: Some("db-0".into()),
        attachment_id: None,
        uid: None,
        at: now(),
    }
}

#[test]
fn an_attachment_that_replaces_another_is_written_before_the_others_detach() {
    let mut store = store();
    store.pending_updates = vec![
        ("a".into(), update(PendingUpdateKind::Ended)),
        ("b".into(), update(PendingUpdateKind::Attached)),
    ];
    let (index, options) = (listed(), options(PluginMode::Delegated));
    let input = PlanInput { options: &options, index: &index, store: &store, now: Duration::ZERO };
    let subjects: Vec<String> = plan(&input, &mut Debounce::default()).iter().map(Action::subject).collect();
    assert_eq!(subjects, ["b", "a"]);
}

#[test]
fn only_a_pod_that_waits_and_is_not_decided_or_attached_is_prepared() {
    let plan_of = |status: Value, change: &dyn Fn(&mut NodeIndex, &mut Snapshot)| {
        let (mut index, mut store) = (listed(), store());
        put_pod(&mut index, "db-0", "u1", status);
        change(&mut index, &mut store);
        twice(&options(PluginMode::Delegated), &index, &store).0
    };
    let nothing = |_: &mut NodeIndex, _: &mut Snapshot| {};
    assert_eq!(plan_of(json!({"phase": "Pending"}), &nothing), ["prepare"]);
    assert!(plan_of(json!({"phase": "Running", "podIP": "10.0.0.5"}), &nothing).is_empty());
    assert!(plan_of(json!({"phase": "Failed"}), &nothing).is_empty());
    let pending = || json!({"phase": "Pending"});
    let running = |_: &mut NodeIndex, store: &mut Snapshot| {
        let record = record("10.0.0.5", "c1", "u1", RecordState::Attached, None);
        store.records.push(NodeRecord { record, netns: Netns::MayExist });
    };
    assert!(plan_of(pending(), &running).is_empty());
    let by_plugin =
        |index: &mut NodeIndex, _: &mut Snapshot| put_sticky(index, "db-0", "10.0.0.5", "u1", "c1");
    assert!(plan_of(pending(), &by_plugin).is_empty());
    let by_us =
        |index: &mut NodeIndex, _: &mut Snapshot| put_sticky(index, "db-0", "10.0.0.5", "u1", "prepared-u1");
    assert_eq!(plan_of(pending(), &by_us), ["prepare"], "it ended before the decision was on the disk");
}

#[test]
fn a_running_pod_that_is_not_sticky_and_has_no_decision_is_decided() {
    let planned = |labels: Value, status: Value, store: Snapshot| {
        let mut index = listed();
        let pod = json!({"metadata": {"name": "web", "namespace": "db", "uid": "u1", "labels": labels},
                         "status": status});
        let seen = super::super::index::NodePod::from(&serde_json::from_value(pod).unwrap());
        index.apply(IndexUpdate::Pod(CacheEvent::Applied(("db/web".into(), seen))));
        let selector = Selector::parse(r#"{"matchLabels":{"app":"db"}}"#).unwrap();
        let rules = Rules { selector: Some(selector), ..Rules::default() };
        let options = PlanOptions { rules, ..options(PluginMode::Crd) };
        let input = PlanInput { options: &options, index: &index, store: &store, now: Duration::ZERO };
        let all = plan(&input, &mut Debounce::default());
        all.iter().any(|action| action.name() == "decide_running")
    };
    let running = || json!({"phase": "Running", "podIP": "10.0.0.5"});
    assert!(planned(json!({}), running(), store()));
    assert!(planned(json!({"app": "db"}), running(), store()), "its namespace may say no");
    assert!(!planned(json!({"fixed-ip": "true"}), running(), store()), "the controller adopts it");
    assert!(!planned(json!({}), json!({"phase": "Pending"}), store()), "it is prepared");
    assert!(!planned(json!({}), json!({"phase": "Failed"}), store()));
    let with_record = |sticky| {
        let record = record("10.0.0.5", "c1", "u1", RecordState::Attached, sticky);
        let records = vec![NodeRecord { record, netns: Netns::MayExist }];
        Snapshot { records, ..store() }
    };
    assert!(!planned(json!({}), running(), with_record(Some("web"))));
    assert!(planned(json!({}), running(), with_record(None)), "it has an address without a StickyIP");
    let pod = PodIdentity::new("db", "web", Some("u1")).unwrap();
    let decisions = vec![Decision::about(&pod, None, "test", now()).unwrap()];
    assert!(!planned(json!({}), running(), Snapshot { decisions, ..store() }));
}

#[test]
fn a_decision_is_withdrawn_when_its_pod_its_boot_or_its_attachment_is_gone() {
    let decision = |boot: &str| {
        let pod = PodIdentity::new("db", "db-0", Some("u1")).unwrap();
        let sticky = PreparedSticky {
            namespace: "db".into(),
            name: "db-0".into(),
            addresses: vec!["10.0.0.5".parse().unwrap()],
            resource: "db/Pod/db-0".into(),
            attachment_id: "prepared-u1".into(),
        };
        Decision::about(&pod, Some(sticky), "test", NodeTime::new(1, 1, boot)).unwrap()
    };
    let (mut index, mut store) = (listed(), store());
    store.decisions = vec![decision("boot")];
    assert_eq!(twice(&options(PluginMode::Delegated), &index, &store).0, ["withdraw"]);
    put_pod(&mut index, "db-0", "u1", json!({}));
    assert_eq!(
        twice(&options(PluginMode::Delegated), &index, &store),
        (vec![], vec!["withdraw"]),
        "the watch may lag"
    );
    put_sticky(&mut index, "db-0", "10.0.0.5", "u1", "prepared-u1");
    assert!(!twice(&options(PluginMode::Delegated), &index, &store).1.contains(&"withdraw"));
    put_pod(&mut index, "db-0", "u1", json!({"phase": "Failed"}));
    assert_eq!(
        twice(&options(PluginMode::Delegated), &index, &store).0,
        ["withdraw"],
        "the kubelet turned it away"
    );
    put_pod(&mut index, "db-0", "u1", json!({}));
    store.decisions = vec![decision("earlier")];
    assert_eq!(twice(&options(PluginMode::Delegated), &index, &store).0, ["withdraw"]);
}

#[test]
fn a_sandbox_is_released_on_the_second_check_and_only_without_its_pod() {
    let (mut index, mut store) = (listed(), store());
    let plain = record("10.0.0.5", "c1", "u1", RecordState::Attached, None);
    store.records.push(NodeRecord { record: plain, netns: Netns::Gone });
    assert_eq!(twice(&options(PluginMode::Delegated), &index, &store), (vec![], vec!["end_attachment"]));
    put_pod(&mut index, "db-0", "u1", json!({"phase": "Running"}));
    assert_eq!(
        twice(&options(PluginMode::Delegated), &index, &store),
        (vec![], vec![]),
        "the runtime may still come"
    );
    store.records[0].netns = Netns::MayExist;
    assert_eq!(twice(&options(PluginMode::Delegated), &listed(), &store), (vec![], vec![]));
}

#[test]
fn an_attachment_without_sandbox_decision_or_pod_is_released_on_the_second_check() {
    let mut index = listed();
    put_sticky(&mut index, "db-0", "10.0.0.5", "u1", "c1");
    assert_eq!(twice(&options(PluginMode::Delegated), &index, &store()), (vec![], vec!["detach"]));
    let mut running = store();
    let record = record("10.0.0.5", "c1", "u1", RecordState::Attached, Some("db-0"));
    running.records.push(NodeRecord { record, netns: Netns::MayExist });
    assert_eq!(twice(&options(PluginMode::Delegated), &index, &running), (vec![], vec![]));
    put_pod(&mut index, "db-0", "u1", json!({"phase": "Running"}));
    assert_eq!(twice(&options(PluginMode::Delegated), &index, &store()), (vec![], vec![]));
}

#[test]
fn a_sandbox_unknown_to_the_api_server_is_attached_on_the_second_check() {
    let mut store = store();
    let running = record("10.0.0.5", "c2", "u1", RecordState::Attached, Some("db-0"));
    store.records.push(NodeRecord { record: running, netns: Netns::MayExist });
    assert_eq!(twice(&options(PluginMode::Delegated), &listed(), &store), (vec![], vec!["attach"]));
    let mut index = listed();
    put_sticky(&mut index, "db-0", "10.0.0.5", "u1", "c2");
    assert_eq!(twice(&options(PluginMode::Delegated), &index, &store), (vec![], vec![]));
}

#[test]
fn a_kept_address_stays_while_claimed_and_one_from_elsewhere_while_its_pod_exists() {
    let kept = |address: &str| {
        let mut store = store();
        let record = record(address, "c1", "u1", RecordState::Kept, Some("db-0"));
        store.records.push(NodeRecord { record, netns: Netns::MayExist });
        store
    };
    let mut index = listed();
    assert_eq!(
        twice(&options(PluginMode::Delegated), &index, &kept("10.0.0.5")),
        (vec![], vec!["release_record"])
    );
    assert_eq!(
        twice(&options(PluginMode::Delegated), &index, &kept("10.7.0.5")),
        (vec![], vec!["release_record"])
    );
    put_pod(&mut index, "db-0", "u1", json!({"phase": "Running"}));
    assert_eq!(twice(&options(PluginMode::Delegated), &index, &kept("10.7.0.5")), (vec![], vec![]));
    put_claim(&mut index, "10.0.0.5");
    assert_eq!(twice(&options(PluginMode::Delegated), &index, &kept("10.0.0.5")), (vec![], vec![]));
    let mut without_ranges = options(PluginMode::Delegated);
    without_ranges.shape.ranges.clear();
    assert_eq!(twice(&without_ranges, &listed(), &kept("10.0.0.5")), (vec![], vec![]), "home is not known");
}

/// A claim of db-0's, whose home is this node.
fn put_claim(index: &mut NodeIndex, address: &str) {
    let claim = crate::cluster::view::ClaimView {
        address: address.parse().unwrap(),
        uid: "c".into(),
        resource_version: "1".into(),
        phase: ClaimPhase::Bound,
        sticky_ref: StickyKey { namespace: "db".into(), name: "db-0".into() },
        sticky_uid: Some("s".into()),
        home_node: Some("n1".into()),
        reason: None,
        pod: None,
        released: false,
        in_use_by: None,
    };
    index.apply(IndexUpdate::Claim(CacheEvent::Applied((address.into(), claim))));
}

#[test]
fn unclaimed_addresses_are_released_once_their_pod_is_gone_and_claimed_ones_kept() {
    for wanted in ["10.0.0.5", "10.7.0.5"] {
        let mut store = store();
        let mut both = record(wanted, "c1", "u1", RecordState::Kept, Some("db-0"));
        both.addresses.push("10.0.0.6".parse().unwrap());
        store.records.push(NodeRecord { record: both, netns: Netns::MayExist });
        let mut index = listed();
        if wanted == "10.0.0.5" {
            put_claim(&mut index, wanted);
        }
        assert_eq!(
            twice(&options(PluginMode::Delegated), &index, &store),
            (vec![], vec!["release_record"]),
            "{wanted}"
        );
        put_pod(&mut index, "db-0", "u1", json!({"phase": "Running"}));
        assert_eq!(
            twice(&options(PluginMode::Delegated), &index, &store),
            (vec![], vec![]),
            "{wanted}: for its next sandbox"
        );
    }
}

#[test]
fn the_pool_is_filled_owned_and_cleared() {
    let mut index = listed();
    put_node(&mut index, json!({}), json!(["10.0.0.0/24"]));
    assert_eq!(twice(&options(PluginMode::Crd), &index, &store()).0, ["refill"]);
    put_node(&mut index, json!({"10.0.0.5": {}, "10.0.0.6": {}}), json!(["10.0.0.0/24"]));
    assert_eq!(twice(&options(PluginMode::Crd), &index, &store()).0, ["record_unowned"]);
    let mut unowned = store();
    for address in ["10.0.0.5", "10.0.0.6"] {
        let record = Record::unowned(address.parse().unwrap(), &now());
        unowned.records.push(NodeRecord { record, netns: Netns::MayExist });
    }
    assert_eq!(twice(&options(PluginMode::Crd), &index, &unowned), (vec![], vec![]));
    put_node(&mut index, json!({"10.0.0.5": {}}), json!(["10.0.0.0/24"]));
    assert_eq!(
        twice(&options(PluginMode::Crd), &index, &unowned).0,
        ["refill"],
        "what was offered is missing"
    );
    let stale = json!({"10.0.0.5": {}, "10.0.0.6": {}, "10.0.0.9": {"owner": "db/db-0"}});
    put_node(&mut index, stale, json!(["10.0.0.0/24", "10.9.0.1/32"]));
    assert_eq!(twice(&options(PluginMode::Crd), &index, &unowned), (vec![], vec!["unpublish", "unpublish"]));
    // As cilium-agent makes it, with neither; then with another block.
    put_node(&mut index, json!({}), json!([]));
    assert_eq!(twice(&options(PluginMode::Crd), &index, &unowned), (vec![], vec!["restore_unowned"]));
    put_node(&mut index, json!({}), json!(["10.8.0.0/24"]));
    let (once, again) = twice(&options(PluginMode::Crd), &index, &unowned);
    assert_eq!(once, ["refill", "record_blocks"]);
    assert_eq!(again, ["refill", "record_blocks", "restore_unowned"]);
}

#[test]
fn an_attached_stickyip_is_published_once_its_sandbox_exists() {
    let mut index = listed();
    put_node(&mut index, json!({}), json!(["10.0.0.0/24"]));
    let pool_limits = PoolLimits { min_free: 0, max_entries: 4 };
    let options = PlanOptions { pool_limits, ..options(PluginMode::Crd) };
    put_pod(&mut index, "db-0", "u1", json!({"phase": "Running"}));
    put_sticky(&mut index, "db-0", "10.0.0.5", "u1", "c1");
    assert_eq!(twice(&options, &index, &store()), (vec![], vec![]), "an ADD or a DEL is on its way");
    let mut running = store();
    let record = record("10.0.0.5", "c1", "u1", RecordState::Attached, Some("db-0"));
    running.records.push(NodeRecord { record, netns: Netns::MayExist });
    assert_eq!(twice(&options, &index, &running), (vec![], vec!["publish"]));
}

#[test]
fn a_store_without_its_mark_is_seeded_at_once_and_where_cilium_picks_never() {
    let unseeded = Snapshot { is_seeded: false, ..store() };
    let first = |mode| {
        let (index, options) = (NodeIndex::default(), options(mode));
        let input = PlanInput { options: &options, index: &index, store: &unseeded, now: Duration::ZERO };
        plan(&input, &mut Debounce::default())
    };
    assert_eq!(first(PluginMode::Delegated), [Action::Seed]);
    assert_eq!(first(PluginMode::Chained), [Action::Seed]);
    assert!(first(PluginMode::Crd).is_empty());
}

/// The pods that the plan refills the pool for, if it does: at a first look, and at one long after it.
fn refills(options: &PlanOptions, index: &NodeIndex, store: &Snapshot) -> (Option<usize>, Option<usize>) {
    let mut debounce = Debounce::default();
    let mut look = |at: u64| {
        let input = PlanInput { options, index, store, now: Duration::from_secs(at) };
        let actions = plan(&input, &mut debounce);
        let found = actions.iter().position(|action| matches!(action, Action::Refill { .. }))?;
        let before = &actions[..found];
        let is_urgent = before.iter().all(|action| !matches!(action, Action::Prepare { .. }));
        assert!(is_urgent || at > 0, "the decisions about many pods take long");
        match &actions[found] {
            Action::Refill { demand } => Some(demand.waiting),
            _ => None,
        }
    };
    (look(0), look(60))
}

/// A node whose store knows the unowned entries of its pool.
fn with_unowned(index: &mut NodeIndex, count: u8) -> Snapshot {
    let mut store = store();
    let mut pool = serde_json::Map::new();
    for last in 1..=count {
        let address = format!("10.0.0.{last}");
        let record = Record::unowned(address.parse().unwrap(), &now());
        store.records.push(NodeRecord { record, netns: Netns::MayExist });
        pool.insert(address, json!({}));
    }
    put_node(index, pool.into(), json!(["10.0.0.0/24"]));
    store
}

#[test]
fn the_pool_follows_the_pods_that_wait_for_an_address_of_ciliums_choice() {
    let pool_limits = PoolLimits { min_free: 4, max_entries: 100 };
    let selector = Selector::parse(r#"{"matchLabels": {"sticky": "yes"}}"#).unwrap();
    let rules = Rules { selector: Some(selector), ..Rules::default() };
    let options = PlanOptions { pool_limits, rules, ..options(PluginMode::Crd) };
    let mut index = listed();
    let mut store = with_unowned(&mut index, 8);
    assert_eq!(refills(&options, &index, &store), (None, None));
    for pod in 0..6 {
        put_pod(&mut index, &format!("web-{pod}"), &format!("u{pod}"), json!({"phase": "Pending"}));
    }
    assert_eq!(refills(&options, &index, &store), (None, Some(6)), "enough for those who wait");
    put_pod(&mut index, "web-7", "u7", json!({}));
    assert_eq!(refills(&options, &index, &store), (Some(7), Some(7)), "too few for the next");
    put_pod(&mut index, "web-7", "u7", json!({"phase": "Running", "podIP": "10.0.0.1"}));
    assert_eq!(refills(&options, &index, &store), (Some(6), Some(6)), "it has one of them");
    put_pod(&mut index, "web-7", "u7", json!({"phase": "Succeeded", "podIP": "10.0.0.1"}));
    assert_eq!(refills(&options, &index, &store), (None, Some(6)), "it has ended");

    // Cilium's list is seconds old, and newer than what the kubelet says of a pod that still starts.
    let mut listed_by_cilium = index.clone();
    let mut node = index.cilium_node().unwrap().clone();
    let used =
        json!({"ipam": {"used": {"10.0.0.1": {"owner": "db/web-0"}, "10.0.0.2": {"owner": "db/web-1"}}}});
    node.status = Some(serde_json::from_value(used).unwrap());
    listed_by_cilium.apply(IndexUpdate::Node(CacheEvent::Applied(("n1".into(), node))));
    assert_eq!(refills(&options, &listed_by_cilium, &store), (None, Some(4)), "six are free for four");

    // Pods that have an entry of their own, or need none.
    let other = |index: &mut NodeIndex, name: &str, labels: Value, spec: Value| {
        let meta = json!({"name": name, "namespace": "db", "uid": name, "labels": labels});
        let pod = json!({"metadata": meta, "spec": spec});
        let seen = super::super::index::NodePod::from(&serde_json::from_value(pod).unwrap());
        index.apply(IndexUpdate::Pod(CacheEvent::Applied((format!("db/{name}"), seen))));
    };
    let containers = json!({"containers": []});
    other(&mut index, "db-0", json!({"sticky": "yes"}), containers.clone());
    other(&mut index, "host", json!({}), json!({"containers": [], "hostNetwork": true}));
    other(&mut index, "db-1", json!({}), containers.clone());
    other(&mut index, "db-2", json!({}), containers);
    let sticky = PreparedSticky {
        namespace: "db".into(),
        name: "db-1".into(),
        addresses: vec!["10.0.0.90".parse().unwrap()],
        resource: "r".into(),
        attachment_id: AttachmentId::Prepared("db-1".into()),
    };
    let pod = PodIdentity::new("db", "db-1", Some("db-1")).unwrap();
    store.decisions.push(Decision::about(&pod, Some(sticky), "test", now()).unwrap());
    let record = record("10.0.0.91", "c2", "db-2", RecordState::Attached, Some("db-2"));
    store.records.push(NodeRecord { record, netns: Netns::MayExist });
    assert_eq!(refills(&options, &index, &store), (None, Some(6)));
}

#[test]
fn what_pods_have_counts_as_used_before_cilium_has_written_it() {
    let mut index = listed();
    let store = with_unowned(&mut index, 4);
    let pool_limits = PoolLimits { min_free: 4, max_entries: 100 };
    let options = PlanOptions { pool_limits, ..options(PluginMode::Crd) };
    for pod in 1..=2 {
        let status = json!({"phase": "Running", "podIP": format!("10.0.0.{pod}")});
        put_pod(&mut index, &format!("web-{pod}"), &format!("u{pod}"), status);
    }
    assert_eq!(refills(&options, &index, &store), (None, Some(0)), "two are left");
    for pod in 3..=4 {
        let status = json!({"phase": "Running", "podIP": format!("10.0.0.{pod}")});
        put_pod(&mut index, &format!("web-{pod}"), &format!("u{pod}"), status);
    }
    assert_eq!(refills(&options, &index, &store), (Some(0), Some(0)));
}
