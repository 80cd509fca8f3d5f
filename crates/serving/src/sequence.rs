//! Requests that belong together (*torchserve-contract* 9.4, *batching-and-scheduling* 5). Pure.
//!
//! Of one sequence at most one request runs at a time (but with continuous batching), in the order
//! of arrival, and a batch holds different sequences. With [`SequenceStrategy::Direct`] a sequence has a fixed row of a fixed
//! worker, so that its state may lie there; with [`SequenceStrategy::Oldest`] any worker takes it.
//! A sequence ends when a request says so, when it was idle for too long, and when its time is over.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use ts_types::{SequencePolicy, SequenceStrategy};

/// A sequence's name, from the client or made by the server.
pub(crate) type SequenceId = Arc<str>;

/// Why a request was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SequenceRefusal {
    /// As many sequences as there may be.
    TooMany,
    /// As many requests of this sequence wait as may.
    QueueFull,
    /// There is no such sequence, and the request does not begin one.
    Unknown,
}

/// The sequences of a model version, with their waiting jobs.
#[derive(Debug)]
pub(crate) struct Sequences<J> {
    policy: SequencePolicy,
    by_id: HashMap<SequenceId, Sequence<J>>,
    /// Those that wait for one of the others to end, in order of arrival.
    waiting: VecDeque<SequenceId>,
    /// Rows in use, by worker. Only with the direct strategy.
    rows: HashMap<u32, BTreeSet<usize>>,
    jobs: usize,
}

#[derive(Debug)]
struct Sequence<J> {
    jobs: VecDeque<(Instant, J)>,
    started: Instant,
    last_used: Instant,
    running: usize,
    /// Its time is over, but a request of it still runs.
    over: bool,
    active: bool,
    seat: Option<Seat>,
}

/// Where a sequence's state lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seat {
    /// The worker.
    pub(crate) worker: u32,
    /// The row of its batches.
    pub(crate) row: usize,
}

impl<J> Sequences<J> {
    pub(crate) fn new(policy: SequencePolicy) -> Self {
        Self {
            policy,
            by_id: HashMap::new(),
            waiting: VecDeque::new(),
            rows: HashMap::new(),
            jobs: 0,
        }
    }

    /// Jobs that wait.
    pub(crate) fn jobs(&self) -> usize {
        self.jobs
    }

