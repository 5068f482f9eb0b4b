//! What is done with the bytes. A fuzzer that guides itself by coverage can call the same two functions.

use std::ffi::OsString;
use std::fs;
use std::net::IpAddr;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;

use serde_json::{Value, json};
use sticky_ipam::cni::{ParsedRequest, Request, RequestError, read_request};
use sticky_ipam::plugin::run_verb_on;
use sticky_ipam::store::{NodeTime, RealDisk};

fn fresh() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.unwrap()
}

/// Lines `KEY=value` up to an empty one, then standard input. The data directory stands for `@DIR@` and is
/// the only place that a verb may touch; requests that name another one are only parsed.
pub fn request(bytes: &[u8]) {
    let dir = fresh();
    let split = bytes.windows(2).position(|pair| pair == b"\n\n").unwrap_or(bytes.len());
    let (head, stdin) = (&bytes[..split], bytes.get(split + 2..).unwrap_or_default());
    let stdin = replaced(stdin, b"@DIR@", dir.path().join("data").to_str().unwrap().as_bytes());
    let lines: Vec<(Vec<u8>, Vec<u8>)> = head
        .split(|byte| *byte == b'\n')
        .filter_map(|line| {
            let at = line.iter().position(|byte| *byte == b'=')?;
            Some((line[..at].to_vec(), line[at + 1..].to_vec()))
        })
        .collect();
    let env = |name: &str| {
        let found = lines.iter().rev().find(|(key, _)| key == name.as_bytes());
        found.map(|(_, value)| OsString::from_vec(value.clone()))
    };
    match read_request(&env, &mut stdin.as_slice()) {
        Ok(ParsedRequest::Verb(request)) => {
            if !stays_in(&request, dir.path()) {
                return;
            }
            let now = NodeTime::new(1_700_000_100, 200, "boot");
            match run_verb_on(&request, RealDisk, now) {
                Ok(None) => {}
                Ok(Some(result)) => assert!(result["cniVersion"].is_string(), "{result}"),
                Err(error) => {
                    let failure = RequestError { error, version: request.config.version };
                    must_be_error(&failure.to_json().to_string());
                    must_hold_nothing(&dir.path().join("data"));
                }
            }
        }
        Ok(ParsedRequest::Version { reply }) => assert!(reply["supportedVersions"].is_array()),
        Ok(ParsedRequest::About) => {}
        Err(failure) => must_be_error(&failure.to_json().to_string()),
    }
}

fn stays_in(request: &Request, dir: &Path) -> bool {
    let config = &request.config;
    let log = config.sticky().and_then(|sticky| sticky.log_file.clone());
    config.delegate.is_none()
        && log.is_none_or(|log| log.starts_with(dir))
        && config.ipam.as_ref().is_some_and(|ipam| {
            ipam.data_dir.starts_with(dir)
                && !ipam.data_dir.components().any(|part| part.as_os_str() == "..")
                && ipam.resolv_conf.as_ref().is_none_or(|file| file.starts_with(dir))
        })
}

fn must_hold_nothing(data_dir: &Path) {
    let networks = fs::read_dir(data_dir).into_iter().flatten().flatten();
    let files = networks.flat_map(|network| fs::read_dir(network.path()).into_iter().flatten().flatten());
    let addresses = files.filter_map(|file| file.file_name().to_str()?.parse::<IpAddr>().ok());
    assert_eq!(addresses.count(), 0, "a verb that failed holds an address");
}

fn must_be_error(document: &str) {
    let error: Value = serde_json::from_str(document).unwrap_or_else(|e| panic!("{e}: {document}"));
    assert!(error["code"].is_u64() && error["cniVersion"].is_string(), "{document}");
    assert!(error["msg"].as_str().is_some_and(|text| !text.is_empty()), "{document}");
    assert_ne!(error["code"], 999, "a defect of ours: {document}");
}

/// Sections `@ name` and the bytes of the file of that name in a network's directory. Whatever they are, an
/// ADD has an address that no trusted record has, a repeated ADD the same, and a DEL gives it back.
pub fn store(bytes: &[u8]) {
    let dir = fresh();
    let root = dir.path().join("net");
    fs::create_dir_all(root.join(".sticky/attachments")).unwrap();
    fs::create_dir_all(root.join(".sticky/claimants")).unwrap();
    fs::create_dir_all(root.join(".sticky/bitmaps")).unwrap();
    for section in sections(bytes) {
        let (name, content) = section;
        let plain = |part: &str| !part.is_empty() && part != ".." && part != "." && !part.contains('\0');
        if name.split('/').all(plain) && name.len() < 200 {
            let _ = fs::write(root.join(name), content);
        }
    }
    let first = verb(dir.path(), "ADD");
    let address = match first {
        Ok(answer) => answer.unwrap()["ips"][0]["address"].clone(),
        Err(code) => {
            assert!([5, 11, 100, 101, 102].contains(&code), "{code}");
            return;
        }
    };
    let again = verb(dir.path(), "ADD").unwrap().unwrap();
    assert_eq!(again["ips"][0]["address"], address);
    verb(dir.path(), "CHECK").unwrap();
    verb(dir.path(), "DEL").unwrap();
    assert_eq!(verb(dir.path(), "CHECK"), Err(3));
    verb(dir.path(), "GC").unwrap();
}

fn sections(bytes: &[u8]) -> Vec<(String, &[u8])> {
    let mut found = Vec::new();
    let mut rest = bytes;
    while let Some(body) = rest.strip_prefix(b"@ ") {
        let line = body.iter().position(|byte| *byte == b'\n').unwrap_or(body.len());
        let name = String::from_utf8_lossy(&body[..line]).into_owned();
        let content = body.get(line + 1..).unwrap_or_default();
        let end = content.windows(3).position(|piece| piece == b"\n@ ").unwrap_or(content.len());
        found.push((name, &content[..end]));
        rest = content.get(end + 1..).unwrap_or_default();
    }
    found
}

fn verb(data_dir: &Path, verb: &str) -> Result<Option<Value>, u32> {
    let config = json!({
        "cniVersion": "1.1.0", "name": "net", "type": "ptp", "cni.dev/valid-attachments": [],
        "ipam": {
            "dataDir": data_dir, "subnet": "10.1.0.0/28",
            "sticky": {"pods": ["db/*"], "waitForOldPod": "0s", "onExhaustion": "reclaim"},
        },
    });
    let env = |name: &str| {
        let value = match name {
            "CNI_COMMAND" => verb,
            "CNI_CONTAINERID" => "fuzz",
            "CNI_IFNAME" => "eth0",
            "CNI_NETNS" => "/run/netns/none-of-this-name",
            "CNI_PATH" => "/opt/cni/bin",
            _ => return None,
        };
        Some(OsString::from(value))
    };
    let text = config.to_string();
    let Ok(ParsedRequest::Verb(request)) = read_request(&env, &mut text.as_bytes()) else { panic!("{text}") };
    run_verb_on(&request, RealDisk, NodeTime::new(1_700_000_100, 200, "boot")).map_err(|error| error.code)
}

fn replaced(bytes: &[u8], what: &[u8], by: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = bytes;
    while let Some(at) = rest.windows(what.len()).position(|piece| piece == what) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(by);
        rest = &rest[at + what.len()..];
    }
    out.extend_from_slice(rest);
    out
}
