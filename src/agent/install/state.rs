//! What is installed and what is wrong with it, for metrics, readiness and operators.

use std::time::SystemTime;

/// The state of one part on the host.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum PartState {
    /// Not checked yet.
    #[default]
    Unknown,
    /// Not installed by the agent: no flag asks for it.
    NotManaged,
    /// As it should be.
    Installed,
    /// It cannot be installed. What was there before still is.
    Failed(String),
}

/// The state of everything that the agent installs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InstallState {
    /// The plugin's binary.
    pub plugin: PartState,
    /// The plugin's credentials.
    pub kubeconfig: PartState,
    pub conflist: PartState,
    /// How many files were restored because another program changed or removed them.
    pub repairs: u64,
    /// How often Cilium renamed the conflist.
    pub displaced: u64,
    /// Whether Cilium keeps renaming the conflist, so that it is restored only now and then.
    pub outnumbered: bool,
    /// A file that runtimes read instead of ours, because its name sorts before.
    pub shadowed_by: Option<String>,
    /// When the plugin's token ends, by the API server's clock.
    pub token_expires: Option<SystemTime>,
    /// How many tokens were written.
    pub renewals: u64,
    /// How many times no token was issued.
    pub renewal_failures: u64,
}

impl InstallState {
    /// What keeps new pods from being served, each with its cure; none when the node is ready.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for (name, part) in
            [("plugin", &self.plugin), ("kubeconfig", &self.kubeconfig), ("conflist", &self.conflist)]
        {
            match part {
                PartState::Unknown => problems.push(format!("{name}: not installed yet")),
                PartState::Failed(why) => problems.push(format!("{name}: {why}")),
                PartState::NotManaged | PartState::Installed => {}
            }
        }
        if self.outnumbered {
            problems.push(format!("conflist: {}", super::rivals::EXCLUSIVE));
        }
        if let Some(other) = &self.shadowed_by {
            problems.push(format!(
                "conflist: runtimes read {other} instead, because its name sorts before {}; remove or rename \
                 it",
                super::settings::CONFLIST
            ));
        }
        problems
    }

    /// Whether new pods are served by what is installed.
    pub fn is_ready(&self) -> bool {
        self.problems().is_empty()
    }
}
