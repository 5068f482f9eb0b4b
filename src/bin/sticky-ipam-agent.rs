//! The node's agent `sticky-ipam-agent`: parses, calls and maps the exit.

use std::io::Write;
use std::process::ExitCode;

use sticky_ipam::agent;

fn main() -> ExitCode {
    match agent::main(std::env::args_os()) {
        Ok(text) => {
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Err(failure) => {
            let _ = writeln!(std::io::stderr(), "{}", failure.text.trim_end());
            ExitCode::from(failure.status)
        }
    }
}
