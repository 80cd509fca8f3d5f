//! The workers of one model version.
//!
//! A worker is a *slot* here: one dispatcher thread (`dispatcher.rs`) that starts the worker in a
//! host, hands it batches from the queue, and starts it again when it is lost. The pool itself
//! only adds slots, stops slots and reads what they publish.

mod children;
mod dispatcher;
mod hosts;
mod imports;
mod limits;
mod logs;
pub(crate) mod python;
mod restart;
mod zygote;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use futures_util::future::try_join_all;
use parking_lot::{Mutex, RwLock};
use tokio::sync::watch;
use ts_types::{DeviceType, Isolation, ModelLimits, ModelName, Version};
use ts_wire::frame::{BackendKind, LoadModel, PythonPlaces};

use crate::batch::BatchPolicy;
use crate::config::HostConfig;
use crate::error::{Refusal, ServingError, StartFailure};
use crate::handler_metrics::HandlerMetrics;
use crate::management::WorkerDescription;
use crate::metrics::ModelMetrics;
use crate::pool::children::Children;
use crate::pool::dispatcher::{Dispatcher, SlotControl};
use crate::pool::hosts::HostLease;
use crate::pool::limits::Confinement;
use crate::pool::python::PythonError;
use crate::pool::zygote::Zygote;
use crate::queue::Queue;
use crate::spec::ResolvedModel;
use crate::warmup::WarmUp;

/// Worker ids start here, as TorchServe's do (*torchserve-contract* 5.5).
const FIRST_WORKER_ID: u32 = 9000;

/// What all pools of a server share.
pub(crate) struct Surroundings {
    pub(crate) hosts: HostConfig,
    pub(crate) handler_metrics: HandlerMetrics,
    next_worker: AtomicU32,
    python: Mutex<Option<Result<PythonPlaces, PythonError>>>,
    children: Arc<Children>,
    zygote: Arc<Zygote>,
    confinement: Arc<Confinement>,
}

impl Surroundings {
    /// To be called inside the runtime.
    pub(crate) fn new(hosts: HostConfig) -> Self {
        let children = Children::start();
        Self {
            zygote: Zygote::new(&hosts, &children),
            children,
            confinement: Arc::default(),
            hosts,
            handler_metrics: HandlerMetrics::new(),
            next_worker: AtomicU32::new(FIRST_WORKER_ID),
            python: Mutex::new(None),
        }
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
    pub(crate) device_type: Option<DeviceType>,
    pub(crate) needs_python: bool,
    pub(crate) limits: RwLock<ModelLimits>,
    /// Copied out of the limits: every request reads it.
    pub(crate) client_timeout: Option<Duration>,
    pub(crate) queue: Queue,
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
            device_type,
            limits,
            load,
            warm_up,
            ..
        } = resolved;
        let policy = BatchPolicy {
            size: limits.batch_size,
            delay: limits.max_batch_delay,
        };
        Self {
            metrics: ModelMetrics::new(&name, &version),
            model: name,
            version,
            isolation,
            device_type,
            needs_python: load.backend == BackendKind::Python,
            load,
            warm_up,
            queue: Queue::new(policy, limits.job_queue_size),
            client_timeout: limits.client_timeout,
            limits: RwLock::new(limits),
            surroundings,
            shared_host: Mutex::default(),
        }
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
    pub(crate) pid: Option<u32>,
    pub(crate) generation: u64,
    pub(crate) last_failure: Option<StartFailure>,
}

struct Slot {
    id: u32,
    control: Arc<SlotControl>,
    status: watch::Receiver<SlotStatus>,
}

/// The workers of one model version.
pub(crate) struct Pool {
    spec: Arc<PoolSpec>,
    slots: Arc<Mutex<Vec<Slot>>>,
}

impl Pool {
    pub(crate) fn new(spec: PoolSpec) -> Self {
        Self {
            spec: Arc::new(spec),
            slots: Arc::default(),
        }
    }

    pub(crate) fn spec(&self) -> &Arc<PoolSpec> {
        &self.spec
    }

    /// Slots that can, or soon may, take batches.
    pub(crate) fn healthy_workers(&self) -> usize {
        healthy(&self.slots.lock())
    }

    /// Slots that take batches now.
    pub(crate) fn ready_workers(&self) -> usize {
        let slots = self.slots.lock();
        let ready = slots
            .iter()
            .filter(|slot| slot.status.borrow().phase == Phase::Ready);
        ready.count()
    }

    /// Brings the number of slots into `min..=max` and returns what to await. Slots that were
    /// given up do not count: they are replaced.
    pub(crate) fn resize(&self, min: usize, max: usize) -> Resizing {
        let mut slots = self.slots.lock();
        {
            let mut limits = self.spec.limits.write();
            limits.min_workers = min;
            limits.max_workers = max;
        }
        let mut stopping = Vec::new();
        slots.retain(|slot| slot.status.borrow().phase != Phase::GivenUp);
        while slots.len() > max
            && let Some(slot) = slots.pop()
        {
            slot.control.stop();
            stopping.push(slot);
        }
        let mut starting = Vec::new();
        let mut failure = None;
        while slots.len() < min && failure.is_none() {
            match self.add_slot() {
                Ok(slot) => {
                    starting.push(slot.status.clone());
                    slots.push(slot);
                }
                Err(error) => {
                    failure = Some(StartFailure {
                        text: format!("a dispatcher thread could not be started: {error}"),
                        out_of_memory: true,
                        permanent: false,
                    });
                }
            }
        }
        drop(slots);
        self.spec.queue.wake_all();
        Resizing {
            starting,
            stopping,
            failure,
        }
    }

