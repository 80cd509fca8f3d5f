//! The worker's side of a queue: finding what to run, waiting for company, cutting the batch.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, MutexGuard};
use ts_types::RequestKind;

use super::groups::{Head, Knife};
use super::{Hold, Queue, State, fail_orphans};
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
    sequences: Vec<InSequence>,
    /// Held for its drop.
    permit: Option<Arc<Permit>>,
}

impl Batch {
    /// Its jobs one by one, where each ends at a time of its own.
    pub(crate) fn singly(self) -> impl Iterator<Item = (Job, Running)> {
        let Self { jobs, mut running } = self;
        let queue = Arc::clone(&running.queue);
        // Each counts as a batch; the one that they were ends here, without jobs.
        queue.state.lock().running_batches += jobs.len();
        let permit = running.permit.take();
        running.jobs = 0;
        running.sequences.clear();
        drop(running);
        jobs.into_iter().map(move |job| {
            let single = Running {
                queue: Arc::clone(&queue),
                jobs: 1,
                sequences: job.demand.sequence.clone().into_iter().collect(),
                permit: permit.clone(),
            };
            (job, single)
        })
    }
}

impl Running {
    /// The batch has run, and took this long.
    pub(crate) fn took(&self, duration: Duration) {
        self.queue.note(self.jobs, duration);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.queue.ended(self.jobs, &self.sequences);
    }
}

/// Jobs that a worker could run together.
struct Found {
    source: Source,
    waiting: usize,
    oldest: Instant,
    level: usize,
}

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
                if state.closed && state.is_empty() {
                    return Taken::Stopped;
                }
                let idle_until = idle_until();
                if idle_until.is_some_and(|until| until <= now) {
                    return Taken::Idle;
                }
                seen_since = None;
                permit = None;
                let expiry = state.sequences.as_ref().and_then(Sequences::next_expiry);
                let until = [idle_until, expiry].into_iter().flatten().min();
                state.idle += 1;
                self.wait(&self.arrival, &mut state, until);
                state.idle -= 1;
                if expiry.is_some()
                    && let Some(sequences) = &mut state.sequences
                {
                    let orphans = sequences.expire(Instant::now(), |job| self.forget(job));
                    fail_orphans(orphans);
                }
                continue;
            };
            let view = View {
                waiting: found.waiting,
                oldest: found.oldest,
                tightest: state.tightest(&found),
                target: state.peaks.target(state.running_jobs),
                idle_since,
                seen_since: *seen_since.get_or_insert(now),
                fit: state.samples.fit(),
                now,
            };
            match state.cut(&found, &view) {
                // One worker at a time gathers.
                Cut::Hold { .. } if state.hold.is_some() => {
                    state.idle += 1;
                    self.wait(&self.arrival, &mut state, None);
                    state.idle -= 1;
                }
                Cut::Hold { until, wake_at } => {
                    let level = found.level;
                    state.hold = Some(Hold { wake_at, level });
                    self.wait(&self.company, &mut state, Some(until));
                    state.hold = None;
                    state.told.holds += 1;
                    state.told.held += now.elapsed();
                }
                // Before the batch is cut, so that it can still grow.
                Cut::Take(..) if permit.is_none() && !self.demands.is_empty() => {
                    permit = MutexGuard::unlocked(&mut state, || {
                        self.resources.acquire(&self.demands, &stop)
                    });
                }
                Cut::Take(count, why) => {
                    let batch = self.pull(&mut state, &found, worker, count, now);
                    let more = !state.is_empty();
                    if let Some(batch) = &batch {
                        state.told.cuts[why as usize] += 1;
                        *state.told.sizes.entry(batch.jobs.len()).or_default() += 1;
                        state.peaks.cut();
                    }
                    if more && state.idle > 0 {
                        // Jobs that stay behind may be ready for another worker whose wake-up
                        // this one has used.
                        self.arrival.notify_one();
                    }
                    // Without a batch, the callers left while it was taken.
                    if let Some(mut batch) = batch {
                        batch.running.permit = permit.map(Arc::new);
                        return Taken::Batch(batch);
                    }
                }
            }
        }
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
        if matches!(&found.source, Source::Group(head) if head.kind != kind) {
            return None;
        }
        let batch = self.pull(&mut state, &found, worker, found.waiting.min(limit), now)?;
        *state.told.sizes.entry(batch.jobs.len()).or_default() += 1;
        state.peaks.cut();
        Some(batch)
    }

    fn wait(&self, condition: &Condvar, state: &mut MutexGuard<'_, State>, until: Option<Instant>) {
        match until {
            Some(until) => drop(condition.wait_until(state, until)),
            None => condition.wait(state),
        }
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
        if let Some((oldest, _)) = ready.first()
            && head.is_none_or(|head| *oldest <= head.arrived)
        {
            return Some(Found {
                waiting: ready.len(),
                oldest: *oldest,
                level: 0,
                source: Source::Sequences(ready.into_iter().map(|(_, id)| id).collect()),
            });
        }
        head.map(|head| Found {
            waiting: head.jobs,
            oldest: head.arrived,
            level: head.level,
            source: Source::Group(head),
        })
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
                    fit: state.samples.fit(),
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
            sequences: in_sequences.collect(),
            permit: None,
        };
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

    fn ended(&self, jobs: usize, ended: &[InSequence]) {
        let mut state = self.state.lock();
        state.running_batches -= 1;
        state.running_jobs -= jobs;
        let now = Instant::now();
        let mut orphans = Vec::new();
        if let Some(sequences) = &mut state.sequences {
            for sequence in ended {
                orphans.append(&mut sequences.finished(&sequence.id, sequence.ends, now));
            }
        }
        let more = state.idle > 0 && (state.closed || !ended.is_empty());
        drop(state);
        fail_orphans(orphans);
        if more {
            // What waited for these sequences may be another worker's, and the end of the last
            // batch of a closed queue is everybody's.
            self.arrival.notify_all();
        }
    }
}

impl State {
    /// What the policy decides about what was found.
    fn cut(&self, found: &Found, view: &View) -> Cut {
        match &found.source {
            // Describing takes no company.
            Source::Group(head) if head.kind == RequestKind::Describe => Cut::Take(1, Why::Full),
            _ => self.rules.batch.cut(view),
        }
    }

    /// The earliest deadline among the jobs found.
    fn tightest(&self, found: &Found) -> Option<Instant> {
        match &found.source {
            Source::Group(head) => self.groups.tightest(head.group),
            Source::Sequences(_) => None,
        }
    }
}
