//! The bitmaps of taken addresses on the disk, one file per group. Derived from the records: a bit that is
//! wrong costs a second look or a repair, never an address given out twice, because placing the record
//! decides.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::IpAddr;

use crate::alloc::{Bitmap, Group, position};
use crate::store::{BITMAPS, Disk, Store, StoreError, first_bytes, open_plain};

/// The bitmaps that this process has looked at.
#[derive(Debug, Default)]
pub(crate) struct Bitmaps {
    groups: BTreeMap<Group, (Option<File>, Bitmap)>,
}

impl Bitmaps {
    /// The bitmap of a group, none where it has no file and so no address is taken.
    pub(crate) fn bitmap<D: Disk>(
        &mut self,
        store: &Store<D>,
        group: Group,
    ) -> Result<Option<Bitmap>, StoreError> {
        let (file, bitmap) = self.entry(store, group)?;
        Ok(file.as_ref().map(|_| bitmap.clone()))
    }

    /// Whether an address is marked as taken.
    pub(crate) fn is_marked<D: Disk>(
        &mut self,
        store: &Store<D>,
        address: IpAddr,
    ) -> Result<bool, StoreError> {
        let (_, bitmap) = self.entry(store, Group::of(address))?;
        Ok(bitmap.get(position(address)))
    }

    /// Marks an address, on the disk too.
    pub(crate) fn mark<D: Disk>(
        &mut self,
        store: &Store<D>,
        address: IpAddr,
        taken: bool,
    ) -> Result<(), StoreError> {
        let group = Group::of(address);
        let at = position(address);
        let path = store.path(&name(group));
        let (file, bitmap) = self.entry(store, group)?;
        if bitmap.get(at) == taken {
            return Ok(());
        }
        bitmap.set(at, taken);
        let offset = usize::from(at / 8);
        let byte = &bitmap.as_bytes()[offset..=offset];
        let written = match file {
            Some(file) => store.disk.write_at(file, offset as u64, byte),
            None => store.disk.create(&path, b"").and_then(|new| {
                let written = store.disk.write_at(&new, offset as u64, byte);
                *file = Some(new);
                written
            }),
        };
        if written.is_err() {
            bitmap.set(at, !taken);
        }
        written.map_err(|source| StoreError::io("mark an address in", &path, source))
    }

    fn entry<D: Disk>(
        &mut self,
        store: &Store<D>,
        group: Group,
    ) -> Result<&mut (Option<File>, Bitmap), StoreError> {
        use std::collections::btree_map::Entry;
        match self.groups.entry(group) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(vacant) => Ok(vacant.insert(read(store, group)?)),
        }
    }
}

pub(crate) fn groups<D: Disk>(store: &Store<D>) -> Result<Vec<Group>, StoreError> {
    let names = crate::store::files::names(&store.path(BITMAPS))?;
    Ok(names.into_iter().filter_map(|(name, _)| name.parse().ok().map(Group::of)).collect())
}

fn name(group: Group) -> String {
    format!("{BITMAPS}/{}", group.first())
}

fn read<D: Disk>(store: &Store<D>, group: Group) -> Result<(Option<File>, Bitmap), StoreError> {
    let path = store.path(&name(group));
    let file = match open_plain(&path, true) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((None, Bitmap::default())),
        Err(source) => return Err(StoreError::io("open", &path, source)),
    };
    let bitmap = contents(&file).map_err(|source| StoreError::io("read", &path, source))?;
    Ok((Some(file), bitmap))
}

/// A group's bitmap, read without the lock.
pub(crate) fn read_unlocked<D: Disk>(store: &Store<D>, group: Group) -> Result<Option<Bitmap>, StoreError> {
    let path = store.path(&name(group));
    match open_plain(&path, false).and_then(|file| contents(&file)) {
        Ok(bitmap) => Ok(Some(bitmap)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StoreError::io("read", &path, source)),
    }
}

fn contents(file: &File) -> io::Result<Bitmap> {
    first_bytes(file, crate::alloc::BITMAP_BYTES).map(Bitmap::from_bytes)
}
