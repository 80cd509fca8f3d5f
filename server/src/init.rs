//! What process 1 of a container has to do besides serving. A process whose parent has ended becomes
//! a child of process 1, and stays in the table of processes until that one reaps it; handlers may
//! leave any number of them. So process 1 starts the server as its child, passes signals on to it,
//! reaps whatever ends, and ends as the server did.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use anyhow::Context as _;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};
use tokio::signal::unix::{SignalKind, signal};

/// Whether this process is the one that orphans are left to.
pub(crate) fn is_process_1() -> bool {
    rustix::process::getpid() == Pid::INIT
}

/// Runs this command line again in a child. Returns the child's exit code once it has ended; with
/// this process everything else in the container ends.
///
/// # Errors
/// The system refuses to catch signals or to start a process.
pub(crate) fn run() -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("the runtime of process 1 cannot be started")?;
    runtime.block_on(look_after_the_server())
}

async fn look_after_the_server() -> anyhow::Result<ExitCode> {
    let mut ended = signal(SignalKind::child())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let server = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        // A Ctrl-C at the terminal comes here alone, so that the server hears it once.
        .process_group(0)
        .spawn()
        .context("the server cannot be started as a child of process 1")?;
    let server = Pid::from_child(&server);
    loop {
        let passed_on = tokio::select! {
            _ = ended.recv() => {
                if let Some(code) = reap(server) {
                    return Ok(code);
                }
                continue;
            }
            _ = terminate.recv() => Signal::TERM,
            _ = interrupt.recv() => Signal::INT,
        };
        // One that has just ended is noticed next.
        let _already_ended = rustix::process::kill_process(server, passed_on);
    }
}

/// Reaps every child that has ended. Returns the exit code of the server if it is among them.
fn reap(server: Pid) -> Option<ExitCode> {
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) if pid == server => return Some(exit_code(status)),
            Ok(Some(_)) | Err(Errno::INTR) => {}
            Ok(None) | Err(_) => return None,
        }
    }
}

/// As shells tell it: 128 and the number of the signal for a process that was killed.
fn exit_code(status: WaitStatus) -> ExitCode {
    let signal = status.terminating_signal().map(|number| 128 + number);
    let code = status.exit_status().or(signal).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
