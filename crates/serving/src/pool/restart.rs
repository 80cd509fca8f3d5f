//! When a failed worker is started again (*torchserve-contract* 8.9). Pure.

use std::time::{Duration, Instant};

/// Seconds before each attempt; the last one repeats.
const BACK_OFF_SECONDS: [u64; 17] = [
    1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597,
];

/// The failures of a worker since it last came up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Failures {
    count: usize,
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
    pub(crate) fn note(&mut self, now: Instant, window: Duration, permanent: bool) -> Restart {
        let first = *self.first.get_or_insert(now);
        let attempt = self.count.min(BACK_OFF_SECONDS.len() - 1);
        self.count += 1;
        if permanent || now.saturating_duration_since(first) >= window {
            return Restart::Never;
        }
        Restart::After(Duration::from_secs(BACK_OFF_SECONDS[attempt]))
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
    use super::*;

    #[test]
    fn waits_grow_and_end_with_the_window() {
        let start = Instant::now();
        let window = Duration::from_secs(300);
        let mut failures = Failures::default();
        let mut now = start;
        let mut waits = Vec::new();
        while let Restart::After(wait) = failures.note(now, window, false) {
            waits.push(wait.as_secs());
            now += wait;
        }
        assert_eq!(waits, [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144]);
        assert!(now - start >= window);
    }

    #[test]
    fn a_permanent_failure_is_not_repeated() {
        let mut failures = Failures::default();
        let never = failures.note(Instant::now(), Duration::from_secs(300), true);
        assert_eq!(never, Restart::Never);
    }

    #[test]
    fn coming_up_resets_the_count_and_the_window() {
        let start = Instant::now();
        let window = Duration::from_secs(10);
        let mut failures = Failures::default();
        failures.note(start, window, false);
        failures.reset();
        let later = failures.note(start + Duration::from_secs(60), window, false);
        assert_eq!(later, Restart::After(Duration::from_secs(1)));
    }
}
