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
    LoadFailureKind, LoadModel, LoadedModel, PythonPlaces, RunFailure, WorkerReply, WorkerRequest,
};
use ts_wire::{Channel, Departures, WireError};

use crate::error::{ServingError, StartFailure};
use crate::handler_metrics::PrintedMetrics;
use crate::metrics;
use crate::pool::devices::{DeviceLease, core_share};
use crate::pool::exchange;
use crate::pool::hosts::{
    Host, HostExit, HostLease, HostStartError, NewHost, VISIBLE_DEVICES, thread_variables,
};
use crate::pool::imports::Modules;
use crate::pool::logs::ModelLog;
use crate::pool::ranks::{
    Loss, NCCL_ERRORS, Parallel, Ranks, Rendezvous, readable, visible_devices,
};
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
    /// Its other ranks, if it is a group.
    pub(super) ranks: Ranks,
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
                status.pids.clear();
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
            status.pids.clear();
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
            status.pids.clear();
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
        let threads = self
            .spec
            .parallel
            .map_or(threads, |parallel| parallel.threads(threads));
        // More would wait for one another in the cores that its host is limited to.
        let threads = cores.map_or(threads, |cores| threads.min(core_share(cores, 1)));
        let group = self.group()?;
        let (host, deadline) = self.host(threads, group.as_ref(), limit)?;
        let hosts = host.process().ranks();
        self.publish.send_modify(|status| {
            status.pids = hosts.iter().map(|host| host.pid()).collect();
            status.threads = Some(threads);
        });
        let mut channels = Vec::with_capacity(hosts.len());
        for host in &hosts {
            let mut channel = host
                .add_worker(self.id, self.max_payload_bytes(0))
                .map_err(|error| host_failure(&error))?;
            // A worker that does not read is one that does not answer.
            channel
                .limit_sending(response_timeout)
                .map_err(|error| host_failure(&error.into()))?;
            channels.push(channel);
        }
        let models = (0..).map(|rank| LoadModel {
            intra_op_threads: threads,
            gpu_id: self.gpu_id(rank),
            rank,
            ..self.spec.load.clone()
        });
        let (model, mut departures) = match load(&mut channels, models, deadline) {
            Ok(loaded) => loaded,
            Err(LoadError::Refused(failure)) => return Err(failure),
            // The host of this worker alone ends as it is dropped; one that others serve in stays.
            Err(LoadError::Missing(ranks)) => {
                let pids: Vec<u32> = hosts.iter().map(|host| host.pid()).collect();
                let absent =
                    group.map_or_else(Vec::new, |(_, rendezvous)| rendezvous.absent(&pids));
                let mut failure = self.silent(&ranks, "while it loaded the model", limit);
                if !absent.is_empty() && absent.len() < pids.len() {
                    let absent = named(&absent);
                    failure
                        .text
                        .push_str(&format!("; {absent} did not join the group"));
                }
                return Err(failure);
            }
            Err(LoadError::Lost(loss)) => {
                return Err(self.lost_to(&host, &loss, "while it loaded the model", limit));
            }
        };
        let mut channel = channels.remove(0);
        let all_run = self.spec.parallel.is_some_and(Parallel::all_run);
        let mut ranks = Ranks::new(channels, all_run, response_timeout);
        if ranks.run_together() {
            // Nobody listens to these: a rank that stopped for a caller that has left would leave
            // the others waiting for it.
            (departures, _) =
                Departures::pair().map_err(|error| host_failure(&HostStartError::Wire(error)))?;
        }
        self.warm_up((&mut channel, &mut ranks), &host, deadline, limit)?;
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
            ranks,
            departures,
            model,
            load_time,
        })
    }

    /// Has the worker answer the model's samples. One that cannot is not ready.
    fn warm_up(
        &self,
        (channel, ranks): (&mut Channel, &mut Ranks),
        host: &Host,
        deadline: Option<Instant>,
        limit: Duration,
    ) -> Result<(), StartFailure> {
        let lost = |loss: Loss| match loss {
            // One that others serve in stays.
            Loss::Channel(WireError::TimedOut) => self.timed_out("", "while it warmed up", limit),
            loss => self.lost_to(host, &loss, "while it warmed up", limit),
        };
        for (file, request) in self.spec.warm_up.requests(&self.spec.model) {
            let request = std::slice::from_ref(&request);
            let answered = exchange::ask((&mut *channel, &mut *ranks), request, deadline)
                .map(|replies| replies.and_then(|mut replies| replies.remove(0)));
            let reason = match answered {
                Err(loss) => return Err(lost(loss)),
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
        self.learn_cost((channel, ranks), deadline).map_err(lost)
    }

    /// Times batches of several sizes, so that the queue knows from the first request on what
    /// company is worth. A handler that cannot run one of them is as ready as without.
    fn learn_cost(
        &self,
        (channel, ranks): (&mut Channel, &mut Ranks),
        deadline: Option<Instant>,
    ) -> Result<(), Loss> {
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
            let replies = exchange::ask((&mut *channel, &mut *ranks), &batch, deadline)?;
            if replies.is_err() {
                break;
            }
            queue.note(count, now.elapsed());
        }
        Ok(())
    }

    /// What its processes are to one another, where it is a group of them.
    fn group(&self) -> Result<Option<(Parallel, Rendezvous)>, StartFailure> {
        let group = self.spec.parallel.filter(|parallel| parallel.is_group());
        let rendezvous = group.map(|parallel| {
            let rendezvous = Rendezvous::new(format!("{}_{}", self.spec.model, self.id));
            rendezvous.map(|rendezvous| (parallel, rendezvous))
        });
        rendezvous
            .transpose()
            .map_err(|error| host_failure(&error.into()))
    }

    /// The device of a rank as its process counts: it sees those of its worker only, where these are
    /// its own.
    fn gpu_id(&self, rank: u32) -> Option<u32> {
        let devices = self.device.as_ref()?.ids();
        if self.sees_its_devices_only() {
            Some(rank)
        } else {
            devices.first().copied()
        }
    }

    fn sees_its_devices_only(&self) -> bool {
        let parallel = self.spec.parallel;
        parallel.is_some_and(Parallel::needs_own_processes)
    }

    /// A host of its own, or the pool's shared one, and when the worker has to be up in it. Of a
    /// group, rank 0.
    fn host(
        &self,
        threads: u32,
        group: Option<&(Parallel, Rendezvous)>,
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
            .start_host(threads, group, deadline)
            .map_err(|error| match error {
                HostStartError::Wire(WireError::TimedOut) => {
                    self.timed_out("", "while it started", limit)
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
        group: Option<&(Parallel, Rendezvous)>,
        deadline: Option<Instant>,
    ) -> Result<Arc<HostLease>, HostStartError> {
        let python = if self.spec.needs_python {
            let places = self.spec.surroundings.python();
            Some(places.map_err(|error| HostStartError::Failed(error.to_string()))?)
        } else {
            None
        };
        let surroundings = &self.spec.surroundings;
        let mut variables = thread_variables(threads).to_vec();
        let own_devices = self.device.as_ref();
        let own_devices = own_devices.filter(|_| self.sees_its_devices_only());
        if let Some(device) = own_devices {
            let own = surroundings.hosts.visible_devices.as_deref();
            let visible = visible_devices(&device.ids(), own);
            variables.push((VISIBLE_DEVICES, visible));
        }
        if let Some((parallel, rendezvous)) = group {
            return self.start_group(*parallel, rendezvous, &variables, python.as_ref(), deadline);
        }
        // Its devices have to be settled before Python starts.
        let forkable = python.as_ref().filter(|_| own_devices.is_none());
        let forked = forkable.and_then(|places| {
            let load = &self.spec.load;
            let candidates = &surroundings.hosts.preload_modules;
            let modules = Modules::of(&load.model_dir, &load.handler, candidates);
            surroundings
                .zygote
                .fork(places, &modules, threads, deadline)
        });
        let mut forks_fail = None;
        if let Some(forked) = forked {
            let host = self.watch_alone(forked)?;
            match host.come_up(deadline) {
                Ok(()) => return Ok(host),
                Err(error) if self.control.stopping() => return Err(error),
                Err(error) => forks_fail = Some(error),
            }
        }
        let host = self.watch_alone(NewHost::exec(
            &surroundings.hosts,
            &surroundings.children,
            &variables,
        )?)?;
        host.set_up(python.as_ref(), deadline)?;
        if let Some(error) = forks_fail {
            surroundings.zygote.distrust(&error);
        }
        Ok(host)
    }

    /// Starts the ranks of a group, all at once. Rank 0 stands for them.
    fn start_group(
        &self,
        parallel: Parallel,
        rendezvous: &Rendezvous,
        variables: &[(&'static str, String)],
        python: Option<&PythonPlaces>,
        deadline: Option<Instant>,
    ) -> Result<Arc<HostLease>, HostStartError> {
        let surroundings = &self.spec.surroundings;
        let exec = |rank| {
            let mut all = [variables, &parallel.variables(rank, rendezvous)].concat();
            if std::env::var_os(NCCL_ERRORS).is_none() {
                // As `torchrun`, which leaves it to whoever has set it.
                all.push((NCCL_ERRORS, "1".to_owned()));
            }
            NewHost::exec(&surroundings.hosts, &surroundings.children, &all)
        };
        let first = self.watch(exec(0)?, Some(0), |_| {})?;
        let first = Arc::new(HostLease::new(first));
        self.control.set_host(Some(first.process()));
        for rank in 1..parallel.processes() {
            let stands_for_it = Arc::downgrade(&first.process());
            let other = self.watch(exec(rank)?, Some(rank), move |exit| {
                if let Some(first) = stands_for_it.upgrade() {
                    first.end_with(exit);
                }
            })?;
            first.join(HostLease::new(other));
        }
        let hosts = first.process().ranks();
        for host in &hosts {
            host.begin(python)?;
        }
        for (rank, host) in hosts.iter().enumerate() {
            host.come_up(deadline).map_err(|error| match error {
                HostStartError::Failed(reason) => {
                    HostStartError::Failed(format!("rank {rank}: {reason}"))
                }
                other => other,
            })?;
        }
        Ok(first)
    }

    /// Watches a host that is no part of a group.
    fn watch_alone(&self, host: NewHost) -> Result<Arc<HostLease>, HostStartError> {
        let host = Arc::new(HostLease::new(self.watch(host, None, |_| {})?));
        self.control.set_host(Some(host.process()));
        Ok(host)
    }

    fn watch(
        &self,
        host: NewHost,
        rank: Option<u32>,
        on_exit: impl FnOnce(HostExit) + Send + 'static,
    ) -> Result<Arc<Host>, HostStartError> {
        let limits = self.spec.limits.read().hosts;
        let host = host.confine(&self.spec.surroundings.confinement, limits)?;
        let spec = Arc::downgrade(&self.spec);
        let metrics = match rank {
            None | Some(0) => PrintedMetrics(Weak::clone(&spec)),
            // As with those that it records: rank 0's count.
            Some(_) => PrintedMetrics::default(),
        };
        let log = ModelLog {
            name: rank.map_or_else(|| self.name(), |rank| format!("{}-rank{rank}", self.name())),
            metrics,
        };
        host.watch(log, rank, move |exit| {
            on_exit(exit);
            if let Some(spec) = spec.upgrade() {
                spec.queue.wake_all();
            }
        })
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
                self.timed_out("", during, limit)
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

    /// As [`Dispatcher::lost`], for a worker that may be a group.
    pub(super) fn lost_to(
        &self,
        host: &Host,
        loss: &Loss,
        during: &str,
        limit: Duration,
    ) -> StartFailure {
        match loss {
            Loss::Channel(error) => self.lost(host, error, during, limit),
            Loss::Rank(rank, WireError::TimedOut) => {
                host.kill();
                self.silent(&[*rank], during, limit)
            }
            Loss::Rank(rank, error) => {
                let mut failure = self.lost(host, error, during, limit);
                host.kill();
                if !failure.text.starts_with("rank ") {
                    failure.text.insert_str(0, &format!("rank {rank}: "));
                }
                failure
            }
            Loss::Silent(ranks) => {
                host.kill();
                self.silent(ranks, during, limit)
            }
            Loss::Apart {
                failed,
                out_of_memory,
            } => {
                host.kill();
                StartFailure {
                    text: format!("{} failed {during}, and the others did not", named(failed)),
                    out_of_memory: *out_of_memory,
                    permanent: false,
                }
            }
        }
    }

    /// The failure of a worker some ranks of which were silent.
    fn silent(&self, ranks: &[u32], during: &str, limit: Duration) -> StartFailure {
        let of = if self.spec.parallel.is_some_and(Parallel::is_group) {
            format!(" of {}", named(ranks))
        } else {
            String::new()
        };
        self.timed_out(&of, during, limit)
    }

    /// The failure of a worker that was killed for its silence, told in the words that people's
    /// alerts look for. `of` says which of its processes, if it has several.
    fn timed_out(&self, of: &str, during: &str, limit: Duration) -> StartFailure {
        tracing::error!(
            worker = self.name(),
            exception = "org.pytorch.serve.wlm.WorkerInitializationException: Backend worker did \
                         not respond in given time",
            "Backend worker error"
        );
        StartFailure {
            text: format!("no answer{of} within {} s {during}", limit.as_secs()),
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
    /// Of these ranks no word came in time.
    Missing(Vec<u32>),
    Lost(Loss),
}

impl From<WireError> for LoadError {
    fn from(error: WireError) -> Self {
        Self::Lost(error.into())
    }
}

/// Has all ranks of a worker load, at the same time: they meet while they do. Returns what rank 0
/// says, and what tells it of departures.
fn load(
    channels: &mut [Channel],
    models: impl Iterator<Item = LoadModel>,
    deadline: Option<Instant>,
) -> Result<(LoadedModel, Departures), LoadError> {
    let several = channels.len() > 1;
    let mut first = None;
    for (channel, model) in channels.iter_mut().zip(models) {
        let (departures, departed) = Departures::pair()?;
        let load = WorkerRequest::Load(Box::new(model));
        channel.send(&load, Some(departed.as_fd()))?;
        first.get_or_insert(departures);
    }
    let mut loaded = None;
    let mut missing: Vec<(u32, &mut Channel)> = (0..).zip(channels).collect();
    while !missing.is_empty() {
        let waited_for: Vec<&Channel> = missing.iter().map(|(_, channel)| &**channel).collect();
        let ready = readable(&waited_for, deadline)?;
        if ready.is_empty() {
            return Err(LoadError::Missing(
                missing.iter().map(|(rank, _)| *rank).collect(),
            ));
        }
        // From the end, so that those before it keep their places.
        for index in ready.into_iter().rev() {
            let (rank, channel) = missing.remove(index);
            match hear_of_loading(channel, deadline) {
                Ok(Ok(model)) if rank == 0 => loaded = Some(model),
                Ok(Ok(_)) => {}
                Ok(Err(mut failure)) => {
                    if several {
                        failure.text.insert_str(0, &format!("rank {rank}: "));
                    }
                    return Err(LoadError::Refused(failure));
                }
                Err(WireError::TimedOut) => return Err(LoadError::Missing(vec![rank])),
                Err(error) if several => return Err(LoadError::Lost(Loss::Rank(rank, error))),
                Err(error) => return Err(error.into()),
            }
        }
    }
    loaded
        .zip(first)
        .ok_or_else(|| WireError::Malformed("a worker without a process").into())
}

fn hear_of_loading(
    channel: &mut Channel,
    deadline: Option<Instant>,
) -> Result<Result<LoadedModel, StartFailure>, WireError> {
    match channel.receive(deadline)?.header()? {
        WorkerReply::Loaded(model) => Ok(Ok(model)),
        WorkerReply::LoadFailed(failure) => Ok(Err(StartFailure {
            text: failure.message,
            out_of_memory: failure.kind == LoadFailureKind::OutOfMemory,
            permanent: failure.kind == LoadFailureKind::Permanent,
        })),
        WorkerReply::Done(_) | WorkerReply::Chunks(_) | WorkerReply::Answered(_) => {
            Err(WireError::Malformed("a batch that nobody asked for"))
        }
    }
}

/// Ranks as a text names them.
fn named(ranks: &[u32]) -> String {
    let numbers: Vec<String> = ranks.iter().map(u32::to_string).collect();
    let word = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{word} {}", numbers.join(", "))
}

fn host_failure(error: &HostStartError) -> StartFailure {
    StartFailure {
        text: with_causes(error),
        out_of_memory: false,
        permanent: false,
    }
}
