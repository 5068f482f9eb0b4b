//! The bitmaps of taken addresses on the disk, one file per group. Derived from the records: a wrong bit
//! costs a second look or a repair, never an address given out twice, because placing the record decides.

use std::collections::btree_map::{BTreeMap, Entry};
use std::fs::File;
use std::io;
use std::net::IpAddr;

use crate::alloc::{BITMAP_BYTES, Bitmap, Group, position};
use crate::store::error::cannot;
use crate::store::files::{self, first_bytes, if_there, open_plain};
use crate::store::{BITMAPS, Disk, Result, Store};

/// The bitmaps that this process has looked at.
#[derive(Debug, Default)]
pub(crate) struct Bitmaps {
    groups: BTreeMap<Group, (Option<File>, Bitmap)>,
}

impl Bitmaps {
    /// The bitmap of a group, none where it has no file and so no address is taken.
    pub(crate) fn bitmap<D: Disk>(&mut self, store: &Store<D>, group: Group) -> Result<Option<Bitmap>> {
        let (file, bitmap) = self.entry(store, group)?;
        Ok(file.as_ref().map(|_| bitmap.clone()))
    }

    pub(crate) fn is_marked<D: Disk>(&mut self, store: &Store<D>, address: IpAddr) -> Result<bool> {
        let (_, bitmap) = self.entry(store, Group::of(address))?;
        Ok(bitmap.get(position(address)))
    }

    /// Marks an address, on the disk too.
    pub(crate) fn mark<D: Disk>(&mut self, store: &Store<D>, address: IpAddr, taken: bool) -> Result<()> {
        let (group, at) = (Group::of(address), position(address));
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
                let new = file.insert(new);
                store.disk.write_at(new, offset as u64, byte)
            }),
        };
        if written.is_err() {
            bitmap.set(at, !taken);
        }
        written.map_err(cannot("mark an address in", &path))
    }

    fn entry<D: Disk>(&mut self, store: &Store<D>, group: Group) -> Result<&mut (Option<File>, Bitmap)> {
        match self.groups.entry(group) {
            Entry::Occupied(known) => Ok(known.into_mut()),
            Entry::Vacant(vacant) => {
                let path = store.path(&name(group));
                let file = if_there(open_plain(&path, true)).map_err(cannot("open", &path))?;
                let bitmap = file.as_ref().map(contents).transpose().map_err(cannot("read", &path))?;
                Ok(vacant.insert((file, bitmap.unwrap_or_default())))
            }
        }
    }
}

pub(crate) fn groups<D: Disk>(store: &Store<D>) -> Result<Vec<Group>> {
    let names = files::names(&store.path(BITMAPS))?;
    Ok(names.into_iter().filter_map(|(name, _)| name.parse().ok().map(Group::of)).collect())
}

fn name(group: Group) -> String {
    format!("{BITMAPS}/{}", group.first())
}

/// A group's bitmap, read without the lock.
pub(crate) fn read_unlocked<D: Disk>(store: &Store<D>, group: Group) -> Result<Option<Bitmap>> {
    let path = store.path(&name(group));
    if_there(open_plain(&path, false).and_then(|file| contents(&file))).map_err(cannot("read", &path))
}

fn contents(file: &File) -> io::Result<Bitmap> {
    first_bytes(file, BITMAP_BYTES).map(Bitmap::from_bytes)
}