    fn add_slot(&self) -> std::io::Result<Slot> {
        let id = self
            .spec
            .surroundings
            .next_worker
            .fetch_add(1, Ordering::Relaxed);
        let status = SlotStatus {
            phase: Phase::Starting,
            started: SystemTime::now(),
            pid: None,
            generation: 1,
            last_failure: None,
        };
        let (publish, status) = watch::channel(status);
        let control = Arc::new(SlotControl::new(self.spec.isolation));
        let slots = Arc::downgrade(&self.slots);
        let nothing_healthy_left = move || {
            slots
                .upgrade()
                .is_none_or(|slots| healthy(&slots.lock()) == 0)
        };
        Dispatcher::new(
            id,
            Arc::clone(&self.spec),
            Arc::clone(&control),
            publish,
            Box::new(nothing_healthy_left),
        )
        .spawn()?;
        Ok(Slot {
            id,
            control,
            status,
        })
    }

    /// Takes no more jobs, lets the workers finish those it has, and ends them; after `limit`
    /// ends them as they are. Every job is answered when this returns. Returns whether all
    /// workers are gone.
    pub(crate) async fn finish(&self, limit: Duration) -> bool {
        self.spec.queue.close();
        let stopping: Vec<Slot> = self.slots.lock().drain(..).collect();
        for slot in &stopping {
            // A worker that is not up finishes nothing.
            if slot.status.borrow().phase != Phase::Ready {
                slot.control.stop();
            }
        }
        let mut resizing = Resizing {
            starting: Vec::new(),
            stopping,
            failure: None,
        };
        let gone = resizing.stopped(limit).await;
        self.spec
            .queue
            .fail_waiting(|job| ServingError::Unregistered {
                model: job.request.model.clone(),
            });
        gone
    }

    /// Answers everything that waits: there is no worker to run it.
    pub(crate) fn refuse_waiting(&self) {
        self.spec.queue.fail_waiting(|job| ServingError::Refused {
            model: job.request.model.clone(),
            version: job.request.version.clone(),
            reason: Refusal::NoWorker,
        });
    }

    /// Whether no worker is left or on its way.
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.lock().is_empty()
    }

    /// What describe-model shows.
    pub(crate) fn describe(&self) -> Vec<WorkerDescription> {
        let slots = self.slots.lock();
        let described = slots.iter().map(|slot| {
            let status = slot.status.borrow();
            WorkerDescription {
                id: slot.id,
                started: status.started,
                ready: status.phase == Phase::Ready,
                pid: status.pid,
                memory_bytes: status.pid.map_or(0, resident_bytes),
                gpu_id: self.spec.load.gpu_id,
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
        for slot in self.slots.lock().iter() {
            slot.control.stop();
            slot.control.kill();
        }
        self.spec.queue.wake_all();
    }
}

fn healthy(slots: &[Slot]) -> usize {
    let can_serve =
        |slot: &&Slot| !matches!(slot.status.borrow().phase, Phase::GivenUp | Phase::Stopped);
    slots.iter().filter(can_serve).count()
}

/// A change of a pool's size under way.
pub(crate) struct Resizing {
    starting: Vec<watch::Receiver<SlotStatus>>,
    stopping: Vec<Slot>,
    failure: Option<StartFailure>,
}

impl Resizing {
    /// Why a slot could not be made at all.
    pub(crate) fn failed(&mut self) -> Result<(), StartFailure> {
        self.failure.take().map_or(Ok(()), Err)
    }

    /// Waits until each new worker has come up once.
    ///
    /// # Errors
    /// The first failure of any of them, without waiting for the others.
    pub(crate) async fn started(&mut self) -> Result<(), StartFailure> {
        self.failed()?;
        try_join_all(self.starting.iter_mut().map(first_result)).await?;
        Ok(())
    }

    /// Waits until each removed worker has finished its batch and ended; after `limit` ends them
    /// as they are. Returns whether they are all gone.
    pub(crate) async fn stopped(&mut self, limit: Duration) -> bool {
        if self.all_stopped(limit).await {
            return true;
        }
        for slot in &self.stopping {
            slot.control.stop();
            slot.control.kill();
        }
        // A killed process is gone within milliseconds, unless the kernel holds it.
        self.all_stopped(Duration::from_secs(5)).await
    }

    async fn all_stopped(&mut self, limit: Duration) -> bool {
        let all = async {
            for slot in &mut self.stopping {
                // A sender that is gone has ended too.
                let _ended = slot
                    .status
                    .wait_for(|status| matches!(status.phase, Phase::Stopped | Phase::GivenUp))
                    .await;
            }
        };
        tokio::time::timeout(limit, all).await.is_ok()
    }
}

async fn first_result(status: &mut watch::Receiver<SlotStatus>) -> Result<(), StartFailure> {
    let first = status
        .wait_for(|status| {
            status.last_failure.is_some()
                || !matches!(status.phase, Phase::Starting | Phase::Waiting)
        })
        .await;
    match first {
        Ok(status) if status.phase == Phase::Ready => Ok(()),
        Ok(status) => Err(status
            .last_failure
            .clone()
            .unwrap_or_else(StartFailure::stopped)),
        Err(_) => Err(StartFailure::stopped()),
    }
}

impl StartFailure {
    pub(crate) fn stopped() -> Self {
        Self {
            text: "the worker was stopped before it came up".to_owned(),
            out_of_memory: false,
            permanent: false,
        }
    }
}

/// Resident memory of a process; 0 when it is gone.
fn resident_bytes(pid: u32) -> u64 {
    let pages = fs_err::read_to_string(format!("/proc/{pid}/statm"))
        .ok()
        .and_then(|line| line.split(' ').nth(1)?.parse::<u64>().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}
