//! The CNI plugin `sticky-ipam`: reads the request, runs the verb, prints the answer.

use std::io::Write;
use std::process::ExitCode;

use sticky_ipam::{cni, plugin};

fn main() -> ExitCode {
    let answer = plugin::run(&|name| std::env::var_os(name), &mut cni::Pollable(std::io::stdin()));
    // Nobody is left to tell if the runtime has closed its ends.
    if let Some(text) = answer.stderr {
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
    if let Some(document) = answer.stdout {
        let _ = std::io::stdout().write_all(document.as_bytes());
    }
    ExitCode::from(answer.status)
}
