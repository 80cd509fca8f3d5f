//! The requests that wait for a worker of one model version.
//!
//! There is no batcher thread: an idle worker cuts its own batch at the moment it can run it, and
//! one arrival wakes one idle worker. Requests of different kinds never share a batch; the batch
//! is cut from the kind whose oldest request has waited longest.

use std::collections::VecDeque;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use ts_types::RequestKind;

use crate::batch::{BatchPolicy, Cut};
use crate::error::ServingError;
use crate::job::Job;

/// Why a job was not taken; it comes back with the reason.
#[derive(Debug)]
pub(crate) enum NotQueued {
    /// The queue has reached its limit.
    Full(Job),
    /// It takes no more jobs.
    Closed(Job),
}

/// Requests that wait for a worker.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    arrival: Condvar,
}

#[derive(Debug)]
struct State {
    predict: VecDeque<Job>,
    explain: VecDeque<Job>,
    describe: VecDeque<Job>,
    policy: BatchPolicy,
    capacity: usize,
    closed: bool,
}

impl Queue {
    pub(crate) fn new(policy: BatchPolicy, capacity: usize) -> Self {
        Self {
            state: Mutex::new(State {
                predict: VecDeque::new(),
                explain: VecDeque::new(),
                describe: VecDeque::new(),
                policy,
                capacity,
                closed: false,
            }),
            arrival: Condvar::new(),
        }
    }

    /// Adds a job at the end.
    ///
    /// # Errors
    /// [`NotQueued`] gives the job back when the queue is full or closed.
    #[expect(
        clippy::result_large_err,
        reason = "the job goes back to whoever made it"
    )]
    pub(crate) fn push(&self, job: Job) -> Result<(), NotQueued> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(NotQueued::Closed(job));
        }
        if state.waiting() >= state.capacity {
            // Jobs whose callers have left hold no place.
            state.drop_abandoned();
            if state.waiting() >= state.capacity {
                return Err(NotQueued::Full(job));
            }
        }
        state.group(job.request.kind).push_back(job);
        drop(state);
        self.arrival.notify_one();
        Ok(())
    }

    /// Puts jobs that were cut but never handed over back at the head, in their order.
    pub(crate) fn put_back(&self, jobs: Vec<Job>) {
        let mut state = self.state.lock();
        for job in jobs.into_iter().rev() {
            state.group(job.request.kind).push_front(job);
        }
        drop(state);
        self.arrival.notify_one();
    }

    /// Waits for a batch. Returns `None` as soon as `stop` says so, when nothing is there at the
    /// instant of `idle_until` (call [`Queue::wake_all`] after changing what the two read), and
    /// when the queue is closed and empty.
    pub(crate) fn take(
        &self,
        stop: impl Fn() -> bool,
        idle_until: impl Fn() -> Option<Instant>,
    ) -> Option<Vec<Job>> {
        let mut state = self.state.lock();
        loop {
            if stop() {
                return None;
            }
            match state.cut(Instant::now()) {
                None if state.closed => return None,
                None => match idle_until() {
                    None => self.arrival.wait(&mut state),
                    Some(end) if Instant::now() >= end => return None,
                    Some(end) => {
                        self.arrival.wait_until(&mut state, end);
                    }
                },
                Some(Decision::HoldUntil(due)) => {
                    self.arrival.wait_until(&mut state, due);
                }
                // Their callers left while they were being taken.
                Some(Decision::Batch(jobs)) if jobs.is_empty() => {}
                Some(Decision::Batch(jobs)) => {
                    let more = state.waiting() > 0;
                    drop(state);
                    if more {
                        // Jobs that stay behind may be ready for another worker whose wake-up
                        // this one has used.
                        self.arrival.notify_one();
                    }
                    return Some(jobs);
                }
            }
        }
    }

    /// Makes every waiting worker look at its stop condition again.
    pub(crate) fn wake_all(&self) {
        // The lock orders this after the check of a worker that is about to wait.
        drop(self.state.lock());
        self.arrival.notify_all();
    }

    /// Takes no more jobs; those that wait are still handed out.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.arrival.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().closed
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
        let State {
            predict,
            explain,
            describe,
            ..
        } = &mut *state;
        predict
            .drain(..)
            .chain(explain.drain(..))
            .chain(describe.drain(..))
            .collect()
    }

    /// Jobs that wait, and places left for more.
    pub(crate) fn occupancy(&self) -> (usize, usize) {
        let state = self.state.lock();
        (
            state.waiting(),
            state.capacity.saturating_sub(state.waiting()),
        )
    }
}

