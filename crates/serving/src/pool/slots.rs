//! The slots of a pool: who comes, who goes, and when all are sent home.
//!
//! The pool and the dispatchers of its workers share this. Everything is decided under one lock, so
//! a worker that leaves and a job that arrives always see each other: either the worker finds the
//! job in the queue, or the job finds that worker gone.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::error::{Refusal, ServingError, StartFailure};
use crate::job::Job;
use crate::pool::dispatcher::{Dispatcher, SlotControl};
use crate::pool::hosts::Host;
use crate::pool::scale::{self, Growth, Load};
use crate::pool::{Phase, PoolSpec, SlotStatus};

/// One worker's place in the pool.
pub(crate) struct Slot {
    pub(crate) id: u32,
    pub(crate) devices: Vec<u32>,
    pub(crate) control: Arc<SlotControl>,
    pub(crate) status: watch::Receiver<SlotStatus>,
}

impl Slot {
    pub(crate) fn phase(&self) -> Phase {
        self.status.borrow().phase
    }

    /// It takes batches, or soon may.
    pub(crate) fn is_healthy(&self) -> bool {
        !self.control.stopping() && !matches!(self.phase(), Phase::GivenUp | Phase::Stopped)
    }

    /// It takes batches.
    fn is_ready(&self) -> bool {
        self.is_healthy() && self.phase() == Phase::Ready
    }
}

/// Whether the server's readiness waits for a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Not yet: it came beside models that serve, and its minimum of workers has not been up.
    Aside,
    /// From the beginning: the server is not ready without it.
    Expected,
    /// All of its minimum of workers were up at once; from then on one of them will do.
    Loaded,
}

/// What one lock guards.
pub(crate) struct State {
    pub(crate) list: Vec<Slot>,
    pub(crate) growth: Growth,
    /// It takes no more requests, since its workers are to go when they have answered those that
    /// wait.
    pub(crate) draining: bool,
    pub(crate) standing: Standing,
    /// Why the model is in quarantine, if it is.
    pub(crate) quarantine: Option<String>,
    /// Why the last worker that the load asked for did not come up.
    pub(crate) growth_failure: Option<String>,
    /// Process of the worker that was lost last: those that share a host which ends are lost
    /// together, and that counts once.
    last_lost: Option<u32>,
}

impl State {
    fn new(standing: Standing) -> Self {
        Self {
            list: Vec::new(),
            growth: Growth::default(),
            draining: false,
            standing,
            quarantine: None,
            growth_failure: None,
            last_lost: None,
        }
    }

    /// What keeps the server from being ready, if so many workers at least are wanted.
    fn obstacle(&self, minimum: usize) -> Option<&'static str> {
        if self.standing == Standing::Aside {
            return None;
        }
        if self.quarantine.is_some() {
            return Some("in quarantine");
        }
        if minimum == 0 || self.draining {
            return None;
        }
        let ready = self.ready();
        match self.standing {
            Standing::Loaded => (ready == 0).then_some("no worker"),
            _ if ready >= minimum => None,
            _ if self.healthy() > 0 => Some("loading"),
            _ => Some("no worker"),
        }
    }

    /// As many workers as are wanted at least may be up now.
    pub(crate) fn note_ready(&mut self, minimum: usize) {
        if self.ready() >= minimum {
            self.standing = Standing::Loaded;
        }
    }

    pub(crate) fn healthy(&self) -> usize {
        self.list.iter().filter(|slot| slot.is_healthy()).count()
    }

    pub(crate) fn ready(&self) -> usize {
        self.list.iter().filter(|slot| slot.is_ready()).count()
    }

    /// Whether none of the workers has nothing to do.
    fn are_all_busy(&self) -> bool {
        let idle = |slot: &Slot| slot.control.idle_since().is_some();
        let mut ready = self.list.iter().filter(|slot| slot.is_ready());
        !ready.any(idle)
    }
}

/// The slots of one pool.
pub(crate) struct Slots {
    pub(crate) spec: Arc<PoolSpec>,
    state: Mutex<State>,
    autoscales: AtomicBool,
    /// Workers lost since one of them last answered a batch.
    losses: AtomicU32,
    made: Instant,
    /// When all workers were last needed, in milliseconds since `made`.
    needed_millis: AtomicU64,
}

