//! What a store holds, seen by walking its directory, and whether everything derived agrees with the records.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::Value;

/// Who has an address, or for whom it is kept: all that the record says.
pub type Sight = BTreeMap<IpAddr, Value>;

/// The records by address. Files that are no records are not looked at.
pub fn records(root: &Path) -> Sight {
    let mut seen = Sight::new();
    for (name, _) in names(root) {
        let Ok(address) = name.parse::<IpAddr>() else { continue };
        if let Ok(record) = serde_json::from_slice(&fs::read(root.join(&name)).unwrap()) {
            seen.insert(address, record);
        }
    }
    seen
}

/// Fails where an index, a bitmap or another name of a record does not agree with the records.
pub fn must_agree(root: &Path, boot: &str, what: &str) {
    let (mut attachments, mut claimants) = (BTreeMap::new(), BTreeMap::new());
    let mut taken = BTreeSet::new();
    let files = names(root);
    for (name, inode) in &files {
        let Ok(address) = name.parse::<IpAddr>() else { continue };
        let bytes = fs::read(root.join(name)).unwrap();
        let record: Value = serde_json::from_slice(&bytes)
            .unwrap_or_else(|error| panic!("{what}: {name} is trusted but torn: {error}: {bytes:?}"));
        taken.insert(address);
        let listed: Vec<&str> =
            record["addresses"].as_array().unwrap().iter().map(|ip| ip.as_str().unwrap()).collect();
        assert!(listed.contains(&name.as_str()), "{what}: {name} tells of {listed:?}");
        for other in listed {
            assert_eq!(files.get(other), Some(inode), "{what}: {name} says it has {other} too: {record}");
        }
        let text = |key: &str| record[key].as_str().unwrap_or_default().to_owned();
        let attached = record["state"] == "attached" && record["since"]["boot"] == boot;
        if attached {
            let before = attachments.insert(format!("{},{}", text("container"), text("interface")), *inode);
            assert!(
                before.is_none_or(|before| before == *inode),
                "{what}: two records of one attachment: {record}"
            );
        }
        if record.get("retention").is_some() {
            let entry = format!("{},{},{}", text("namespace"), text("pod"), text("interface"));
            let before = claimants.insert(entry, *inode);
            assert!(
                before.is_none_or(|before| before == *inode),
                "{what}: two records of one claimant: {record}"
            );
        } else {
            assert!(attached, "{what}: dynamic, and from before the boot: {record}");
        }
    }
    assert_eq!(names(&root.join(".sticky/attachments")), attachments, "{what}: the index of attachments");
    assert_eq!(names(&root.join(".sticky/claimants")), claimants, "{what}: the index of claimants");
    assert_eq!(marked(&root.join(".sticky/bitmaps")), taken, "{what}: the bitmaps");
    assert!(!root.join(".sticky/swap").exists(), "{what}: something is left half way");
}

fn marked(folder: &Path) -> BTreeSet<IpAddr> {
    let mut marked = BTreeSet::new();
    for (name, _) in names(folder) {
        for (at, byte) in fs::read(folder.join(&name)).unwrap().into_iter().enumerate() {
            for bit in (0..8).filter(|bit| byte & (1 << bit) != 0) {
                let low = u16::try_from(at * 8 + bit).unwrap();
                marked.insert(match name.parse().unwrap() {
                    IpAddr::V4(first) => IpAddr::V4((first.to_bits() | u32::from(low)).into()),
                    IpAddr::V6(first) => IpAddr::V6((first.to_bits() | u128::from(low)).into()),
                });
            }
        }
    }
    marked
}

fn names(folder: &Path) -> BTreeMap<String, u64> {
    let entries = fs::read_dir(folder).into_iter().flatten().map(Result::unwrap);
    entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().ino())).collect()
}
