//! Model hosts as the server sees them: start, watch, kill, reap.
//!
//! A host is the server's own executable in its hidden `worker` command, in a process group of its
//! own. One thread per host copies its output to the model log, reaps it, and then hangs up all its
//! channels: a grandchild may hold their other ends open, so their closing alone tells nothing.

use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions};
use ts_wire::frame::{ControlRequest, HostReply, HostSetup, PythonPlaces};
use ts_wire::{Channel, HangUp, WireError};

use crate::config::HostConfig;
use crate::pool::logs::ModelLog;

/// Control messages carry paths and texts, never bodies.
const MAX_CONTROL_PAYLOAD_BYTES: u64 = 1 << 20;

/// A forward pass allocates and frees the same large tensors every time. By default the C library
/// gives them back to the system and fetches them again: some 2,300 page faults and 6 ms a photo of
/// the image classifier. Both are needed: setting one switches off the library's own adjustment of
/// the other.
const KEEP_MEMORY: [(&str, &str); 2] = [
    ("MALLOC_TRIM_THRESHOLD_", "268435456"),
    ("MALLOC_MMAP_THRESHOLD_", "33554432"),
];

/// Why there is no host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HostStartError {
    #[error("a model host could not be started")]
    Spawn(#[from] io::Error),
    #[error("a new model host does not answer")]
    Wire(#[from] WireError),
    #[error("{0}")]
    Failed(String),
}

/// How a host ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostExit {
    status: ExitStatus,
    ordered: bool,
}

impl HostExit {
    /// Killed from outside by the one signal that the kernel uses when memory runs out, or by a
    /// parent that says so with 137 (*torchserve-contract* 4.6).
    pub(crate) fn out_of_memory(self) -> bool {
        !self.ordered && (self.status.signal() == Some(9) || self.status.code() == Some(137))
    }

    /// One line for the log and the model's last failure.
    pub(crate) fn describe(self) -> String {
        match (self.status.signal(), self.status.code()) {
            (Some(9), _) if !self.ordered => {
                "killed by signal 9; the usual cause is that memory ran out".to_owned()
            }
            (Some(signal), _) => format!("killed by signal {signal}"),
            (None, Some(code)) => format!("exited with status {code}"),
            (None, None) => "ended".to_owned(),
        }
    }
}

/// One host process.
pub(crate) struct Host {
    pid: Pid,
    control: Mutex<Channel>,
    /// The control channel and those of its workers.
    hang_ups: Mutex<Vec<HangUp>>,
    ordered_to_end: AtomicBool,
    exit: Mutex<Option<HostExit>>,
    exited: Condvar,
}

