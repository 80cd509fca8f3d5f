//! When a pool that scales by itself gets a worker more, and when one of its workers may go. Pure:
//! instants and counts come in, a decision goes out.
//!
//! Nothing polls. Growth is decided where the load shows: when a job arrives and when a worker cuts
//! a batch. Shrinking is decided by the worker that has waited for too long.

use std::time::{Duration, Instant};

use crate::pool::restart::{Failures, Lost, Restart};

/// Cuts in a row that leave jobs behind before the pool grows.
const BUSY_CUTS: u32 = 3;

/// Rounds of all workers that have to wait before another one is started while one is starting.
const LARGE_BACKLOG_ROUNDS: usize = 4;

/// A pool at the moment of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Load {
    /// Jobs that wait.
    pub(crate) waiting: usize,
    /// Jobs that one worker takes at once.
    pub(crate) batch_size: usize,
    /// Workers that take batches.
    pub(crate) ready: usize,
    /// Workers on their way: loading, or waiting to be started again.
    pub(crate) starting: usize,
    /// Workers at most.
    pub(crate) max: usize,
}

impl Load {
    /// Jobs that this many workers take in so many rounds.
    fn rounds(self, rounds: usize, workers: usize) -> usize {
        let batch = self.batch_size.max(1);
        rounds.saturating_mul(workers).saturating_mul(batch)
    }
}

/// What a pool remembers for its growth.
#[derive(Debug, Default)]
pub(crate) struct Growth {
    busy_cuts: u32,
    failures: Failures,
    not_before: Option<Instant>,
}

impl Growth {
    /// A job has arrived: whether to start one worker now.
    pub(crate) fn at_arrival(&mut self, load: Load, now: Instant) -> bool {
        let more_than_a_round = load.waiting > load.rounds(1, load.ready);
        self.starts(load, more_than_a_round, now)
    }

    /// A worker has cut a batch: whether to start one worker now. What piled up while the workers
    /// were loading may be gone in a moment, so a single look does not count here.
    pub(crate) fn at_cut(&mut self, load: Load, now: Instant) -> bool {
        self.busy_cuts = match load.waiting {
            0 => 0,
            _ => self.busy_cuts.saturating_add(1),
        };
        let busy = self.busy_cuts >= BUSY_CUTS;
        self.starts(load, busy, now)
    }

    fn starts(&mut self, load: Load, wanted: bool, now: Instant) -> bool {
        let workers = load.ready + load.starting;
        if load.waiting == 0 || workers >= load.max || !self.may_start(now) {
            return false;
        }
        let is_large = load.waiting >= load.rounds(LARGE_BACKLOG_ROUNDS, workers);
        let starts = is_large || (wanted && load.starting == 0);
        if starts {
            self.busy_cuts = 0;
        }
        starts
    }

    /// Whether enough time has passed since a worker could not be started.
    pub(crate) fn may_start(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|instant| now >= instant)
    }

    /// A worker that the load asked for could not be started. Returns whether the pool may try
    /// again, later.
    pub(crate) fn note_failure(&mut self, now: Instant, window: Duration, permanent: bool) -> bool {
        match self.failures.note(now, window, Lost::NeverUp { permanent }) {
            Restart::After(wait) => {
                self.not_before = now.checked_add(wait);
                true
            }
            Restart::Never => false,
        }
    }

    /// A worker came up.
    pub(crate) fn note_success(&mut self) {
        self.failures.reset();
        self.not_before = None;
    }
}

/// When a worker may ask to leave that has waited `since` then, in a pool that was last `needed`
/// as a whole at that instant. A pool with more workers than a light load needs hands each of them
/// a job now and then, so their own waits alone would keep them all.
pub(crate) fn leaves_at(since: Instant, needed: Instant, idle: Duration) -> Option<Instant> {
    since.min(needed).checked_add(idle)
}

