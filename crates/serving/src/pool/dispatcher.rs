//! The thread behind one worker: starts it, serves with it (`exchange.rs`), and starts it again
//! when it is lost.
//!
//! A generation is one incarnation of the worker: its own thread or process, its own channel. When
//! it is lost its channel goes with it, so nothing late from it can be heard. Every job that was
//! handed over is answered here, whatever happens; jobs that were not go back to the queue.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;
use ts_metrics::Metric;
use ts_types::{Isolation, with_causes};
use ts_wire::frame::{
    LoadFailureKind, LoadModel, LoadedModel, RunFailure, WorkerReply, WorkerRequest,
};
use ts_wire::{Channel, Departures, WireError};

use crate::error::{ServingError, StartFailure};
use crate::handler_metrics::PrintedMetrics;
use crate::metrics;
use crate::pool::devices::{DeviceLease, core_share};
use crate::pool::exchange;
use crate::pool::hosts::{Host, HostLease, HostStartError, NewHost, thread_variables};
use crate::pool::imports::Modules;
use crate::pool::logs::ModelLog;
use crate::pool::restart::{Failures, Lost, Restart};
use crate::pool::slots::Slots;
use crate::pool::{Phase, PoolSpec, SlotStatus};

/// Room for what travels beside the bodies of a batch.
pub(super) const REPLY_SLACK_BYTES: u64 = 1 << 20;

/// How long the end of a process may take to show after its channel has closed.
const EXIT_SHOWS_WITHIN: Duration = Duration::from_millis(300);

/// A batch that would run longer is not run only to see how long it takes.
const LONGEST_TRIAL: Duration = Duration::from_secs(1);

/// How a slot is told to end.
pub(crate) struct SlotControl {
    isolation: Isolation,
    stop: AtomicBool,
    ready: AtomicBool,
    /// Since when its worker has had nothing to do; `None` while it has requests.
    idle_since: Mutex<Option<Instant>>,
    host: Mutex<Option<Arc<Host>>>,
    pause: Mutex<()>,
    wake: Condvar,
}

impl SlotControl {
    pub(crate) fn new(isolation: Isolation) -> Self {
        Self {
            isolation,
            stop: AtomicBool::new(false),
            ready: AtomicBool::new(false),
            idle_since: Mutex::new(None),
            host: Mutex::new(None),
            pause: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// Asks the slot to end after the batch that it runs; the caller wakes the queue. A worker
    /// that is still loading has nothing to finish and is ended at once.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        if !self.ready.load(Ordering::SeqCst) {
            self.kill_own_host();
        }
        drop(self.pause.lock());
        self.wake.notify_all();
    }

    /// Ends the worker's host, whatever it is doing.
    pub(crate) fn kill(&self) {
        if let Some(host) = &*self.host.lock() {
            host.kill();
        }
    }

    /// Ends the host if no other worker lives there.
    fn kill_own_host(&self) {
        if self.isolation == Isolation::Process {
            self.kill();
        }
    }

    /// Makes the host known to whoever may have to end it.
    fn set_host(&self, host: Option<Arc<Host>>) {
        *self.host.lock() = host;
        if self.stopping() {
            // Asked to end before there was a host to end.
            self.kill_own_host();
        }
    }

    /// The worker has requests from now on.
    pub(super) fn has_work(&self) {
        *self.idle_since.lock() = None;
    }

    /// The worker has none from now on.
    pub(super) fn has_no_work(&self) {
        *self.idle_since.lock() = Some(Instant::now());
    }

    /// Since when the worker has had nothing to do; `None` while it has requests.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        *self.idle_since.lock()
    }

    pub(super) fn stopping(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    /// Waits, but not once the slot is to end.
    fn pause(&self, duration: Duration) {
        let mut pause = self.pause.lock();
        if !self.stopping() {
            self.wake.wait_for(&mut pause, duration);
        }
    }
}

/// The thread behind one worker.
pub(crate) struct Dispatcher {
    pub(super) id: u32,
    pub(super) spec: Arc<PoolSpec>,
    pub(super) slots: Arc<Slots>,
    pub(super) control: Arc<SlotControl>,
    publish: watch::Sender<SlotStatus>,
    /// Goes back when this thread ends.
    device: Option<DeviceLease>,
    /// The present generation of the worker has answered a batch.
    served: AtomicBool,
}

