//! What the settings take and refuse. The three configurations and the Deployment are those of the guide
//! whose flags are taken over.

use super::*;
use crate::policy::lifetime::retention::{Keep, OnScaleDown};
use crate::policy::selection::selector::Selector;
use crate::runtime::log::LogFormat;
use clap::CommandFactory;
use std::ffi::OsString;
use std::time::Duration;
use tracing_subscriber::filter::LevelFilter;

fn arguments(given: &[&str]) -> Vec<OsString> {
    std::iter::once("sticky-ipam-controller").chain(given.iter().copied()).map(OsString::from).collect()
}

fn parse(given: &[&str]) -> Result<ControllerSettings, String> {
    match load(&arguments(given)) {
        Ok(loaded) => Ok(loaded.line.settings),
        Err(LoadError::CommandLine(error)) => Err(error.to_string()),
        Err(LoadError::Settings(refused)) => Err(refused.to_string()),
    }
}

#[test]
fn the_definitions_of_the_flags_are_sound() {
    ControllerCommandLine::command().debug_assert();
}

#[test]
fn without_any_flag_the_defaults_are_those_of_the_guide() {
    let settings = parse(&[]).unwrap();
    assert_eq!(
        settings.selection.label_selector,
        Selector::parse(r#"{"matchLabels":{"noStatic":"true"}}"#).ok()
    );
    assert_eq!((settings.ip_rate_num, settings.max_allocated_ip), (255, 255));
    assert!(
        !settings.enable_ipv6
            && !settings.enable_static_pod_ipv6
            && settings.selection.exclude_prefixes.is_empty()
    );
    assert!(settings.enable_leader_election);
    assert_eq!(settings.leader_election_id, "cilium-ipam-leader");
    assert_eq!(settings.lease_times(), crate::cluster::api::lease::LeaseTimes::default());
    assert_eq!(settings.cep_termination_timeout.0, Duration::from_secs(30 * 60));
    assert_eq!((settings.log.log_level, settings.log.log_format), (LevelFilter::INFO, LogFormat::Text));
    let pool = settings.cluster_pool().unwrap();
    assert_eq!(pool.spec.cidrs, ["10.0.0.0/8".parse().unwrap()]);
    assert_eq!(pool.spec.block_size.ipv4, 24);
}

#[test]
fn the_deployment_and_the_three_examples_of_the_guide_run_as_they_stand() {
    let deployment = parse(&[
        r#"--labelSector={"matchLabels":{"app":"fixed-ip-pod"}}"#,
        "--ipRateNum=10",
        "--maxAllocatedIP=100",
        "--enableIPv6=false",
        "--cluster-pool-ipv4-cidr=10.240.0.0/16",
        "--cluster-pool-ipv4-mask-size=24",
        "--enable-leader-election=true",
    ])
    .unwrap();
    assert_eq!((deployment.ip_rate_num, deployment.max_allocated_ip), (10, 100));
    let small = parse(&[
        r#"--labelSector={"matchLabels":{"fixed-ip":"true"}}"#,
        "--ipRateNum=10",
        "--maxAllocatedIP=50",
        "--cluster-pool-ipv4-cidr=192.168.0.0/16",
        "--cluster-pool-ipv4-mask-size=24",
    ])
    .unwrap();
    assert_eq!(small.cluster_pool().unwrap().spec.cidrs, ["192.168.0.0/16".parse().unwrap()]);
    let dual = parse(&[
        r#"--labelSector={"matchLabels":{"app":"database"}}"#,
        "--ipRateNum=20",
        "--maxAllocatedIP=200",
        "--enableIPv6=true",
        "--enableStaticPodIPv6=true",
        "--cluster-pool-ipv4-cidr=10.240.0.0/16",
        "--cluster-pool-ipv4-mask-size=24",
        "--cluster-pool-ipv6-cidr=fd00:240::/120",
        "--cluster-pool-ipv6-mask-size=124",
    ])
    .unwrap();
    let pool = dual.cluster_pool().unwrap();
    assert_eq!((pool.spec.cidrs.len(), pool.spec.block_size.ipv6), (2, 124));
    assert!(dual.enable_static_pod_ipv6);
    let excluding = parse(&[
        r#"--labelSector={"matchLabels":{"env":"production"}}"#,
        "--excludeDbbranchPrefixs=test-,staging-",
    ])
    .unwrap();
    assert_eq!(excluding.selection.rules().exclude_prefixes, ["test-", "staging-"]);
    let expressions =
        r#"--labelSector={"matchExpressions":[{"key":"fixed-ip","operator":"In","values":["true"]}]}"#;
    parse(&[expressions, "--logLevel=6", "--cepTerminationTimeout=45m"]).unwrap();
}

#[test]
fn every_flag_and_variable_of_the_guide_is_known_by_its_own_spelling() {
    let command = ControllerCommandLine::command();
    let knows = |flag: &str| {
        command.get_arguments().any(|argument| {
            argument.get_long() == Some(flag)
                || argument.get_all_aliases().is_some_and(|aliases| aliases.contains(&flag))
        })
    };
    for flag in [
        "labelSector",
        "ipRateNum",
        "maxAllocatedIP",
        "enableIPv6",
        "enableStaticPodIPv6",
        "excludeDbbranchPrefixs",
        "cluster-pool-ipv4-cidr",
        "cluster-pool-ipv4-mask-size",
        "cluster-pool-ipv6-cidr",
        "cluster-pool-ipv6-mask-size",
        "enable-leader-election",
        "leader-election-namespace",
        "leader-election-id",
        "leader-election-lease-duration",
        "leader-election-renew-deadline",
        "leader-election-retry-period",
        "cepTerminationTimeout",
        "logLevel",
    ] {
        assert!(knows(flag), "--{flag}");
    }
    let variables: Vec<_> =
        command.get_arguments().filter_map(|argument| argument.get_env()?.to_str()).collect();
    for variable in [
        "KUBECONFIG",
        "POD_NAMESPACE",
        "CLUSTER_POOL_IPV4_CIDR",
        "CLUSTER_POOL_IPV4_MASK_SIZE",
        "CLUSTER_POOL_IPV6_CIDR",
        "CLUSTER_POOL_IPV6_MASK_SIZE",
    ] {
        assert!(variables.contains(&variable), "{variable}");
    }
}

#[test]
fn every_mistake_names_the_flag_and_the_value() {
    for (given, parts) in [
        (&["--labelSector=app=db"][..], ["--label-selector", "app=db"]),
        (&[r#"--label-selector={"matchLabels":{"a b":"c"}}"#], ["--label-selector", "a b"]),
        (&["--cluster-pool-ipv4-cidr=10.0.0.1/8"], ["--cluster-pool-ipv4-cidr", "10.0.0.0/8"]),
        (&["--cluster-pool-ipv4-cidr=fd00::/64"], ["--cluster-pool-ipv4-cidr", "not IPv4"]),
        (&["--cluster-pool-ipv4-mask-size=33"], ["--cluster-pool-ipv4-mask-size", "33"]),
        (&["--ipRateNum=-1"], ["--ip-rate-num", "-1"]),
        (&["--logLevel=7"], ["--log-level", "7"]),
        (&["--quarantine=soon"], ["--quarantine", "soon"]),
        (&["--retention=Never"], ["--retention", "Never"]),
        (&["--enableIPv6=maybe"], ["--enable-ipv6", "maybe"]),
        (&["--metrics-address=here"], ["--metrics-address", "here"]),
        (&["--leader-election-id=Not_A_Name"], ["--leader-election-id", "Not_A_Name"]),
        (&["--no-such-flag"], ["--no-such-flag", "unexpected"]),
    ] {
        let error = parse(given).unwrap_err();
        assert!(parts.iter().all(|part| error.contains(part)), "{given:?}: {error}");
    }
}

#[test]
fn settings_that_contradict_each_other_are_refused_with_both_names() {
    for (given, parts) in [
        (&["--ipRateNum=9", "--maxAllocatedIP=8"][..], ["--ip-rate-num 9", "--max-allocated-ip 8"]),
        (&["--enableStaticPodIPv6=true"], ["--enable-static-pod-ipv6", "--enable-ipv6"]),
        (
            &["--cluster-pool-ipv4-cidr=10.1.0.0/26"],
            ["--cluster-pool-ipv4-mask-size 24", "--cluster-pool-ipv4-cidr 10.1.0.0/26"],
        ),
        (&["--tls-cert-file=/x"], ["--tls-cert-file", "--tls-key-file"]),
        (&["--tls-key-file=/x"], ["--tls-key-file", "--tls-cert-file"]),
        (&["--retention=TTL"], ["--retention TTL", "--retention-ttl"]),
        (&["--retention-ttl=1h"], ["--retention-ttl", "--retention"]),
        (&["--on-scale-down=TTL"], ["--on-scale-down TTL", "--scale-down-ttl"]),
        (&["--scale-down-ttl=1h"], ["--scale-down-ttl", "--on-scale-down"]),
        (
            &["--leader-election-renew-deadline=15s"],
            ["--leader-election-renew-deadline 15s", "--leader-election-lease-duration 15s"],
        ),
        (
            &["--leader-election-retry-period=10s"],
            ["--leader-election-retry-period 10s", "--leader-election-renew-deadline 10s"],
        ),
    ] {
        let error = parse(given).unwrap_err();
        assert!(parts.iter().all(|part| error.contains(part)), "{given:?}: {error}");
    }
}

#[test]
fn retention_flags_become_the_default_of_new_bindings() {
    let settings = parse(&["--retention=TTL", "--retention-ttl=2h", "--on-scale-down=release"]).unwrap();
    let retention = settings.default_retention();
    assert_eq!((retention.keep, retention.ttl_seconds), (Keep::Ttl, Some(7200)));
    assert_eq!(retention.on_scale_down, OnScaleDown::Release);
}

#[test]
fn a_file_gives_what_flags_do_not_and_its_mistakes_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("settings.yaml");
    let config = format!("--config={}", path.display());
    let with = |text: &str, more: &[&str]| {
        std::fs::write(&path, text).unwrap();
        parse(&[&[config.as_str()], more].concat())
    };
    let text = "labelSector:\n  matchLabels:\n    app: db\nexclude-prefixes: [test-, tmp-]\nquarantine: \
        1h\nenable-ipv6: true\n";
    let settings = with(text, &["--quarantine=5m"]).unwrap();
    assert_eq!(settings.quarantine.0, Duration::from_secs(300), "a flag wins");
    assert!(settings.enable_ipv6);
    assert_eq!(settings.selection.exclude_prefixes, ["test-", "tmp-"]);
    assert_eq!(settings.selection.label_selector, Selector::parse(r#"{"matchLabels":{"app":"db"}}"#).ok());
    assert!(with("", &[]).is_ok(), "an empty file says nothing");
    for (text, part) in [
        ("quarantin: 1h\n", "quarantin"),
        ("quarantine: soon\n", "soon"),
        ("config: /x\n", "config"),
        ("- a\n", "YAML map"),
        ("retention: TTL\n", "--retention-ttl"),
        ("a: [\n", "YAML map"),
    ] {
        let error = with(text, &[]).unwrap_err();
        assert!(error.contains(part) && error.contains("settings.yaml"), "{text:?}: {error}");
    }
    std::fs::remove_file(&path).unwrap();
    assert!(parse(&[&config]).unwrap_err().contains("settings.yaml"));
}

#[test]
fn a_change_of_the_file_is_noticed_and_a_bad_one_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("settings.yaml");
    let given = arguments(&[&format!("--config={}", path.display())]);
    std::fs::write(&path, "quarantine: 1h\n").unwrap();
    let Ok(LoadedSettings { file: Some((file, text)), .. }) = load(&given) else {
        panic!("it was not loaded")
    };
    assert!(reread(&given, &file, &text).is_none());
    std::fs::write(&path, "quarantine: 2h\n").unwrap();
    assert_eq!(reread(&given, &file, &text), Some(Ok(())));
    std::fs::write(&path, "quarantine: x\n").unwrap();
    assert!(matches!(reread(&given, &file, &text), Some(Err(_))));
}

#[test]
fn help_is_grouped() {
    let help = ControllerCommandLine::command().render_long_help().to_string();
    for group in ["Who is sticky", "How long an address is kept", "Node blocks", "Leader election", "Process"]
    {
        assert!(help.contains(&format!("{group}:")), "{group}");
    }
}

#[test]
fn what_was_set_and_has_no_effect_here_is_remarked_with_where_it_has() {
    let remarks = |given: &[&str]| parse(given).unwrap().remarks();
    assert!(remarks(&[]).is_empty());
    for (given, both) in [
        ("--ipRateNum=10", ["--ip-rate-num", "--ipRateNum"]),
        ("--max-allocated-ip=300", ["--max-allocated-ip", "--maxAllocatedIP"]),
    ] {
        let said = remarks(&[given]);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(both.iter().all(|name| said[0].contains(name)), "{said:?}");
        assert!(said[0].contains("no effect") && said[0].contains("sticky-ipam-agent"), "{said:?}");
    }
    assert_eq!(remarks(&["--ipRateNum=10", "--maxAllocatedIP=100"]).len(), 2);
}