/// Whether a worker that has waited for long enough may go, of `workers` with `min` to keep.
pub(crate) fn may_leave(workers: usize, min: usize, waiting: usize) -> bool {
    workers > min && waiting == 0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const WINDOW: Duration = Duration::from_secs(300);

    fn load(waiting: usize, ready: usize, starting: usize) -> Load {
        Load {
            waiting,
            batch_size: 2,
            ready,
            starting,
            max: 4,
        }
    }

    fn starts(load: Load) -> bool {
        Growth::default().at_arrival(load, Instant::now())
    }

    #[test]
    fn the_first_job_of_an_empty_pool_starts_a_worker_and_the_next_ones_wait_for_it() {
        assert!(starts(load(1, 0, 0)));
        assert!(!starts(load(2, 0, 1)));
        assert!(!starts(load(0, 0, 0)));
    }

    #[test]
    fn more_than_a_round_of_all_workers_starts_one() {
        assert!(!starts(load(4, 2, 0)));
        assert!(starts(load(5, 2, 0)));
        assert!(!starts(load(5, 4, 0)), "never above the bound");
        let cut = Growth::default().at_cut(load(5, 2, 0), Instant::now());
        assert!(!cut, "what came while it was loading");
    }

    #[test]
    fn one_is_started_at_a_time_unless_much_waits() {
        assert!(!starts(load(15, 1, 1)));
        assert!(starts(load(16, 1, 1)));
        assert!(Growth::default().at_cut(load(8, 1, 0), Instant::now()));
    }

    #[test]
    fn three_cuts_in_a_row_that_leave_jobs_behind_start_one() {
        let mut growth = Growth::default();
        let now = Instant::now();
        for waiting in [1, 1, 0, 1, 1] {
            assert!(!growth.at_cut(load(waiting, 2, 0), now));
        }
        assert!(growth.at_cut(load(1, 2, 0), now));
        // It has to show again that it needs another one.
        assert!(!growth.at_cut(load(1, 3, 0), now));
    }

    #[test]
    fn a_start_that_failed_is_not_repeated_at_once_and_not_for_ever() {
        let mut growth = Growth::default();
        let mut now = Instant::now();
        assert!(growth.note_failure(now, WINDOW, false));
        assert!(!growth.at_arrival(load(1, 0, 0), now));
        now += Duration::from_secs(1);
        assert!(growth.at_arrival(load(1, 0, 0), now));
        let mut tries = 1;
        while growth.note_failure(now, WINDOW, false) {
            assert!(tries < 100);
            tries += 1;
            now += Duration::from_secs(30);
        }
        let mut growth = Growth::default();
        assert!(!growth.note_failure(now, WINDOW, true), "no retry can help");
    }

    #[test]
    fn the_last_ones_and_those_with_work_stay() {
        assert!(may_leave(2, 1, 0));
        assert!(may_leave(1, 0, 0));
        assert!(!may_leave(1, 1, 0));
        assert!(!may_leave(2, 1, 1));
    }

    #[test]
    fn a_worker_leaves_when_it_or_the_whole_pool_has_had_too_little_to_do() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let idle = 60 * second;
        assert_eq!(leaves_at(start, start + second, idle), Some(start + idle));
        assert_eq!(leaves_at(start + second, start, idle), Some(start + idle));
    }

    proptest! {
        /// Never above the bound, never without work, and a pool without workers always starts
        /// one for the work it has.
        #[test]
        fn growth_stays_within_its_bounds(
            waiting in 0_usize..200, batch_size in 0_usize..16, ready in 0_usize..9,
            starting in 0_usize..9, max in 0_usize..9,
            cuts in proptest::collection::vec(any::<bool>(), 1..8),
        ) {
            let mut growth = Growth::default();
            let now = Instant::now();
            let load = Load { waiting, batch_size, ready, starting, max };
            for cut in cuts {
                let starts = if cut { growth.at_cut(load, now) } else { growth.at_arrival(load, now) };
                if starts {
                    prop_assert!(ready + starting < max && waiting > 0);
                } else {
                    prop_assert!(waiting == 0 || max == 0 || ready + starting > 0);
                }
            }
        }
    }
}
