//! The record of an address that is an unowned entry in the pool of the node's CiliumNode, so that Cilium may
//! give it to any pod. As long as it exists, nothing on this node can reserve the address for a claimant.

use std::net::IpAddr;

use crate::names::Attachment;
use crate::policy::lifetime::retention::Retention;
use crate::store::{NodeTime, Record, RecordState};

impl Record {
    /// The record of an address that is about to be published without an owner.
    pub fn unowned(address: IpAddr, now: &NodeTime) -> Self {
        Self {
            state: RecordState::Unowned,
            retention: Some(Retention::FOREVER),
            ..Self::attached(vec![address], Attachment::of_cilium(), now)
        }
    }

    pub fn is_unowned(&self) -> bool {
        self.state == RecordState::Unowned
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
        locked.put(&Record::unowned(address, first.now()), None).unwrap();
        locked.commit().unwrap();
        let later = store("b");
        let mut locked = later.lock().unwrap();
        assert_eq!(locked.next_free(0, &set).unwrap(), None, "the only address is unowned");
        assert!(locked.find_by_address(address).unwrap().unwrap().record.is_unowned());
        drop(locked);
        assert!(later.verify().unwrap().iter().all(|finding| !finding.wrong));
    }
}
