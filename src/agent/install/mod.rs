//! What the agent puts onto its host: the plugin, the plugin's credentials and the conflist; and how it keeps
//! them whole.
//!
//! Everything is validated before it is put in place, and put in place by a rename: a runtime reads the old
//! conflist or the new one, and an ADD that runs keeps its plugin. Must never leave the host with a conflist
//! whose plugin or credentials are not there, and never ask the API server for what the disk shows.

mod credentials;
mod error;
mod kubeconfig;
mod place;
mod render;
mod rivals;
mod settings;
mod state;
mod token;
mod uninstall;

use std::fs;
use std::future::Future;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use ipnet::IpNet;
use tokio::sync::watch;

use credentials::Credentials;
pub(crate) use error::InstallError;
use kubeconfig::ApiServerAccess;
pub use place::copy;
use place::{Content, FileChange, Fingerprint};
use render::Template;
pub(crate) use settings::{
    CONFLIST, ConflistSource, DEFAULT_BIN_DIR, DEFAULT_CONF_DIR, DEFAULT_KUBECONFIG, ServiceAccountRef,
};
pub use settings::{InstallSettings, PLUGIN};
pub use state::{InstallState, PartState};
pub use uninstall::{Removed, uninstall};

/// How often the files of the host are checked. That sends no request.
pub(crate) const CHECK_EVERY: Duration = Duration::from_secs(10);

const EXECUTABLE: u32 = 0o755;
const PRIVATE: u32 = 0o600;

/// Keeps the plugin, its credentials and the conflist on the host.
pub struct Installer {
    settings: InstallSettings,
    credentials: Option<Credentials>,
    plugin_seen: Option<Fingerprint>,
    conflist: Option<Vec<u8>>,
    conflist_seen: Option<Fingerprint>,
    restore_limit: rivals::RestoreLimit,
    /// Which parts stood there once: from then on, what must be put there again is a repair.
    installed_before: InstalledBefore,
    state: watch::Sender<InstallState>,
}

#[derive(Debug, Default)]
struct InstalledBefore {
    plugin: bool,
    conflist: bool,
}

impl Installer {
    /// An installer that has done nothing yet. `config` is the agent's own way to the API server, whose
    /// address and authority the plugin gets too; `client` asks for its tokens.
    /// Errors: the way cannot be written down for the plugin.
    pub fn new(
        settings: InstallSettings,
        client: kube::Client,
        config: &kube::Config,
    ) -> Result<Self, InstallError> {
        let credentials = match settings.plugin_service_account.clone() {
            None => None,
            Some(account) => {
                let server = ApiServerAccess::of(config, settings.api_server.as_deref())?;
                Some(Credentials::new(&settings, account, client, server))
            }
        };
        Ok(Self {
            settings,
            credentials,
            plugin_seen: None,
            conflist: None,
            conflist_seen: None,
            restore_limit: rivals::RestoreLimit::default(),
            installed_before: InstalledBefore::default(),
            state: watch::Sender::default(),
        })
    }

    /// What is installed and what is wrong, as it changes.
    pub fn state(&self) -> watch::Receiver<InstallState> {
        self.state.subscribe()
    }

    /// Installs everything once. `blocks` are the node's home blocks
    /// ([`crate::cluster::cilium::pool::home_blocks`]); `crd` needs none. Errors: the first thing that could
    /// not be installed. The other parts are, and what was there before stays.
    pub async fn install_once(&mut self, blocks: &[IpNet]) -> Result<(), InstallError> {
        #[expect(clippy::disallowed_methods, reason = "ages of files and tokens are wall-clock times")]
        let now = SystemTime::now();
        for folder in [&self.settings.cni_bin_dir, &self.settings.cni_conf_dir] {
            place::sweep(&self.settings.on_host(folder), now);
        }
        self.step(blocks, now, false).await
    }