/// A worker that has loaded its model.
pub(super) struct Worker {
    pub(super) host: Arc<HostLease>,
    pub(super) channel: Channel,
    /// Tells it of callers that have left.
    pub(super) departures: Departures,
    pub(super) model: LoadedModel,
    /// How long that took, on the page as long as the worker lives.
    #[expect(dead_code, reason = "held for its drop")]
    load_time: Metric,
}

/// Why a worker takes no more batches.
pub(super) enum End {
    /// The slot is to end.
    Asked,
    /// The worker is lost.
    Lost(StartFailure),
    /// The same, while it had nothing to do.
    LostIdle(StartFailure),
}

impl Dispatcher {
    pub(crate) fn new(
        id: u32,
        slots: Arc<Slots>,
        control: Arc<SlotControl>,
        publish: watch::Sender<SlotStatus>,
        device: Option<DeviceLease>,
    ) -> Self {
        Self {
            id,
            spec: Arc::clone(&slots.spec),
            slots,
            control,
            publish,
            device,
            served: AtomicBool::new(false),
        }
    }

    pub(crate) fn spawn(self) -> io::Result<()> {
        let name = self.name();
        std::thread::Builder::new()
            .name(name)
            .spawn(move || self.run())
            .map(drop)
    }

    /// TorchServe's name for a worker thread, which log shippers parse.
    pub(super) fn name(&self) -> String {
        format!("W-{}-{}_{}", self.id, self.spec.model, self.spec.version)
    }

    fn run(self) {
        let mut failures = Failures::default();
        let mut unsuccessful = 0;
        let mut generation = 0;
        while !self.ending() {
            generation += 1;
            self.publish.send_modify(|status| {
                status.phase = Phase::Starting;
                status.started = SystemTime::now();
                status.generation = generation;
            });
            let (lost, failure) = match self.start() {
                Err(failure) => {
                    let permanent = failure.permanent;
                    (Lost::NeverUp { permanent }, failure)
                }
                Ok(mut worker) => {
                    if failures.count() > 0 {
                        tracing::info!(
                            worker = self.name(),
                            "Auto recovery succeeded, reset recoveryStartTS"
                        );
                    }
                    failures.reset();
                    self.control.has_no_work();
                    self.slots.came_up();
                    self.served.store(false, Ordering::Relaxed);
                    let end = self.serve(&mut worker, &mut unsuccessful);
                    self.control.ready.store(false, Ordering::SeqCst);
                    self.spec.queue.worker_lost(self.id);
                    let _already_gone = worker.channel.halves().0.try_send(&WorkerRequest::Stop);
                    let (failure, was_idle) = match end {
                        End::Asked => break,
                        End::Lost(failure) => (failure, false),
                        End::LostIdle(failure) => (failure, true),
                    };
                    // One that is killed from outside while it does nothing says nothing about the
                    // model.
                    let blameless = was_idle && failure.out_of_memory;
                    if !blameless && !self.ending() {
                        self.publish.send_modify(|status| {
                            status.last_failure = Some(failure.clone());
                        });
                        self.slots.note_loss(&worker.host, &failure);
                    }
                    // The host ends with the last worker that is dropped here.
                    let served = self.served.load(Ordering::Relaxed);
                    (if served { Lost::Served } else { Lost::Unused }, failure)
                }
            };
            self.control.set_host(None);
            if self.ending() || !self.retry(&mut failures, lost, &failure) {
                break;
            }
        }
        self.control.set_host(None);
        if self.ending() {
            let phase = if self.slots.is_quarantined() {
                Phase::GivenUp
            } else {
                Phase::Stopped
            };
            self.publish.send_modify(|status| {
                status.phase = phase;
                status.pid = None;
            });
            // It may have put jobs back that no other worker is left for.
            self.slots.arrived();
        }
    }

    /// The worker answered a batch.
    pub(super) fn answered(&self) {
        self.served.store(true, Ordering::Relaxed);
        self.slots.answered();
    }

    /// The slot was asked to end, or its queue will never hold a job again.
    pub(super) fn ending(&self) -> bool {
        self.control.stopping() || self.spec.queue.is_closed()
    }

