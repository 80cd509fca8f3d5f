//! The thread behind one worker: starts it, hands it batches, answers their jobs, and starts it
//! again when it is lost.
//!
//! A generation is one incarnation of the worker: its own thread or process, its own channel. When
//! it is lost its channel goes with it, so nothing late from it can be heard. Every job that was
//! handed over is answered here, whatever happens; jobs that were not go back to the queue.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};
use tokio::sync::watch;
use ts_types::{DeviceType, Isolation, Reply, with_causes};
use ts_wire::frame::{
    BatchOutcome, ItemOutcome, LoadFailureKind, LoadModel, MetricEvent, RunBatch, RunFailure,
    RunItem, RunPart, WorkerReply, WorkerRequest,
};
use ts_wire::{Channel, Incoming, WireError};

use crate::error::{ServingError, StartFailure};
use crate::job::Job;
use crate::pool::hosts::{Host, HostLease, HostStartError, NewHost, thread_variables};
use crate::pool::imports::Modules;
use crate::pool::logs::ModelLog;
use crate::pool::restart::{Failures, Restart};
use crate::pool::{Phase, PoolSpec, SlotStatus};
use crate::spec::intra_op_threads;

/// Room for what travels beside the bodies of a batch.
const REPLY_SLACK_BYTES: u64 = 1 << 20;

/// How long the end of a process may take to show after its channel has closed.
const EXIT_SHOWS_WITHIN: Duration = Duration::from_millis(300);

/// How a slot is told to end.
pub(crate) struct SlotControl {
    isolation: Isolation,
    stop: AtomicBool,
    ready: AtomicBool,
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

    fn stopping(&self) -> bool {
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
    id: u32,
    spec: Arc<PoolSpec>,
    control: Arc<SlotControl>,
    publish: watch::Sender<SlotStatus>,
    nothing_healthy_left: Box<dyn Fn() -> bool + Send>,
}

/// A worker that has loaded its model.
struct Worker {
    host: Arc<HostLease>,
    channel: Channel,
}

/// What came of each request of a batch, in its order.
type Replies = Vec<Result<Reply, RunFailure>>;

/// Why a worker takes no more batches.
enum End {
    /// The slot is to end.
    Asked,
    /// The worker is lost.
    Lost(StartFailure),
}

impl Dispatcher {
    pub(crate) fn new(
        id: u32,
        spec: Arc<PoolSpec>,
        control: Arc<SlotControl>,
        publish: watch::Sender<SlotStatus>,
        nothing_healthy_left: Box<dyn Fn() -> bool + Send>,
    ) -> Self {
        Self {
            id,
            spec,
            control,
            publish,
            nothing_healthy_left,
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
    fn name(&self) -> String {
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
            let end = self.start().map(|mut worker| {
                if failures.count() > 0 {
                    tracing::info!(
                        worker = self.name(),
                        "Auto recovery succeeded, reset recoveryStartTS"
                    );
                }
                failures.reset();
                let end = self.serve(&mut worker, &mut unsuccessful);
                self.control.ready.store(false, Ordering::SeqCst);
                let _already_gone = worker.channel.send(&WorkerRequest::Stop, None);
                // The host ends with the last worker that is dropped here.
                end
            });
            self.control.set_host(None);
            let failure = match end {
                Ok(End::Asked) => break,
                Ok(End::Lost(failure)) | Err(failure) => failure,
            };
            if self.ending() || !self.retry(&mut failures, failure) {
                break;
            }
        }
        if self.ending() {
            self.publish.send_modify(|status| {
                status.phase = Phase::Stopped;
                status.pid = None;
            });
        }
    }

    /// The slot was asked to end, or its queue will never hold a job again.
    fn ending(&self) -> bool {
        self.control.stopping() || self.spec.queue.is_closed()
    }

    /// Publishes a failure and waits for the next try. Returns whether there is one.
    fn retry(&self, failures: &mut Failures, failure: StartFailure) -> bool {
        let name = self.name();
        let window = self.spec.limits.read().max_retry_timeout;
        let restart = failures.note(Instant::now(), window, failure.permanent);
        tracing::warn!(
            worker = name,
            reason = failure.text,
            "{} Worker disconnected.",
            self.id
        );
        let out_of_memory = failure.out_of_memory;
        self.publish.send_modify(|status| {
            status.phase = match restart {
                Restart::After(_) => Phase::Waiting,
                Restart::Never => Phase::GivenUp,
            };
            status.pid = None;
            status.last_failure = Some(failure);
        });
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
                self.answer_for_the_last(out_of_memory);
                false
            }
        }
    }

