//! Model hosts as the server sees them: start, watch, kill, reap.
//!
//! A host is the server's own executable in its hidden `worker` command, or a copy of one such that
//! the zygote has forked (`zygote.rs`), in a process group of its own. One thread per host copies
//! its output to the model log, reaps it, and then hangs up all its channels: a grandchild may hold
//! their other ends open, so their closing alone tells nothing.

use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, Signal};
use serde::Serialize;
use serde::de::DeserializeOwned;
use ts_types::HostLimits;
use ts_wire::frame::{ControlRequest, HostReply, HostSetup, PythonPlaces};
use ts_wire::{Channel, HangUp, WireError};

use crate::config::HostConfig;
use crate::pool::children::{Children, OwnChild, kill_tree};
use crate::pool::limits::{Confined, Confinement};
use crate::pool::logs::ModelLog;

/// Control messages carry paths and texts, never bodies.
const MAX_CONTROL_PAYLOAD_BYTES: u64 = 1 << 20;

/// Only a host that has long stopped reading has no room for the next control message.
const CONTROL_SENT_WITHIN: Duration = Duration::from_secs(10);

/// A forward pass allocates and frees the same large tensors every time. By default the C library
/// gives them back to the system and fetches them again: some 2,300 page faults and 6 ms a photo of
/// the image classifier. Both are needed: setting one switches off the library's own adjustment of
/// the other.
const KEEP_MEMORY: [(&str, &str); 2] = [
    ("MALLOC_TRIM_THRESHOLD_", "268435456"),
    ("MALLOC_MMAP_THRESHOLD_", "33554432"),
];

/// What CUDA reads the devices of a process from.
pub(crate) const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// Why there is no host.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HostStartError {
    #[error("a model host could not be started")]
    Spawn(#[from] io::Error),
    #[error("the limits of a model host (`memoryLimitMb`, `cpuLimit`) cannot be enforced")]
    Limits(#[source] io::Error),
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
    limit: Option<MemoryLimit>,
    /// Which of its group it was.
    rank: Option<u32>,
}

/// What a limit on its memory has to do with a host's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MemoryLimit {
    bytes: u64,
    /// The kernel has ended it for being over.
    exceeded: bool,
    /// What is over is refused, and native code that is refused memory aborts.
    refuses: bool,
}

impl HostExit {
    /// Killed from outside by the one signal that the kernel uses when memory runs out, or by a
    /// parent that says so with 137 (*torchserve-contract* 4.6).
    pub(crate) fn out_of_memory(self) -> bool {
        let refused = self.limit.is_some_and(|limit| limit.refuses);
        match (self.status.signal(), self.status.code()) {
            _ if self.ordered => false,
            (Some(6), _) => refused,
            (signal, code) => signal == Some(9) || code == Some(137),
        }
    }

    /// One line for the log and the model's last failure.
    pub(crate) fn describe(self) -> String {
        let how = self.how();
        match self.rank {
            Some(rank) => format!("rank {rank}: {how}"),
            None => how,
        }
    }

    fn how(self) -> String {
        match (self.status.signal(), self.status.code()) {
            (Some(signal), _)
                if !self.ordered && self.limit.is_some_and(|of| of.explains(signal)) =>
            {
                let mib = self.limit.map_or(0, |limit| limit.bytes >> 20);
                format!("killed by signal {signal}: out of memory under its limit of {mib} MiB")
            }
            (Some(9), _) if !self.ordered => {
                "killed by signal 9; the usual cause is that memory ran out".to_owned()
            }
            (Some(signal), _) => format!("killed by signal {signal}"),
            (None, Some(code)) => format!("exited with status {code}"),
            (None, None) => "ended".to_owned(),
        }
    }
}

impl MemoryLimit {
    fn explains(self, signal: i32) -> bool {
        self.exceeded && signal == 9 || self.refuses && signal == 6
    }
}

/// The server's end of a host's control channel.
pub(crate) fn control_channel(socket: OwnedFd) -> Result<Channel, WireError> {
    let mut control = Channel::new(socket, MAX_CONTROL_PAYLOAD_BYTES);
    control.limit_sending(CONTROL_SENT_WITHIN)?;
    Ok(control)
}