    /// Sequences that are under way, and those that wait for one to end.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.by_id.len() - self.waiting.len(), self.waiting.len())
    }

    /// Whether a job of this sequence would be taken now.
    ///
    /// # Errors
    /// Why it would not.
    pub(crate) fn admits(&self, id: &str, starts: bool) -> Result<(), SequenceRefusal> {
        match self.by_id.get(id) {
            None if self.policy.continuous && !starts => Err(SequenceRefusal::Unknown),
            Some(known) if known.jobs.len() >= self.policy.max_queued => {
                Err(SequenceRefusal::QueueFull)
            }
            Some(_) => Ok(()),
            None if self.has_room() || self.waiting.len() < self.policy.max_waiting_sequences => {
                Ok(())
            }
            None => Err(SequenceRefusal::TooMany),
        }
    }

    /// Adds a job that [`Sequences::admits`] has let in.
    /// One that begins a sequence anew gives it its whole time again.
    pub(crate) fn push(
        &mut self,
        id: &SequenceId,
        starts: bool,
        (arrived, job): (Instant, J),
        now: Instant,
    ) {
        let active = self.has_room();
        let sequence = self.by_id.entry(Arc::clone(id)).or_insert_with(|| {
            if !active {
                self.waiting.push_back(Arc::clone(id));
            }
            Sequence {
                jobs: VecDeque::new(),
                started: now,
                last_used: now,
                running: 0,
                over: false,
                active,
                seat: None,
            }
        });
        if starts {
            sequence.started = now;
        }
        sequence.jobs.push_back((arrived, job));
        self.jobs += 1;
    }

    /// Puts a job that never ran back at the head of its sequence.
    pub(crate) fn put_back(&mut self, id: &SequenceId, arrived: Instant, job: J, now: Instant) {
        if !self.by_id.contains_key(id) {
            self.push(id, false, (arrived, job), now);
        } else if let Some(sequence) = self.by_id.get_mut(id) {
            sequence.jobs.push_front((arrived, job));
            self.jobs += 1;
        }
    }

    fn has_room(&self) -> bool {
        self.by_id.len() - self.waiting.len() < self.policy.max_sequences
    }

    /// The sequences whose next job this worker may run now, the longest waiting first.
    /// `rows` is how many sequences a worker can keep.
    pub(crate) fn ready(&self, worker: u32, rows: usize) -> Vec<(Instant, SequenceId)> {
        let free_row = self.rows.get(&worker).is_none_or(|used| used.len() < rows);
        let mut ready: Vec<_> = self
            .by_id
            .iter()
            .filter(|(_, sequence)| sequence.active && !sequence.over)
            .filter(|(_, sequence)| sequence.running == 0 || self.policy.continuous)
            .filter(
                |(_, sequence)| match (self.policy.strategy, sequence.seat) {
                    (SequenceStrategy::Oldest, _) => true,
                    (SequenceStrategy::Direct, Some(seat)) => seat.worker == worker,
                    (SequenceStrategy::Direct, None) => free_row,
                },
            )
            .filter_map(|(id, sequence)| Some((sequence.jobs.front()?.0, Arc::clone(id))))
            .collect();
        ready.sort_unstable();
        if self.policy.strategy == SequenceStrategy::Direct {
            // New ones only as far as there are rows for them.
            let mut left = rows.saturating_sub(self.rows.get(&worker).map_or(0, BTreeSet::len));
            ready.retain(|(_, id)| {
                let seated = self.by_id.get(id).is_some_and(|known| known.seat.is_some());
                let kept = seated || left > 0;
                if !seated {
                    left = left.saturating_sub(1);
                }
                kept
            });
        }
        ready
    }

    /// Takes the next job of a sequence that is ready for this worker.
    pub(crate) fn take(&mut self, id: &SequenceId, worker: u32) -> Option<(J, Option<Seat>)> {
        let sequence = self.by_id.get_mut(id)?;
        let (_, job) = sequence.jobs.pop_front()?;
        self.jobs -= 1;
        sequence.running += 1;
        if self.policy.strategy == SequenceStrategy::Direct && sequence.seat.is_none() {
            let used = self.rows.entry(worker).or_default();
            let row = (0..).find(|row| !used.contains(row)).unwrap_or_default();
            used.insert(row);
            sequence.seat = Some(Seat { worker, row });
        }
        Some((job, sequence.seat))
    }

    /// A job was dropped unrun from the head of a sequence: the next one may run.
    pub(crate) fn skipped(&mut self, id: &SequenceId) {
        if let Some(sequence) = self.by_id.get_mut(id) {
            sequence.running -= 1;
        }
    }

    /// A job of the sequence has been answered. Returns the jobs that its end leaves without one.
    pub(crate) fn finished(&mut self, id: &SequenceId, ended: bool, now: Instant) -> Vec<J> {
        let Some(sequence) = self.by_id.get_mut(id) else {
            return Vec::new();
        };
        sequence.running = sequence.running.saturating_sub(1);
        sequence.last_used = now;
        // Requests that came after the last one begin the sequence anew.
        sequence.over |= ended && sequence.jobs.is_empty();
        if sequence.over && sequence.running == 0 {
            return self.remove(id);
        }
        Vec::new()
    }

    /// The handler has ended a sequence. Returns the jobs that are left without it.
    pub(crate) fn end(&mut self, id: &str) -> Vec<J> {
        let Some((id, sequence)) = self.by_id.get_key_value(id) else {
            return Vec::new();
        };
        let (id, running) = (Arc::clone(id), sequence.running > 0);
        if running {
            // With its last request.
            if let Some(sequence) = self.by_id.get_mut(&id) {
                sequence.over = true;
            }
            return Vec::new();
        }
        self.remove(&id)
    }

    /// Ends what has been idle for too long or goes on for too long, and drops the jobs for which
    /// `is_left` holds. Returns the jobs that are left without a sequence.
    pub(crate) fn expire(&mut self, now: Instant, is_left: impl Fn(&J) -> bool) -> Vec<J> {
        let mut dropped = 0;
        let mut over = Vec::new();
        let past = |start: Instant, limit| now.saturating_duration_since(start) >= limit;
        for (id, sequence) in &mut self.by_id {
            let before = sequence.jobs.len();
            sequence.jobs.retain(|(_, job)| !is_left(job));
            dropped += before - sequence.jobs.len();
            let unused = sequence.jobs.is_empty() && sequence.running == 0;
            let idle =
                unused && (!sequence.active || past(sequence.last_used, self.policy.max_idle));
            let timeout = self.policy.timeout;
            if idle || timeout.is_some_and(|limit| past(sequence.started, limit)) {
                sequence.over = true;
                if sequence.running == 0 {
                    over.push(Arc::clone(id));
                }
            }
        }
        self.jobs -= dropped;
        over.iter().flat_map(|id| self.remove(id)).collect()
    }

    /// When the next sequence that is idle ends, if others wait for that.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        if self.waiting.is_empty() {
            return None;
        }
        let idle = self.by_id.values();
        let idle = idle.filter(|sequence| sequence.active && sequence.running == 0);
        idle.filter(|sequence| sequence.jobs.is_empty())
            .filter_map(|sequence| sequence.last_used.checked_add(self.policy.max_idle))
            .min()
    }

    /// A worker is gone, and with it the state of the sequences that had their row in it. Returns
    /// their jobs.
    pub(crate) fn worker_lost(&mut self, worker: u32) -> Vec<J> {
        let lost: Vec<SequenceId> = self
            .by_id
            .iter()
            .filter(|(_, known)| known.seat.is_some_and(|seat| seat.worker == worker))
            .map(|(id, _)| Arc::clone(id))
            .collect();
        let jobs = lost.iter().flat_map(|id| self.remove(id)).collect();
        self.rows.remove(&worker);
        jobs
    }

    /// Takes all jobs out.
    pub(crate) fn drain(&mut self) -> Vec<J> {
        let ids: Vec<SequenceId> = self.by_id.keys().cloned().collect();
        self.waiting.clear();
        ids.iter().flat_map(|id| self.remove(id)).collect()
    }

    fn remove(&mut self, id: &SequenceId) -> Vec<J> {
        let Some(sequence) = self.by_id.remove(id) else {
            return Vec::new();
        };
        if let Some(seat) = sequence.seat
            && let Some(used) = self.rows.get_mut(&seat.worker)
        {
            used.remove(&seat.row);
        }
        if !sequence.active {
            self.waiting.retain(|waiting| waiting != id);
        }
        while self.has_room()
            && let Some(next) = self.waiting.pop_front()
        {
            if let Some(next) = self.by_id.get_mut(&next) {
                next.active = true;
            }
        }
        self.jobs -= sequence.jobs.len();
        sequence.jobs.into_iter().map(|(_, job)| job).collect()
    }
}

#[cfg(test)]
mod tests;