    /// Once this slot has given up as the last one, answers what waits for a worker.
    fn answer_for_the_last(&self, out_of_memory: bool) {
        if (self.nothing_healthy_left)() {
            self.spec
                .queue
                .fail_waiting(|_| ServingError::WorkerDied { out_of_memory });
        }
    }

    /// Starts the worker in a host and loads the model.
    fn start(&self) -> Result<Worker, StartFailure> {
        let began = Instant::now();
        if self.spec.device_type == Some(DeviceType::Gpu) && self.spec.load.gpu_id.is_none() {
            return Err(StartFailure {
                text: "the model asks for a GPU (`deviceType: gpu`) and this server has none to \
                       give it"
                    .to_owned(),
                out_of_memory: false,
                permanent: true,
            });
        }
        let (limit, workers, cores) = {
            let limits = self.spec.limits.read();
            (
                limits.startup_timeout,
                limits.min_workers,
                limits.hosts.cores(),
            )
        };
        let threads = intra_op_threads(self.spec.surroundings.hosts.cores, workers);
        // More would wait for one another in the cores that its host is limited to.
        let threads = cores.map_or(threads, |cores| threads.min(intra_op_threads(cores, 1)));
        let (host, deadline) = self.host(threads, limit)?;
        self.publish
            .send_modify(|status| status.pid = Some(host.pid()));
        let max_payload = self
            .spec
            .load
            .max_response_bytes
            .saturating_mul(u64::from(self.spec.load.batch_size));
        let mut channel = host
            .add_worker(self.id, max_payload.saturating_add(REPLY_SLACK_BYTES))
            .map_err(|error| host_failure(&error))?;
        let model = LoadModel {
            intra_op_threads: threads,
            ..self.spec.load.clone()
        };
        match load(&mut channel, model, deadline) {
            Ok(()) => {}
            Err(LoadError::Refused(failure)) => return Err(failure),
            // The host of this worker alone ends as it is dropped; one that others serve in stays.
            Err(LoadError::Wire(WireError::TimedOut)) => {
                return Err(self.timed_out("while it loaded the model", limit));
            }
            Err(LoadError::Wire(error)) => {
                return Err(self.lost(&host, &error, "while it loaded the model", limit));
            }
        }
        self.warm_up(&mut channel, &host, deadline, limit)?;
        self.control.ready.store(true, Ordering::SeqCst);
        self.publish
            .send_modify(|status| status.phase = Phase::Ready);
        self.spec
            .metrics
            .worker_loaded(&self.name(), began.elapsed());
        tracing::info!(
            worker = self.name(),
            pid = host.pid(),
            millis = began.elapsed().as_millis(),
            "worker ready"
        );
        Ok(Worker { host, channel })
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
            let (job, _nobody_waits) = Job::new(request, Instant::now());
            let answered = hand_over(channel, &[job]).and_then(|()| {
                let incoming = channel.receive(deadline)?;
                finished(&incoming, 1).map(|(replies, _)| replies)
            });
            let reason = match answered {
                Err(WireError::TimedOut) => {
                    return Err(self.timed_out("while it warmed up", limit));
                }
                Err(error) => return Err(self.lost(host, &error, "while it warmed up", limit)),
                Ok(replies) => match replies.into_iter().next() {
                    Some(Ok(reply)) if reply.status < 400 => continue,
                    Some(Ok(reply)) => format!("status {}", reply.status),
                    Some(Err(failure)) => ServingError::Run(failure).to_string(),
                    None => "no answer".to_owned(),
                },
            };
            return Err(StartFailure {
                text: format!("the warm-up with `{file}` failed: {reason}"),
                out_of_memory: false,
                permanent: false,
            });
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
        let host = host.watch(ModelLog { name: self.name() }, move || {
            if let Some(spec) = spec.upgrade() {
                spec.queue.wake_all();
            }
        })?;
        let host = Arc::new(HostLease::new(host));
        self.control.set_host(Some(host.process()));
        Ok(host)
    }