/// A host process that nobody watches yet.
pub(crate) struct NewHost {
    pub(crate) child: OwnChild,
    pub(crate) control: Channel,
    pub(crate) stdout: Option<OwnedFd>,
    pub(crate) stderr: Option<OwnedFd>,
    pub(crate) confined: Confined,
}

impl NewHost {
    /// Starts a host as a program of its own. [`Host::set_up`] tells it what to be.
    pub(crate) fn exec(
        config: &HostConfig,
        children: &Arc<Children>,
        variables: &[(&str, String)],
    ) -> Result<Self, HostStartError> {
        let (near, far) = Channel::pair()?;
        let control = control_channel(near)?;
        let (mut child, own) = children.spawn(&mut command(config, variables, far))?;
        Ok(Self {
            child: own,
            control,
            stdout: child.stdout.take().map(OwnedFd::from),
            stderr: child.stderr.take().map(OwnedFd::from),
            confined: Confined::default(),
        })
    }

    /// Limits what it may use.
    pub(crate) fn confine(
        mut self,
        confinement: &Arc<Confinement>,
        limits: HostLimits,
    ) -> Result<Self, HostStartError> {
        match confinement.confine(self.child.pid(), limits) {
            Ok(confined) => {
                self.confined = confined;
                Ok(self)
            }
            Err(error) => {
                self.child.discard();
                Err(HostStartError::Limits(error))
            }
        }
    }

    /// Watches it from now on. `on_exit` is called once, from the host's own thread, after the
    /// process has been reaped. `rank` tells it from others of its group.
    pub(crate) fn watch(
        self,
        log: ModelLog,
        rank: Option<u32>,
        on_exit: impl FnOnce(HostExit) + Send + 'static,
    ) -> Result<Arc<Host>, HostStartError> {
        let Self {
            child,
            control,
            stdout,
            stderr,
            confined,
        } = self;
        let pid = child.pid();
        let pidfd = match child.pidfd() {
            Ok(pidfd) => pidfd,
            Err(error) => {
                child.discard();
                return Err(error.into());
            }
        };
        let host = Arc::new(Host {
            pid,
            rank,
            others: Mutex::default(),
            cause: Mutex::default(),
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
                on_exit(watched.reap(child, &confined));
            })
            .inspect_err(|_| {
                // The child is an orphan by now, and is reaped as one.
                let _already_gone = rustix::process::kill_process_group(pid, Signal::KILL);
            })?;
        Ok(host)
    }
}

/// One host process.
pub(crate) struct Host {
    pid: Pid,
    rank: Option<u32>,
    /// The other ranks of the group that this one stands for.
    others: Mutex<Vec<HostLease>>,
    /// How one of them ended, which has ended this one.
    cause: Mutex<Option<HostExit>>,
    control: Mutex<Channel>,
    /// The control channel and those of its workers.
    hang_ups: Mutex<Vec<HangUp>>,
    ordered_to_end: AtomicBool,
    exit: Mutex<Option<HostExit>>,
    exited: Condvar,
}

impl Host {
    /// Waits for the end of the process and makes it known. Returns how it ended, or the other
    /// rank that has ended it.
    fn reap(&self, child: OwnChild, confined: &Confined) -> HostExit {
        child.wait();
        // Whatever it started and left behind goes too, while the number of the group is still
        // taken by the process that waits to be reaped.
        let _nothing_left = rustix::process::kill_process_group(self.pid, Signal::KILL);
        let ordered = self.ordered_to_end.load(Ordering::SeqCst);
        let limit = confined.limits().memory_bytes.map(|bytes| MemoryLimit {
            bytes,
            exceeded: confined.was_over_memory(),
            refuses: confined.refuses_memory(),
        });
        let mut exit = self.exit.lock();
        let status = child.reap().unwrap_or_else(|error| {
            tracing::error!(%error, pid = self.pid(), "reaping a host failed");
            ExitStatus::default()
        });
        let own = HostExit {
            status,
            ordered,
            limit,
            rank: self.rank,
        };
        let told = self.cause.lock().unwrap_or(own);
        *exit = Some(told);
        drop(exit);
        self.end_others();
        self.exited.notify_all();
        for channel in self.hang_ups.lock().iter() {
            channel.now();
        }
        told
    }

