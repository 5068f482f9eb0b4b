//! What the agent puts onto its host: the plugin, the plugin's credentials and the conflist; and how it keeps
//! them whole.
//!
//! Everything is validated before it is put in place, and put in place by a rename: a runtime reads the old
//! conflist or the new one, and an ADD that runs keeps its plugin. Must never leave the host with a conflist
//! whose plugin or credentials are not there, and never ask the API server for what the disk shows.

pub mod bypass;
mod credentials;
mod error;
mod kubeconfig;
mod place;
mod render;
mod resolve;
mod rivals;
mod settings;
mod state;
mod token;
mod uninstall;

use std::fs;
use std::future::Future;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use ipnet::IpNet;
use tokio::sync::watch;

use credentials::{Credentials, CredentialsUpdate};
pub(crate) use error::InstallError;
use kubeconfig::ApiServerAccess;
pub use place::copy;
use place::{Content, FileChange, Fingerprint};
use render::Template;
pub(crate) use settings::{
    CONFLIST, ConflistSource, DEFAULT_BIN_DIR, DEFAULT_CONF_DIR, DEFAULT_KUBECONFIG, DEFAULT_TOKEN_HOURS,
    ServiceAccountRef, is_kernels,
};
pub use settings::{InstallSettings, PLUGIN};
pub use state::{InstallState, PartState};
pub(crate) use uninstall::attached;
pub use uninstall::{DelConflist, Removed, installed, uninstall};

use crate::agent::cilium;
use crate::cluster::cilium::socket;
use crate::cni::config::cluster::DEFAULT_CILIUM_SOCKET;

/// How often the files of the host are checked. That sends no request.
pub(crate) const CHECK_EVERY: Duration = Duration::from_secs(10);

/// How often it is looked whether Cilium runs, before a host's first conflist. Once it does, the node's pods
/// wait for nothing else; and a conflist that another program writes meanwhile must not stand alone.
const CILIUM_CHECK_EVERY: Duration = Duration::from_millis(100);
/// The plugin that every mode has before or behind ours.
const CILIUM_CNI: &str = "cilium-cni";

const EXECUTABLE: u32 = 0o755;
const PRIVATE: u32 = 0o600;

pub struct Installer {
    settings: InstallSettings,
    credentials: Option<Credentials>,
    plugin: KeptFile,
    conflist: KeptFile,
    /// The conflist of this node, as it was rendered last.
    rendered: Option<Vec<u8>>,
    restore_limit: rivals::RestoreLimit,
    state: watch::Sender<InstallState>,
}

#[derive(Default)]
struct KeptFile {
    seen: Option<Fingerprint>,
    /// It stood there once: from then on, what must be put there again is a repair.
    installed_before: bool,
}

