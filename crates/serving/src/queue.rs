//! The requests that wait for a worker of one model version.
//!
//! There is no batcher thread: an idle worker cuts its own batch at the moment it can run it, and
//! one arrival wakes one idle worker. While one of them holds for company (`batch.rs`), arrivals
//! wake that one, and only when enough have come.
//!
//! Requests of different kinds, or of different groups that the model names, never share a batch.
//! The batch is cut from the group whose most urgent and then oldest request comes first, so a
//! request that fits no other never holds up the rest. Requests of sequences wait in
//! `sequence.rs` instead.
//!
//! Here is the callers' side; `queue/worker.rs` has the workers', `queue/groups.rs` the jobs.

mod groups;
mod worker;

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use ts_types::{LevelPolicy, ResourceDemand, SequencePolicy};

use crate::Batching;
use crate::batch::{BatchPolicy, Peaks, Why};
use crate::error::{Refusal, ServingError};
use crate::fit::{BatchCost, Samples};
use crate::job::{Job, Place};
use crate::queue::groups::Groups;
pub(crate) use crate::queue::worker::{Batch, Running, Taken};
use crate::resources::{Permit, Resources};
use crate::sequence::{SequenceRefusal, Sequences};

/// Why a job was not taken; it comes back with the reason.
#[derive(Debug)]
pub(crate) enum NotQueued {
    /// As the reason says. The second value is after how long another try may succeed.
    Refused(Box<Job>, Refusal, Duration),
    /// It takes no more jobs.
    Closed(Box<Job>),
}

/// What holds for a queue.
#[derive(Debug, Clone)]
pub(crate) struct QueueRules {
    pub(crate) batch: BatchPolicy,
    /// Jobs that may wait at once.
    pub(crate) capacity: usize,
    /// At least one.
    pub(crate) levels: Vec<LevelPolicy>,
    /// A job is only taken while a worker is idle.
    pub(crate) job_ticket: bool,
    /// Jobs that would be answered later than this are refused.
    pub(crate) latency_goal: Option<Duration>,
    pub(crate) sequences: Option<SequencePolicy>,
    /// What each batch needs while it runs.
    pub(crate) resources: Vec<ResourceDemand>,
}

/// Requests that wait for a worker.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    /// An idle worker may find something.
    arrival: Condvar,
    /// The worker that holds may have what it waits for.
    company: Condvar,
    /// Jobs still in the queue whose callers have left. Negative for a moment when a worker meets
    /// one before its caller has counted it.
    left: AtomicI64,
    /// Set under the lock, read with or without it.
    closed: AtomicBool,
    resources: Arc<Resources>,
    /// What each batch needs of them while it runs.
    demands: Vec<ResourceDemand>,
}

#[derive(Debug)]
struct State {
    rules: QueueRules,
    groups: Groups,
    sequences: Option<Sequences<Job>>,
    /// What the batch of a worker holds, for those that join it.
    permits: HashMap<u32, Weak<Permit>>,
    /// Sequences that one worker can keep.
    rows: usize,
    /// Workers that wait for a job.
    idle: usize,
    /// What the worker that holds for company waits for.
    hold: Option<Hold>,
    /// Batches and their jobs that run.
    running_batches: usize,
    running_jobs: usize,
    peaks: Peaks,
    samples: Samples,
    told: Told,
}

#[derive(Debug, Clone, Copy)]
struct Hold {
    wake_at: usize,
    level: usize,
}

/// What the queue tells of itself.
#[derive(Debug, Default)]
struct Told {
    cuts: [u64; Why::ALL.len()],
    sizes: BTreeMap<usize, u64>,
    holds: u64,
    held: Duration,
    late: u64,
}

impl Queue {
    pub(crate) fn new(rules: QueueRules, resources: Arc<Resources>) -> Self {
        Self {
            resources,
            demands: rules.resources.clone(),
            state: Mutex::new(State {
                groups: Groups::default(),
                sequences: rules.sequences.map(Sequences::new),
                permits: HashMap::new(),
                rows: usize::MAX,
                idle: 0,
                hold: None,
                running_batches: 0,
                running_jobs: 0,
                peaks: Peaks::default(),
                samples: Samples::default(),
                told: Told::default(),
                rules,
            }),
            arrival: Condvar::new(),
            company: Condvar::new(),
            left: AtomicI64::new(0),
            closed: AtomicBool::new(false),
        }
    }

