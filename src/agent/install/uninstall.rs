//! Removing everything from the host again, in an order in which nothing that remains needs what is gone.
//!
//! Must never remove what the DEL of a running pod needs, unless it is forced to.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::agent::install::{error::InstallError, place, rivals, settings::InstallSettings};
use crate::cni::config::sticky::DEFAULT_BOOT_ID_FILE;
use crate::store::{NodeTime, RealDisk, Store};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Removed {
    pub removed: Vec<PathBuf>,
    /// What stays, because pods of this node need it for their DEL.
    pub kept: Vec<PathBuf>,
    /// How many addresses of live pods are in the store.
    pub attached: usize,
}

impl std::fmt::Display for Removed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for path in &self.removed {
            writeln!(f, "removed {}", path.display())?;
        }
        for path in &self.kept {
            let (path, attached) = (path.display(), self.attached);
            writeln!(
                f,
                "kept {path}: the DEL of pods that have {attached} addresses needs it. Delete those pods and \
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
/// knows pods that have addresses, unless `force`. The store itself is never touched.
/// Errors: a file cannot be removed, or the store cannot be read.
pub fn uninstall(settings: &InstallSettings, force: bool) -> Result<Removed, InstallError> {
    let mut done = Removed::default();
    let conflist = settings.conflist_path();
    for path in [conflist.clone(), rivals::renamed(&conflist)] {
        remove(path, &mut done)?;
    }
    if !force {
        done.attached = attached(settings)?;
    }
    let kubeconfig = settings.plugin_service_account.is_some().then(|| settings.kubeconfig_path());
    if done.attached == 0 {
        remove(settings.bypass_path(), &mut done)?;
    }
    for path in kubeconfig.into_iter().chain([settings.plugin_path()]) {
        if done.attached == 0 {
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

fn remove(path: PathBuf, done: &mut Removed) -> Result<(), InstallError> {
    if place::remove(&path)? {
        done.removed.push(path);
    }
    Ok(())
}

/// How many addresses of the network a container has.
fn attached(settings: &InstallSettings) -> Result<usize, InstallError> {
    let now = NodeTime::now(Path::new(DEFAULT_BOOT_ID_FILE))?;
    let data_dir = settings.on_host(&settings.data_dir);
    // This read takes no lock, so it never waits.
    let store = Store::new(RealDisk, &data_dir, &settings.network, now, Duration::ZERO);
    let files = store.address_files()?.into_iter().filter(|found| !found.is_host_local);
    let records = files.filter_map(|found| found.record);
    Ok(records.filter(|record| record.is_attached(store.now())).count())
}