    /// Publishes a failure and waits for the next try. Returns whether there is one.
    fn retry(&self, failures: &mut Failures, lost: Lost, failure: &StartFailure) -> bool {
        let name = self.name();
        let window = self.spec.limits.read().max_retry_timeout;
        let restart = failures.note(Instant::now(), window, lost);
        tracing::warn!(
            worker = name,
            reason = failure.text,
            "{} Worker disconnected.",
            self.id
        );
        self.publish.send_modify(|status| {
            status.phase = Phase::Waiting;
            status.pid = None;
            status.last_failure = Some(failure.clone());
        });
        let never_up = matches!(lost, Lost::NeverUp { .. });
        if self.ending() || (never_up && self.slots.leave_failed(self.id, failure)) {
            return false;
        }
        match restart {
            Restart::After(wait) => {
                if failures.count() == 1 {
                    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
                    let millis = now.unwrap_or_default().as_millis();
                    tracing::info!(worker = name, "Auto recovery start timestamp: {millis}");
                } else {
                    tracing::warn!(worker = name, "Auto recovery failed again");
                }
                tracing::info!(
                    worker = name,
                    "Retry worker: {} in {} seconds.",
                    self.id,
                    wait.as_secs()
                );
                self.control.pause(wait);
                true
            }
            Restart::Never => {
                tracing::error!(worker = name, "the worker is not started again");
                self.give_up(failure);
                false
            }
        }
    }

    /// Ends the slot's work for good.
    fn give_up(&self, failure: &StartFailure) {
        self.publish.send_modify(|status| {
            status.phase = Phase::GivenUp;
            status.pid = None;
        });
        self.slots.gave_up(failure);
    }

    /// Starts the worker in a host and loads the model.
    fn start(&self) -> Result<Worker, StartFailure> {
        let began = Instant::now();
        if self.spec.devices.is_missing() {
            return Err(StartFailure {
                text: "the model asks for a GPU (`deviceType: gpu`) and this server has none to \
                       give it"
                    .to_owned(),
                out_of_memory: false,
                permanent: true,
            });
        }
        let (limit, response_timeout, cores) = {
            let limits = self.spec.limits.read();
            let cores = limits.hosts.cores();
            (limits.startup_timeout, limits.response_timeout, cores)
        };
        let threads = core_share(self.spec.surroundings.hosts.cores, self.slots.target());
        // More would wait for one another in the cores that its host is limited to.
        let threads = cores.map_or(threads, |cores| threads.min(core_share(cores, 1)));
        let (host, deadline) = self.host(threads, limit)?;
        self.publish.send_modify(|status| {
            status.pid = Some(host.pid());
            status.threads = Some(threads);
        });
        let mut channel = host
            .add_worker(self.id, self.max_payload_bytes(0))
            .map_err(|error| host_failure(&error))?;
        // A worker that does not read is one that does not answer.
        channel
            .limit_sending(response_timeout)
            .map_err(|error| host_failure(&error.into()))?;
        let model = LoadModel {
            intra_op_threads: threads,
            gpu_id: self.device.as_ref().map(DeviceLease::id),
            ..self.spec.load.clone()
        };
        let (model, departures) = match load(&mut channel, model, deadline) {
            Ok(loaded) => loaded,
            Err(LoadError::Refused(failure)) => return Err(failure),
            // The host of this worker alone ends as it is dropped; one that others serve in stays.
            Err(LoadError::Wire(WireError::TimedOut)) => {
                return Err(self.timed_out("while it loaded the model", limit));
            }
            Err(LoadError::Wire(error)) => {
                return Err(self.lost(&host, &error, "while it loaded the model", limit));
            }
        };
        self.warm_up(&mut channel, &host, deadline, limit)?;
        self.control.ready.store(true, Ordering::SeqCst);
        self.publish
            .send_modify(|status| status.phase = Phase::Ready);
        let metrics = &self.spec.surroundings.metrics;
        let load_time = metrics::worker_loaded(metrics, &self.name(), began.elapsed());
        tracing::info!(
            worker = self.name(),
            pid = host.pid(),
            millis = began.elapsed().as_millis(),
            "worker ready"
        );
        Ok(Worker {
            host,
            channel,
            departures,
            model,
            load_time,
        })
    }

