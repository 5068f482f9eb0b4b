//! A disk that writes down what was done to it, and can tell what a loss of power may leave of it.
//!
//! A directory keeps its changes in their order, and loses any number of the last ones that were not synced.
//! A file that was not synced holds all of its bytes, half of them, or none. A page written in place is old
//! or new.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sticky_ipam::store::{Disk, RealDisk};

type Id = usize;

#[derive(Clone, Debug)]
enum Node {
    Dir {
        /// Every change of a name, in order: what it leads to afterwards.
        changes: Vec<(String, Option<Id>)>,
        synced: usize,
    },
    File {
        bytes: Vec<u8>,
        synced: Option<Vec<u8>>,
    },
}

/// How much of what was not synced is there after the power is back.
#[derive(Clone, Copy, Debug)]
pub struct Leaves {
    /// Of every ten changes of the records' directory, this many.
    pub names: usize,
    /// Of every ten changes of the other directories, this many.
    pub other_names: usize,
    /// Of every ten bytes, this many.
    pub bytes: usize,
}

#[derive(Clone, Debug)]
struct Tree {
    nodes: Vec<Node>,
    by_inode: BTreeMap<u64, Id>,
    /// The tree as it was after each operation, the last one included.
    base: PathBuf,
}

/// Does everything on the real disk, and remembers every state on the way.
#[derive(Debug)]
pub struct Recorder {
    tree: RefCell<Tree>,
    past: RefCell<Vec<Tree>>,
}

impl Recorder {
    /// Of a directory that is there, empty and synced.
    pub fn new(base: &Path) -> Self {
        let root = Node::Dir { changes: Vec::new(), synced: 0 };
        let by_inode = [(fs::metadata(base).unwrap().ino(), 0)].into();
        let tree = Tree { nodes: vec![root], by_inode, base: base.to_owned() };
        Self { past: RefCell::new(vec![tree.clone()]), tree: RefCell::new(tree) }
    }

    /// How many states there are: before each operation, and after the last.
    pub fn states(&self) -> usize {
        self.past.borrow().len()
    }

    /// Makes what a loss of power in this state may leave.
    pub fn leave(&self, state: usize, leaves: Leaves, to: &Path) {
        self.past.borrow()[state].leave(0, leaves, to, &mut BTreeMap::new());
    }

    /// Whether the file is on stable storage, with the name and all directories that lead to it.
    pub fn is_safe(&self, path: &Path) -> bool {
        let tree = self.tree.borrow();
        let mut at = 0;
        for part in path.strip_prefix(&tree.base).unwrap().iter() {
            let Node::Dir { changes, synced } = &tree.nodes[at] else { return false };
            let name = part.to_str().unwrap();
            let last = |changes: &[(String, Option<Id>)]| {
                changes.iter().rev().find(|(changed, _)| changed == name).and_then(|(_, to)| *to)
            };
            match (last(changes), last(&changes[..*synced])) {
                (Some(now), Some(safe)) if now == safe => at = now,
                _ => return false,
            }
        }
        matches!(&tree.nodes[at], Node::File { bytes, synced: Some(safe) } if bytes == safe)
    }

    fn note(&self, change: impl FnOnce(&mut Tree)) {
        let mut tree = self.tree.borrow_mut();
        change(&mut tree);
        self.past.borrow_mut().push(tree.clone());
    }
}

impl Tree {
    fn split(&self, path: &Path) -> Option<(Id, String)> {
        let parts: Vec<_> = path.strip_prefix(&self.base).ok()?.iter().collect();
        let (name, folders) = parts.split_last()?;
        let mut at = 0;
        for part in folders {
            at = self.lookup(at, part.to_str()?)?;
        }
        Some((at, name.to_str()?.to_owned()))
    }

    fn lookup(&self, dir: Id, name: &str) -> Option<Id> {
        let Node::Dir { changes, .. } = &self.nodes[dir] else { return None };
        changes.iter().rev().find(|(changed, _)| changed == name).and_then(|(_, to)| *to)
    }

    fn find(&self, path: &Path) -> Option<Id> {
        let (dir, name) = self.split(path)?;
        self.lookup(dir, &name)
    }

    fn change(&mut self, path: &Path, to: Option<Id>) {
        let Some((dir, name)) = self.split(path) else { return };
        if let Node::Dir { changes, .. } = &mut self.nodes[dir] {
            changes.push((name, to));
        }
    }

    fn add(&mut self, path: &Path, node: Node) {
        let id = self.nodes.len();
        self.nodes.push(node);
        self.by_inode.insert(fs::symlink_metadata(path).unwrap().ino(), id);
        self.change(path, Some(id));
    }

    fn leave(&self, dir: Id, leaves: Leaves, to: &Path, made: &mut BTreeMap<Id, PathBuf>) {
        let Node::Dir { changes, synced } = &self.nodes[dir] else { return };
        let share = if to.ends_with("net") { leaves.names } else { leaves.other_names };
        let there = synced + (changes.len() - synced) * share / 10;
        let names: BTreeMap<&String, Option<Id>> = changes[..there].iter().map(|(n, id)| (n, *id)).collect();
        for (name, id) in names.into_iter().filter_map(|(name, id)| Some((name, id?))) {
            let path = to.join(name);
            match (&self.nodes[id], made.get(&id)) {
                (Node::Dir { .. }, _) => {
                    fs::create_dir(&path).unwrap();
                    self.leave(id, leaves, &path, made);
                }
                (Node::File { .. }, Some(first)) => fs::hard_link(first, &path).unwrap(),
                (Node::File { bytes, synced }, None) => {
                    let torn = &bytes[..bytes.len() * leaves.bytes / 10];
                    fs::write(&path, synced.as_deref().unwrap_or(torn)).unwrap();
                    made.insert(id, path);
                }
            }
        }
    }
}

impl Disk for &Recorder {
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.make_dir(path)?;
        self.note(|tree| tree.add(path, Node::Dir { changes: Vec::new(), synced: 0 }));
        Ok(())
    }

    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<File> {
        let file = RealDisk.create(path, bytes)?;
        self.note(|tree| tree.add(path, Node::File { bytes: bytes.to_vec(), synced: None }));
        Ok(file)
    }

    fn write_at(&self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
        RealDisk.write_at(file, offset, bytes)?;
        let inode = file.metadata()?.ino();
        self.note(|tree| {
            let Some(id) = tree.by_inode.get(&inode).copied() else { return };
            if let Node::File { bytes: all, .. } = &mut tree.nodes[id] {
                let from = usize::try_from(offset).unwrap();
                all.resize(all.len().max(from + bytes.len()), 0);
                all[from..from + bytes.len()].copy_from_slice(bytes);
            }
        });
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.link(from, to)?;
        self.note(|tree| tree.change(to, tree.find(from)));
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.rename(from, to)?;
        self.note(|tree| {
            tree.change(to, tree.find(from));
            tree.change(from, None);
        });
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        RealDisk.remove(path)?;
        self.note(|tree| tree.change(path, None));
        Ok(())
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        let inode = file.metadata()?.ino();
        self.note(|tree| {
            let Some(id) = tree.by_inode.get(&inode).copied() else { return };
            match &mut tree.nodes[id] {
                Node::Dir { changes, synced } => *synced = changes.len(),
                Node::File { bytes, synced } => *synced = Some(bytes.clone()),
            }
        });
        Ok(())
    }
}
