//! Removing everything from the host again, in an order in which nothing that remains needs what is gone.
//!
//! Once our conflist is gone, containerd calls DEL with the conflist that is there then, so what a sandbox
//! leaves is ended here: by looking whether its network namespace is gone. CRI-O calls DEL with the
//! conflist of the ADD, which needs the plugin.
//!
//! Must never remove what the DEL of a running pod needs, unless it is forced to, and never end what a
//! sandbox has that may live.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use crate::agent::install::{error::InstallError, place, rivals, settings::InstallSettings};
use crate::agent::snapshot::{Netns, Snapshot};
use crate::node::end::{UpdateFirst, end_attachment};
use crate::node::list;
use crate::store::{NodeTime, RealDisk, Record, Store};

/// How long to wait for the store's lock: every process that has it needs a fraction of this.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// Which conflist the DEL of a running pod is called with, once ours is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DelConflist {
    /// That of its ADD, or it is not known: the plugin stays as long as pods have addresses.
    #[default]
    OfItsAdd,
    /// The one that is there then: no DEL comes to the plugin.
    OfNow,
}

impl DelConflist {
    /// By `status.nodeInfo.containerRuntimeVersion` of a Node.
    pub(crate) fn of_runtime(version: &str) -> Self {
        if version.starts_with("containerd://") { Self::OfNow } else { Self::OfItsAdd }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removed {
    pub removed: Vec<PathBuf>,
    /// What was ended because its sandbox is gone: who had which addresses.
    pub ended: Vec<String>,
    /// What stays, because pods of this node need it for their DEL.
    pub kept: Vec<PathBuf>,
    /// How many addresses of live pods are in the store.
    pub attached: usize,
}

impl std::fmt::Display for Removed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for what in &self.ended {
            writeln!(f, "ended {what}: its sandbox is gone")?;
        }
        for path in &self.removed {
            writeln!(f, "removed {}", path.display())?;
        }
        for path in &self.kept {
            let (path, attached) = (path.display(), self.attached);
            writeln!(
                f,
                "kept {path}: the DEL of pods that have {attached} addresses may need it. Delete those pods and \
                 run uninstall again, or use --force"
            )?;
        }
        if self.removed.is_empty() && self.kept.is_empty() {
            writeln!(f, "nothing of ours is installed")?;
        }
        Ok(())
    }
}

/// Removes the conflist, then the plugin's credentials, then the plugin. The last two stay while the store
/// knows pods that have addresses and whose DEL may come, unless `force`. Nothing of the store is removed;
/// what sandboxes that are gone have left is ended, with a pending update for the API server.
/// Errors: a file cannot be removed, or the store cannot be read or written.
pub fn uninstall(settings: &InstallSettings, force: bool, del: DelConflist) -> Result<Removed, InstallError> {
    let mut done = Removed::default();
    let conflist = settings.conflist_path();
    let mut is_first = false;
    for path in [conflist.clone(), rivals::renamed(&conflist)] {
        is_first |= remove(path, &mut done)?;
    }
    if !force {
        done.ended = end_what_is_gone(settings)?;
        done.attached = attached(settings)?.len();
    }
    // The runtime may take a moment until it has seen that the conflist is gone.
    let may_come = match del {
        DelConflist::OfItsAdd => true,
        DelConflist::OfNow => is_first,
    };
    let stays = done.attached > 0 && may_come;
    if !stays {
        remove(settings.bypass_path(), &mut done)?;
    }
    let kubeconfig = settings.plugin_service_account.is_some().then(|| settings.kubeconfig_path());
    for path in kubeconfig.into_iter().chain([settings.plugin_path()]) {
        if !stays {
            remove(path, &mut done)?;
        } else if place::metadata(&path)?.is_some() {
            done.kept.push(path);
        }
    }
    // The folder of the credentials goes if nothing else is in it.
    if let Some(folder) = settings.kubeconfig_path().parent() {
        let _ = fs::remove_dir(folder);
    }
    Ok(done)
}

/// What of ours is on the host.
/// Errors: it cannot be looked at.
pub fn installed(settings: &InstallSettings) -> Result<Vec<PathBuf>, InstallError> {
    let conflist = settings.conflist_path();
    let renamed = rivals::renamed(&conflist);
    let kubeconfig = settings.plugin_service_account.is_some().then(|| settings.kubeconfig_path());
    let all =
        [conflist, renamed, settings.bypass_path(), settings.plugin_path()].into_iter().chain(kubeconfig);
    let mut found = Vec::new();
    for path in all {
        if place::metadata(&path)?.is_some() {
            found.push(path);
        }
    }
    Ok(found)
}

fn remove(path: PathBuf, done: &mut Removed) -> Result<bool, InstallError> {
    let was_there = place::remove(&path)?;
    if was_there {
        done.removed.push(path);
    }
    Ok(was_there)
}

fn store(settings: &InstallSettings) -> Result<Store<RealDisk>, InstallError> {
    let now = NodeTime::now(&settings.boot_id_path())?;
    let data_dir = settings.on_host(&settings.data_dir);
    Ok(Store::new(RealDisk, &data_dir, &settings.network, now, LOCK_PATIENCE))
}

/// The records of the network that a container has.
pub(crate) fn attached(settings: &InstallSettings) -> Result<Vec<Record>, InstallError> {
    let store = store(settings)?;
    let files = store.address_files()?.into_iter().filter(|found| !found.is_host_local);
    let records = files.filter_map(|found| found.record);
    Ok(records.filter(|record| record.is_attached(store.now())).collect())
}

/// Ends what the sandboxes have whose network namespaces are gone, as their DEL would have.
fn end_what_is_gone(settings: &InstallSettings) -> Result<Vec<String>, InstallError> {
    let store = store(settings)?;
    let snapshot = Snapshot::take(&store, |path| settings.on_host(path))?;
    let mut ended = Vec::new();
    for gone in snapshot.attached().filter(|found| found.netns == Netns::Gone) {
        let mut locked = store.lock()?;
        let stored = locked.find_by_attachment(&gone.record.attachment)?;
        let Some(stored) = stored.filter(|stored| stored.record == gone.record) else { continue };
        end_attachment(&mut locked, &stored, store.now(), UpdateFirst::IfBound)?;
        locked.commit()?;
        ended.push(format!("{} of {}", list(&gone.record.addresses), gone.record.holder()));
    }
    Ok(ended)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_of_containerd_it_is_known_that_no_del_comes() {
        assert_eq!(DelConflist::of_runtime("containerd://1.6.20"), DelConflist::OfNow);
        for other in ["cri-o://1.30.0", "docker://27.0.0", ""] {
            assert_eq!(DelConflist::of_runtime(other), DelConflist::OfItsAdd, "{other}");
        }
    }
}
