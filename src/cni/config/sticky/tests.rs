use super::*;
use serde_json::{Value, json};

fn read(value: Value) -> Result<StickyConf, CniError> {
    StickyConf::read(&Fields::of("ipam.sticky".into(), &value).unwrap())
}

fn pod(namespace: &str, name: &str) -> PodIdentity {
    PodIdentity::new(namespace, name, None).unwrap()
}

#[test]
fn an_empty_section_keeps_every_pod_forever_and_stays_ready() {
    let conf = read(json!({})).unwrap();
    assert_eq!(conf, StickyConf::default());
    assert!(conf.selects(&pod("a", "b")));
    assert_eq!(conf.retention, Retention::FOREVER);
    assert_eq!(conf.status_when_exhausted, StatusWhenExhausted::Ready);
}

#[test]
fn every_field_is_read() {
    let conf = read(json!({
        "pods": ["db/*", "*/web-?"], "excludePods": ["db/tmp-*"], "retention": "1h30m", "onExhaustion": "reclaim",
        "statusWhenExhausted": "notReady", "lockTimeout": "2s", "waitForOldPod": "0", "logFile": "/var/log/x",
        "logLevel": "trace", "logMaxFiles": 3, "bootIDFile": "/run/boot"
    }))
    .unwrap();
    assert_eq!(conf.retention, Retention::for_time(Duration::from_secs(5400)));
    assert_eq!(conf.on_exhaustion, OnExhaustion::Reclaim);
    assert_eq!(conf.status_when_exhausted, StatusWhenExhausted::NotReady);
    assert_eq!((conf.lock_timeout, conf.wait_for_old_pod), (Duration::from_secs(2), Duration::ZERO));
    assert_eq!(conf.log_file, Some("/var/log/x".into()));
    assert_eq!((conf.log_level, conf.log_max_files), (PluginLogLevel::Trace, 3));
    assert_eq!(conf.boot_id_file, PathBuf::from("/run/boot"));
    assert!(conf.selects(&pod("db", "x")) && conf.selects(&pod("any", "web-1")));
    assert!(!conf.selects(&pod("db", "tmp-1")) && !conf.selects(&pod("any", "web-10")));
}

#[test]
fn an_empty_list_of_pods_keeps_none() {
    assert!(!read(json!({"pods": []})).unwrap().selects(&pod("a", "b")));
}

#[test]
fn every_mistake_names_the_field_the_value_and_what_would_be_right() {
    for (value, parts) in [
        (json!({"retenton": "1h"}), ["ipam.sticky.retenton", "1h", "\"retention\""]),
        (json!({"retention": "3 days"}), ["ipam.sticky.retention", "3 days", "72h"]),
        (json!({"retention": "forever"}), ["ipam.sticky.retention", "forever", "Forever"]),
        (json!({"retention": "-1h"}), ["ipam.sticky.retention", "-1h", "Forever"]),
        (json!({"pods": ["web"]}), ["ipam.sticky.pods[0]", "web", "namespace/name"]),
        (json!({"pods": ["*/*", "a/b/c"]}), ["ipam.sticky.pods[1]", "a/b/c", "namespace/name"]),
        (json!({"excludePods": ["/x"]}), ["ipam.sticky.excludePods[0]", "/x", "namespace/name"]),
        (json!({"onExhaustion": "steal"}), ["ipam.sticky.onExhaustion", "steal", "reclaim"]),
        (json!({"statusWhenExhausted": "NotReady"}), ["statusWhenExhausted", "NotReady", "notReady"]),
        (json!({"lockTimeout": "1h"}), ["ipam.sticky.lockTimeout", "1h", "10m"]),
        (json!({"waitForOldPod": "soon"}), ["ipam.sticky.waitForOldPod", "soon", "10s"]),
        (json!({"logFile": "x.log"}), ["ipam.sticky.logFile", "x.log", "absolute"]),
        (json!({"logLevel": "verbose"}), ["ipam.sticky.logLevel", "verbose", "debug"]),
        (json!({"logMaxFiles": 0}), ["ipam.sticky.logMaxFiles", "0", "between 1"]),
        (json!({"bootIDFile": "boot"}), ["ipam.sticky.bootIDFile", "boot", "absolute"]),
    ] {
        let error = read(value.clone()).unwrap_err();
        assert_eq!(error.code, 7, "{value}");
        for part in parts {
            assert!(error.msg.contains(part), "{value}: {:?} lacks {part:?}", error.msg);
        }
    }
    for value in
        [json!({"pods": "a/b"}), json!({"logMaxFiles": 1.5}), json!({"retention": 5}), json!({"pods": [1]})]
    {
        assert_eq!(read(value.clone()).unwrap_err().code, 6, "{value}");
    }
}

#[test]
fn globs_match_as_a_shell_would() {
    for (pattern, text, matches) in [
        ("*", "", true),
        ("a*", "abc", true),
        ("*c", "abcabc", true),
        ("a*c*e", "abcde", true),
        ("a?c", "abc", true),
        ("a?c", "ac", false),
        ("abc", "abcd", false),
        ("abcd", "abc", false),
        ("**", "x", true),
    ] {
        assert_eq!(glob(pattern.as_bytes(), text.as_bytes()), matches, "{pattern} {text}");
    }
    let hostile = "a*".repeat(100) + "b";
    assert!(!glob(hostile.as_bytes(), "a".repeat(253).as_bytes()));
}
