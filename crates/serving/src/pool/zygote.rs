//! The server's zygote: started when the first Python model needs a host, kept for the next ones,
//! replaced when it is lost.
//!
//! A host that it forks is ready at once and shares its pages (`docs/architecture.md` has figures).
//! It imports what the models name in their sources (`imports.rs`), when the first one that does is
//! started: that one waits as long as if it had imported them itself, and a server whose models need
//! no torch never has it in memory.
//!
//! Nobody depends on it. Where it is missing, slow or lost, a host is executed; hosts that it has
//! forked are children of the server and do not notice its end.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Pid;
use ts_types::with_causes;
use ts_wire::frame::{ForkedSetup, PythonPlaces, ZygoteReply, ZygoteRequest};
use ts_wire::{Channel, WireError};

use crate::config::HostConfig;
use crate::handler_metrics::PrintedMetrics;
use crate::pool::children::Children;
use crate::pool::hosts::{
    HostExit, HostLease, HostStartError, NewHost, control_channel, is_hidden, thread_variables,
};
use crate::pool::imports::Modules;
use crate::pool::limits::Confined;
use crate::pool::logs::ModelLog;

/// How long the zygote may take to start; it takes 0.3 s.
const STARTS_WITHIN: Duration = Duration::from_secs(30);

/// How long its imports may take; torch from a cold disk takes 10 s.
const IMPORTS_WITHIN: Duration = Duration::from_secs(120);

/// How long a fork may take; it takes some 20 ms.
const FORKS_WITHIN: Duration = Duration::from_secs(10);

/// The longest pause before a lost zygote is started again.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// The variable that OpenBLAS reads before the others. In the zygote it is 1, so that importing
/// numpy starts no threads.
const BLAS_VARIABLE: &str = "OPENBLAS_NUM_THREADS";

/// Lets torch tell whether there are accelerators without a use of CUDA, after which no copy could
/// use it. For modules that ask when they are imported.
const CUDA_CHECK_VARIABLE: &str = "PYTORCH_NVML_BASED_CUDA_CHECK";

/// The server's zygote, whether or not there is a process behind it now.
pub(crate) struct Zygote {
    config: HostConfig,
    children: Arc<Children>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    phase: Phase,
    /// One after the other without a forked host in between.
    failures: u32,
    /// When the next one may be started.
    pause_until: Option<Instant>,
}

enum Phase {
    /// There is none, and will be none.
    Off,
    /// There is none.
    Down,
    /// Somebody has it, and gives it back soon; importing takes a while.
    Taken { importing: bool },
    /// It waits for requests.
    Ready(Process),
}

struct Process {
    host: HostLease,
    places: PythonPlaces,
    imported: Vec<String>,
}

