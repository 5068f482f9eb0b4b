//! Where the third-party programs are. It never builds and never skips: what is missing is named with its
//! cure.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Go programs and clients take their way by these; the bench is on the loopback and wants none of them.
pub const PROXY_VARIABLES: [&str; 6] =
    ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"];

/// The folder of a group of pinned tools: `bin/` holds its programs, `crds/` and others lie beside it.
pub fn group(group: &str) -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tools/path");
    let asked = Command::new(&script).arg(group).output();
    let asked = asked.unwrap_or_else(|why| panic!("cannot run {}: {why}", script.display()));
    assert!(
        asked.status.success(),
        "the API tier needs the pinned tools '{group}': {}. Run `make tools` (minutes once, then cached)",
        String::from_utf8_lossy(&asked.stderr).trim()
    );
    let bin = PathBuf::from(String::from_utf8_lossy(&asked.stdout).trim());
    bin.parent().expect("it ends in /bin").to_owned()
}

/// A program of the machine, or the command that installs it.
pub fn on_path(program: &str, cure: &str) -> PathBuf {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&folders).map(|folder| folder.join(program)).find(|path| path.is_file());
    found.unwrap_or_else(|| {
        panic!("the API tier needs {program}, which is not on PATH. Run `make tools`, or: {cure}")
    })
}