    /// Takes another rank into the group that this one stands for: it ends with this one. The other
    /// way round, its end is for [`Host::end_with`].
    pub(crate) fn join(&self, other: HostLease) {
        self.others.lock().push(other);
        if self.ordered_to_end.load(Ordering::SeqCst) || !self.is_alive() {
            self.end_others();
        }
    }

    /// Ends, since another rank has ended.
    pub(crate) fn end_with(&self, other: HostExit) {
        if !other.ordered {
            self.cause.lock().get_or_insert(other);
        }
        self.kill();
    }

    fn end_others(&self) {
        for other in &*self.others.lock() {
            other.kill();
        }
    }

    /// All ranks of its group, this one first.
    pub(crate) fn ranks(self: &Arc<Self>) -> Vec<Arc<Host>> {
        let others = self.others.lock();
        let others = others.iter().map(HostLease::process);
        std::iter::once(Arc::clone(self)).chain(others).collect()
    }

    /// Tells the host what to load, and waits until it can take workers.
    pub(crate) fn set_up(
        &self,
        python: Option<&PythonPlaces>,
        deadline: Option<Instant>,
    ) -> Result<(), HostStartError> {
        self.begin(python)?;
        self.come_up(deadline)
    }

    /// Tells the host to be a zygote, and waits until it can fork.
    pub(crate) fn set_up_zygote(
        &self,
        python: &PythonPlaces,
        deadline: Option<Instant>,
    ) -> Result<(), HostStartError> {
        self.tell(Some(python), true)?;
        self.come_up(deadline)
    }

    /// Tells the host what to load, and does not wait.
    pub(crate) fn begin(&self, python: Option<&PythonPlaces>) -> Result<(), HostStartError> {
        self.tell(python, false)
    }

    fn tell(&self, python: Option<&PythonPlaces>, zygote: bool) -> Result<(), HostStartError> {
        let setup = HostSetup {
            python: python.cloned(),
            zygote,
        };
        Ok(self.control.lock().send(&setup, None)?)
    }

    /// Waits until the host can do its work.
    pub(crate) fn come_up(&self, deadline: Option<Instant>) -> Result<(), HostStartError> {
        let reply = self
            .control
            .lock()
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

    /// Asks something on the control channel, and waits for the answer.
    pub(crate) fn ask<T: DeserializeOwned>(
        &self,
        request: &impl Serialize,
        descriptor: Option<BorrowedFd<'_>>,
        deadline: Option<Instant>,
    ) -> Result<T, WireError> {
        let mut control = self.control.lock();
        control.send(request, descriptor)?;
        control.receive(deadline)?.header()
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

    /// Ends the process and everything below it, at once, and the other ranks of its group.
    pub(crate) fn kill(&self) {
        {
            // Held so that the process cannot be reaped, and its number taken by another, in between.
            let exit = self.exit.lock();
            if exit.is_none() {
                self.ordered_to_end.store(true, Ordering::SeqCst);
                kill_tree(self.pid);
            }
        }
        self.end_others();
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

/// What libraries read once, before the first thread of their pools. Each worker thread sets its own
/// number as well; without these a fresh thread would start a pool for the whole machine.
pub(crate) fn thread_variables(threads: u32) -> [(&'static str, String); 2] {
    ["OMP_NUM_THREADS", "MKL_NUM_THREADS"].map(|name| (name, threads.to_string()))
}

fn command(config: &HostConfig, variables: &[(&str, String)], control: OwnedFd) -> Command {
    let mut command = Command::new(&config.executable);
    command
        .arg("worker")
        .stdin(Stdio::from(control))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A Ctrl-C at the server's terminal is the server's to act on.
        .process_group(0);
    for (name, value) in KEEP_MEMORY {
        if std::env::var_os(name).is_none() {
            command.env(name, value);
        }
    }
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| is_hidden(config, name)) {
            command.env_remove(name);
        }
    }
    // Last: one that is hidden where it is inherited may be one that is set.
    command.envs(variables.iter().map(|(name, value)| (name, value)));
    command
}

/// Whether hosts do not inherit a variable.
pub(crate) fn is_hidden(config: &HostConfig, name: &str) -> bool {
    let hidden = config.hidden_environment.as_ref();
    hidden.is_some_and(|hidden| hidden.is_match(name))
        || config.secret_variables.iter().any(|secret| secret == name)
}