impl Slots {
    pub(crate) fn new(spec: PoolSpec, standing: Standing) -> Self {
        Self {
            // What it is to be comes with its first size.
            autoscales: AtomicBool::new(false),
            spec: Arc::new(spec),
            state: Mutex::new(State::new(standing)),
            losses: AtomicU32::new(0),
            made: Instant::now(),
            needed_millis: AtomicU64::new(0),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(crate) fn autoscales(&self) -> bool {
        self.autoscales.load(Ordering::SeqCst)
    }

    pub(crate) fn set_autoscale(&self, on: bool) {
        self.autoscales.store(on, Ordering::SeqCst);
    }

    /// Workers that the pool is to have: what its cores are divided by.
    pub(crate) fn target(&self) -> usize {
        let slots = self.lock().list.len();
        let limits = self.spec.limits.read();
        if limits.autoscale {
            // Those that come later shall find their share.
            limits.max_workers
        } else {
            limits.min_workers.max(slots)
        }
    }

    /// Starts one more worker.
    pub(crate) fn add(self: &Arc<Self>, state: &mut State) -> io::Result<()> {
        let id = self.spec.surroundings.next_worker_id();
        let (publish, status) = watch::channel(SlotStatus {
            phase: Phase::Starting,
            started: SystemTime::now(),
            pids: Vec::new(),
            threads: None,
            generation: 1,
            last_failure: None,
        });
        let control = Arc::new(SlotControl::new(self.spec.isolation));
        let lease = self.spec.devices.lease();
        let devices = lease.as_ref().map(super::devices::DeviceLease::ids);
        let slots = Arc::clone(self);
        Dispatcher::new(id, slots, Arc::clone(&control), publish, lease).spawn()?;
        state.list.push(Slot {
            id,
            devices: devices.unwrap_or_default(),
            control,
            status,
        });
        Ok(())
    }

    /// Why a request would not be taken now, if so.
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        let state = self.lock();
        if state.draining {
            return Some(Refusal::Draining);
        }
        self.refusal_in(&state)
    }

    /// The same for one that has been taken.
    fn refusal_in(&self, state: &State) -> Option<Refusal> {
        if state.quarantine.is_some() {
            return Some(Refusal::Quarantined);
        }
        let served = state.healthy() > 0
            || (self.starts_on_demand() && state.growth.may_start(Instant::now()));
        (!served).then_some(Refusal::NoWorker)
    }

    /// The first job brings up a worker, if there is none.
    fn starts_on_demand(&self) -> bool {
        self.autoscales() && self.spec.limits.read().max_workers > 0
    }

    /// Whether a request would be served: a worker takes batches, or the model is one that is
    /// loaded by its requests. Such a model stays ready while it loads.
    pub(crate) fn can_serve(&self) -> bool {
        let state = self.lock();
        let needs_none = || self.autoscales() && self.spec.limits.read().min_workers == 0;
        let loads = || needs_none() && self.refusal_in(&state).is_none();
        !state.draining && (state.ready() > 0 || loads())
    }

    /// What keeps the server from being ready, if this pool does. One without a minimum of workers,
    /// or whose workers are to go, keeps nobody, nor does one that stands aside.
    pub(crate) fn obstacle(&self) -> Option<&'static str> {
        let state = self.lock();
        state.obstacle(self.spec.limits.read().min_workers)
    }

    /// A job is in the queue: starts a worker if the load asks for one, and answers all that wait
    /// if nobody will ever take them.
    pub(crate) fn arrived(self: &Arc<Self>) {
        let refusal = {
            let mut state = self.lock();
            if self.autoscales() && !self.spec.queue.is_closed() {
                self.grow(&mut state, Growth::at_arrival);
            }
            self.refusal_in(&state)
        };
        // Of a closed queue the workers, no longer listed here, finish what it has.
        if let Some(reason) = refusal
            && !self.spec.queue.is_closed()
        {
            self.refuse_waiting(reason);
        }
    }

    /// A worker has cut a batch and is about to run it.
    pub(crate) fn cut(self: &Arc<Self>) {
        if self.autoscales() {
            let mut state = self.lock();
            if !self.spec.queue.is_closed() {
                self.look_for_need(&state);
                self.grow(&mut state, Growth::at_cut);
            }
        }
    }

    /// The worker of a slot has nothing to do any more. Until now it was needed, perhaps for long.
    pub(crate) fn work_ended(&self, control: &SlotControl) {
        if self.autoscales() && control.idle_since().is_none() {
            self.look_for_need(&self.lock());
        }
        control.has_no_work();
    }

    fn look_for_need(&self, state: &State) {
        let waiting = self.spec.queue.occupancy().0;
        if waiting > 0 || state.are_all_busy() {
            self.note_need();
        }
    }

