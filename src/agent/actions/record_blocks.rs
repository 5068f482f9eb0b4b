//! `RecordBlocks`: the store keeps the blocks of the CiliumNode, for a time in which it names none.
//!
//! Must never be performed for a CiliumNode without blocks.

use ipnet::IpNet;

use super::{ActionContext, Performed, done};
use crate::store::Disk;

pub(super) fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>, blocks: &[IpNet]) -> Performed {
    let store = context.store()?;
    let mut locked = store.lock()?;
    locked.keep_blocks(blocks)?;
    locked.commit()?;
    let blocks: Vec<String> = blocks.iter().map(ToString::to_string).collect();
    done(format!("this node's blocks are {}", blocks.join(", ")))
}
