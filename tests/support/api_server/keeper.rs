//! The processes of one server and the folder they live in, held so that they go when the test process goes.
//!
//! A test binary has no place to clean up: statics are not dropped, and SIGKILL asks nobody. So a small shell
//! (`keeper.sh`) is the parent of etcd and kube-apiserver; its standard input is a pipe from here, and the
//! kernel closes that pipe whatever ends us. It must never signal a process that it did not start itself.

use std::fs::{self, File, TryLockError};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

/// Folders of servers carry this name, and only they are ever swept.
const PREFIX: &str = "sticky-ipam-api.";
/// Where logs go instead of the folder that is removed: set it to look at them after a failure.
pub const LOGS_VARIABLE: &str = "STICKY_IPAM_API_LOGS";
const SCRIPT: &str = include_str!("keeper.sh");

/// The keeper of one folder and of the processes started in it. Dropping it ends them and removes the folder.
pub struct Keeper {
    folder: PathBuf,
    conversation: Mutex<Option<Conversation>>,
    /// Shared with the keeper's own: the folder is in use from before the shell has started.
    _lock: File,
}

struct Conversation {
    shell: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Keeper {
    /// Sweeps what killed keepers left under `parent`, makes a fresh folder there and starts its keeper.
    pub fn start(parent: &Path) -> Self {
        for program in ["bash", "setpriv", "flock"] {
            super::tools::on_path(program, "apt-get install bash util-linux");
        }
        sweep(parent);
        let (folder, lock) = fresh_folder(parent);
        let complaints = File::create(folder.join("logs/keeper.log")).expect("the keeper's log");
        let mut shell = Command::new("bash");
        for variable in super::tools::PROXY_VARIABLES {
            shell.env_remove(variable);
        }
        let mut shell = shell
            .args(["-c", SCRIPT, "keeper.sh"])
            .arg(&folder)
            // Its own process group: Ctrl-C in the terminal ends us, and the keeper then clears up.
            .process_group(0)
            .env("LC_ALL", "C")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(complaints)
            .spawn()
            .expect("bash starts the keeper");
        let orders = shell.stdin.take().expect("a pipe was asked for");
        let mut answers = BufReader::new(shell.stdout.take().expect("a pipe was asked for"));
        let mut first = String::new();
        answers.read_line(&mut first).expect("the keeper's first word");
        assert_eq!(
            first.trim(),
            "ready",
            "the keeper of {} did not start: {}",
            folder.display(),
            log_of(&folder, "keeper")
        );
        Self { folder, conversation: Mutex::new(Some(Conversation { shell, orders, answers })), _lock: lock }
    }

    /// The folder that lives as long as the keeper.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The pid of the keeper's own process.
    pub fn pid(&self) -> u32 {
        self.conversation.lock().expect("no order panics").as_ref().expect("it is not dropped yet").shell.id()
    }

    /// Starts `argv` under `name` in the folder and gives its pid.
    pub fn run(&self, name: &str, argv: &[String]) -> u32 {
        let words: Vec<u8> = argv.iter().flat_map(|word| word.bytes().chain([0])).collect();
        fs::write(self.folder.join(format!("{name}.argv")), words).expect("the folder is ours");
        let answer = self.order(&format!("start {name}"));
        answer.parse().unwrap_or_else(|_| panic!("the keeper was to start {name} and said {answer:?}"))
    }

    /// Whether the process of that name is there; a paused one is.
    pub fn is_running(&self, name: &str) -> bool {
        self.order(&format!("running {name}")) == "yes"
    }

    /// Sends a signal by its name (`STOP`, `CONT`, `TERM`).
    pub fn signal(&self, name: &str, signal: &str) {
        let answer = self.order(&format!("signal {signal} {name}"));
        assert_eq!(answer, "ok", "{name} is not running, it cannot be sent SIG{signal}: {}", self.log(name));
    }

    /// Kills the process of that name and waits until it is gone. None there is fine.
    pub fn stop(&self, name: &str) {
        assert_eq!(self.order(&format!("stop {name}")), "ok");
    }

    /// The last lines of a process's log, for messages.
    pub fn log(&self, name: &str) -> String {
        log_of(&self.folder, name)
    }

    fn order(&self, order: &str) -> String {
        let mut guard = self.conversation.lock().expect("no order panics");
        let conversation = guard.as_mut().expect("it is not dropped yet");
        let mut answer = String::new();
        let said = writeln!(conversation.orders, "{order}")
            .and_then(|()| conversation.answers.read_line(&mut answer));
        drop(guard);
        match said {
            Ok(length) if length > 0 => answer.trim().to_owned(),
            _ => panic!("the keeper of {} is gone, it cannot {order}", self.folder.display()),
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let conversation = self.conversation.get_mut().ok().and_then(Option::take);
        if let Some(Conversation { mut shell, orders, answers }) = conversation {
            drop((orders, answers));
            // Its exit is the end of its processes and of the folder; a failure here must not hide the test's
            // own.
            let _ = shell.wait();
        }
    }
}

/// Removes the folders under `parent` that no living server holds.
pub fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        let Some(lock) = ours.then(|| File::open(entry.path().join("lock")).ok()).flatten() else { continue };
        match lock.try_lock() {
            // Another sweeper may be at it, or the folder may be another user's: neither is our failure.
            Ok(()) => drop(fs::remove_dir_all(entry.path())),
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => {}
        }
    }
}

/// A folder that is locked before it gets the name that sweepers look for.
fn fresh_folder(parent: &Path) -> (PathBuf, File) {
    let unnamed = tempfile::Builder::new().prefix("sticky-ipam-new.").tempdir_in(parent);
    let unnamed = unnamed.unwrap_or_else(|why| {
        panic!(
            "no folder for the API server under {}: {why}. Set TMPDIR to a folder with room",
            parent.display()
        )
    });
    let lock = File::create(unnamed.path().join("lock")).expect("the folder is ours");
    lock.lock_shared().expect("nobody else knows the file");
    let logs = unnamed.path().join("logs");
    match std::env::var_os(LOGS_VARIABLE) {
        Some(elsewhere) => {
            let elsewhere = Path::new(&elsewhere).join(unnamed.path().file_name().expect("it has a name"));
            fs::create_dir_all(&elsewhere).expect("the folder for logs can be made");
            let elsewhere = elsewhere.canonicalize().expect("it was just made");
            std::os::unix::fs::symlink(elsewhere, logs).expect("the folder is ours");
        }
        None => fs::DirBuilder::new().mode(0o700).create(logs).expect("the folder is ours"),
    }
    let unnamed = unnamed.keep();
    let suffix = unnamed.extension().expect("tempfile adds one").to_string_lossy().into_owned();
    let folder = parent.join(format!("{PREFIX}{suffix}"));
    fs::rename(&unnamed, &folder).expect("one file system, a fresh name");
    (folder, lock)
}

fn log_of(folder: &Path, name: &str) -> String {
    let path = folder.join(format!("logs/{name}.log"));
    let text = fs::read_to_string(&path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    format!("the last lines of {name}'s log:\n{}", lines[lines.len().saturating_sub(15)..].join("\n"))
}

/// Waits for a condition by asking again and again; `false` when the deadline passed first.
pub async fn comes_true<F: Future<Output = bool>>(
    deadline: Duration,
    mut condition: impl FnMut() -> F,
) -> bool {
    tokio::time::timeout(deadline, async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .is_ok()
}
