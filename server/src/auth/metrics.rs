//! The metric of refused tokens: of the whole process, so it goes through the facade.

use metrics::{Counter, counter};
use ts_metrics::names;

/// Calls refused for want of a token, by what was wrong.
pub(super) struct Refusals {
    /// There was no `Authorization` header.
    pub(super) missing: Counter,
    /// There was one, and it was not good for the call.
    pub(super) wrong: Counter,
}

impl Refusals {
    pub(super) fn new() -> Self {
        let of = |reason| counter!(names::TOKEN_REFUSALS.name, "Reason" => reason);
        Self {
            missing: of("missing"),
            wrong: of("wrong"),
        }
    }
}