    /// Has the worker answer the model's samples. One that cannot is not ready.
    fn warm_up(
        &self,
        channel: &mut Channel,
        host: &Host,
        deadline: Option<Instant>,
        limit: Duration,
    ) -> Result<(), StartFailure> {
        for (file, request) in self.spec.warm_up.requests(&self.spec.model) {
            let answered = exchange::ask(channel, std::slice::from_ref(&request), deadline)
                .map(|replies| replies.and_then(|mut replies| replies.remove(0)));
            let reason = match answered {
                Err(WireError::TimedOut) => {
                    return Err(self.timed_out("while it warmed up", limit));
                }
                Err(error) => return Err(self.lost(host, &error, "while it warmed up", limit)),
                Ok(Ok(reply)) if reply.status < 400 => continue,
                Ok(Ok(reply)) => format!("status {}", reply.status),
                Ok(Err(failure)) => ServingError::Run(failure).to_string(),
            };
            return Err(StartFailure {
                text: format!("the warm-up with `{file}` failed: {reason}"),
                out_of_memory: false,
                permanent: false,
            });
        }
        self.learn_cost(channel, deadline)
            .map_err(|error| match error {
                WireError::TimedOut => self.timed_out("while it warmed up", limit),
                error => self.lost(host, &error, "while it warmed up", limit),
            })
    }

    /// Times batches of several sizes, so that the queue knows from the first request on what
    /// company is worth. A handler that cannot run one of them is as ready as without.
    fn learn_cost(
        &self,
        channel: &mut Channel,
        deadline: Option<Instant>,
    ) -> Result<(), WireError> {
        let queue = &self.spec.queue;
        if queue.knows_cost() {
            return Ok(());
        }
        let warm_up = &self.spec.warm_up;
        for count in warm_up.batch_sizes(self.spec.load.batch_size as usize) {
            if queue
                .expected(count)
                .is_some_and(|expected| expected > LONGEST_TRIAL)
            {
                break;
            }
            let batch = warm_up.batch(&self.spec.model, count);
            let now = Instant::now();
            let replies = exchange::ask(channel, &batch, deadline)?;
            if replies.is_err() {
                break;
            }
            queue.note(count, now.elapsed());
        }
        Ok(())
    }

    /// A host of its own, or the pool's shared one, and when the worker has to be up in it.
    fn host(
        &self,
        threads: u32,
        limit: Duration,
    ) -> Result<(Arc<HostLease>, Option<Instant>), StartFailure> {
        let mut shared = match self.spec.isolation {
            Isolation::Process => None,
            // Held while it starts: the other workers of the pool wait for the same host. Only
            // dispatchers ever take this lock.
            Isolation::Thread => Some(self.spec.shared_host.lock()),
        };
        if self.control.stopping() {
            return Err(StartFailure::stopped());
        }
        // What was spent waiting for the others is not this worker's.
        let deadline = Instant::now().checked_add(limit);
        let living = shared
            .as_ref()
            .and_then(|shared| shared.upgrade())
            .filter(|host| host.is_alive());
        if let Some(host) = living {
            self.control.set_host(Some(host.process()));
            return Ok((host, deadline));
        }
        let host = self
            .start_host(threads, deadline)
            .map_err(|error| match error {
                HostStartError::Wire(WireError::TimedOut) => {
                    self.timed_out("while it started", limit)
                }
                other => host_failure(&other),
            })?;
        if let Some(shared) = &mut shared {
            **shared = Arc::downgrade(&host);
        }
        Ok((host, deadline))
    }

    fn start_host(
        &self,
        threads: u32,
        deadline: Option<Instant>,
    ) -> Result<Arc<HostLease>, HostStartError> {
        let python = if self.spec.needs_python {
            let places = self.spec.surroundings.python();
            Some(places.map_err(|error| HostStartError::Failed(error.to_string()))?)
        } else {
            None
        };
        let surroundings = &self.spec.surroundings;
        let forked = python.as_ref().and_then(|places| {
            let load = &self.spec.load;
            let candidates = &surroundings.hosts.preload_modules;
            let modules = Modules::of(&load.model_dir, &load.handler, candidates);
            surroundings
                .zygote
                .fork(places, &modules, threads, deadline)
        });
        let mut forks_fail = None;
        if let Some(forked) = forked {
            let host = self.watch(forked)?;
            match host.come_up(deadline) {
                Ok(()) => return Ok(host),
                Err(error) if self.control.stopping() => return Err(error),
                Err(error) => forks_fail = Some(error),
            }
        }
        let host = self.watch(NewHost::exec(
            &surroundings.hosts,
            &surroundings.children,
            &thread_variables(threads),
        )?)?;
        host.set_up(python.as_ref(), deadline)?;
        if let Some(error) = forks_fail {
            surroundings.zygote.distrust(&error);
        }
        Ok(host)
    }

