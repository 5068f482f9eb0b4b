//! Prepared decisions under a disk that fails: put, used once, withdrawn; ended at every operation.

use std::fs;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use sticky_ipam::names::{
    Attachment, AttachmentId, ContainerId, IfName, NetworkName, PodIdentity, StickyKey,
};
use sticky_ipam::policy::lifetime::retention::Retention;
use sticky_ipam::store::{
    ClaimantKey, Decision, Disk, NodeTime, PreparedSticky, RealDisk, Record, RecordState, StickyBinding,
    Store, StoreError, Withdrawn,
};

use crate::faulty::{Fault, Faulty};
use crate::stage::fresh_dir;

const UID: &str = "11111111-2222-3333-4444-555555555555";

fn now() -> NodeTime {
    NodeTime::new(1_700_000_000, 100, "boot-1")
}

fn store<D: Disk>(disk: D, dir: &Path) -> Store<D> {
    Store::new(disk, dir, &NetworkName::new("net").unwrap(), now(), Duration::ZERO)
}

fn eth0() -> IfName {
    IfName::new("eth0").unwrap()
}

fn pod() -> PodIdentity {
    PodIdentity::new("db", "db-0", Some(UID)).unwrap()
}

fn address() -> IpAddr {
    "10.1.0.7".parse().unwrap()
}

fn decision() -> Decision {
    let sticky = PreparedSticky {
        namespace: "db".into(),
        name: "db-0".into(),
        addresses: vec![address()],
        resource: "db/StatefulSet/db".into(),
        attachment_id: AttachmentId::Prepared(UID.into()),
    };
    Decision::about(&pod(), Some(sticky), "it is selected", now()).unwrap()
}

/// The sandbox's record when it has taken the decision over.
fn record(container: &str) -> Record {
    Record {
        addresses: vec![address()],
        attachment: Attachment { container: ContainerId::new(container).unwrap(), interface: eth0() },
        state: RecordState::Attached,
        netns: None,
        pod: Some(pod()),
        retention: Some(Retention::FOREVER),
        binding: Some(StickyBinding {
            key: StickyKey { namespace: "db".into(), name: "db-0".into() },
            attachment_id: Some(AttachmentId::Prepared(UID.into())),
        }),
        since: now(),
    }
}

fn consume<D: Disk>(store: &Store<D>, container: &str) -> Result<bool, StoreError> {
    let mut locked = store.lock()?;
    let Some(found) = locked.find_decision(UID, &eth0())? else { return Ok(false) };
    let kept = locked.find_by_claimant(&ClaimantKey::new("db", "db-0", &eth0()))?;
    locked.use_decision(&found, &record(container), kept.as_ref(), &[])?;
    locked.commit()?;
    Ok(true)
}

/// Ends the process, or has the disk full, at every operation of `act` on a directory that `before` has
/// prepared.
fn at_every_operation(
    before: impl Fn(&Store),
    act: impl Fn(&Store<&Faulty>) -> bool,
    check: impl Fn(&Store, bool, &str),
) {
    for fault in [Fault::End, Fault::EndHalfWay, Fault::Full] {
        for at in 0.. {
            let dir = fresh_dir();
            before(&store(RealDisk, dir.path()));
            let disk = Faulty::new(fault, at);
            let done = act(&store(&disk, dir.path()));
            let what = format!("{fault:?} at operation {at}");
            if !disk.struck() {
                assert!(at > 1 && done, "{what}: {at} operations, done: {done}");
                break;
            }
            check(&store(RealDisk, dir.path()), done, &what);
        }
    }
}

fn put(store: &Store) {
    store.lock().unwrap().put_decision(&decision()).unwrap();
}

#[test]
fn a_decision_is_there_whole_or_not_at_all_whenever_its_writer_ends() {
    at_every_operation(
        |_| {},
        |store| store.lock().and_then(|mut locked| locked.put_decision(&decision())).is_ok(),
        |store, done, what| {
            let found = store.lock().unwrap().find_decision(UID, &eth0()).unwrap();
            assert!(found.is_none() || found == Some(decision()), "{what}: {found:?}");
            assert!(!done || found.is_some(), "{what}: it said that it was written");
            // Nothing is in the way of the next one.
            put(store);
            assert_eq!(store.decisions().unwrap(), [decision()], "{what}");
        },
    );
}

