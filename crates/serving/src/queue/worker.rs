//! The worker's side of a queue: finding what to run, waiting for company, cutting the batch.

use std::cell::Cell;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use ts_types::RequestKind;

use super::groups::{Head, Knife};
use super::{Hold, Queue, State};
use crate::batch::{Cut, View, Why};
use crate::job::{InSequence, Job};
use crate::resources::Permit;
use crate::sequence::{SequenceId, Sequences};

/// Name under which a handler finds the row of a request's sequence.
pub(super) const SEQUENCE_ROW: &str = "ts_request_sequence_row";

/// What a worker got.
pub(crate) enum Taken {
    Batch(Batch),
    /// Nothing came until the instant given.
    Idle,
    /// The queue is closed and empty, or the worker is to stop.
    Stopped,
}

/// Jobs to run together, at least one.
pub(crate) struct Batch {
    pub(crate) jobs: Vec<Job>,
    pub(crate) running: Running,
}

/// A batch under way, as the queue counts it; ends when dropped.
pub(crate) struct Running {
    queue: Arc<Queue>,
    jobs: usize,
    took: Cell<Option<Duration>>,
    sequences: Vec<InSequence>,
    /// Held for its drop.
    permit: Option<Arc<Permit>>,
}

impl Batch {
    /// Its jobs one by one, where each ends at a time of its own.
    pub(crate) fn singly(self) -> Vec<(Job, Running)> {
        let Self { jobs, mut running } = self;
        let queue = Arc::clone(&running.queue);
        // Each counts as a batch; the one that they were ends here, without jobs.
        queue.state.lock().running_batches += jobs.len();
        let permit = running.permit.take();
        running.jobs = 0;
        running.sequences.clear();
        drop(running);
        let single = |job: Job| {
            let single = Running {
                queue: Arc::clone(&queue),
                jobs: 1,
                took: Cell::new(None),
                sequences: job.demand.sequence.clone().into_iter().collect(),
                permit: permit.clone(),
            };
            (job, single)
        };
        jobs.into_iter().map(single).collect()
    }
}

impl Running {
    /// The batch has run, and took this long.
    pub(crate) fn took(&self, duration: Duration) {
        self.took.set(Some(duration));
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.queue.ended(self);
    }
}

/// Jobs that a worker could run together.
#[derive(Debug)]
struct Found {
    source: Source,
    kind: RequestKind,
    waiting: usize,
    oldest: Instant,
    level: usize,
}

#[derive(Debug)]
enum Source {
    Group(Head),
    /// The sequences whose next jobs are ready, oldest first.
    Sequences(Vec<SequenceId>),
}

impl Queue {
    /// Waits for a batch. Returns [`Taken::Stopped`] as soon as `stop` says so (call
    /// [`Queue::wake_all`] after changing what it reads), and when the queue is closed and empty;
    /// [`Taken::Idle`] when nothing has come until `idle_until`, which is asked before each wait.
    pub(crate) fn take(
        self: &Arc<Self>,
        worker: u32,
        stop: impl Fn() -> bool,
        idle_until: impl Fn() -> Option<Instant>,
    ) -> Taken {
        let idle_since = Instant::now();
        let mut seen_since = None;
        let mut permit = None;
        let mut state = self.state.lock();
        loop {
            if stop() {
                drop(state);
                // A wake-up that this worker has used may have been meant for another.
                self.arrival.notify_one();
                return Taken::Stopped;
            }
            let now = Instant::now();
            let Some(found) = self.find(&mut state, worker, now) else {
                (seen_since, permit) = (None, None);
                match self.idle(&mut state, worker, idle_until(), now) {
                    None => continue,
                    Some(end) => return end,
                }
            };
            let since = (idle_since, *seen_since.get_or_insert(now));
            match state.decide(&found, since, now) {
                // One worker at a time gathers. What it needs to run a batch is not kept meanwhile.
                Cut::Hold { .. } if state.hold.is_some() => {
                    permit = None;
                    state.idle += 1;
                    self.arrival.wait(&mut state);
                    state.idle -= 1;
                }
                Cut::Hold { until, wake_at } => {
                    permit = None;
                    let level = found.level;
                    state.hold = Some(Hold { wake_at, level });
                    self.company.wait_until(&mut state, until);
                    state.hold = None;
                    state.told.holds += 1;
                    state.told.held += now.elapsed();
                }
                // Before the batch is cut, so that it can still grow.
                Cut::Take(..) if permit.is_none() && !self.demands.is_empty() => {
                    permit = MutexGuard::unlocked(&mut state, || {
                        self.resources.acquire(&self.demands, &stop)
                    })
                    .map(Arc::new);
                }
                Cut::Take(count, why) => {
                    let found = match state.full_beside(&found, count) {
                        Some(other) => other,
                        None => found,
                    };
                    // Without a batch, the callers left while it was taken.
                    if let Some(batch) = self.take_now(&mut state, &found, worker, count, why) {
                        return Taken::Batch(self.with_permit(&mut state, batch, worker, permit));
                    }
                }
            }
        }
    }

