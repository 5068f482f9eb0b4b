//! `RecordUnowned`: the store learns of unowned pool entries that it does not know, so that nothing on this
//! node reserves their addresses.

use std::net::IpAddr;

use super::{ActionContext, Performed, done};
use crate::node::list;
use crate::store::{Disk, Record};

pub(super) fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>, addresses: &[IpAddr]) -> Performed {
    let store = context.store()?;
    let mut locked = store.lock()?;
    let mut recorded = Vec::new();
    for address in addresses {
        if locked.find_by_address(*address)?.is_none() {
            locked.put(&Record::unowned(*address, store.now()), None)?;
            recorded.push(*address);
        }
    }
    locked.commit()?;
    done(format!("Cilium may give {} to any pod", list(&recorded)))
}
