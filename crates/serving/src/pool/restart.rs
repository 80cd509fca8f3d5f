//! When a failed worker is started again (*torchserve-contract* 8.9). Pure.

use std::time::{Duration, Instant};

/// Seconds before each attempt; the last one repeats. Only a worker that had served starts at the
/// zero: it worked, so it very likely will again.
const BACK_OFF_SECONDS: [u64; 18] = [
    0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597,
];

/// How a worker was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lost {
    /// It answered at least one batch since it came up.
    Served,
    /// It came up and answered none.
    Unused,
    /// It did not come up.
    NeverUp {
        /// Another try cannot help.
        permanent: bool,
    },
}

/// The failures of a worker since it last came up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Failures {
    count: usize,
    next_wait: usize,
    first: Option<Instant>,
}

/// What happens after a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Restart {
    /// Try again after this long.
    After(Duration),
    /// Leave it stopped: another try cannot help, or the recovery window is over.
    Never,
}

impl Failures {
    /// Notes a failure and decides. `window` counts from the first failure in a row.
    pub(crate) fn note(&mut self, now: Instant, window: Duration, lost: Lost) -> Restart {
        let first = *self.first.get_or_insert(now);
        if self.count == 0 && lost != Lost::Served {
            self.next_wait = 1;
        }
        let wait = BACK_OFF_SECONDS[self.next_wait.min(BACK_OFF_SECONDS.len() - 1)];
        self.next_wait += 1;
        self.count += 1;
        let permanent = lost == Lost::NeverUp { permanent: true };
        if permanent || now.saturating_duration_since(first) >= window {
            return Restart::Never;
        }
        Restart::After(Duration::from_secs(wait))
    }

    /// Failures in a row so far.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// The worker came up.
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NEVER_UP: Lost = Lost::NeverUp { permanent: false };

    /// The waits of a worker that was lost in one way and then never comes up again.
    fn waits(first: Lost, window: Duration) -> Vec<u64> {
        let mut failures = Failures::default();
        let mut now = Instant::now();
        let mut waits = Vec::new();
        let mut lost = first;
        while let Restart::After(wait) = failures.note(now, window, lost) {
            waits.push(wait.as_secs());
            now += wait;
            lost = NEVER_UP;
        }
        waits
    }

    #[test]
    fn waits_grow_and_end_with_the_window() {
        let window = Duration::from_secs(300);
        let expected = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144];
        assert_eq!(waits(NEVER_UP, window), expected);
        assert_eq!(waits(Lost::Unused, window), expected);
    }

    #[test]
    fn a_worker_that_served_is_started_again_at_once() {
        assert_eq!(
            waits(Lost::Served, Duration::from_secs(10)),
            [0, 1, 1, 2, 3, 5]
        );
    }

    #[test]
    fn a_permanent_failure_is_not_repeated() {
        let mut failures = Failures::default();
        let permanent = Lost::NeverUp { permanent: true };
        let never = failures.note(Instant::now(), Duration::from_secs(300), permanent);
        assert_eq!(never, Restart::Never);
    }

    #[test]
    fn coming_up_resets_the_count_and_the_window() {
        let start = Instant::now();
        let window = Duration::from_secs(10);
        let mut failures = Failures::default();
        failures.note(start, window, NEVER_UP);
        failures.note(start, window, NEVER_UP);
        failures.reset();
        let later = failures.note(start + Duration::from_secs(60), window, NEVER_UP);
        assert_eq!(later, Restart::After(Duration::from_secs(1)));
    }

    proptest! {
        #[test]
        fn no_restart_comes_after_the_window(
            window in 0_u64..5_000, gaps in proptest::collection::vec(0_u64..400, 1..40),
        ) {
            let start = Instant::now();
            let mut now = start;
            let mut failures = Failures::default();
            for gap in gaps {
                let within = now - start < Duration::from_secs(window);
                let restart = failures.note(now, Duration::from_secs(window), NEVER_UP);
                prop_assert_eq!(matches!(restart, Restart::After(_)), within);
                now += Duration::from_secs(gap);
            }
        }
    }
}