    fn note_need(&self) {
        let millis = u64::try_from(self.made.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.needed_millis.store(millis, Ordering::SeqCst);
    }

    fn grow(self: &Arc<Self>, state: &mut State, starts: fn(&mut Growth, Load, Instant) -> bool) {
        if !self.autoscales() || state.quarantine.is_some() {
            return;
        }
        let ready = state.ready();
        let (batch_size, max, window) = {
            let limits = self.spec.limits.read();
            (
                limits.batch_size,
                limits.max_workers,
                limits.max_retry_timeout,
            )
        };
        let load = Load {
            waiting: self.spec.queue.occupancy().0,
            batch_size,
            ready,
            starting: state.healthy() - ready,
            max,
        };
        let now = Instant::now();
        if !starts(&mut state.growth, load, now) {
            return;
        }
        tracing::info!(
            model = %self.spec.model,
            version = %self.spec.version,
            waiting = load.waiting,
            workers = load.ready + load.starting,
            "the load asks for a worker"
        );
        if let Err(error) = self.add(state) {
            tracing::warn!(%error, "a dispatcher thread could not be started");
            state.growth.note_failure(now, window, false);
        }
    }

    /// When the worker of a slot asks to leave, or looks at this again.
    pub(crate) fn idle_until(&self, control: &SlotControl) -> Option<Instant> {
        if !self.autoscales() {
            return None;
        }
        let needed = Duration::from_millis(self.needed_millis.load(Ordering::SeqCst));
        let idle = self.spec.limits.read().scale_down_idle;
        let Some(since) = control.idle_since() else {
            // It takes more while it has some, and stays for as long after them at least.
            return Instant::now().checked_add(idle);
        };
        scale::leaves_at(since, self.made.checked_add(needed)?, idle)
    }

    /// A worker has waited for too long: tells it to end, if the pool can do without it.
    pub(crate) fn leave_idle(&self, id: u32) {
        let mut state = self.lock();
        let min = self.spec.limits.read().min_workers;
        let waiting = self.spec.queue.occupancy().0;
        if self.autoscales()
            && scale::may_leave(state.healthy(), min, waiting)
            && let Some(index) = state.list.iter().position(|slot| slot.id == id)
            && state.list[index].control.idle_since().is_some()
        {
            state.list.remove(index).control.stop();
            tracing::info!(
                model = %self.spec.model,
                version = %self.spec.version,
                worker = id,
                workers = state.healthy(),
                "an idle worker ends"
            );
        }
        // Whether those that are left are needed shows from now on.
        self.note_need();
    }

    /// A worker came up.
    pub(crate) fn came_up(&self) {
        let mut state = self.lock();
        let minimum = self.spec.limits.read().min_workers;
        state.note_ready(minimum);
        if self.autoscales() {
            state.growth.note_success();
            self.note_need();
            state.growth_failure = None;
        }
    }

    /// A worker answered a batch.
    pub(crate) fn answered(&self) {
        // Read first: the line is shared by all workers, and nearly always zero already.
        if self.losses.load(Ordering::Relaxed) > 0 {
            self.losses.store(0, Ordering::Relaxed);
        }
    }

    /// A worker did not come up. Takes its slot away if only the load asked for it, so that it is
    /// not tried again until the load does; the jobs that nobody else will take get the failure.
    /// Returns whether the slot is gone.
    pub(crate) fn leave_failed(&self, id: u32, failure: &StartFailure) -> bool {
        let (min, window) = {
            let limits = self.spec.limits.read();
            (limits.min_workers, limits.max_retry_timeout)
        };
        let mut state = self.lock();
        if !self.autoscales() || state.healthy() <= min {
            return false;
        }
        state.list.retain(|slot| slot.id != id);
        state.growth_failure = Some(failure.text.clone());
        let may_try = state
            .growth
            .note_failure(Instant::now(), window, failure.permanent);
        if state.healthy() == 0 {
            if !may_try {
                self.quarantine(&mut state, no_start(failure));
            }
            drop(state);
            self.spec.queue.fail_waiting(|_| ServingError::WorkerStart {
                model: self.spec.model.clone(),
                version: self.spec.version.clone(),
                cause: failure.clone(),
            });
        }
        true
    }

    /// A worker that had come up was lost. Too many in a row, with no batch answered in between,
    /// and the model is put into quarantine.
    pub(crate) fn note_loss(&self, host: &Host, failure: &StartFailure) {
        let limit = self.spec.limits.read().quarantine_after;
        let mut state = self.lock();
        let before = state.last_lost.replace(host.pid());
        if !host.is_alive() && before == Some(host.pid()) {
            return;
        }
        let losses = self.losses.fetch_add(1, Ordering::Relaxed) + 1;
        if losses >= limit && state.quarantine.is_none() {
            let reason = format!(
                "{losses} workers were lost in a row and no batch was answered in between. The \
                 last one: {}",
                failure.text
            );
            self.quarantine(&mut state, reason);
            drop(state);
            self.refuse_waiting(Refusal::Quarantined);
        }
    }

    /// A slot is not started again. If it was the last one, the model is put into quarantine, and
    /// what waits is answered.
    pub(crate) fn gave_up(&self, failure: &StartFailure) {
        let mut state = self.lock();
        if state.healthy() > 0 {
            return;
        }
        if state.quarantine.is_none() {
            self.quarantine(&mut state, no_start(failure));
        }
        drop(state);
        let out_of_memory = failure.out_of_memory;
        self.spec
            .queue
            .fail_waiting(|_| ServingError::WorkerDied { out_of_memory });
    }

    /// No worker of the model is started any more, until someone scales it.
    fn quarantine(&self, state: &mut State, reason: String) {
        tracing::error!(
            model = %self.spec.model,
            version = %self.spec.version,
            reason,
            "the model is in quarantine: no worker of it is started until it is scaled or \
             registered again"
        );
        state.quarantine = Some(reason);
        for slot in &state.list {
            slot.control.stop();
        }
        self.spec.queue.wake_all();
    }

    /// Gives the model another chance; the slots of the quarantine are taken out and returned.
    pub(crate) fn lift_quarantine(&self, state: &mut State) -> Vec<Slot> {
        if state.quarantine.take().is_some() {
            tracing::info!(
                model = %self.spec.model,
                version = %self.spec.version,
                "the quarantine is lifted"
            );
        }
        self.losses.store(0, Ordering::Relaxed);
        state.growth = Growth::default();
        state.growth_failure = None;
        let (healthy, ended) = std::mem::take(&mut state.list)
            .into_iter()
            .partition(Slot::is_healthy);
        state.list = healthy;
        ended
    }

    /// Whether the model is in quarantine.
    pub(crate) fn is_quarantined(&self) -> bool {
        self.lock().quarantine.is_some()
    }

    /// Answers everything that waits: there is no worker to run it.
    fn refuse_waiting(&self, reason: Refusal) {
        let refusal = |job: &Job| job.refusal(reason, Duration::ZERO);
        self.spec.queue.fail_waiting(refusal);
    }
}

fn no_start(failure: &StartFailure) -> String {
    format!("no worker can be started: {}", failure.text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slot in some phase; who publishes it stays alive with the sender.
    fn slot(id: u32, phase: Phase) -> (watch::Sender<SlotStatus>, Slot) {
        let (publish, status) = watch::channel(SlotStatus {
            phase,
            started: SystemTime::now(),
            pids: Vec::new(),
            threads: None,
            generation: 1,
            last_failure: None,
        });
        let control = Arc::new(SlotControl::new(ts_types::Isolation::Process));
        let slot = Slot {
            id,
            devices: Vec::new(),
            control,
            status,
        };
        (publish, slot)
    }

    fn state(standing: Standing, slots: &[Phase]) -> State {
        let mut state = State::new(standing);
        state.list = (0..)
            .zip(slots)
            .map(|(id, phase)| slot(id, *phase).1)
            .collect();
        state
    }

    #[test]
    fn who_came_with_the_start_counts_at_once_and_others_when_they_have_been_up() {
        use Phase::{Ready, Starting, Waiting};
        for (standing, slots, obstacle) in [
            (
                Standing::Expected,
                &[Starting, Starting][..],
                Some("loading"),
            ),
            (Standing::Expected, &[Ready, Starting], Some("loading")),
            (Standing::Expected, &[], Some("no worker")),
            (Standing::Expected, &[Ready, Ready], None),
            (Standing::Aside, &[Starting, Starting], None),
            (Standing::Aside, &[], None),
            (Standing::Loaded, &[Ready, Waiting], None),
            (Standing::Loaded, &[Waiting, Waiting], Some("no worker")),
        ] {
            let state = state(standing, slots);
            assert_eq!(state.obstacle(2), obstacle, "{standing:?} {slots:?}");
            let nobody_wanted = state.obstacle(0);
            assert_eq!(nobody_wanted, None, "{standing:?} {slots:?}");
        }
    }

    #[test]
    fn a_minimum_that_was_up_counts_from_then_on() {
        let (publish, second) = slot(2, Phase::Starting);
        let mut state = state(Standing::Aside, &[Phase::Ready]);
        state.list.push(second);
        state.note_ready(2);
        assert_eq!(state.standing, Standing::Aside);
        publish.send_modify(|status| status.phase = Phase::Ready);
        state.note_ready(2);
        assert_eq!(state.standing, Standing::Loaded);
    }

    #[test]
    fn a_quarantine_counts_unless_the_model_never_served_beside_others() {
        for (standing, obstacle) in [
            (Standing::Expected, Some("in quarantine")),
            (Standing::Loaded, Some("in quarantine")),
            (Standing::Aside, None),
        ] {
            let mut state = state(standing, &[]);
            state.quarantine = Some("it fails".to_owned());
            assert_eq!(state.obstacle(0), obstacle, "{standing:?}");
        }
    }
}
