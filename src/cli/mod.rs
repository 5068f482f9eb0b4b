//! What people call by hand. Prints for people, and never changes anything that it was not asked to change.

pub mod store;

use std::ffi::OsString;

/// What a command leaves: what to print where, and how to exit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandOutput {
    /// For standard output.
    pub stdout: String,
    /// For standard error.
    pub stderr: String,
    /// 0: done and well; 1: something is wrong; 2: the command was not understood.
    pub status: u8,
}

/// Runs a command of the plugin's executable: the arguments after its name.
pub fn run(arguments: &[OsString]) -> CommandOutput {
    let first = arguments.first().map(|argument| argument.to_string_lossy());
    match first.as_deref() {
        Some("store") => store::run(&arguments[1..]),
        Some("-h" | "--help") | None => CommandOutput {
            stdout: format!("{}\n{}", crate::cni::about(), store::HELP),
            ..CommandOutput::default()
        },
        Some("-V" | "--version") => {
            let stdout = format!("sticky-ipam {}\n", env!("CARGO_PKG_VERSION"));
            CommandOutput { stdout, ..CommandOutput::default() }
        }
        Some(other) => {
            let stderr = format!("sticky-ipam: there is no command '{other}'; try: sticky-ipam --help\n");
            CommandOutput { stderr, status: 2, ..CommandOutput::default() }
        }
    }
}