    /// Hands batches to the worker until it is lost or the slot is to end.
    fn serve(&self, worker: &mut Worker, unsuccessful: &mut u32) -> End {
        let queue = &self.spec.queue;
        loop {
            let taken = queue.take(|| self.control.stopping() || !worker.host.is_alive());
            let Some(jobs) = taken else {
                if self.ending() {
                    return End::Asked;
                }
                return End::Lost(self.lost(
                    &worker.host,
                    &WireError::Closed,
                    "while it was idle",
                    Duration::ZERO,
                ));
            };
            let count = jobs.len();
            let handed_over = Instant::now();
            match hand_over(&mut worker.channel, &jobs) {
                Ok(()) => {}
                Err(error @ WireError::Closed) => {
                    // They never reached a worker, so another may have them.
                    queue.put_back(jobs);
                    let during = "before it took a batch";
                    return End::Lost(self.lost(&worker.host, &error, during, Duration::ZERO));
                }
                Err(error) => {
                    let reason = error.to_string();
                    tracing::warn!(
                        worker = self.name(),
                        reason,
                        "a batch cannot be handed over"
                    );
                    for job in jobs {
                        let reason = reason.clone();
                        job.fail(ServingError::NotHandedOver { reason });
                    }
                    if error.is_before_sending() {
                        // It is the batch that cannot travel, not the worker.
                        continue;
                    }
                    let during = "while it was handed a batch";
                    return End::Lost(self.lost(&worker.host, &error, during, Duration::ZERO));
                }
            }
            let limit = self.spec.limits.read().response_timeout;
            let received = worker.channel.receive(handed_over.checked_add(limit));
            let backend_time = handed_over.elapsed();
            let read = received.and_then(|incoming| finished(&incoming, count));
            match read {
                Ok((replies, events)) => {
                    *unsuccessful = 0;
                    let over_memory = self.over_memory(&replies);
                    answer(jobs, replies, handed_over);
                    self.spec
                        .surroundings
                        .handler_metrics
                        .record(&self.spec.model, &events);
                    let overhead = handed_over.elapsed().saturating_sub(backend_time);
                    self.spec.metrics.batch_done(overhead);
                    if let Some(failure) = over_memory {
                        return End::Lost(failure);
                    }
                }
                Err(error) => {
                    *unsuccessful += 1;
                    tracing::warn!(
                        worker = self.name(),
                        "Number or consecutive unsuccessful inference {unsuccessful}"
                    );
                    let failure = self.lost(&worker.host, &error, "while it ran a batch", limit);
                    for job in jobs {
                        job.fail(ServingError::WorkerDied {
                            out_of_memory: failure.out_of_memory,
                        });
                    }
                    return End::Lost(failure);
                }
            }
        }
    }

    /// A worker that was refused memory under its model's limit is replaced: what it still holds
    /// would be missing to every batch that follows.
    fn over_memory(&self, replies: &Replies) -> Option<StartFailure> {
        let bytes = self.spec.limits.read().hosts.memory_bytes?;
        let refused = |reply: &Result<Reply, RunFailure>| *reply == Err(RunFailure::OutOfMemory);
        replies.iter().any(refused).then(|| StartFailure {
            text: format!("out of memory under its limit of {} MiB", bytes >> 20),
            out_of_memory: true,
            permanent: false,
        })
    }

