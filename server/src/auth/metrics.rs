//! The metric of refused tokens.

use ts_metrics::{Metric, Metrics, names};

/// Calls refused for want of a token, by what was wrong.
pub(super) struct Refusals {
    /// There was no `Authorization` header.
    pub(super) missing: Metric,
    /// There was one, and it was not good for the call.
    pub(super) wrong: Metric,
}

impl Refusals {
    pub(super) fn new(metrics: &Metrics) -> Self {
        let of = |reason| metrics.builtin(&names::TOKEN_REFUSALS, &[reason]);
        Self {
            missing: of("missing"),
            wrong: of("wrong"),
        }
    }
}