    fn watch(&self, host: NewHost) -> Result<Arc<HostLease>, HostStartError> {
        let limits = self.spec.limits.read().hosts;
        let host = host.confine(&self.spec.surroundings.confinement, limits)?;
        let spec = Arc::downgrade(&self.spec);
        let log = ModelLog {
            name: self.name(),
            metrics: PrintedMetrics(Weak::clone(&spec)),
        };
        let host = host.watch(log, move || {
            if let Some(spec) = spec.upgrade() {
                spec.queue.wake_all();
            }
        })?;
        let host = Arc::new(HostLease::new(host));
        self.control.set_host(Some(host.process()));
        Ok(host)
    }

    /// A worker that was refused memory under its model's limit is replaced: what it still holds
    /// would be missing to every batch that follows.
    pub(super) fn over_memory<'f>(
        &self,
        failures: impl IntoIterator<Item = &'f RunFailure>,
    ) -> Option<StartFailure> {
        let bytes = self.spec.limits.read().hosts.memory_bytes?;
        let mut failures = failures.into_iter();
        let refused = failures.any(|failure| *failure == RunFailure::OutOfMemory);
        refused.then(|| StartFailure {
            text: format!("out of memory under its limit of {} MiB", bytes >> 20),
            out_of_memory: true,
            permanent: false,
        })
    }

    /// Explains the loss of a worker, and makes sure that what is lost is also gone.
    pub(super) fn lost(
        &self,
        host: &Host,
        error: &WireError,
        during: &str,
        limit: Duration,
    ) -> StartFailure {
        let failure = |text: String, out_of_memory| StartFailure {
            text,
            out_of_memory,
            permanent: false,
        };
        match error {
            WireError::TimedOut => {
                // A thread that does not answer can only be ended with its process.
                host.kill();
                self.timed_out(during, limit)
            }
            WireError::Closed => match host.wait_for_exit(EXIT_SHOWS_WITHIN) {
                Some(exit) => failure(
                    format!("{} {during}", exit.describe()),
                    exit.out_of_memory(),
                ),
                None => failure(format!("the worker thread ended {during}"), false),
            },
            other => {
                host.kill();
                failure(format!("{other} {during}"), false)
            }
        }
    }

    /// The failure of a worker that was killed for its silence, told in the words that people's
    /// alerts look for.
    fn timed_out(&self, during: &str, limit: Duration) -> StartFailure {
        tracing::error!(
            worker = self.name(),
            exception = "org.pytorch.serve.wlm.WorkerInitializationException: Backend worker did \
                         not respond in given time",
            "Backend worker error"
        );
        StartFailure {
            text: format!("no answer within {} s {during}", limit.as_secs()),
            out_of_memory: false,
            permanent: false,
        }
    }
}

impl Drop for Dispatcher {
    /// Reached by unwinding only if this thread has a fault of ours: what it had taken is answered
    /// by being dropped, and nobody may count on the worker any more.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        self.control.kill();
        self.spec.queue.worker_lost(self.id);
        self.give_up(&StartFailure {
            text: "its dispatcher panicked".to_owned(),
            out_of_memory: false,
            permanent: false,
        });
    }
}

enum LoadError {
    Refused(StartFailure),
    Wire(WireError),
}

fn load(
    channel: &mut Channel,
    model: LoadModel,
    deadline: Option<Instant>,
) -> Result<(LoadedModel, Departures), LoadError> {
    let (departures, departed) = Departures::pair().map_err(LoadError::Wire)?;
    channel
        .send(
            &WorkerRequest::Load(Box::new(model)),
            Some(departed.as_fd()),
        )
        .map_err(LoadError::Wire)?;
    drop(departed);
    let incoming = channel.receive(deadline).map_err(LoadError::Wire)?;
    match incoming.header().map_err(LoadError::Wire)? {
        WorkerReply::Loaded(model) => Ok((model, departures)),
        WorkerReply::LoadFailed(failure) => Err(LoadError::Refused(StartFailure {
            text: failure.message,
            out_of_memory: failure.kind == LoadFailureKind::OutOfMemory,
            permanent: failure.kind == LoadFailureKind::Permanent,
        })),
        WorkerReply::Done(_) | WorkerReply::Chunks(_) | WorkerReply::Answered(_) => Err(
            LoadError::Wire(WireError::Malformed("a batch that nobody asked for")),
        ),
    }
}

fn host_failure(error: &HostStartError) -> StartFailure {
    StartFailure {
        text: with_causes(error),
        out_of_memory: false,
        permanent: false,
    }
}