    /// Explains the loss of a worker, and makes sure that what is lost is also gone.
    fn lost(&self, host: &Host, error: &WireError, during: &str, limit: Duration) -> StartFailure {
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
            "Backend worker error\norg.pytorch.serve.wlm.WorkerInitializationException: Backend \
             worker did not respond in given time"
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
        self.publish.send_modify(|status| {
            status.phase = Phase::GivenUp;
            status.pid = None;
        });
        self.answer_for_the_last(false);
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
) -> Result<(), LoadError> {
    let request = WorkerRequest::Load(model);
    channel.send(&request, None).map_err(LoadError::Wire)?;
    let incoming = channel.receive(deadline).map_err(LoadError::Wire)?;
    match incoming.header().map_err(LoadError::Wire)? {
        WorkerReply::Loaded => Ok(()),
        WorkerReply::LoadFailed(failure) => Err(LoadError::Refused(StartFailure {
            text: failure.message,
            out_of_memory: failure.kind == LoadFailureKind::OutOfMemory,
            permanent: failure.kind == LoadFailureKind::Permanent,
        })),
        WorkerReply::Done(_) => Err(LoadError::Wire(WireError::Malformed(
            "a batch that nobody asked for",
        ))),
    }
}

fn host_failure(error: &HostStartError) -> StartFailure {
    StartFailure {
        text: with_causes(error),
        out_of_memory: false,
        permanent: false,
    }
}

fn hand_over(channel: &mut Channel, jobs: &[Job]) -> Result<(), WireError> {
    let mut values: Vec<&[u8]> = Vec::with_capacity(jobs.len());
    let items = jobs.iter().map(|job| {
        let request = &job.request;
        let parts = request.parts.iter().map(|part| {
            values.push(&part.value);
            RunPart {
                name: &part.name,
                content_type: &part.content_type,
                value_bytes: part.value.len() as u64,
            }
        });
        RunItem {
            request_id: request.id.as_str(),
            parts: parts.collect(),
            headers: request
                .headers
                .iter()
                .map(|(k, v)| (k.as_str(), v.as_str()))
                .collect(),
        }
    });
    let run = WorkerRequest::Run(RunBatch {
        items: items.collect(),
    });
    channel.send_payload(&run, &values)
}

fn answer(jobs: Vec<Job>, replies: Replies, handed_over: Instant) {
    for (job, reply) in jobs.into_iter().zip(replies) {
        match reply {
            Ok(reply) => job.succeed(reply, handed_over),
            Err(failure) => job.fail(ServingError::Run(failure)),
        }
    }
}

/// What a worker says of a batch of `jobs` requests: their replies, and what the handler recorded.
fn finished<'a>(
    incoming: &Incoming<'a>,
    jobs: usize,
) -> Result<(Replies, Vec<MetricEvent<'a>>), WireError> {
    match incoming.header()? {
        WorkerReply::Done(done) => {
            Ok((replies(done.outcome, incoming.payload, jobs)?, done.metrics))
        }
        WorkerReply::Loaded | WorkerReply::LoadFailed(_) => {
            Err(WireError::Malformed("a worker that loads twice"))
        }
    }
}

/// The replies of a finished batch of `jobs` requests, copied out of the channel's buffer.
fn replies(outcome: BatchOutcome<'_>, payload: &[u8], jobs: usize) -> Result<Replies, WireError> {
    let items = match outcome {
        BatchOutcome::Failed(failure) => return Ok(vec![Err(failure); jobs]),
        BatchOutcome::Items(items) => items,
    };
    if items.len() != jobs {
        return Err(WireError::Malformed(
            "a reply for another number of requests",
        ));
    }
    let mut rest = payload;
    let mut replies = Vec::with_capacity(jobs);
    for item in items {
        replies.push(match item {
            ItemOutcome::Failed(failure) => Err(failure),
            ItemOutcome::Reply(reply) => {
                let bytes = usize::try_from(reply.body_bytes).unwrap_or(usize::MAX);
                let (body, after) = rest
                    .split_at_checked(bytes)
                    .ok_or(WireError::Malformed("bodies longer than their payload"))?;
                rest = after;
                let headers = reply.headers.into_iter();
                Ok(Reply {
                    status: reply.status,
                    reason: reply.reason.to_owned(),
                    headers: headers.map(|(k, v)| (k.to_owned(), v.to_owned())).collect(),
                    body: Bytes::copy_from_slice(body),
                })
            }
        });
    }
    Ok(replies)
}
