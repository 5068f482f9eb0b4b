//! The CNI plugin `sticky-ipam`: reads the request, runs the verb, prints the answer. Without a request and
//! with arguments it is a person's command.

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use sticky_ipam::{cli, cni, plugin};

fn main() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let asked = std::env::var_os("CNI_COMMAND").is_some_and(|command| !command.is_empty());
    let (stdout, stderr, status) = if asked || arguments.is_empty() {
        let answer = plugin::run(&|name| std::env::var_os(name), &mut cni::Pollable(std::io::stdin()));
        (answer.stdout.unwrap_or_default(), answer.stderr.unwrap_or_default(), answer.status)
    } else {
        let outcome = cli::run(&arguments);
        (outcome.stdout, outcome.stderr, outcome.status)
    };
    // If the caller has closed its ends, there is no reader left.
    let _ = std::io::stderr().write_all(stderr.as_bytes());
    let _ = std::io::stdout().write_all(stdout.as_bytes());
    ExitCode::from(status)
}
