//! When an idle worker takes what is waiting, and how much of it (*batching-and-scheduling* 15.3).
//! Pure: instants come in, a decision goes out.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ts_types::Gather;

use crate::fit::BatchCost;

/// Share of a batch's fixed cost that a wait for company may take. A wait that nobody joins then
/// costs less than a third of what it could have saved.
const HOLD_SHARE: f64 = 0.3;

/// A wait below this is none: to sleep and to be woken costs about as much.
const LEAST_HOLD: Duration = Duration::from_micros(250);

/// Batches over which the usual number of requests in the system is taken.
const PEAKS: usize = 8;

/// How large a batch may get, and what it waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BatchPolicy {
    /// Requests at most, at least 1.
    pub(crate) size: usize,
    /// Upper bound of a wait for company.
    pub(crate) delay: Duration,
    /// What is worth such a wait.
    pub(crate) gather: Gather,
    /// Sizes that the model likes, ascending, each from 1 to `size`; usually none.
    pub(crate) preferred: Vec<usize>,
}

/// What an idle worker sees of the requests that it could run together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View {
    /// How many wait; at least 1.
    pub(crate) waiting: usize,
    /// When the oldest of them arrived.
    pub(crate) oldest: Instant,
    /// The earliest instant by which one of them has to be answered.
    pub(crate) tightest: Option<Instant>,
    /// How many are worth waiting for, from [`Peaks::target`].
    pub(crate) target: usize,
    /// Since when the worker has had nothing to do.
    pub(crate) idle_since: Instant,
    /// When the worker first saw something to take.
    pub(crate) seen_since: Instant,
    /// What a batch costs, if that is known.
    pub(crate) fit: Option<BatchCost>,
    /// Now.
    pub(crate) now: Instant,
}

/// What an idle worker does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Take this many, the oldest first.
    Take(usize, Why),
    /// Wait for company.
    Hold {
        /// At most until then.
        until: Instant,
        /// Or until so many wait.
        wake_at: usize,
    },
}

/// Why a batch was cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Why {
    /// It has the greatest size.
    Full,
    /// As many wait as there usually are.
    TargetReached,
    /// A preferred size was reached.
    PreferredSize,
    /// Waiting costs more than it saves, or nobody else is to be expected.
    NoGain,
    /// What a batch costs is not known yet.
    CostUnknown,
    /// It waited as long as it may.
    HoldOver,
    /// A request would be late otherwise.
    Deadline,
}

impl Why {
    /// All of them, in the order of their numbers.
    pub(crate) const ALL: [Self; 7] = [
        Self::Full,
        Self::TargetReached,
        Self::PreferredSize,
        Self::NoGain,
        Self::CostUnknown,
        Self::HoldOver,
        Self::Deadline,
    ];

    /// As it is shown.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::TargetReached => "targetReached",
            Self::PreferredSize => "preferredSize",
            Self::NoGain => "noGain",
            Self::CostUnknown => "costUnknown",
            Self::HoldOver => "holdOver",
            Self::Deadline => "deadline",
        }
    }
}

impl BatchPolicy {
    /// Decides for the requests in `view`.
    pub(crate) fn cut(&self, view: &View) -> Cut {
        if view.waiting >= self.size {
            // The largest preferred size may be below the greatest one.
            let size = self.preferred.last().copied().unwrap_or(self.size);
            return Cut::Take(size, Why::Full);
        }
        if let Some(&largest) = self.preferred.last()
            && view.waiting >= largest
        {
            return Cut::Take(largest, Why::PreferredSize);
        }
        match self.gather {
            Gather::Auto if self.preferred.is_empty() => self.cut_as_learned(view),
            Gather::Auto | Gather::Fixed => self.cut_after(view, view.oldest),
            Gather::Strict => self.cut_after(view, view.seen_since),
        }
    }

    /// Waits for the whole delay, counted from `start`.
    fn cut_after(&self, view: &View, start: Instant) -> Cut {
        let due = start.checked_add(self.delay);
        match due {
            Some(due) if view.now < due => {
                let reached = self
                    .preferred
                    .iter()
                    .rev()
                    .find(|size| **size <= view.waiting);
                match reached {
                    Some(&size) => Cut::Take(size, Why::PreferredSize),
                    None => self.hold(view, due, self.preferred.first().copied()),
                }
            }
            _ if self.delay.is_zero() => Cut::Take(view.waiting, Why::NoGain),
            _ => Cut::Take(view.waiting, Why::HoldOver),
        }
    }

    /// Waits a little where experience says that company comes and is worth it.
    fn cut_as_learned(&self, view: &View) -> Cut {
        let target = view.target.min(self.size);
        if view.waiting >= target && target > 1 {
            return Cut::Take(view.waiting, Why::TargetReached);
        }
        let Some(fit) = view.fit else {
            return Cut::Take(view.waiting, Why::CostUnknown);
        };
        if target <= 1 || !fit.gains_from_company() {
            return Cut::Take(view.waiting, Why::NoGain);
        }
        let hold = fit.overhead(HOLD_SHARE).min(self.delay);
        if hold < LEAST_HOLD {
            return Cut::Take(view.waiting, Why::NoGain);
        }
        match view.idle_since.checked_add(hold) {
            Some(due) if view.now < due => self.hold(view, due, Some(target)),
            _ => Cut::Take(view.waiting, Why::HoldOver),
        }
    }

    /// Holds until `due`, unless a deadline comes before.
    fn hold(&self, view: &View, due: Instant, wake_at: Option<usize>) -> Cut {
        let run = view
            .fit
            .map_or(Duration::ZERO, |fit| fit.duration(view.waiting));
        let latest = view
            .tightest
            .map(|deadline| deadline.checked_sub(run).unwrap_or(view.now));
        match latest {
            Some(latest) if latest <= view.now => Cut::Take(view.waiting, Why::Deadline),
            Some(latest) => Cut::Hold {
                until: due.min(latest),
                wake_at: wake_at.unwrap_or(self.size),
            },
            None => Cut::Hold {
                until: due,
                wake_at: wake_at.unwrap_or(self.size),
            },
        }
    }
}

/// How many requests are in the system at once, learned from the arrivals between two cuts.
#[derive(Debug, Default)]
pub(crate) struct Peaks {
    /// The last full intervals.
    kept: VecDeque<usize>,
    /// The one under way.
    now: usize,
}

impl Peaks {
    /// A request arrived; `in_system` wait or run now, itself included.
    pub(crate) fn arrival(&mut self, in_system: usize) {
        self.now = self.now.max(in_system);
    }

    /// A batch was cut.
    pub(crate) fn cut(&mut self) {
        if self.kept.len() == PEAKS {
            self.kept.pop_front();
        }
        self.kept.push_back(std::mem::take(&mut self.now));
    }

    /// How many requests are worth waiting for: the median of the intervals, less those that run
    /// elsewhere already.
    pub(crate) fn target(&self, running: usize) -> usize {
        let mut peaks: Vec<usize> = self.kept.iter().copied().collect();
        peaks.sort_unstable();
        let median = peaks.get(peaks.len() / 2).copied().unwrap_or(0);
        median.saturating_sub(running)
    }
}

#[cfg(test)]
mod tests;
