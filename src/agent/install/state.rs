//! What is installed and what is wrong with it, for metrics, readiness and operators.

use std::time::SystemTime;

use super::rivals::EXCLUSIVE;
use super::settings::CONFLIST;

/// The state of one part on the host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum PartState {
    /// Not checked yet.
    #[default]
    Unknown,
    /// Not installed by the agent: no flag asks for it.
    NotManaged,
    Installed,
    /// It cannot be installed. What was there before still is.
    Failed(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InstallState {
    pub plugin: PartState,
    pub kubeconfig: PartState,
    pub conflist: PartState,
    /// How many files were restored because another program changed or removed them.
    pub repairs: u64,
    pub displaced: u64,
    /// Whether Cilium keeps renaming the conflist, so that it is restored only now and then.
    pub outnumbered: bool,
    /// A file that runtimes read instead of ours, because its name sorts before.
    pub shadowed_by: Option<String>,
    /// When the plugin's token ends, by the API server's clock.
    pub token_expires: Option<SystemTime>,
    pub renewals: u64,
    /// How many times no token was issued.
    pub renewal_failures: u64,
}

impl InstallState {
    /// What keeps new pods from being served, each with its cure; none when the node is ready.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        let parts =
            [("plugin", &self.plugin), ("kubeconfig", &self.kubeconfig), ("conflist", &self.conflist)];
        for (name, part) in parts {
            match part {
                PartState::Unknown => problems.push(format!("{name}: not installed yet")),
                PartState::Failed(why) => problems.push(format!("{name}: {why}")),
                PartState::NotManaged | PartState::Installed => {}
            }
        }
        if self.outnumbered {
            problems.push(format!("conflist: {}", EXCLUSIVE));
        }
        if let Some(other) = &self.shadowed_by {
            problems.push(format!(
                "conflist: runtimes read {other} instead, because its name sorts before {CONFLIST}; remove \
                 or rename it"
            ));
        }
        problems
    }
}