    /// Checks every [`CHECK_EVERY`], restores what another program changed, follows the node's blocks and
    /// renews the token, until `stop` comes. What fails is logged once and is part of the state.
    pub async fn run(mut self, mut blocks: watch::Receiver<Vec<IpNet>>, stop: impl Future<Output = ()>) {
        let mut stop = std::pin::pin!(stop);
        let (mut logged, mut blocks_end) = (String::new(), false);
        loop {
            let now_blocks = blocks.borrow_and_update().clone();
            #[expect(clippy::disallowed_methods, reason = "ages of files and tokens are wall-clock times")]
            let now = SystemTime::now();
            let problem = match self.step(&now_blocks, now, false).await {
                Ok(()) => String::new(),
                Err(error) => error.to_string(),
            };
            if problem != logged && !problem.is_empty() {
                tracing::error!(reason = problem, "cannot install; trying again");
            }
            logged = problem;
            tokio::select! {
                () = &mut stop => return,
                () = tokio::time::sleep(CHECK_EVERY) => {}
                changed = blocks.changed(), if !blocks_end => blocks_end = changed.is_err(),
            }
        }
    }

    /// Checks everything once. `asked`: a new token was asked for, because the old one was refused.
    pub async fn step(&mut self, blocks: &[IpNet], now: SystemTime, asked: bool) -> Result<(), InstallError> {
        let mut state = self.state.borrow().clone();
        let plugin = self.keep_plugin(&mut state);
        let kubeconfig = self.keep_credentials(&mut state, now, asked).await;
        let conflist = self.keep_conflist(&mut state, blocks, now);
        state.plugin = part(&plugin);
        state.kubeconfig = part(&kubeconfig);
        state.conflist = part(&conflist);
        self.state.send_if_modified(|old| {
            let changed = *old != state;
            *old = state;
            changed
        });
        plugin.and(kubeconfig).and(conflist).map(|_| ())
    }

    fn keep_plugin(&mut self, state: &mut InstallState) -> Result<bool, InstallError> {
        let Some(from) = &self.settings.plugin else { return Ok(false) };
        let path = self.settings.plugin_path();
        check_plugin(from)?;
        let done = place::ensure(&path, Content::CopyOf(from), EXECUTABLE, &mut self.plugin_seen)?;
        report(done, &path, &mut self.installed_before.plugin, state);
        Ok(true)
    }

    async fn keep_credentials(
        &mut self,
        state: &mut InstallState,
        now: SystemTime,
        asked: bool,
    ) -> Result<bool, InstallError> {
        let Some(credentials) = &mut self.credentials else { return Ok(false) };
        let before = credentials.failures();
        let kept = credentials.keep(now, asked).await;
        state.token_expires = credentials.expires();
        if credentials.failures() > before {
            state.renewal_failures += 1;
        }
        let kept = kept?;
        state.renewals += u64::from(kept.renewed);
        if kept.repaired && state.kubeconfig == PartState::Installed {
            state.repairs += 1;
            let path = self.settings.kubeconfig_path();
            tracing::warn!(file = %path.display(), "restored a file that another program changed or removed");
        }
        Ok(true)
    }

    fn keep_conflist(
        &mut self,
        state: &mut InstallState,
        blocks: &[IpNet],
        now: SystemTime,
    ) -> Result<bool, InstallError> {
        // A template that becomes invalid, or blocks that disappear, remove nothing that is installed.
        let problem = match self.render(blocks) {
            Ok(None) => return Ok(false),
            Ok(Some(fresh)) => {
                if self.conflist.as_ref() != Some(&fresh) {
                    (self.conflist, self.conflist_seen, self.installed_before.conflist) =
                        (Some(fresh), None, false);
                }
                None
            }
            Err(error) => Some(error),
        };
        let path = self.settings.conflist_path();
        let shadow = rivals::sorts_before(&path);
        if shadow != state.shadowed_by
            && let Some(other) = &shadow
        {
            tracing::warn!(
                file = other,
                "runtimes read this file instead of {CONFLIST}, because its name sorts before; remove or \
                 rename \
                 it"
            );
        }
        state.shadowed_by = shadow;
        if let Some(conflist) = self.conflist.take() {
            let put = self.put_conflist(&path, &conflist, state, now);
            self.conflist = Some(conflist);
            put?;
        }
        problem.map_or(Ok(true), Err)
    }

