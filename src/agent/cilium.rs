//! What cilium-agent on this node says of itself, asked at the start and now and then: whether the agent's
//! mode works with Cilium's, and whether the proofs of sticky-ipam were run on this version of Cilium.
//!
//! Must never stop what works: a Cilium that does not answer changes nothing, and a conflist that is
//! installed stays.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::agent::metrics::AgentMetrics;
use crate::cluster::cilium::settings::{CiliumSettings, CiliumVersion};
use crate::policy::mode::PluginMode;

/// How often Cilium is asked. It may be restarted with other settings at any time.
const ASK_EVERY: Duration = Duration::from_secs(60);
/// While it does not answer: it may be about to start.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Cilium as it answered last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CiliumState {
    /// It was asked once, whether it answered or not.
    pub(crate) asked: bool,
    pub(crate) settings: Option<CiliumSettings>,
}

impl CiliumState {
    /// Why the agent's mode cannot work with Cilium, and the cure.
    pub(crate) fn problem(&self, mode: PluginMode) -> Option<String> {
        self.settings.as_ref().and_then(|settings| check_mode(mode, settings).err())
    }
}

/// Errors: Cilium's mode is not what ours needs, and the cure. Cilium may not say yet which it has.
pub(crate) fn check_mode(mode: PluginMode, settings: &CiliumSettings) -> Result<(), String> {
    settings.ipam.as_deref().map_or(Ok(()), |ipam| mode.check_cilium(ipam))
}

/// Asks Cilium once.
/// Errors: it is not there, does not answer in time, or answers with something else.
pub(crate) async fn ask(socket: PathBuf) -> io::Result<CiliumSettings> {
    let asked = tokio::task::spawn_blocking(move || CiliumSettings::read(&socket)).await;
    asked.unwrap_or_else(|error| Err(io::Error::other(error)))
}

/// Asks Cilium for ever.
pub(crate) async fn watch(
    socket: PathBuf,
    mode: PluginMode,
    metrics: Arc<AgentMetrics>,
    out: watch::Sender<CiliumState>,
) {
    loop {
        let answer = ask(socket.clone()).await;
        let pause = if answer.is_ok() { ASK_EVERY } else { ASK_AGAIN };
        let known = out.borrow().settings.clone();
        let now = match answer {
            Ok(found) => Some(keep_version(found, known.as_ref())),
            Err(error) => {
                tracing::debug!(%error, "cannot ask cilium-agent for its settings");
                known.clone()
            }
        };
        if let Some(now) = &now {
            report(mode, known.as_ref(), now, &metrics);
        }
        out.send_if_modified(|state| {
            let next = CiliumState { asked: true, settings: now };
            let changed = *state != next;
            *state = next;
            changed
        });
        tokio::time::sleep(pause).await;
    }
}

/// While it starts, it does not say its version: that is no other version.
fn keep_version(mut found: CiliumSettings, known: Option<&CiliumSettings>) -> CiliumSettings {
    found.version = found.version.or_else(|| known.and_then(|known| known.version.clone()));
    found
}

fn report(mode: PluginMode, known: Option<&CiliumSettings>, now: &CiliumSettings, metrics: &AgentMetrics) {
    let (version, ipam) = (name_of(now), now.ipam.clone().unwrap_or_default());
    let is_same = known.is_some_and(|known| known.version == now.version && known.ipam == now.ipam);
    if is_same {
        return;
    }
    let tested = now.version.as_ref().is_some_and(CiliumVersion::is_tested);
    metrics.cilium.clear();
    metrics.cilium.with([&version, &ipam, &tested.to_string()]).set(1);
    tracing::info!(version, ipam, tested, "cilium-agent has answered");
    if !tested {
        let tested = CiliumVersion::tested();
        tracing::warn!(
            version,
            tested,
            "sticky-ipam was not tested with this version of Cilium; try it on one node, or use a tested one"
        );
    }
    if let Err(reason) = check_mode(mode, now) {
        tracing::error!(%mode, ipam, reason, "the agent cannot work with Cilium as it is set");
    }
}

fn name_of(settings: &CiliumSettings) -> String {
    settings.version.as_ref().map_or_else(|| "unknown".to_owned(), ToString::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answering(version: &str, ipam: &str) -> CiliumSettings {
        CiliumSettings {
            version: CiliumVersion::parse(version),
            ipam: Some(ipam.to_owned()),
            ..CiliumSettings::default()
        }
    }

    fn reported(metrics: &AgentMetrics) -> Vec<String> {
        let page = metrics.page();
        let lines = page.lines().filter(|line| line.starts_with("sticky_ipam_agent_cilium_info{"));
        lines.map(str::to_owned).collect()
    }

    #[test]
    fn another_mode_of_ciliums_is_a_problem_with_its_cure_until_it_is_right() {
        let state = |ipam: Option<&str>| CiliumState {
            asked: true,
            settings: Some(CiliumSettings { ipam: ipam.map(str::to_owned), ..CiliumSettings::default() }),
        };
        let problem = state(Some("cluster-pool")).problem(PluginMode::Crd).unwrap();
        for part in ["cluster-pool", "--mode crd", "ipam: crd", "docs/adoption.md"] {
            assert!(problem.contains(part), "{problem}");
        }
        assert_eq!(state(Some("crd")).problem(PluginMode::Crd), None);
        assert_eq!(state(None).problem(PluginMode::Crd), None, "it does not say");
        assert_eq!(CiliumState::default().problem(PluginMode::Crd), None, "it has not answered");
    }

    #[test]
    fn the_version_on_the_page_is_the_one_that_answered_last() {
        let metrics = AgentMetrics::default();
        let first = answering("1.19.5", "crd");
        report(PluginMode::Crd, None, &first, &metrics);
        let shown = |version: &str, ipam: &str, tested: bool| {
            format!(
                "sticky_ipam_agent_cilium_info{{version=\"{version}\",ipam=\"{ipam}\",tested=\"{tested}\"}} 1"
            )
        };
        assert_eq!(reported(&metrics), [shown("1.19.5", "crd", true)]);
        let second = answering("1.21.0", "crd");
        report(PluginMode::Crd, Some(&first), &second, &metrics);
        assert_eq!(reported(&metrics), [shown("1.21.0", "crd", false)]);
        // It starts again and does not say its version yet.
        let starting = keep_version(answering("", "crd"), Some(&second));
        assert_eq!(starting, second);
        let unnamed = keep_version(answering("", "crd"), None);
        report(PluginMode::Crd, Some(&second), &unnamed, &metrics);
        assert_eq!(reported(&metrics), [shown("unknown", "crd", false)]);
    }
}