enum Decision {
    Batch(Vec<Job>),
    HoldUntil(Instant),
}

impl State {
    fn waiting(&self) -> usize {
        self.predict.len() + self.explain.len() + self.describe.len()
    }

    fn group(&mut self, kind: RequestKind) -> &mut VecDeque<Job> {
        match kind {
            RequestKind::Predict => &mut self.predict,
            RequestKind::Explain => &mut self.explain,
            RequestKind::Describe => &mut self.describe,
        }
    }

    fn drop_abandoned(&mut self) {
        for kind in [
            RequestKind::Predict,
            RequestKind::Explain,
            RequestKind::Describe,
        ] {
            self.group(kind).retain(|job| !job.is_abandoned());
        }
    }

    /// `None` when nothing waits.
    fn cut(&mut self, now: Instant) -> Option<Decision> {
        for kind in [
            RequestKind::Predict,
            RequestKind::Explain,
            RequestKind::Describe,
        ] {
            let group = self.group(kind);
            while group.front().is_some_and(Job::is_abandoned) {
                group.pop_front();
            }
        }
        let oldest_of = |group: &VecDeque<Job>| group.front().map(|job| job.arrived);
        let (oldest, kind) = [
            (oldest_of(&self.predict), RequestKind::Predict),
            (oldest_of(&self.explain), RequestKind::Explain),
            (oldest_of(&self.describe), RequestKind::Describe),
        ]
        .into_iter()
        .filter_map(|(oldest, kind)| Some((oldest?, kind)))
        .min_by_key(|(oldest, _)| *oldest)?;
        let policy = match kind {
            RequestKind::Describe => BatchPolicy {
                size: 1,
                ..self.policy
            },
            RequestKind::Predict | RequestKind::Explain => self.policy,
        };
        let group = self.group(kind);
        match policy.cut(group.len(), oldest, now) {
            Cut::HoldUntil(due) => Some(Decision::HoldUntil(due)),
            Cut::Take(count) => {
                let mut jobs = Vec::with_capacity(count);
                while jobs.len() < count
                    && let Some(job) = group.pop_front()
                {
                    if !job.is_abandoned() {
                        jobs.push(job);
                    }
                }
                Some(Decision::Batch(jobs))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use ts_types::{InferRequest, ModelName, RequestId};

    use super::*;
    use crate::job::Answered;

    fn job(kind: RequestKind) -> (Job, Answered) {
        let request = InferRequest {
            id: RequestId::random(),
            model: ModelName::new("m").unwrap(),
            version: None,
            kind,
            parts: vec![],
            headers: vec![],
        };
        Job::new(request, Instant::now())
    }

    fn queue(size: usize, delay_ms: u64, capacity: usize) -> Queue {
        Queue::new(
            BatchPolicy {
                size,
                delay: Duration::from_millis(delay_ms),
            },
            capacity,
        )
    }

    #[test]
    fn a_full_queue_refuses_until_a_caller_leaves() {
        let queue = queue(1, 0, 2);
        let (one, _kept) = job(RequestKind::Predict);
        let (two, leaver) = job(RequestKind::Predict);
        queue.push(one).unwrap();
        queue.push(two).unwrap();
        assert!(matches!(
            queue.push(job(RequestKind::Predict).0),
            Err(NotQueued::Full(_))
        ));
        drop(leaver);
        let (three, _kept) = job(RequestKind::Predict);
        queue.push(three).unwrap();
    }

    #[test]
    fn abandoned_jobs_are_never_handed_out() {
        let queue = queue(8, 0, 100);
        let mut kept = Vec::new();
        for number in 0..6 {
            let (job, answered) = job(RequestKind::Predict);
            queue.push(job).unwrap();
            if number % 2 == 0 {
                kept.push(answered);
            }
        }
        assert_eq!(queue.take(|| false, || None).unwrap().len(), 3);
    }

    #[test]
    fn kinds_do_not_share_a_batch_and_the_oldest_goes_first() {
        let queue = queue(8, 0, 100);
        let kinds = [
            RequestKind::Explain,
            RequestKind::Predict,
            RequestKind::Describe,
            RequestKind::Describe,
            RequestKind::Explain,
        ];
        let _kept: Vec<_> = kinds
            .into_iter()
            .map(|kind| {
                let (job, answered) = job(kind);
                queue.push(job).unwrap();
                answered
            })
            .collect();
        let batches: Vec<Vec<RequestKind>> = std::iter::from_fn(|| {
            (queue.occupancy().0 > 0).then(|| {
                queue
                    .take(|| false, || None)
                    .unwrap()
                    .iter()
                    .map(|job| job.request.kind)
                    .collect()
            })
        })
        .collect();
        use RequestKind::{Describe, Explain, Predict};
        assert_eq!(
            batches,
            [
                vec![Explain, Explain],
                vec![Predict],
                vec![Describe],
                vec![Describe]
            ]
        );
    }

    #[test]
    fn a_closed_queue_takes_nothing_and_hands_out_what_it_has() {
        let queue = queue(8, 0, 100);
        let (waiting, _kept) = job(RequestKind::Predict);
        queue.push(waiting).unwrap();
        queue.close();
        assert!(matches!(
            queue.push(job(RequestKind::Predict).0),
            Err(NotQueued::Closed(_))
        ));
        assert_eq!(queue.take(|| false, || None).unwrap().len(), 1);
        assert!(queue.take(|| false, || None).is_none());
    }

    #[test]
    fn a_worker_that_has_waited_for_long_enough_takes_what_is_there_and_else_nothing() {
        let queue = queue(8, 0, 100);
        let past = || Some(Instant::now());
        assert!(queue.take(|| false, past).is_none());
        let (waiting, _kept) = job(RequestKind::Predict);
        queue.push(waiting).unwrap();
        assert_eq!(queue.take(|| false, past).unwrap().len(), 1);
        let soon = Instant::now() + Duration::from_millis(20);
        assert!(queue.take(|| false, || Some(soon)).is_none());
        assert!(Instant::now() >= soon);
    }

    #[test]
    fn put_back_keeps_the_order() {
        let queue = queue(2, 0, 100);
        let mut kept = Vec::new();
        let mut ids = Vec::new();
        for _ in 0..4 {
            let (job, answered) = job(RequestKind::Predict);
            ids.push(job.request.id.clone());
            queue.push(job).unwrap();
            kept.push(answered);
        }
        let first = queue.take(|| false, || None).unwrap();
        queue.put_back(first);
        let mut seen = Vec::new();
        for _ in 0..2 {
            seen.extend(
                queue
                    .take(|| false, || None)
                    .unwrap()
                    .into_iter()
                    .map(|job| job.request.id),
            );
        }
        assert_eq!(seen, ids);
        assert_eq!(queue.occupancy(), (0, 100));
    }

    #[test]
    fn many_workers_share_a_queue_and_lose_nothing() {
        let queue = Arc::new(queue(3, 1, 10_000));
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let workers: Vec<_> = (0..4)
            .map(|_| {
                let (queue, stop) = (Arc::clone(&queue), Arc::clone(&stop));
                std::thread::Builder::new()
                    .spawn(move || {
                        let mut done = 0;
                        let stopped = || stop.load(std::sync::atomic::Ordering::SeqCst);
                        while let Some(jobs) = queue.take(stopped, || None) {
                            done += jobs.len();
                        }
                        done
                    })
                    .unwrap()
            })
            .collect();
        let kept: Vec<_> = (0..5_000)
            .map(|_| {
                let (job, answered) = job(RequestKind::Predict);
                queue.push(job).unwrap();
                answered
            })
            .collect();
        while queue.occupancy().0 > 0 {
            std::thread::yield_now();
        }
        stop.store(true, std::sync::atomic::Ordering::SeqCst);
        queue.wake_all();
        let done: usize = workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .sum();
        assert_eq!(done, kept.len());
    }
}
