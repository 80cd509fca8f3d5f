//! The workers of one model version.
//!
//! A worker is a *slot* here: one dispatcher thread (`dispatcher.rs`) that starts the worker in a
//! host, hands it batches from the queue, and starts it again when it is lost. `slots.rs` adds and
//! removes slots as the load asks (`scale.rs`) and puts a model whose workers only fail into
//! quarantine; the pool itself does what management asks and reads what the slots publish.

mod children;
mod conversation;
mod devices;
mod dispatcher;
mod exchange;
mod hosts;
mod imports;
mod limits;
mod logs;
pub(crate) mod python;
mod ranks;
mod resizing;
mod restart;
mod scale;
mod slots;
mod zygote;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use parking_lot::{Mutex, RwLock};
use ts_metrics::Metrics;
use ts_types::{Isolation, ModelLimits, ModelName, Scheduling, Version};
use ts_wire::frame::{BackendKind, Exchange, LoadModel, PythonPlaces};

use crate::batch::BatchPolicy;
use crate::config::{HostConfig, ServingConfig};
use crate::error::{Refusal, ServingError, StartFailure};
use crate::handler_metrics::HandlerMetrics;
use crate::management::{LiveLimits, RankDescription, WorkerDescription};
use crate::metrics::{CoreMetrics, ModelMetrics, WorkerStates};
use crate::order::Order;
use crate::pool::children::Children;
use crate::pool::devices::{Devices, PoolDevices};
use crate::pool::hosts::HostLease;
use crate::pool::limits::Confinement;
use crate::pool::python::PythonError;
use crate::pool::slots::{Slot, Slots};
use crate::pool::zygote::Zygote;
use crate::queue::{Queue, QueueRules};
use crate::resources::Resources;
use crate::spec::{ResolvedModel, check_delay};
use crate::warmup::WarmUp;

pub(crate) use crate::pool::devices::Placement;
pub(crate) use crate::pool::ranks::Parallel;
pub(crate) use crate::pool::resizing::Resizing;
pub(crate) use crate::pool::slots::Standing;

/// Worker ids start here, as TorchServe's do (*torchserve-contract* 5.5).
const FIRST_WORKER_ID: u32 = 9000;

/// How often a pool that drains looks whether it is empty.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What all pools of a server share.
pub(crate) struct Surroundings {
    pub(crate) hosts: HostConfig,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) core_metrics: CoreMetrics,
    pub(crate) handler_metrics: HandlerMetrics,
    pub(crate) resources: Arc<Resources>,
    devices: Arc<Devices>,
    next_worker: AtomicU32,
    python: Mutex<Option<Result<PythonPlaces, PythonError>>>,
    children: Arc<Children>,
    zygote: Arc<Zygote>,
    confinement: Arc<Confinement>,
}

impl Surroundings {
    /// To be called inside the runtime.
    pub(crate) fn new(config: &ServingConfig) -> Self {
        let hosts = config.hosts.clone();
        let children = Children::start();
        Self {
            zygote: Zygote::new(&hosts, &children),
            children,
            confinement: Arc::default(),
            devices: Devices::new(hosts.devices.clone()),
            hosts,
            resources: Arc::new(Resources::new(&config.resources)),
            metrics: Arc::clone(&config.metrics),
            core_metrics: CoreMetrics::new(&config.metrics),
            handler_metrics: HandlerMetrics::new(
                Arc::clone(&config.metrics),
                &config.handler_metrics,
            ),
            next_worker: AtomicU32::new(FIRST_WORKER_ID),
            python: Mutex::new(None),
        }
    }

    fn next_worker_id(&self) -> u32 {
        self.next_worker.fetch_add(1, Ordering::Relaxed)
    }

    /// What enforces a model's limits on its hosts.
    pub(crate) fn means_of_limits(&self) -> &'static str {
        self.confinement.means()
    }

    /// Where Python lives; looked for at the first call.
    fn python(&self) -> Result<PythonPlaces, PythonError> {
        let find = || python::find(&self.hosts, &self.children);
        let mut known = self.python.lock();
        match &*known {
            Some(Ok(places)) => Ok(places.clone()),
            // Someone may have built the plugin since.
            None | Some(Err(_)) => known.insert(find()).clone(),
        }
    }
}