    /// Adds a job at the end of its level.
    ///
    /// # Errors
    /// [`NotQueued`] gives the job back when the queue is full or closed, and when the job could
    /// not be answered in time.
    pub(crate) fn push(&self, job: Job, now: Instant) -> Result<(), NotQueued> {
        let mut orphans = Vec::new();
        let pushed = {
            let mut state = self.state.lock();
            self.push_locked(&mut state, job, now, &mut orphans)
        };
        self.refuse_orphans(orphans);
        let wake = match &pushed {
            Ok(wake) => *wake,
            // Sequences that have ended have made room.
            Err(_) => Wake::All,
        };
        match wake {
            Wake::Nobody => {}
            Wake::Holder => drop(self.company.notify_one()),
            Wake::Idle => drop(self.arrival.notify_one()),
            Wake::All => {
                self.company.notify_one();
                self.arrival.notify_all();
            }
        }
        pushed.map(drop)
    }

    fn push_locked(
        &self,
        state: &mut State,
        job: Job,
        now: Instant,
        orphans: &mut Vec<Job>,
    ) -> Result<Wake, NotQueued> {
        if self.is_closed() {
            return Err(NotQueued::Closed(Box::new(job)));
        }
        self.expire(state, now, orphans);
        if state.groups.jobs() >= state.rules.capacity.saturating_mul(2) {
            // Jobs whose callers have left hold no place, but memory.
            state.groups.purge(|job| self.forget(job));
        }
        if let Some((refusal, after)) = self.refusal(state, &job, now) {
            return Err(NotQueued::Refused(Box::new(job), refusal, after));
        }
        let level = job.demand.level;
        let urgent = job.demand.deadline.is_some();
        state.add(job, now);
        let in_system = self.waiting(state) + state.running_jobs;
        state.peaks.arrival(in_system);
        Ok(match state.hold {
            // Only a certain worker may be able to run it.
            _ if state.sequences.is_some() => Wake::All,
            Some(hold) if urgent || level < hold.level || self.waiting(state) >= hold.wake_at => {
                Wake::Holder
            }
            // A job of another group is nothing to the one that holds.
            Some(_) if state.groups.len() < 2 => Wake::Nobody,
            _ if state.idle == 0 => Wake::Nobody,
            _ => Wake::Idle,
        })
    }

    /// Ends the sequences whose time is over, and gives their jobs out.
    fn expire(&self, state: &mut State, now: Instant, orphans: &mut Vec<Job>) {
        if let Some(sequences) = &mut state.sequences {
            orphans.append(&mut sequences.expire(now, |job| self.forget(job)));
        }
    }

    /// Why a job cannot be taken now, and when to come again.
    fn refusal(&self, state: &State, job: &Job, now: Instant) -> Option<(Refusal, Duration)> {
        let waiting = self.waiting(state);
        let soon = Duration::from_secs(1);
        if waiting >= state.rules.capacity {
            let after = state.predicted_wait(waiting).unwrap_or(soon);
            return Some((Refusal::QueueFull, after));
        }
        if state.rules.job_ticket && waiting >= state.idle {
            return Some((Refusal::NoIdleWorker, soon));
        }
        let level = job.demand.level;
        let limit = state
            .rules
            .levels
            .get(level)
            .and_then(|level| level.capacity);
        if limit.is_some_and(|limit| state.groups.waiting_at(level) >= limit) {
            return Some((Refusal::QueueFull, soon));
        }
        if let (Some(sequences), Some(sequence)) = (&state.sequences, &job.demand.sequence)
            && let Err(refused) = sequences.admits(&sequence.id, sequence.starts)
        {
            return Some(match refused {
                SequenceRefusal::TooMany => (Refusal::TooManySequences, soon),
                SequenceRefusal::QueueFull => (Refusal::SequenceQueueFull, soon),
                SequenceRefusal::Unknown => (Refusal::SequenceOver, Duration::ZERO),
            });
        }
        let goal = state.rules.latency_goal;
        let due = goal.and_then(|goal| job.arrived.checked_add(goal));
        let due = [due, job.demand.deadline].into_iter().flatten().min()?;
        let ahead = state.groups.ahead(level);
        if ahead == 0 && state.running_jobs == 0 {
            // Nothing is known to be in its way, and only a batch that runs can tell that batches
            // have become faster.
            return None;
        }
        let wait = state.predicted_wait(ahead)?;
        let size = state.rules.batch.size;
        let run = state.samples.cost()?.duration(ahead % size + 1);
        let late = now.checked_add(wait + run).is_none_or(|end| end > due);
        late.then_some((Refusal::TooLate, wait))
    }