    /// Waits for something to do, as long as there may be something. Returns why the worker got
    /// nothing, if it is to know.
    fn idle(
        &self,
        state: &mut MutexGuard<'_, State>,
        worker: u32,
        idle_until: Option<Instant>,
        now: Instant,
    ) -> Option<Taken> {
        if self.is_closed() && state.is_empty() {
            // Others may wait for the same.
            self.arrival.notify_all();
            self.company.notify_all();
            return Some(Taken::Stopped);
        }
        let sequences = state.sequences.as_ref();
        let kept_until = sequences.and_then(|all| all.kept_until(worker));
        // One that keeps the state of sequences is of use as long as they last.
        let idle_until = idle_until.map(|idle| kept_until.map_or(idle, |kept| idle.max(kept)));
        if idle_until.is_some_and(|until| until <= now) {
            return Some(Taken::Idle);
        }
        let expiry = sequences.and_then(Sequences::next_expiry);
        state.idle += 1;
        match [idle_until, expiry].into_iter().flatten().min() {
            Some(until) => drop(self.arrival.wait_until(state, until)),
            None => self.arrival.wait(state),
        }
        state.idle -= 1;
        let mut orphans = Vec::new();
        self.expire(state, Instant::now(), &mut orphans);
        if !orphans.is_empty() {
            MutexGuard::unlocked(state, || self.refuse_orphans(orphans));
        }
        None
    }

    /// Cuts a batch, and wakes whoever may take what it leaves.
    fn take_now(
        self: &Arc<Self>,
        state: &mut State,
        found: &Found,
        worker: u32,
        count: usize,
        why: Why,
    ) -> Option<Batch> {
        let batch = self.pull(state, found, worker, count, Instant::now());
        if batch.is_some() {
            state.told.cuts[why as usize] += 1;
        }
        if state.idle > 0 && !state.is_empty() {
            // Jobs that stay behind may be ready for another worker whose wake-up this one has
            // used; with sequences only a certain one may be able to run them.
            if state.sequences.is_some() {
                self.arrival.notify_all();
            } else {
                self.arrival.notify_one();
            }
        }
        batch
    }

    /// Gives a batch what it holds of the server's resources, for itself and for who joins it.
    fn with_permit(
        &self,
        state: &mut State,
        mut batch: Batch,
        worker: u32,
        permit: Option<Arc<Permit>>,
    ) -> Batch {
        if let Some(permit) = &permit {
            state.permits.insert(worker, Arc::downgrade(permit));
        }
        batch.running.permit = permit;
        batch
    }

    /// Takes what waits, at most `limit` jobs of a kind, without any wait: for a batch that is under
    /// way.
    pub(crate) fn try_take(
        self: &Arc<Self>,
        worker: u32,
        limit: usize,
        kind: RequestKind,
    ) -> Option<Batch> {
        if limit == 0 {
            return None;
        }
        let mut state = self.state.lock();
        let now = Instant::now();
        let found = self.find(&mut state, worker, now)?;
        if found.kind != kind {
            return None;
        }
        let mut batch = self.pull(&mut state, &found, worker, found.waiting.min(limit), now)?;
        let held = state.permits.get(&worker);
        batch.running.permit = held.and_then(Weak::upgrade);
        Some(batch)
    }

    /// What this worker would run next.
    fn find(&self, state: &mut State, worker: u32, now: Instant) -> Option<Found> {
        let levels = &state.rules.levels;
        state.groups.skip(levels, now, |job| self.forget(job));
        let head = state.groups.next();
        let ready = match &state.sequences {
            None => Vec::new(),
            Some(sequences) => sequences.ready(worker, state.rows),
        };
        // Requests of sequences have no levels: the older of the two goes first.
        if let Some((oldest, first)) = ready.first()
            && head.is_none_or(|head| *oldest <= head.arrived)
            && let Some(sequences) = &state.sequences
            && let Some(job) = sequences.head(first)
        {
            let (kind, oldest) = (job.request.kind, *oldest);
            let alike = |id: &SequenceId| {
                let head = sequences.head(id);
                head.is_some_and(|head| {
                    head.request.kind == kind && head.demand.group == job.demand.group
                })
            };
            let ids: Vec<SequenceId> = ready
                .iter()
                .map(|(_, id)| id)
                .filter(|id| alike(id))
                .cloned()
                .collect();
            return Some(Found {
                waiting: ids.len(),
                kind,
                oldest,
                level: 0,
                source: Source::Sequences(ids),
            });
        }
        head.map(Found::group)
    }

