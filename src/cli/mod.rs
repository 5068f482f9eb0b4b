//! What people call by hand. Prints for people, and never changes anything that it was not asked to change.

pub mod store;

use std::ffi::OsString;

/// What a command leaves: what to print where, and how to exit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandOutput {
    pub stdout: String,
    pub stderr: String,
    /// 0: done and well; 1: something is wrong; 2: the command was not understood.
    pub status: u8,
}

impl CommandOutput {
    fn printed(stdout: impl Into<String>) -> Self {
        Self { stdout: stdout.into(), ..Self::default() }
    }
}

/// Runs a command of the plugin's executable: the arguments after its name.
pub fn run(arguments: &[OsString]) -> CommandOutput {
    let first = arguments.first().map(|argument| argument.to_string_lossy());
    match first.as_deref() {
        Some("store") => store::run(&arguments[1..]),
        Some("-h" | "--help") | None => {
            CommandOutput::printed(format!("{}\n{}", crate::cni::about(), store::HELP))
        }
        Some("-V" | "--version") => {
            CommandOutput::printed(format!("sticky-ipam {}\n", env!("CARGO_PKG_VERSION")))
        }
        Some(other) => {
            let stderr = format!("sticky-ipam: there is no command '{other}'; try: sticky-ipam --help\n");
            CommandOutput { stderr, status: 2, ..CommandOutput::default() }
        }
    }
}