    /// Puts jobs that were cut but never handed over back at the head, in their order.
    pub(crate) fn put_back(&self, jobs: Vec<Job>) {
        let mut state = self.state.lock();
        let now = Instant::now();
        for job in jobs.into_iter().rev() {
            if job.is_abandoned() {
                continue;
            }
            job.enter_queue();
            state.put_back(job, now);
        }
        drop(state);
        self.arrival.notify_all();
    }

    /// Whether the caller of a waiting job has left; counts it out if so.
    fn forget(&self, job: &Job) -> bool {
        job.is_abandoned() && !self.claim(job)
    }

    /// Takes a waiting job out of the queue for good. Not if its caller has left.
    fn claim(&self, job: &Job) -> bool {
        if job.leave_queue() {
            return !job.is_abandoned();
        }
        // The caller counted itself as left.
        self.left.fetch_sub(1, Ordering::Relaxed);
        false
    }

    /// Notes how long a batch of `jobs` took.
    pub(crate) fn note(&self, jobs: usize, duration: Duration) {
        let now = Instant::now();
        self.state.lock().samples.add(jobs, duration, now);
    }

    /// Whether it is known what a batch costs.
    pub(crate) fn knows_cost(&self) -> bool {
        let state = self.state.lock();
        state.samples.fit().is_some() || (state.rules.batch.size == 1 && state.samples.count() > 0)
    }

    /// How long a batch of `jobs` will take, where that is known.
    pub(crate) fn expected(&self, jobs: usize) -> Option<Duration> {
        let cost = self.state.lock().samples.cost()?;
        Some(cost.duration(jobs))
    }

    /// The handler has ended these sequences.
    pub(crate) fn end_sequences<'i>(&self, ids: impl Iterator<Item = &'i str>) {
        let mut orphans = Vec::new();
        if let Some(sequences) = &mut self.state.lock().sequences {
            for id in ids {
                orphans.append(&mut sequences.end(id));
            }
        }
        self.refuse_orphans(orphans);
        self.arrival.notify_all();
    }

    /// Answers jobs whose sequence has ended before they ran.
    fn refuse_orphans(&self, jobs: Vec<Job>) {
        for job in jobs.into_iter().filter(|job| self.claim(job)) {
            let error = job.refusal(Refusal::SequenceOver, Duration::ZERO);
            job.fail(error);
        }
    }

    /// A worker has ended, and with it the state of the sequences that it kept.
    pub(crate) fn worker_lost(&self, worker: u32) {
        let lost = {
            let mut state = self.state.lock();
            state.permits.remove(&worker);
            let sequences = state.sequences.as_mut();
            sequences.map_or_else(Vec::new, |all| all.worker_lost(worker))
        };
        for job in lost.into_iter().filter(|job| self.claim(job)) {
            job.fail(ServingError::WorkerDied {
                out_of_memory: false,
            });
        }
        self.arrival.notify_all();
    }

    /// Tells over how many workers the sequences are spread.
    pub(crate) fn spread_over(&self, workers: usize) {
        let mut state = self.state.lock();
        if let Some(policy) = state.rules.sequences {
            state.rows = policy.max_sequences.div_ceil(workers.max(1));
        }
    }

    /// Other numbers from the next batch and the next job on. Jobs that wait keep their places, even
    /// where there would be fewer now.
    pub(crate) fn change_limits(&self, size: usize, delay: Duration, capacity: usize) {
        let mut state = self.state.lock();
        state.rules.batch.size = size;
        state.rules.batch.delay = delay;
        state.rules.capacity = capacity;
        drop(state);
        // One that holds may have enough, or have waited for long enough.
        self.arrival.notify_all();
        self.company.notify_all();
    }

    /// The caller of a job gives it up; tells whether it had still been waiting.
    pub(crate) fn leave(&self, place: &Place) -> bool {
        let waited = place.leave();
        if waited {
            self.left.fetch_add(1, Ordering::Relaxed);
        }
        waited
    }

    /// Makes every waiting worker look at its stop condition again.
    pub(crate) fn wake_all(&self) {
        // The lock orders this after the check of a worker that is about to wait.
        drop(self.state.lock());
        self.arrival.notify_all();
        self.company.notify_all();
        self.resources.wake_all();
    }

    /// Takes no more jobs; those that wait are still handed out.
    pub(crate) fn close(&self) {
        {
            let _decided_under_it = self.state.lock();
            self.closed.store(true, Ordering::SeqCst);
        }
        self.arrival.notify_all();
        self.company.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Answers everything that waits with an error.
    pub(crate) fn fail_waiting(&self, error: impl Fn(&Job) -> ServingError) {
        for job in self.drain() {
            let error = error(&job);
            job.fail(error);
        }
    }

    fn drain(&self) -> Vec<Job> {
        let mut state = self.state.lock();
        let jobs = state.groups.drain();
        let sequenced = state.sequences.as_mut().map(Sequences::drain);
        jobs.chain(sequenced.into_iter().flatten())
            .filter(|job| self.claim(job))
            .collect()
    }

    /// Jobs that wait for a worker and have a caller.
    fn waiting(&self, state: &State) -> usize {
        let sequenced = state.sequences.as_ref().map_or(0, Sequences::jobs);
        let left = self.left.load(Ordering::Relaxed).max(0);
        (state.groups.jobs() + sequenced).saturating_sub(usize::try_from(left).unwrap_or(0))
    }

    /// Jobs that wait, and places left for more.
    pub(crate) fn occupancy(&self) -> (usize, usize) {
        let state = self.state.lock();
        let waiting = self.waiting(&state);
        (waiting, state.rules.capacity.saturating_sub(waiting))
    }

    /// What it does, and why.
    pub(crate) fn explain(&self) -> Batching {
        let state = self.state.lock();
        let cuts = Why::ALL.iter().zip(state.told.cuts);
        Batching {
            batch_size: state.rules.batch.size,
            max_delay: state.rules.batch.delay,
            gather: state.rules.batch.gather,
            preferred_sizes: state.rules.batch.preferred.clone(),
            cost: state.known_cost(),
            samples: state.samples.count(),
            target: state.peaks.target(state.running_jobs),
            cuts: cuts.map(|(why, count)| (why.as_str(), count)).collect(),
            sizes: state.told.sizes.clone(),
            holds: state.told.holds,
            held: state.told.held,
            late: state.told.late,
            waiting: self.waiting(&state),
            running_batches: state.running_batches,
            running_jobs: state.running_jobs,
            idle_workers: state.idle,
            predicted_wait: state.predicted_wait(self.waiting(&state)),
            sequences: state.sequences.as_ref().map(Sequences::counts),
        }
    }
}