impl Host {
    /// Starts a host process. `on_exit` is called once, from the host's own thread, after the
    /// process has been reaped. [`Host::set_up`] comes next.
    pub(crate) fn spawn(
        config: &HostConfig,
        intra_op_threads: u32,
        log: ModelLog,
        on_exit: impl FnOnce() + Send + 'static,
    ) -> Result<Arc<Self>, HostStartError> {
        let (near, far) = Channel::pair()?;
        let mut child = command(config, intra_op_threads, far).spawn()?;
        let pid = Pid::from_child(&child);
        let stdout = child.stdout.take().map(OwnedFd::from);
        let stderr = child.stderr.take().map(OwnedFd::from);
        let discard = |error: io::Error| {
            let _already_gone = rustix::process::kill_process_group(pid, Signal::KILL);
            let _nothing_to_reap = rustix::process::waitpid(Some(pid), WaitOptions::empty());
            HostStartError::Spawn(error)
        };
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty())
            .map_err(|errno| discard(errno.into()))?;
        let control = Channel::new(near, MAX_CONTROL_PAYLOAD_BYTES);
        let host = Arc::new(Self {
            pid,
            hang_ups: Mutex::new(vec![control.hang_up()]),
            control: Mutex::new(control),
            ordered_to_end: AtomicBool::new(false),
            exit: Mutex::new(None),
            exited: Condvar::new(),
        });
        let watched = Arc::clone(&host);
        std::thread::Builder::new()
            .name(format!("host-{}", pid.as_raw_nonzero()))
            .spawn(move || {
                log.copy(stdout, stderr, pidfd.as_fd());
                watched.reap(&mut child);
                on_exit();
            })
            .map_err(discard)?;
        Ok(host)
    }

    /// Waits for the end of the process and makes it known.
    fn reap(&self, child: &mut Child) {
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(Errno::INTR) = rustix::process::waitid(WaitId::Pid(self.pid), ended) {}
        // Whatever it started and left behind goes too, while the number of the group is still
        // taken by the process that waits to be reaped.
        let _nothing_left = rustix::process::kill_process_group(self.pid, Signal::KILL);
        let ordered = self.ordered_to_end.load(Ordering::SeqCst);
        let mut exit = self.exit.lock();
        let status = child.wait().unwrap_or_else(|error| {
            tracing::error!(%error, pid = child.id(), "reaping a host failed");
            ExitStatus::default()
        });
        *exit = Some(HostExit { status, ordered });
        drop(exit);
        self.exited.notify_all();
        for channel in self.hang_ups.lock().iter() {
            channel.now();
        }
    }

    /// Tells the host what to load, and waits until it can take workers.
    pub(crate) fn set_up(
        &self,
        python: Option<&PythonPlaces>,
        deadline: Option<Instant>,
    ) -> Result<(), HostStartError> {
        let mut control = self.control.lock();
        control.send(
            &HostSetup {
                python: python.cloned(),
            },
            None,
        )?;
        let reply = control
            .receive(deadline)
            .and_then(|incoming| incoming.header());
        match reply {
            Ok(HostReply::Ready) => Ok(()),
            Ok(HostReply::Failed { message }) => Err(HostStartError::Failed(message)),
            Err(WireError::Closed) => {
                let exit = self.wait_for_exit(Duration::from_secs(1));
                let how = exit.map_or_else(|| "closed its socket".to_owned(), HostExit::describe);
                Err(HostStartError::Failed(format!(
                    "the model host {how} while it started"
                )))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Adds a worker and returns the server's end of its channel.
    pub(crate) fn add_worker(
        &self,
        worker: u32,
        max_payload_bytes: u64,
    ) -> Result<Channel, HostStartError> {
        let (near, far) = Channel::pair()?;
        self.control
            .lock()
            .send(&ControlRequest::AddWorker { worker }, Some(far.as_fd()))?;
        let channel = Channel::new(near, max_payload_bytes);
        let hang_up = channel.hang_up();
        let mut hang_ups = self.hang_ups.lock();
        hang_ups.retain(HangUp::is_pending);
        if !self.is_alive() {
            // It ended before there was this one to hang up.
            hang_up.now();
        }
        hang_ups.push(hang_up);
        Ok(channel)
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.exit.lock().is_none()
    }

    /// Ends the process and everything in its group, at once.
    pub(crate) fn kill(&self) {
        // Held so that the process cannot be reaped, and its number taken by another, in between.
        let exit = self.exit.lock();
        if exit.is_none() {
            self.ordered_to_end.store(true, Ordering::SeqCst);
            let _already_ending = rustix::process::kill_process_group(self.pid, Signal::KILL);
        }
    }

    /// How it ended, waiting up to `limit` for that.
    pub(crate) fn wait_for_exit(&self, limit: Duration) -> Option<HostExit> {
        let mut exit = self.exit.lock();
        if exit.is_none() {
            self.exited.wait_for(&mut exit, limit);
        }
        *exit
    }
}

/// The use of a host by a worker. The host ends with its last user.
pub(crate) struct HostLease {
    host: Arc<Host>,
}

impl HostLease {
    pub(crate) fn new(host: Arc<Host>) -> Self {
        Self { host }
    }

    /// The process, without a share in its life.
    pub(crate) fn process(&self) -> Arc<Host> {
        Arc::clone(&self.host)
    }
}

impl Deref for HostLease {
    type Target = Host;
    fn deref(&self) -> &Host {
        &self.host
    }
}

impl Drop for HostLease {
    fn drop(&mut self) {
        self.host.kill();
    }
}

fn command(config: &HostConfig, intra_op_threads: u32, control: OwnedFd) -> Command {
    let mut command = Command::new(&config.executable);
    command
        .arg("worker")
        .stdin(Stdio::from(control))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A Ctrl-C at the server's terminal is the server's to act on.
        .process_group(0)
        // OpenMP reads these once, before the first thread of its pool. Each worker thread sets its
        // own number as well; without these a fresh thread would start a pool for the whole machine.
        .env("OMP_NUM_THREADS", intra_op_threads.to_string())
        .env("MKL_NUM_THREADS", intra_op_threads.to_string());
    for (name, value) in KEEP_MEMORY {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    if let Some(hidden) = &config.hidden_environment {
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|name| hidden.is_match(name)) {
                command.env_remove(name);
            }
        }
    }
    command
}