#[test]
fn a_decision_is_used_once_whenever_its_user_ends() {
    at_every_operation(
        put,
        |store| consume(store, "first").unwrap_or(false),
        |store, done, what| {
            // The runtime's DEL of the sandbox whose ADD did not answer, or nobody.
            let mut locked = store.lock().unwrap();
            let held = locked.find_by_attachment(&record("first").attachment).unwrap();
            let left = locked.find_decision(UID, &eth0()).unwrap();
            assert!(held.is_none() || left.is_none(), "{what}: it is used, and can be used again");
            assert!(held.is_some() || left.is_some(), "{what}: it is lost");
            assert!(!done || held.is_some(), "{what}: it said that it was done");
            drop(locked);
            let again = consume(store, "second").unwrap();
            assert_eq!(again, held.is_none(), "{what}");
        },
    );
}

#[test]
fn a_decision_that_was_used_stays_used_after_its_sandbox_has_gone() {
    let dir = fresh_dir();
    let store = store(RealDisk, dir.path());
    put(&store);
    assert!(consume(&store, "first").unwrap());
    let mut locked = store.lock().unwrap();
    let stored = locked.find_by_attachment(&record("first").attachment).unwrap().unwrap();
    locked.put(&Record { state: RecordState::Kept, ..stored.record.clone() }, Some(&stored)).unwrap();
    locked.commit().unwrap();
    // As a crash between the record and the removal of the file would have left it.
    put(&store);
    assert!(!consume(&store, "second").unwrap());
    assert_eq!(store.decisions().unwrap(), []);
}

#[test]
fn a_withdrawn_decision_is_the_withdrawers_or_the_sandboxs_after_any_crash() {
    at_every_operation(
        put,
        |store| {
            let withdrawn = store.lock().and_then(|mut locked| locked.withdraw_decision(UID, &eth0()));
            matches!(withdrawn, Ok(Withdrawn::Unused(found)) if *found == decision())
        },
        |store, done, what| {
            let used = consume(store, "first").unwrap();
            assert!(!(done && used), "{what}: withdrawn and used");
            let again = store.lock().unwrap().withdraw_decision(UID, &eth0()).unwrap();
            assert_eq!(again, Withdrawn::Nothing, "{what}");
        },
    );
    let dir = fresh_dir();
    let store = store(RealDisk, dir.path());
    put(&store);
    assert!(consume(&store, "first").unwrap());
    put(&store);
    assert_eq!(store.lock().unwrap().withdraw_decision(UID, &eth0()).unwrap(), Withdrawn::InUse);
    assert_eq!(store.decisions().unwrap(), []);
}

#[test]
fn what_is_torn_foreign_or_of_another_boot_is_not_believed() {
    let dir = fresh_dir();
    let store = store(RealDisk, dir.path());
    put(&store);
    let file = store.root().join(".sticky/decisions").join(UID);
    let whole = fs::read_to_string(&file).unwrap();
    let elsewhere = whole.replace(UID, "another-uid");
    let nowhere = whole.replace("prepared-", "../prepared-");
    let newer = whole.replace("\"version\": 1", "\"version\": 2");
    for text in ["", "{", &whole[..whole.len() / 2], &elsewhere, &nowhere, &newer] {
        fs::write(&file, text).unwrap();
        assert_eq!(store.decisions().unwrap(), []);
        assert_eq!(store.lock().unwrap().find_decision(UID, &eth0()).unwrap(), None, "{text}");
        assert!(!file.exists(), "set aside: {text}");
    }
    assert_eq!(fs::read_dir(store.root().join(".sticky/aside")).unwrap().count(), 6);
    std::os::unix::fs::symlink("/etc/hostname", &file).unwrap();
    assert_eq!(store.lock().unwrap().find_decision(UID, &eth0()).unwrap(), None);
    for uid in ["../lock", "", "a/b", ".."] {
        assert!(store.lock().unwrap().find_decision(uid, &eth0()).is_err(), "{uid}");
    }
    let other = PodIdentity::new("db", "db-1", Some(UID)).unwrap();
    assert!(decision().is_for(&pod(), &now()) && !decision().is_for(&other, &now()));
    let rebooted = NodeTime::new(1_700_000_100, 5, "boot-2");
    assert!(!decision().is_for(&pod(), &rebooted));
    let plain = Decision::about(&pod(), None, "nothing asks for it", now()).unwrap();
    assert!(plain.is_for(&pod(), &rebooted), "who is not sticky is not after a reboot either");
}
