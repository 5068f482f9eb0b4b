//! The plugin's kubeconfig on the host: written, restored when another program changed it, renewed before its
//! token ends.
//!
//! Must never let a token run out while the API server can be asked, and never be readable for anyone but
//! root.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use crate::agent::install::error::InstallError;
use crate::agent::install::kubeconfig::{ApiServerAccess, token_in};
use crate::agent::install::place::{self, Content, FileChange};
use crate::agent::install::settings::{InstallSettings, SHORT_TOKEN, ServiceAccountRef};
use crate::agent::install::token::{self, TokenClaims};
use crate::cluster::api::client::Connection;

/// Between two tries to get a token: from the first to the last of these, doubling.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// How often the API server is asked whether it still accepts the token: an account or Node that was deleted
/// and made again ends a token long before its time, and nothing else shows that.
const CHECK_EVERY: Duration = Duration::from_secs(300);
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CredentialsUpdate {
    Unchanged,
    Renewed,
    /// The file was restored without a new token.
    Repaired,
}

pub(super) struct Credentials {
    client: kube::Client,
    server: ApiServerAccess,
    account: ServiceAccountRef,
    node: String,
    lifetime: Duration,
    path: PathBuf,
    current: Option<CurrentToken>,
    checked: Option<SystemTime>,
    not_before: Option<SystemTime>,
    /// How many times in a row no token was issued.
    pub(super) failures: u32,
}

struct CurrentToken {
    token: String,
    claims: TokenClaims,
    /// By this node's clock.
    since: SystemTime,
}

impl CurrentToken {
    fn is_due(&self, now: SystemTime) -> bool {
        // A clock that was set back says nothing about the token's age.
        let age = now.duration_since(self.since).ok();
        age.is_none_or(|age| age >= token::renew_after(self.claims.lifetime(), &self.token))
    }
}

/// Logs once that the API server gives shorter tokens than were asked for, if that is less than a day.
fn report_short(before: &Option<CurrentToken>, claims: &TokenClaims, asked: Duration) {
    let lifetime = claims.lifetime();
    let is_known = before.as_ref().is_some_and(|before| before.claims.lifetime() <= lifetime);
    if lifetime < SHORT_TOKEN.min(asked) && !is_known {
        let (hours, asked) = (lifetime.as_secs() / 3600, asked.as_secs() / 3600);
        tracing::warn!(
            hours,
            asked,
            "the API server shortens the plugin's token: if the agent is away for longer, no pod that it has not \
             prepared starts on this node; raise the API server's --service-account-max-token-expiration"
        );
    }
}

impl Credentials {
    pub(super) fn new(
        settings: &InstallSettings,
        account: ServiceAccountRef,
        client: kube::Client,
        server: ApiServerAccess,
    ) -> Self {
        Self {
            client,
            server,
            account,
            node: settings.node.clone(),
            lifetime: settings.token_lifetime,
            path: settings.kubeconfig_path(),
            current: None,
            checked: None,
            not_before: None,
            failures: 0,
        }
    }

    /// When the token ends, by the API server's clock.
    pub(super) fn expires(&self) -> Option<SystemTime> {
        let current = self.current.as_ref()?;
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(current.claims.exp))
    }

    /// Makes sure that the file exists, is complete, private and valid for a while. `asked`: the API server
    /// is said to have refused the token.
    pub(super) async fn keep(
        &mut self,
        now: SystemTime,
        asked: bool,
    ) -> Result<CredentialsUpdate, InstallError> {
        let moved = self.server.refresh(&self.path, now).await?;
        if self.current.is_none() {
            self.current = self.found();
        }
        let refused = asked || self.was_refused(now).await;
        let due = self.current.as_ref().is_none_or(|current| current.is_due(now)) || refused;
        let paused = self.not_before.is_some_and(|then| now < then) && !asked;
        if due && !(paused && self.current.is_some()) {
            match token::request(&self.client, &self.account, &self.node, self.lifetime).await {
                Ok((token, claims)) => {
                    report_short(&self.current, &claims, self.lifetime);
                    self.current = Some(CurrentToken { token, claims, since: now });
                    self.write()?;
                    (self.not_before, self.failures, self.checked) = (None, 0, Some(now));
                    return Ok(CredentialsUpdate::Renewed);
                }
                Err(error) => {
                    let pause = FIRST_PAUSE * 2u32.saturating_pow(self.failures.min(8));
                    self.not_before = now.checked_add(pause.min(LONGEST_PAUSE));
                    self.failures = self.failures.saturating_add(1);
                    // The old token is written all the same: it may be valid for a while.
                    self.write()?;
                    return Err(error);
                }
            }
        }
        let is_repaired = self.write()? != FileChange::Unchanged && !moved;
        Ok(if is_repaired { CredentialsUpdate::Repaired } else { CredentialsUpdate::Unchanged })
    }

    /// The file of an agent before this one, if it is exactly what this one would write.
    fn found(&self) -> Option<CurrentToken> {
        let text = fs::read_to_string(&self.path).ok()?;
        let token = token_in(&text)?;
        let claims = TokenClaims::of(&token).filter(|claims| claims.is_for(&self.account, &self.node))?;
        let since = fs::metadata(&self.path).and_then(|meta| meta.modified()).ok()?;
        // The lifetime that the flags ask for may have changed since.
        let same_life = claims.lifetime() <= self.lifetime;
        let same_text = self.server.kubeconfig(&token).is_ok_and(|own| own == text);
        (same_life && same_text).then_some(CurrentToken { token, claims, since })
    }

    /// Whether the API server refuses the token that the file holds; asked now and then.
    async fn was_refused(&mut self, now: SystemTime) -> bool {
        let Some(current) = &self.current else { return false };
        let fresh = |then: SystemTime| now.duration_since(then).is_ok_and(|age| age < CHECK_EVERY);
        if current.is_due(now) || self.checked.is_some_and(fresh) {
            return false;
        }
        self.checked = Some(now);
        let Ok(api) = Connection::open(&self.path, CHECK_TIMEOUT).await else { return false };
        let (accepted, kubeconfig) = (token::is_accepted(&api.client()).await, self.path.display());
        match accepted {
            Some(true) => {}
            Some(false) => {
                tracing::warn!(%kubeconfig, "the API server refuses the plugin's token; it is renewed");
            }
            None => tracing::warn!(
                %kubeconfig,
                "the API server does not answer at the address of the plugin's kubeconfig; if the agent uses \
                 another address, correct --api-server"
            ),
        }
        accepted == Some(false)
    }

    fn write(&self) -> Result<FileChange, InstallError> {
        let Some(current) = &self.current else { return Ok(FileChange::Unchanged) };
        let text = self.server.kubeconfig(&current.token)?;
        if let Some(folder) = self.path.parent() {
            place::private_folder(folder)?;
        }
        // It is small, so it is compared every time.
        place::ensure(&self.path, Content::Bytes(text.as_bytes()), 0o600, &mut None)
    }
}
