//! When an idle worker takes what is waiting. Pure: instants come in, a decision goes out.

use std::time::{Duration, Instant};

/// How large a batch may get and how long its first request may wait for company.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchPolicy {
    /// Requests at most, at least 1.
    pub(crate) size: usize,
    /// Upper bound of the wait, counted from the arrival of the oldest request: a backlog is
    /// taken without any wait, whatever its size. (TorchServe counts from the moment that a
    /// worker looks, which delays requests that have waited already.)
    pub(crate) delay: Duration,
}

/// What an idle worker does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Take this many, the oldest first.
    Take(usize),
    /// Wait for an arrival, at most until then.
    HoldUntil(Instant),
}

impl BatchPolicy {
    /// Decides for `waiting` requests, of which the oldest arrived at `oldest`.
    pub(crate) fn cut(self, waiting: usize, oldest: Instant, now: Instant) -> Cut {
        if waiting >= self.size {
            return Cut::Take(self.size);
        }
        match oldest.checked_add(self.delay) {
            Some(due) if now < due => Cut::HoldUntil(due),
            _ => Cut::Take(waiting),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn policy(size: usize, delay_ms: u64) -> BatchPolicy {
        BatchPolicy {
            size,
            delay: Duration::from_millis(delay_ms),
        }
    }

    #[test]
    fn a_single_request_never_waits_when_batching_is_off() {
        let now = Instant::now();
        assert_eq!(policy(1, 100).cut(1, now, now), Cut::Take(1));
    }

    #[test]
    fn a_full_batch_goes_at_once_and_a_partial_one_when_its_delay_is_over() {
        let start = Instant::now();
        let due = start + Duration::from_millis(100);
        assert_eq!(policy(4, 100).cut(9, start, start), Cut::Take(4));
        assert_eq!(policy(4, 100).cut(3, start, start), Cut::HoldUntil(due));
        assert_eq!(policy(4, 100).cut(3, start, due), Cut::Take(3));
    }

    proptest! {
        #[test]
        fn never_empty_never_over_the_size_never_past_the_delay(
            size in 1_usize..64, delay in 0_u64..10_000, waiting in 1_usize..200, age in 0_u64..20_000,
        ) {
            let oldest = Instant::now();
            let now = oldest + Duration::from_millis(age);
            match policy(size, delay).cut(waiting, oldest, now) {
                Cut::Take(taken) => prop_assert!(taken >= 1 && taken <= size && taken <= waiting),
                Cut::HoldUntil(due) => {
                    prop_assert!(waiting < size);
                    prop_assert!(due > now && due <= oldest + Duration::from_millis(delay));
                }
            }
        }
    }
}