/// Whom an arrival wakes.
#[derive(Debug, Clone, Copy)]
enum Wake {
    Nobody,
    Holder,
    Idle,
    All,
}

impl State {
    fn is_empty(&self) -> bool {
        self.groups.jobs() == 0 && self.sequences.as_ref().is_none_or(|all| all.jobs() == 0)
    }

    fn add(&mut self, job: Job, now: Instant) {
        if let (Some(sequences), Some(sequence)) = (&mut self.sequences, &job.demand.sequence) {
            let id = Arc::clone(&sequence.id);
            let starts = sequence.starts;
            return sequences.push(&id, starts, (job.arrived, job), now);
        }
        self.groups.add(job, self.rules.levels.len());
    }

    fn put_back(&mut self, job: Job, now: Instant) {
        if let (Some(sequences), Some(sequence)) = (&mut self.sequences, &job.demand.sequence) {
            let id = Arc::clone(&sequence.id);
            return sequences.put_back(&id, job.arrived, job, now);
        }
        self.groups.put_back(job, self.rules.levels.len());
    }

    /// What a batch costs, as far as that can be told of its size.
    fn known_cost(&self) -> Option<BatchCost> {
        let single = self.rules.batch.size == 1;
        self.samples
            .fit()
            .or_else(|| self.samples.cost().filter(|_| single))
    }

    /// How long a job waits that has this many before it; `None` where costs are not known.
    fn predicted_wait(&self, ahead: usize) -> Option<Duration> {
        let fit = self.samples.cost()?;
        let workers = self.idle + self.running_batches;
        if workers == 0 {
            return None;
        }
        let size = self.rules.batch.size;
        if self.idle > 0 && ahead < self.idle.saturating_mul(size) {
            return Some(Duration::ZERO);
        }
        // A batch that runs is half done on average.
        let running = fit.duration(self.running_jobs.div_ceil(self.running_batches.max(1)));
        let running = running.mul_f64(self.running_batches as f64 / 2.0);
        let before = fit.duration(size).mul_f64((ahead / size) as f64);
        Some((running + before).div_f64(workers as f64))
    }
}

#[cfg(test)]
mod tests;