/// What a pool is made for: everything that its workers have in common.
pub(crate) struct PoolSpec {
    pub(crate) model: ModelName,
    pub(crate) version: Version,
    pub(crate) load: LoadModel,
    pub(crate) warm_up: WarmUp,
    pub(crate) isolation: Isolation,
    /// Each worker is several processes, or has several devices.
    pub(crate) parallel: Option<Parallel>,
    pub(crate) devices: PoolDevices,
    /// `None` leaves it to the handler.
    pub(crate) isolate_bad_requests: Option<bool>,
    pub(crate) needs_python: bool,
    pub(crate) limits: RwLock<ModelLimits>,
    /// Copied out of the limits: every request reads it.
    pub(crate) client_timeout: Option<Duration>,
    pub(crate) scheduling: Scheduling,
    /// Where answers leave in order of arrival.
    pub(crate) order: Option<Arc<Order>>,
    pub(crate) queue: Arc<Queue>,
    pub(crate) metrics: ModelMetrics,
    pub(crate) surroundings: Arc<Surroundings>,
    /// Under thread isolation, the host that all workers share; it ends with the last of them.
    shared_host: Mutex<Weak<HostLease>>,
}

impl PoolSpec {
    pub(crate) fn new(resolved: ResolvedModel, surroundings: Arc<Surroundings>) -> Self {
        let ResolvedModel {
            name,
            version,
            isolation,
            parallel,
            placement,
            limits,
            scheduling,
            load,
            warm_up,
            isolate_bad_requests,
            ..
        } = resolved;
        let rules = QueueRules {
            batch: BatchPolicy {
                size: limits.batch_size,
                delay: limits.max_batch_delay,
                gather: scheduling.gather,
                preferred: scheduling.preferred_batch_sizes.clone(),
            },
            capacity: limits.job_queue_size,
            levels: scheduling.levels.clone(),
            job_ticket: scheduling.job_ticket,
            latency_goal: scheduling.latency_goal,
            sequences: scheduling.sequences,
            resources: scheduling.resources.clone(),
        };
        let queue = Queue::new(rules, Arc::clone(&surroundings.resources));
        queue.spread_over(limits.min_workers);
        Self {
            metrics: ModelMetrics::new(&surroundings.metrics, &name, &version),
            model: name,
            version,
            isolation,
            parallel,
            isolate_bad_requests,
            devices: PoolDevices::new(
                Arc::clone(&surroundings.devices),
                placement,
                parallel.map_or(1, Parallel::devices),
            ),
            needs_python: load.backend == BackendKind::Python,
            load,
            warm_up,
            queue: Arc::new(queue),
            order: scheduling.preserve_ordering.then(Arc::default),
            scheduling,
            client_timeout: limits.client_timeout,
            limits: RwLock::new(limits),
            surroundings,
            shared_host: Mutex::default(),
        }
    }
}

impl PoolSpec {
    /// Whether limits may change under workers that have loaded with others.
    fn may_change(&self, new: &LiveLimits) -> Result<(), ServingError> {
        let fixed = |parameter, reason: String| Err(ServingError::FixedLimit { parameter, reason });
        let batches = [
            ("batch_size", new.batch_size.is_some()),
            ("max_batch_delay", new.max_batch_delay.is_some()),
        ];
        if self.load.exchange == Exchange::Asynchronous
            && let Some((parameter, _)) = batches.into_iter().find(|(_, given)| *given)
        {
            let reason = "with `asyncCommunication` each request is handed over on its own";
            return fixed(parameter, reason.to_owned());
        }
        let Some(size) = new.batch_size else {
            return Ok(());
        };
        let loaded = self.load.batch_size as usize;
        if self.load.exchange == Exchange::Continuous && size > loaded {
            return fixed(
                "batch_size",
                format!(
                    "with `continuousBatching` its workers have room for the {loaded} requests that \
                     they were loaded with. Register the model again with `batch_size={size}`"
                ),
            );
        }
        match self.scheduling.preferred_batch_sizes.last() {
            Some(largest) if *largest > size => fixed(
                "batch_size",
                format!("`preferred_batch_size` of its configuration has {largest}"),
            ),
            _ => Ok(()),
        }
    }
}

impl PoolSpec {
    /// The version is gone, and so are its series.
    fn retire_metrics(&self) {
        self.metrics.retire();
        self.surroundings
            .handler_metrics
            .forget(&self.metrics.owner);
    }
}

impl Drop for PoolSpec {
    fn drop(&mut self) {
        // Of a version that was never published too.
        self.retire_metrics();
    }
}

/// Where a slot stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Its worker is loading, for the first time or again.
    Starting,
    /// Its worker takes batches.
    Ready,
    /// Its worker was lost and will be started again.
    Waiting,
    /// It is not started again.
    GivenUp,
    /// It has ended as asked.
    Stopped,
}

/// What a slot publishes.
#[derive(Debug, Clone)]
pub(crate) struct SlotStatus {
    pub(crate) phase: Phase,
    pub(crate) started: SystemTime,
    /// Processes of its ranks; most have the one.
    pub(crate) pids: Vec<u32>,
    /// Threads of one forward pass, once it has been given its share of the cores.
    pub(crate) threads: Option<u32>,
    pub(crate) generation: u64,
    pub(crate) last_failure: Option<StartFailure>,
}