impl KeptFile {
    /// Logs and counts what keeping the file came to.
    fn report(&mut self, change: FileChange, path: &Path, state: &mut InstallState) {
        let file = path.display();
        let before = std::mem::replace(&mut self.installed_before, true);
        match change {
            FileChange::Unchanged => return,
            _ if !before => tracing::info!(%file, "installed a file"),
            FileChange::Created => tracing::warn!(%file, "restored a file that was removed"),
            FileChange::Replaced => tracing::warn!(%file, "restored a file that another program changed"),
        }
        state.repairs += u64::from(before);
    }
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
                let server = ApiServerAccess::of(config, settings.api_server.as_deref(), &settings.node)?;
                Some(Credentials::new(&settings, account, client, server))
            }
        };
        Ok(Self {
            settings,
            credentials,
            plugin: KeptFile::default(),
            conflist: KeptFile::default(),
            rendered: None,
            restore_limit: rivals::RestoreLimit::default(),
            state: watch::Sender::default(),
        })
    }

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
            let stepped = self.step(&now_blocks, now, false).await;
            let is_early = matches!(stepped, Err(InstallError::CiliumAwaited { .. }));
            let problem = stepped.err().map(|error| error.to_string()).unwrap_or_default();
            if problem != logged && is_early {
                tracing::info!(reason = problem, "waiting for Cilium");
            } else if problem != logged && !problem.is_empty() {
                tracing::error!(reason = problem, "cannot install; trying again");
            }
            logged = problem;
            tokio::select! {
                () = &mut stop => return,
                () = tokio::time::sleep(if is_early { CILIUM_CHECK_EVERY } else { CHECK_EVERY }) => {}
                changed = blocks.changed(), if !blocks_end => blocks_end = changed.is_err(),
            }
        }
    }

    /// Checks everything once. `asked`: a new token was asked for, because the old one was refused.
    pub async fn step(&mut self, blocks: &[IpNet], now: SystemTime, asked: bool) -> Result<(), InstallError> {
        let mut state = self.state.borrow().clone();
        let plugin = self.keep_plugin(&mut state);
        let kubeconfig = self.keep_credentials(&mut state, now, asked).await;
        let cilium = self.check_cilium().await;
        let conflist = self.keep_conflist(&mut state, blocks, now, cilium);
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
        let change = place::ensure(&path, Content::CopyOf(from), EXECUTABLE, &mut self.plugin.seen)?;
        self.plugin.report(change, &path, state);
        Ok(true)
    }

    async fn keep_credentials(
        &mut self,
        state: &mut InstallState,
        now: SystemTime,
        asked: bool,
    ) -> Result<bool, InstallError> {
        let Some(credentials) = &mut self.credentials else { return Ok(false) };
        let before = credentials.failures;
        let kept = credentials.keep(now, asked).await;
        state.token_expires = credentials.expires();
        state.renewal_failures += u64::from(credentials.failures > before);
        match kept? {
            CredentialsUpdate::Renewed => state.renewals += 1,
            CredentialsUpdate::Repaired if state.kubeconfig == PartState::Installed => {
                state.repairs += 1;
                let path = self.settings.kubeconfig_path();
                let file = path.display();
                tracing::warn!(%file, "restored a file that another program changed or removed");
            }
            CredentialsUpdate::Repaired | CredentialsUpdate::Unchanged => {}
        }
        Ok(true)
    }

    fn keep_conflist(
        &mut self,
        state: &mut InstallState,
        blocks: &[IpNet],
        now: SystemTime,
        cilium: Result<(), InstallError>,
    ) -> Result<bool, InstallError> {
        // A template that becomes invalid, or blocks that disappear, remove nothing that is installed.
        let rendered = self.render(blocks);
        match &rendered {
            Ok(None) => return Ok(false),
            Ok(fresh) if *fresh != self.rendered => {
                (self.rendered, self.conflist) = (fresh.clone(), KeptFile::default());
            }
            _ => {}
        }
        let path = self.settings.conflist_path();
        let shadow = rivals::sorts_before(&path);
        if shadow != state.shadowed_by
            && let Some(other) = &shadow
        {
            tracing::warn!(
                file = other,
                "runtimes read this file instead of {CONFLIST}, because its name sorts before; remove or \
                 rename it"
            );
        }
        state.shadowed_by = shadow;
        if let Some(conflist) = self.rendered.clone() {
            self.put_conflist(&path, &conflist, state, now, cilium)?;
        }
        rendered.map(|_| true)
    }

    /// The conflist of this node; none if no flag asks for one.
    fn render(&self, blocks: &[IpNet]) -> Result<Option<Vec<u8>>, InstallError> {
        let (from, text);
        let template = match &self.settings.conflist {
            ConflistSource::None => return Ok(None),
            ConflistSource::BuiltIn => Template::BuiltIn,
            ConflistSource::File(path) => {
                text = fs::read_to_string(path).map_err(InstallError::io("read", path))?;
                from = path.display().to_string();
                Template::Text { from: &from, text: &text }
            }
        };
        render::conflist(template, &self.settings, blocks).map(Some)
    }

    fn put_conflist(
        &mut self,
        path: &Path,
        conflist: &[u8],
        state: &mut InstallState,
        now: SystemTime,
        cilium: Result<(), InstallError>,
    ) -> Result<(), InstallError> {
        let exists = place::metadata(path)?.is_some();
        if !exists {
            self.check_parts()?;
            cilium?;
        }
        let renamed = rivals::renamed(path);
        let displaced = !exists && place::metadata(&renamed)?.is_some();
        if displaced {
            let (file, advice) = (path.display(), rivals::EXCLUSIVE);
            if !self.restore_limit.may_restore(now) {
                if !state.outnumbered {
                    tracing::error!(%file, "{advice}");
                }
                state.outnumbered = true;
                return Ok(());
            }
            state.displaced += 1;
            tracing::warn!(%file, "restored the conflist, which Cilium had renamed. {advice}");
        } else if exists {
            state.outnumbered = false;
        }
        let change = place::ensure(path, Content::Bytes(conflist), PRIVATE, &mut self.conflist.seen)?;
        if displaced {
            place::remove(&renamed)?;
        }
        self.conflist.report(change, path, state);
        Ok(())
    }

    async fn check_cilium(&self) -> Result<(), InstallError> {
        self.check_cilium_runs().await?;
        self.check_cilium_mode().await
    }

    /// Before a host's first conflist: whether Cilium can serve pods. Where ours has stood, it is restored at
    /// once. Where another one stands, the runtime starts pods by that, so ours cannot come too soon.
    async fn check_cilium_runs(&self) -> Result<(), InstallError> {
        let path = self.settings.conflist_path();
        let is_first = self.settings.conflist != ConflistSource::None && !self.conflist.installed_before;
        let Some(socket) = self.settings.awaited_cilium.as_ref().filter(|_| is_first) else {
            return Ok(());
        };
        let stood = [path.clone(), rivals::renamed(&path)];
        for stood in &stood {
            if place::metadata(stood)?.is_some() {
                return Ok(());
            }
        }
        if !rivals::others(&path).is_empty() {
            return Ok(());
        }
        let awaited = |why: String| InstallError::CiliumAwaited { why };
        let program = self.settings.on_host(&self.settings.cni_bin_dir).join(CILIUM_CNI);
        if place::metadata(&program)?.is_none() {
            return Err(awaited(format!("{} is not there; Cilium installs it", program.display())));
        }
        let socket = self.settings.on_host(socket);
        let name = socket.display().to_string();
        let asked = tokio::task::spawn_blocking(move || socket::answers(&socket)).await;
        let asked = asked.unwrap_or_else(|error| Err(io::Error::other(error)));
        asked.map_err(|error| awaited(format!("cilium-agent does not answer on {name}: {error}")))
    }

    /// Before a conflist that is new to the host: whether Cilium is in the mode that ours needs, if it says.
    async fn check_cilium_mode(&self) -> Result<(), InstallError> {
        let is_wanted = !matches!(self.settings.conflist, ConflistSource::None);
        if !is_wanted || place::metadata(&self.settings.conflist_path())?.is_some() {
            return Ok(());
        }
        let socket = self.settings.cilium_socket.as_deref().unwrap_or(Path::new(DEFAULT_CILIUM_SOCKET));
        match cilium::ask(self.settings.on_host(socket)).await {
            Ok(found) => {
                cilium::check_mode(self.settings.mode, &found).map_err(|why| InstallError::CiliumMode { why })
            }
            Err(error) => {
                tracing::debug!(%error, "cannot ask cilium-agent for its mode");
                Ok(())
            }
        }
    }

    /// A conflist that is new to the host comes last: its plugin and credentials must be there.
    fn check_parts(&self) -> Result<(), InstallError> {
        let kubeconfig = self.credentials.as_ref().map(|_| self.settings.kubeconfig_path());
        for path in [self.settings.plugin_path()].into_iter().chain(kubeconfig) {
            if place::metadata(&path)?.is_none() {
                let missing = io::ErrorKind::NotFound.into();
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
