//! The mark of an address that Cilium may give to anybody: it stands unowned in the pool of the node's CiliumNode. As
//! long as the mark stands, nobody on this node can reserve the address for a claimant.

use std::net::IpAddr;

use crate::names::{Attachment, ContainerId, IfName};
use crate::store::{Keep, NodeTime, Phase, Record};

/// What stands in the place of a container. No runtime gives such a short id.
const OFFERED: &str = "offered";

impl Record {
    /// The mark of an address that is about to be offered.
    ///
    /// # Errors
    /// Never, as long as the marks are sound names; a sentence then.
    pub fn offered(address: IpAddr, now: &NodeTime) -> Result<Self, String> {
        let attachment =
            Attachment { container: ContainerId::new(OFFERED)?, interface: IfName::new("cilium")? };
        Ok(Self {
            addresses: vec![address],
            attachment,
            phase: Phase::Kept,
            netns: None,
            pod: None,
            keep: Keep::Forever,
            binding: None,
            since: now.clone(),
        })
    }

    /// Whether this is such a mark.
    pub fn is_unowned(&self) -> bool {
        self.phase == Phase::Kept
            && self.pod.is_none()
            && self.binding.is_none()
            && self.attachment.container.as_str() == OFFERED
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::NetworkName;
    use crate::store::{RealDisk, Store};

    #[test]
    fn an_unowned_record_outlasts_a_reboot_and_reserves_its_address() {
        let dir = tempfile::tempdir().unwrap();
        let store = |boot: &str| {
            let network = NetworkName::new("net").unwrap();
            Store::new(RealDisk, dir.path(), &network, NodeTime::new(1, 1, boot), std::time::Duration::ZERO)
        };
        let set = crate::alloc::RangeSet::new(vec![
            crate::alloc::Range::from_spec(&crate::alloc::range::RangeSpec {
                subnet: "10.0.0.0/30",
                ..Default::default()
            })
            .unwrap(),
        ])
        .unwrap();
        let first = store("a");
        let mut locked = first.lock().unwrap();
        let address = locked.next_free(0, &set).unwrap().unwrap();
        locked.put(&Record::offered(address, first.now()).unwrap(), None).unwrap();
        locked.commit().unwrap();
        let later = store("b");
        let mut locked = later.lock().unwrap();
        assert_eq!(locked.next_free(0, &set).unwrap(), None, "the only address is offered");
        assert!(locked.at(address).unwrap().unwrap().record.is_unowned());
        drop(locked);
        assert!(later.verify().unwrap().iter().all(|finding| !finding.wrong));
    }
}
