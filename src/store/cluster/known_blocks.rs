//! The blocks that the node's CiliumNode had last. A CiliumNode that is created again names none until it
//! is filled: then these say what is home. Must never be used where the CiliumNode names blocks.

use ipnet::IpNet;

use crate::store::error::cannot;
use crate::store::files::read_file;
use crate::store::{Disk, KNOWN_BLOCKS, LockedStore, Result, Store};

/// The file before it has its name.
const NEW: &str = ".sticky/new-blocks";

impl<D: Disk> Store<D> {
    /// None if no blocks were known yet, or if the file is torn.
    pub fn known_blocks(&self) -> Result<Vec<IpNet>> {
        let found = read_file("read", &self.path(KNOWN_BLOCKS))?;
        Ok(found.and_then(|(bytes, _)| serde_json::from_slice(&bytes).ok()).unwrap_or_default())
    }
}

impl<D: Disk> LockedStore<'_, D> {
    /// Keeps the blocks, whole and on stable storage.
    pub fn keep_blocks(&mut self, blocks: &[IpNet]) -> Result<()> {
        let (new, path) = (self.store.path(NEW), self.store.path(KNOWN_BLOCKS));
        let failed = cannot("write", &path);
        let bytes = serde_json::to_vec(blocks).map_err(|error| failed(error.into()))?;
        let file = self.store.create_replacing(&new, &bytes).map_err(&failed)?;
        self.store.disk.sync(&file).and_then(|()| self.store.disk.rename(&new, &path)).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::NetworkName;
    use crate::store::{NodeTime, RealDisk};

    #[test]
    fn known_blocks_outlast_a_reboot_and_a_torn_file_says_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = |boot: &str| {
            let network = NetworkName::new("net").unwrap();
            Store::new(RealDisk, dir.path(), &network, NodeTime::new(1, 1, boot), std::time::Duration::ZERO)
        };
        let blocks: Vec<IpNet> = ["10.0.0.0/24", "fd00::/64"].map(|block| block.parse().unwrap()).into();
        assert_eq!(store("a").known_blocks().unwrap(), []);
        for kept in [&blocks[..1], &blocks] {
            store("a").lock().unwrap().keep_blocks(kept).unwrap();
            assert_eq!(store("a").known_blocks().unwrap(), kept);
        }
        drop(store("b").lock().unwrap());
        assert_eq!(store("b").known_blocks().unwrap(), blocks);
        assert!(store("b").verify().unwrap().iter().all(|finding| !finding.wrong));
        std::fs::write(store("b").root().join(KNOWN_BLOCKS), "[\"10.0").unwrap();
        assert_eq!(store("b").known_blocks().unwrap(), []);
    }
}