/// The workers of one model version.
pub(crate) struct Pool {
    slots: Arc<Slots>,
}

/// The size that a pool is to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Size {
    /// Workers at least.
    pub(crate) min: usize,
    /// Workers at most.
    pub(crate) max: usize,
    /// Whether the load moves it between the two.
    pub(crate) autoscale: bool,
}

impl Pool {
    pub(crate) fn new(spec: PoolSpec, standing: Standing) -> Self {
        Self {
            slots: Arc::new(Slots::new(spec, standing)),
        }
    }

    pub(crate) fn spec(&self) -> &Arc<PoolSpec> {
        &self.slots.spec
    }

    /// Slots that can, or soon may, take batches.
    pub(crate) fn healthy_workers(&self) -> usize {
        self.slots.lock().healthy()
    }

    /// Slots that take batches now.
    pub(crate) fn ready_workers(&self) -> usize {
        self.slots.lock().ready()
    }

    /// Whether a request would be served: what readiness tells.
    pub(crate) fn can_serve(&self) -> bool {
        self.slots.can_serve()
    }

    /// What keeps the server from being ready, if this pool does.
    pub(crate) fn obstacle(&self) -> Option<&'static str> {
        self.slots.obstacle()
    }

    /// Why a request would not be taken now, if so.
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        self.slots.refusal()
    }

    /// A job is in the queue: starts a worker if the load asks for one, and answers all that wait
    /// if nobody will ever take them.
    pub(crate) fn arrived(&self) {
        self.slots.arrived();
    }

    /// Brings the number of slots into the bounds and returns what to await. Slots that were given
    /// up do not count: they are replaced. A quarantine is over.
    pub(crate) fn resize(&self, size: Size) -> Resizing {
        let Size {
            min,
            max,
            autoscale,
        } = size;
        let mut state = self.slots.lock();
        {
            let mut limits = self.spec().limits.write();
            if limits.min_workers == 0 && min > 0 {
                // Nobody counted on it until now.
                state.standing = Standing::Aside;
            }
            if min > 0 {
                state.note_ready(min);
            }
            limits.min_workers = min;
            limits.max_workers = max;
            limits.autoscale = autoscale;
        }
        self.spec().queue.spread_over(min);
        self.slots.set_autoscale(autoscale);
        state.draining = false;
        let mut stopping = self.slots.lift_quarantine(&mut state);
        while state.list.len() > max
            && let Some(slot) = state.list.pop()
        {
            slot.control.stop();
            stopping.push(slot);
        }
        let before = state.list.len();
        let mut failure = None;
        while state.list.len() < min && failure.is_none() {
            if let Err(error) = self.slots.add(&mut state) {
                failure = Some(StartFailure {
                    text: format!("a dispatcher thread could not be started: {error}"),
                    out_of_memory: true,
                    permanent: false,
                });
            }
        }
        // Those that an earlier call has begun to start are waited for like those of this one.
        let is_coming = |slot: &&Slot| {
            let status = slot.status.borrow();
            status.phase == Phase::Starting && status.last_failure.is_none()
        };
        let (earlier, new) = state.list.split_at(before);
        let starting = earlier
            .iter()
            .filter(is_coming)
            .chain(new)
            .map(|slot| slot.status.clone())
            .collect();
        drop(state);
        self.spec().queue.wake_all();
        Resizing {
            starting,
            stopping,
            failure,
        }
    }

    /// Changes limits for the next batch and the next request; all of them or, on an error, none.
    /// Returns what those that change were before.
    ///
    /// # Errors
    /// One that cannot change.
    pub(crate) fn change_limits(&self, new: &LiveLimits) -> Result<LiveLimits, ServingError> {
        let spec = self.spec();
        // Held until the queue has them too.
        let mut limits = spec.limits.write();
        spec.may_change(new)?;
        let before = LiveLimits {
            batch_size: new.batch_size.and(Some(limits.batch_size)),
            max_batch_delay: new.max_batch_delay.and(Some(limits.max_batch_delay)),
            response_timeout: new.response_timeout.and(Some(limits.response_timeout)),
            job_queue_size: new.job_queue_size.and(Some(limits.job_queue_size)),
        };
        let mut after = limits.clone();
        after.batch_size = new.batch_size.unwrap_or(limits.batch_size);
        after.max_batch_delay = new.max_batch_delay.unwrap_or(limits.max_batch_delay);
        after.response_timeout = new.response_timeout.unwrap_or(limits.response_timeout);
        after.job_queue_size = new.job_queue_size.unwrap_or(limits.job_queue_size);
        if new.batch_size.is_some() || new.max_batch_delay.is_some() {
            check_delay(&after, &spec.scheduling)?;
        }
        *limits = after;
        spec.queue.change_limits(
            limits.batch_size,
            limits.max_batch_delay,
            limits.job_queue_size,
        );
        Ok(before)
    }

    /// No worker will come up, and this is why.
    pub(crate) fn cannot_start(&self, reason: String) {
        self.slots.lock().growth_failure = Some(reason);
    }

    /// Takes no more requests until it gets another size.
    pub(crate) fn stop_taking(&self) {
        self.slots.lock().draining = true;
    }

    /// After [`Pool::stop_taking`]: waits until no request waits, nobody is left to take them, or
    /// `limit` is over. Returns whether the pool has not been given another size meanwhile.
    pub(crate) async fn drained(&self, limit: Duration) -> bool {
        let is_served = || {
            let state = self.slots.lock();
            !state.draining || state.healthy() == 0 || self.spec().queue.occupancy().0 == 0
        };
        let served = async {
            while !is_served() {
                tokio::time::sleep(LOOK_EVERY).await;
            }
        };
        let _in_time = tokio::time::timeout(limit, served).await;
        self.slots.lock().draining
    }

    /// Takes no more jobs, lets the workers finish those it has, and ends them; after `limit`
    /// ends them as they are. Every job is answered when this returns. Returns whether all
    /// workers are gone.
    pub(crate) async fn finish(&self, limit: Duration) -> bool {
        self.spec().queue.close();
        let stopping = std::mem::take(&mut self.slots.lock().list);
        for slot in &stopping {
            // A worker that is not up finishes nothing.
            if slot.phase() != Phase::Ready {
                slot.control.stop();
            }
        }
        let mut resizing = Resizing {
            starting: Vec::new(),
            stopping,
            failure: None,
        };
        let gone = resizing.stopped(limit).await;
        self.spec()
            .queue
            .fail_waiting(|job| ServingError::Unregistered {
                model: job.request.model.clone(),
            });
        self.spec().retire_metrics();
        gone
    }

    /// Why the model is in quarantine, if it is.
    pub(crate) fn quarantine(&self) -> Option<String> {
        self.slots.lock().quarantine.clone()
    }

    /// Why the last worker that the load asked for did not come up.
    pub(crate) fn growth_failure(&self) -> Option<String> {
        self.slots.lock().growth_failure.clone()
    }

    /// Brings the gauges of its queue and its workers up to date.
    pub(crate) fn observe(&self) {
        let mut workers = WorkerStates::default();
        for slot in &self.slots.lock().list {
            match slot.phase() {
                Phase::Starting => workers.starting += 1,
                Phase::Ready => workers.ready += 1,
                Phase::Waiting => workers.waiting += 1,
                Phase::GivenUp => workers.given_up += 1,
                Phase::Stopped => {}
            }
        }
        let (waiting, _) = self.spec().queue.occupancy();
        self.spec().metrics.observe(waiting, workers);
    }

    /// What describe-model shows.
    pub(crate) fn describe(&self) -> Vec<WorkerDescription> {
        let state = self.slots.lock();
        let described = state.list.iter().map(|slot| {
            let status = slot.status.borrow();
            let ranks = (0..).zip(&status.pids).map(|(rank, pid)| RankDescription {
                rank,
                pid: *pid,
                memory_bytes: resident_bytes(*pid),
            });
            let ranks: Vec<RankDescription> = ranks.collect();
            WorkerDescription {
                id: slot.id,
                started: status.started,
                ready: status.phase == Phase::Ready,
                pid: status.pids.first().copied(),
                memory_bytes: ranks.iter().map(|rank| rank.memory_bytes).sum(),
                ranks: if self.spec().parallel.is_some_and(Parallel::is_group) {
                    ranks
                } else {
                    Vec::new()
                },
                isolation: self.spec().isolation,
                devices: slot.devices.clone(),
                threads: status.threads,
                generation: status.generation,
                last_failure: status
                    .last_failure
                    .as_ref()
                    .map(|failure| failure.text.clone()),
            }
        });
        described.collect()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for slot in &self.slots.lock().list {
            slot.control.stop();
            slot.control.kill();
        }
        self.spec().queue.wake_all();
    }
}

/// Resident memory of a process; 0 when it is gone.
fn resident_bytes(pid: u32) -> u64 {
    let pages = fs_err::read_to_string(format!("/proc/{pid}/statm"))
        .ok()
        .and_then(|line| line.split(' ').nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}
