//! The plugin's kubeconfig on the host: written, put back when another changed it, renewed before its token ends.
//!
//! Must never let a token run out while the API server can be asked, and never be readable for anyone but root.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use crate::agent::install::error::InstallError;
use crate::agent::install::kubeconfig::{Server, token_in};
use crate::agent::install::place;
use crate::agent::install::place::{Content, Done};
use crate::agent::install::settings::{InstallSettings, ServiceAccountRef};
use crate::agent::install::token;
use crate::agent::install::token::Claims;
use crate::cluster::api::client::Connection;

/// Between two tries to get a token: from the first to the last of these, doubling.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// How often the API server is asked whether it still accepts the token: an account or Node that was deleted and made
/// again ends a token long before its time, and nothing else tells.
const CHECK_EVERY: Duration = Duration::from_secs(300);
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

/// What keeping them came to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Kept {
    /// A new token was written.
    pub(super) renewed: bool,
    /// The file was put back without a new token.
    pub(super) repaired: bool,
}

/// The plugin's credentials.
pub(super) struct Credentials {
    client: kube::Client,
    server: Server,
    account: ServiceAccountRef,
    node: String,
    lifetime: Duration,
    path: PathBuf,
    held: Option<Held>,
    checked: Option<SystemTime>,
    not_before: Option<SystemTime>,
    failures: u32,
}

struct Held {
    token: String,
    claims: Claims,
    /// By this node's clock.
    since: SystemTime,
}

impl Held {
    fn is_due(&self, now: SystemTime) -> bool {
        // A clock that was set back says nothing about the token's age.
        let age = now.duration_since(self.since).ok();
        age.is_none_or(|age| age >= token::renew_after(self.claims.lifetime(), &self.token))
    }
}

impl Credentials {
    pub(super) fn new(
        settings: &InstallSettings,
        account: ServiceAccountRef,
        client: kube::Client,
        server: Server,
    ) -> Self {
        Self {
            client,
            server,
            account,
            node: settings.node.clone(),
            lifetime: settings.token_lifetime,
            path: settings.kubeconfig_path(),
            held: None,
            checked: None,
            not_before: None,
            failures: 0,
        }
    }

    /// When the token ends, by the API server's clock.
    pub(super) fn expires(&self) -> Option<SystemTime> {
        let held = self.held.as_ref()?;
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(held.claims.exp))
    }

    /// How many times in a row no token was to be had.
    pub(super) fn failures(&self) -> u32 {
        self.failures
    }

    /// Makes sure that the file is there, whole, private and good for a while. `asked` is somebody's word that the API
    /// server refused the token.
    pub(super) async fn keep(&mut self, now: SystemTime, asked: bool) -> Result<Kept, InstallError> {
        if self.held.is_none() {
            self.held = self.found();
        }
        let refused = asked || self.was_refused(now).await;
        let due = self.held.as_ref().is_none_or(|held| held.is_due(now)) || refused;
        let paused = self.not_before.is_some_and(|then| now < then) && !asked;
        if due && !(paused && self.held.is_some()) {
            match token::request(&self.client, &self.account, &self.node, self.lifetime).await {
                Ok((token, claims)) => {
                    self.held = Some(Held { token, claims, since: now });
                    self.write()?;
                    (self.not_before, self.failures, self.checked) = (None, 0, Some(now));
                    return Ok(Kept { renewed: true, repaired: false });
                }
                Err(error) => {
                    let pause = FIRST_PAUSE * 2u32.saturating_pow(self.failures.min(8));
                    self.not_before = now.checked_add(pause.min(LONGEST_PAUSE));
                    self.failures = self.failures.saturating_add(1);
                    // What is there is put back all the same: it may be good for a while yet.
                    self.write()?;
                    return Err(error);
                }
            }
        }
        Ok(Kept { renewed: false, repaired: self.write()? != Done::Nothing })
    }

    /// The file of an agent before this one, if it is exactly what this one would write.
    fn found(&self) -> Option<Held> {
        let text = fs::read_to_string(&self.path).ok()?;
        let token = token_in(&text)?;
        let claims = Claims::of(&token).filter(|claims| claims.is_for(&self.account, &self.node))?;
        let since = fs::metadata(&self.path).and_then(|meta| meta.modified()).ok()?;
        // How it was told to live may have changed since.
        let same_life = claims.lifetime() <= self.lifetime;
        let same_text = self.server.kubeconfig(&token).is_ok_and(|own| own == text);
        (same_life && same_text).then_some(Held { token, claims, since })
    }

    /// Whether the API server refuses the token that the file holds; asked now and then.
    async fn was_refused(&mut self, now: SystemTime) -> bool {
        let Some(held) = &self.held else { return false };
        let fresh = |then: SystemTime| now.duration_since(then).is_ok_and(|age| age < CHECK_EVERY);
        if held.is_due(now) || self.checked.is_some_and(fresh) {
            return false;
        }
        self.checked = Some(now);
        let Ok(api) = Connection::open(&self.path, CHECK_TIMEOUT).await else { return false };
        match token::is_accepted(&api.client()).await {
            Some(false) => {
                tracing::warn!(kubeconfig = %self.path.display(), "the API server refuses the plugin's token; it is renewed");
                true
            }
            Some(true) => false,
            None => {
                tracing::warn!(
                    kubeconfig = %self.path.display(),
                    "the API server does not answer by the plugin's way; if the agent has another one, correct --api-server"
                );
                false
            }
        }
    }

    fn write(&self) -> Result<Done, InstallError> {
        let Some(held) = &self.held else { return Ok(Done::Nothing) };
        let text = self.server.kubeconfig(&held.token)?;
        if let Some(folder) = self.path.parent() {
            place::private_folder(folder)?;
        }
        // It is small, so it is compared every time.
        place::ensure(&self.path, Content::Bytes(text.as_bytes()), 0o600, &mut None)
    }
}