/// Why a zygote is of no use.
#[derive(Debug, thiserror::Error)]
enum ZygoteError {
    #[error(transparent)]
    Start(#[from] HostStartError),
    #[error("the zygote does not answer")]
    Wire(#[from] WireError),
    #[error("a forked host could not be taken in")]
    System(#[from] std::io::Error),
    #[error("{0}")]
    Refused(String),
    #[error("it was {}", .0.describe())]
    Ended(HostExit),
}

impl Zygote {
    pub(crate) fn new(config: &HostConfig, children: &Arc<Children>) -> Arc<Self> {
        let phase = if config.zygote {
            Phase::Down
        } else {
            Phase::Off
        };
        Arc::new(Self {
            config: config.clone(),
            children: Arc::clone(children),
            state: Mutex::new(State {
                phase,
                failures: 0,
                pause_until: None,
            }),
            changed: Condvar::new(),
        })
    }

    /// Forks a host for a model with these modules, or tells that one has to be executed.
    pub(crate) fn fork(
        self: &Arc<Self>,
        places: &PythonPlaces,
        modules: &Modules,
        threads: u32,
        deadline: Option<Instant>,
    ) -> Option<NewHost> {
        // What is left then has to do for executing a host.
        let half = deadline.map(|deadline| {
            let now = Instant::now();
            now + deadline.saturating_duration_since(now) / 2
        });
        let process = self.take(places, &modules.imported, half)?;
        let forked = self.fork_from(&process, &modules.own, threads, half);
        let mut state = self.state.lock();
        let forked = match forked {
            Ok(host) => {
                state.failures = 0;
                state.phase = Phase::Ready(process);
                host
            }
            Err(error) => {
                state.fail(&error);
                None
            }
        };
        drop(state);
        self.changed.notify_all();
        forked
    }

    /// Ends a zygote whose hosts do not come up.
    pub(crate) fn distrust(&self, error: &HostStartError) {
        let mut state = self.state.lock();
        if matches!(state.phase, Phase::Ready(_)) {
            state.fail(error);
        }
    }

    /// Takes the process for one fork, having it started and its modules imported if need be.
    fn take(
        self: &Arc<Self>,
        places: &PythonPlaces,
        modules: &[String],
        until: Option<Instant>,
    ) -> Option<Process> {
        let mut state = self.state.lock();
        loop {
            match &mut state.phase {
                Phase::Off => return None,
                // It needs none of this, and takes less time on its own.
                Phase::Taken { importing: true } if modules.is_empty() => return None,
                Phase::Taken { .. } => {
                    if self.wait(&mut state, until) {
                        return None;
                    }
                }
                Phase::Down => {
                    if state
                        .pause_until
                        .is_some_and(|until| Instant::now() < until)
                    {
                        return None;
                    }
                    self.prepare(&mut state, None, places, modules);
                }
                Phase::Ready(process) => {
                    if let Some(exit) = process.host.wait_for_exit(Duration::ZERO) {
                        state.fail(&ZygoteError::Ended(exit));
                        continue;
                    }
                    if process.places != *places {
                        // Another Python was found: the old one's zygote is not needed any more.
                        state.phase = Phase::Down;
                        continue;
                    }
                    let complete = modules.iter().all(|name| process.imported.contains(name));
                    let taken = Phase::Taken { importing: false };
                    let Phase::Ready(process) = std::mem::replace(&mut state.phase, taken) else {
                        return None;
                    };
                    if complete {
                        return Some(process);
                    }
                    self.prepare(&mut state, Some(process), places, modules);
                }
            }
        }
    }

    /// Waits for a change; returns whether the time was up.
    fn wait(&self, state: &mut MutexGuard<'_, State>, until: Option<Instant>) -> bool {
        match until {
            Some(until) => self.changed.wait_until(state, until).timed_out(),
            None => {
                self.changed.wait(state);
                false
            }
        }
    }

    /// Has a thread start the process, unless there is one, and import what it has not.
    fn prepare(
        self: &Arc<Self>,
        state: &mut State,
        process: Option<Process>,
        places: &PythonPlaces,
        modules: &[String],
    ) {
        state.phase = Phase::Taken {
            importing: !modules.is_empty(),
        };
        let (zygote, places, modules) = (Arc::clone(self), places.clone(), modules.to_vec());
        let prepare = move || {
            let prepared = match process {
                Some(process) => Ok(process),
                None => zygote.start(places).map_err(ZygoteError::from),
            }
            .and_then(|process| import(process, &modules));
            let mut state = zygote.state.lock();
            match prepared {
                Ok(process) => state.phase = Phase::Ready(process),
                Err(error @ ZygoteError::Refused(_)) => {
                    tracing::warn!(
                        "hosts are not forked but executed: {error}. Take the module out of \
                         `preload_modules`, or set `zygote=false`"
                    );
                    state.phase = Phase::Off;
                }
                Err(error) => state.fail(&error),
            }
            drop(state);
            zygote.changed.notify_all();
        };
        let started = std::thread::Builder::new()
            .name("zygote".to_owned())
            .spawn(prepare);
        if let Err(error) = started {
            state.fail(&error);
        }
    }

    fn start(&self, places: PythonPlaces) -> Result<Process, HostStartError> {
        let mut variables = thread_variables(1).to_vec();
        for name in [BLAS_VARIABLE, CUDA_CHECK_VARIABLE] {
            variables.push((name, "1".to_owned()));
        }
        let log = ModelLog {
            metrics: PrintedMetrics::default(),
            name: "zygote".to_owned(),
        };
        let host =
            NewHost::exec(&self.config, &self.children, &variables)?.watch(log, None, |_| {})?;
        let host = HostLease::new(host);
        host.set_up_zygote(&places, Some(Instant::now() + STARTS_WITHIN))?;
        tracing::info!(pid = host.pid(), "the zygote of Python hosts is up");
        Ok(Process {
            host,
            places,
            imported: Vec::new(),
        })
    }

    fn fork_from(
        &self,
        process: &Process,
        own_modules: &[String],
        threads: u32,
        until: Option<Instant>,
    ) -> Result<Option<NewHost>, ZygoteError> {
        let (near, far) = Channel::pair()?;
        let mut control = control_channel(near)?;
        let pipe = || pipe_with(PipeFlags::CLOEXEC).map_err(std::io::Error::from);
        let ((stdout, its_stdout), (stderr, its_stderr)) = (pipe()?, pipe()?);
        control.send(&ForkedSetup::Stdout, Some(its_stdout.as_fd()))?;
        control.send(&ForkedSetup::Stderr, Some(its_stderr.as_fd()))?;
        let environment = self.environment(threads);
        let begin = ForkedSetup::Begin {
            environment,
            threads,
        };
        control.send(&begin, None)?;
        let adoption = self.children.adoption();
        let limit = Instant::now() + FORKS_WITHIN;
        let deadline = until.map_or(limit, |until| until.min(limit));
        let request = ZygoteRequest::Fork {
            own_modules: own_modules.to_vec(),
        };
        let reply = process
            .host
            .ask(&request, Some(far.as_fd()), Some(deadline))?;
        let pid = match reply {
            ZygoteReply::Forked { pid } => i32::try_from(pid).ok().and_then(Pid::from_raw),
            ZygoteReply::Refused { message } => return Err(ZygoteError::Refused(message)),
            ZygoteReply::Declined { module } => {
                tracing::info!(
                    "a host is executed and not forked: its model brings a module `{module}`, and \
                     the zygote has imported another"
                );
                return Ok(None);
            }
            ZygoteReply::Preloaded { .. } => None,
        };
        let pid = pid.ok_or(WireError::Malformed("a fork without a process"))?;
        Ok(Some(NewHost {
            child: adoption.take(pid)?,
            control,
            stdout: Some(stdout),
            stderr: Some(stderr),
            confined: Confined::default(),
        }))
    }

    /// What an executed host would have and the zygote has not.
    fn environment(&self, threads: u32) -> Vec<(String, Option<String>)> {
        let inherited = [BLAS_VARIABLE, CUDA_CHECK_VARIABLE].map(|name| {
            let value = std::env::var_os(name).filter(|_| !is_hidden(&self.config, name));
            (name, value.and_then(|value| value.into_string().ok()))
        });
        let set = thread_variables(threads).map(|(name, value)| (name, Some(value)));
        let all = inherited.into_iter().chain(set);
        all.map(|(name, value)| (name.to_owned(), value)).collect()
    }
}

impl State {
    /// Ends the process, if there is one, and puts off the next.
    fn fail(&mut self, error: &(dyn std::error::Error + 'static)) {
        // The first one is replaced at once.
        let pause = match self.failures {
            0 => Duration::ZERO,
            earlier => LONGEST_PAUSE.min(Duration::from_secs(1 << (earlier - 1).min(6))),
        };
        self.failures = self.failures.saturating_add(1);
        tracing::warn!(
            "the zygote is lost: {}. Hosts are executed until it is started again, {} s from now \
             at the earliest",
            with_causes(error),
            pause.as_secs()
        );
        self.phase = Phase::Down;
        self.pause_until = Instant::now().checked_add(pause);
    }
}

fn import(mut process: Process, modules: &[String]) -> Result<Process, ZygoteError> {
    let missing = modules
        .iter()
        .filter(|name| !process.imported.contains(name));
    let missing: Vec<String> = missing.cloned().collect();
    if missing.is_empty() {
        return Ok(process);
    }
    let began = Instant::now();
    let request = ZygoteRequest::Preload {
        modules: missing.clone(),
    };
    let deadline = began + IMPORTS_WITHIN;
    match process.host.ask(&request, None, Some(deadline))? {
        ZygoteReply::Preloaded { failed } => {
            for reason in failed {
                tracing::warn!("the zygote cannot import {reason}");
            }
            tracing::info!(
                millis = began.elapsed().as_millis(),
                "the zygote has imported {}",
                missing.join(", ")
            );
            process.imported.extend(missing);
            Ok(process)
        }
        ZygoteReply::Refused { message } => Err(ZygoteError::Refused(message)),
        ZygoteReply::Forked { .. } | ZygoteReply::Declined { .. } => {
            Err(WireError::Malformed("a fork that nobody asked for").into())
        }
    }
}