    /// The conflist of this node; none if no flag asks for one.
    fn render(&self, blocks: &[IpNet]) -> Result<Option<Vec<u8>>, InstallError> {
        let rendered = match &self.settings.conflist {
            ConflistSource::None => return Ok(None),
            ConflistSource::BuiltIn => render::conflist(Template::BuiltIn, &self.settings, blocks),
            ConflistSource::File(path) => {
                let text = fs::read_to_string(path).map_err(InstallError::io("read", path))?;
                let from = path.display().to_string();
                render::conflist(Template::Text { from: &from, text: &text }, &self.settings, blocks)
            }
        };
        rendered.map(Some)
    }

    fn put_conflist(
        &mut self,
        path: &Path,
        conflist: &[u8],
        state: &mut InstallState,
        now: SystemTime,
    ) -> Result<(), InstallError> {
        let exists = place::metadata(path)?.is_some();
        if !exists {
            self.check_parts()?;
        }
        let renamed = rivals::renamed(path);
        let displaced = !exists && place::metadata(&renamed)?.is_some();
        if displaced {
            if !self.restore_limit.may_restore(now) {
                if !state.outnumbered {
                    tracing::error!(file = %path.display(), "{}", rivals::EXCLUSIVE);
                }
                state.outnumbered = true;
                return Ok(());
            }
            state.displaced += 1;
            let (file, advice) = (path.display(), rivals::EXCLUSIVE);
            tracing::warn!(%file, "restored the conflist, which Cilium had renamed. {advice}");
        } else if exists {
            state.outnumbered = false;
        }
        let done = place::ensure(path, Content::Bytes(conflist), PRIVATE, &mut self.conflist_seen)?;
        if displaced {
            place::remove(&renamed)?;
        }
        report(done, path, &mut self.installed_before.conflist, state);
        Ok(())
    }

    /// A conflist that is new to the host comes last: its plugin and credentials must be there.
    fn check_parts(&self) -> Result<(), InstallError> {
        let mut parts = vec![self.settings.plugin_path()];
        if self.credentials.is_some() {
            parts.push(self.settings.kubeconfig_path());
        }
        for path in parts {
            if place::metadata(&path)?.is_none() {
                let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
                return Err(InstallError::io("install the conflist before", &path)(missing));
            }
        }
        Ok(())
    }
}

fn part(kept: &Result<bool, InstallError>) -> PartState {
    match kept {
        Ok(true) => PartState::Installed,
        Ok(false) => PartState::NotManaged,
        Err(error) => PartState::Failed(error.to_string()),
    }
}

fn report(done: FileChange, path: &Path, installed_before: &mut bool, state: &mut InstallState) {
    match (done, *installed_before) {
        (FileChange::Unchanged, _) => {}
        (FileChange::Created | FileChange::Replaced, false) => {
            tracing::info!(file = %path.display(), "installed a file")
        }
        (FileChange::Created, true) => {
            tracing::warn!(file = %path.display(), "restored a file that was removed")
        }
        (FileChange::Replaced, true) => {
            tracing::warn!(file = %path.display(), "restored a file that another program changed")
        }
    }
    if done != FileChange::Unchanged && *installed_before {
        state.repairs += 1;
    }
    *installed_before = true;
}

fn check_plugin(path: &Path) -> Result<(), InstallError> {
    let wrong = |why: &str| InstallError::Plugin { path: path.to_owned(), why: why.to_owned() };
    let meta = fs::metadata(path)
        .map_err(|error| wrong(&format!("cannot be read: {error}; name the plugin's file")))?;
    match () {
        () if !meta.is_file() => Err(wrong("is not a file; name the plugin's file")),
        () if meta.len() == 0 => Err(wrong("is empty; build it with `make plugin`")),
        () if meta.mode() & 0o111 == 0 => Err(wrong("cannot be executed; chmod +x it")),
        () => Ok(()),
    }
}

#[cfg(test)]
mod tests;
