//! Which flags contradict each other, and what the duties get from them.

use thiserror::Error;

use crate::cluster::api::lease::{BadLeaseTimes, LeaseTimes};
use crate::cluster::objects::{BlockSize, IPPool, IPPoolSpec, PoolUse};
use crate::cluster::protocol::faults::RepairTimes;
use crate::controller::flags::{ControllerSettings, DurationArg, WATERMARK};
use crate::policy::lifetime::recycle::Proof;
use crate::policy::lifetime::retention::{Keep, LONGEST_TTL, OnScaleDown, Retention};

pub(crate) const CLUSTER_POOL: &str = "cluster-pool";
/// Below the priority of any IPPool.
const LOWEST_PRIORITY: i32 = -1001;

/// Settings that are not accepted, with the names of the flags to correct.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct SettingsError(pub String);

impl ControllerSettings {
    /// Checks what flags say together.
    pub fn check(&self) -> Result<(), SettingsError> {
        let refuse = |text: String| Err(SettingsError(text));
        if self.ip_rate_num > self.max_allocated_ip {
            return refuse(format!(
                "--ip-rate-num {} is more than --max-allocated-ip {}; so many can never be free",
                self.ip_rate_num, self.max_allocated_ip
            ));
        }
        if self.enable_static_pod_ipv6 && !self.enable_ipv6 {
            return refuse(
                "--enable-static-pod-ipv6=true contradicts --enable-ipv6=false; set both or neither".into(),
            );
        }
        self.selection.check().map_err(SettingsError)?;
        self.server.certificate().map_err(|error| SettingsError(error.to_string()))?;
        self.check_pool()?;
        self.check_retention()?;
        let lease = format!("--leader-election-lease-duration {}", self.leader_election_lease_duration);
        let renew = format!("--leader-election-renew-deadline {}", self.leader_election_renew_deadline);
        let retry = format!("--leader-election-retry-period {}", self.leader_election_retry_period);
        match self.lease_times().check() {
            Ok(_) => Ok(()),
            Err(BadLeaseTimes::RenewTooLong { .. }) => {
                refuse(format!("{renew} must be shorter than {lease}"))
            }
            Err(BadLeaseTimes::RetryTooLong { .. }) => {
                refuse(format!("{retry} must be more than zero and shorter than {renew}"))
            }
            Err(BadLeaseTimes::TooShort(_)) => refuse(format!("{lease} must be at least 1s")),
        }
    }

    /// Where the Leases are that lock blocks.
    pub fn block_namespace(&self) -> &str {
        self.block_namespace.as_deref().unwrap_or(&self.leader_election_namespace)
    }

    fn check_pool(&self) -> Result<(), SettingsError> {
        for (family, range, mask) in [
            ("ipv4", self.cluster_pool_ipv4_cidr, self.cluster_pool_ipv4_mask_size),
            ("ipv6", self.cluster_pool_ipv6_cidr, self.cluster_pool_ipv6_mask_size),
        ] {
            let Some(range) = range.0 else { continue };
            if mask < range.prefix_len() {
                let least = range.prefix_len();
                return Err(SettingsError(format!(
                    "--cluster-pool-{family}-mask-size {mask} is a larger block than \
                     --cluster-pool-{family}-cidr {range}; write a mask of {least} or more"
                )));
            }
        }
        Ok(())
    }

    fn check_retention(&self) -> Result<(), SettingsError> {
        let keep_ttl = self.retention == Keep::Ttl;
        let scale_down_ttl = self.on_scale_down == OnScaleDown::Ttl;
        for (word, is_ttl, time, given) in [
            ("--retention", keep_ttl, "--retention-ttl", self.retention_ttl),
            ("--on-scale-down", scale_down_ttl, "--scale-down-ttl", self.scale_down_ttl),
        ] {
            let why = match given {
                None if is_ttl => format!("{word} TTL needs {time}"),
                Some(given) if !is_ttl => format!("{time} {given} contradicts {word}, which is not TTL"),
                Some(given) if !(1..=LONGEST_TTL).contains(&given.seconds()) => {
                    format!("{time} {given} must be between one second and ten years")
                }
                _ => continue,
            };
            return Err(SettingsError(why));
        }
        Ok(())
    }

    /// What was set and has no effect, for the log.
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        if self.cluster_pool_ipv6_cidr.0.is_some() && !self.enable_ipv6 {
            remarks.push("--cluster-pool-ipv6-cidr has no effect with --enable-ipv6=false".to_owned());
        }
        let here = [
            ("--ip-rate-num", "--ipRateNum", self.ip_rate_num != WATERMARK),
            ("--max-allocated-ip", "--maxAllocatedIP", self.max_allocated_ip != WATERMARK),
        ];
        for (flag, older, _) in here.into_iter().filter(|(_, _, is_set)| *is_set) {
            remarks.push(format!(
                "{flag} ({older}) has no effect here: a node's pool is filled by its agent; give the flag, \
                 under either spelling, to sticky-ipam-agent"
            ));
        }
        if !self.enable_leader_election {
            let remark = "--enable-leader-election=false: run one replica only; two do no harm, but their \
                          writes conflict";
            remarks.push(remark.to_owned());
        }
        remarks
    }

    /// The retention of an address whose pod and namespace do not say otherwise.
    pub fn default_retention(&self) -> Retention {
        let seconds = |time: Option<DurationArg>| time.and_then(|time| u32::try_from(time.seconds()).ok());
        Retention {
            keep: self.retention,
            ttl_seconds: seconds(self.retention_ttl),
            on_scale_down: self.on_scale_down,
            scale_down_ttl_seconds: seconds(self.scale_down_ttl),
        }
    }

    pub fn proof(&self) -> Proof {
        Proof {
            gap_seconds: self.proof_gap.seconds(),
            inherit: self.inherit,
            owner_grace_seconds: self.owner_grace.seconds(),
        }
    }

    pub fn times(&self) -> RepairTimes {
        RepairTimes { orphan: self.orphan_after.seconds(), quarantine: self.quarantine.seconds() }
    }

    pub fn lease_times(&self) -> LeaseTimes {
        LeaseTimes {
            lease_duration: self.leader_election_lease_duration.0,
            renew_deadline: self.leader_election_renew_deadline.0,
            retry_period: self.leader_election_retry_period.0,
        }
    }

    /// The pool of the cluster-pool flags, behind every IPPool; none if Cilium's operator hands out the
    /// blocks, or no range was given.
    pub fn cluster_pool(&self) -> Option<IPPool> {
        self.cilium_ipam.blocks_go_to()?;
        let v6 = self.cluster_pool_ipv6_cidr.0.filter(|_| self.enable_ipv6);
        let (ipv4, ipv6) = (self.cluster_pool_ipv4_mask_size, self.cluster_pool_ipv6_mask_size);
        let spec = IPPoolSpec {
            cidrs: self.cluster_pool_ipv4_cidr.0.into_iter().chain(v6).collect(),
            purpose: PoolUse::NodeBlocks,
            block_size: BlockSize { ipv4, ipv6 },
            node_selector: None,
            priority: LOWEST_PRIORITY,
            excluded: Vec::new(),
        };
        (!spec.cidrs.is_empty()).then(|| IPPool::new(CLUSTER_POOL, spec))
    }
}
