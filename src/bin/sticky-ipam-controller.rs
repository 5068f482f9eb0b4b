//! The cluster's controller `sticky-ipam-controller`: parses, calls and maps the exit.

use std::io::Write;
use std::process::ExitCode;

use sticky_ipam::controller;

fn main() -> ExitCode {
    match controller::main(std::env::args_os().collect()) {
        Ok(printed) => {
            let _ = std::io::stdout().write_all(printed.text.as_bytes());
            ExitCode::from(printed.status)
        }
        Err(failure) => {
            let _ = writeln!(std::io::stderr(), "{}", failure.text.trim_end());
            ExitCode::from(failure.status)
        }
    }
}