    /// Takes up to `count` jobs of what was found. `None` when none of them is left.
    fn pull(
        self: &Arc<Self>,
        state: &mut State,
        found: &Found,
        worker: u32,
        count: usize,
        now: Instant,
    ) -> Option<Batch> {
        let jobs = match &found.source {
            Source::Sequences(ids) => self.pull_sequences(state, ids, worker, count),
            Source::Group(head) => {
                let knife = Knife {
                    count,
                    now,
                    cost: state.samples.cost(),
                    nothing_runs: state.running_jobs == 0,
                    policies: &state.rules.levels,
                    claim: |job: &Job| self.claim(job),
                };
                let (jobs, late) = state.groups.cut(head.group, &knife);
                state.told.late += late;
                jobs
            }
        };
        if jobs.is_empty() {
            return None;
        }
        let in_sequences = jobs.iter().filter_map(|job| job.demand.sequence.clone());
        let running = Running {
            queue: Arc::clone(self),
            jobs: jobs.len(),
            took: Cell::new(None),
            sequences: in_sequences.collect(),
            permit: None,
        };
        *state.told.sizes.entry(jobs.len()).or_default() += 1;
        state.peaks.cut();
        state.running_batches += 1;
        state.running_jobs += jobs.len();
        Some(Batch { jobs, running })
    }

    fn pull_sequences(
        &self,
        state: &mut State,
        ids: &[SequenceId],
        worker: u32,
        count: usize,
    ) -> Vec<Job> {
        let Some(sequences) = &mut state.sequences else {
            return Vec::new();
        };
        let mut jobs = Vec::with_capacity(count);
        for id in ids {
            if jobs.len() == count {
                break;
            }
            let Some((mut job, seat)) = sequences.take(id, worker) else {
                continue;
            };
            if !self.claim(&job) {
                sequences.skipped(id);
                continue;
            }
            if let Some(seat) = seat {
                job.tell(SEQUENCE_ROW, seat.row.to_string());
            }
            jobs.push(job);
        }
        jobs
    }

    fn ended(&self, running: &Running) {
        let mut state = self.state.lock();
        state.running_batches -= 1;
        state.running_jobs -= running.jobs;
        let now = Instant::now();
        if let Some(took) = running.took.get() {
            state.samples.add(running.jobs, took, now);
        }
        let mut orphans = Vec::new();
        if let Some(sequences) = &mut state.sequences {
            for sequence in &running.sequences {
                orphans.append(&mut sequences.finished(&sequence.id, sequence.ends, now));
            }
        }
        let more = state.idle > 0 && (self.is_closed() || !running.sequences.is_empty());
        drop(state);
        self.refuse_orphans(orphans);
        if more {
            // What waited for these sequences may be another worker's, and the end of the last
            // batch of a closed queue is everybody's.
            self.arrival.notify_all();
        }
    }
}

impl Found {
    fn group(head: Head) -> Self {
        Self {
            waiting: head.jobs,
            kind: head.kind,
            oldest: head.arrived,
            level: head.level,
            source: Source::Group(head),
        }
    }
}

impl State {
    /// What is to be done about what was found, by a worker that is idle and sees it since then.
    fn decide(
        &self,
        found: &Found,
        (idle_since, seen_since): (Instant, Instant),
        now: Instant,
    ) -> Cut {
        let policy = &self.rules.batch;
        if found.kind == RequestKind::Describe {
            // Describing takes no company.
            return Cut::Take(1, Why::Full);
        }
        if found.waiting >= policy.size && policy.preferred.is_empty() {
            return Cut::Take(policy.size, Why::Full);
        }
        let view = View {
            waiting: found.waiting,
            oldest: found.oldest,
            tightest: match &found.source {
                Source::Group(head) => self.groups.tightest(head.group),
                Source::Sequences(_) => None,
            },
            target: self.peaks.target(self.running_jobs),
            idle_since,
            seen_since,
            fit: self.samples.fit(),
            now,
        };
        match policy.cut(&view) {
            // A full batch of another group does not wait for this one's company.
            Cut::Hold { .. } if self.groups.full(policy.size).is_some() => {
                Cut::Take(policy.size, Why::Full)
            }
            cut => cut,
        }
    }

    /// Where a full batch is to be cut and what was found does not fill it: what does.
    fn full_beside(&self, found: &Found, count: usize) -> Option<Found> {
        if found.waiting >= count {
            return None;
        }
        self.groups.full(count).map(Found::group)
    }
}
