//! The metric of refused tokens.

use metrics::{Counter, Unit, counter, describe_counter};

const REFUSALS: &str = "ts_token_refusals_total";

/// Calls refused for want of a token, by what was wrong.
#[derive(Clone)]
pub(super) struct Refusals {
    /// There was no `Authorization` header.
    pub(super) missing: Counter,
    /// There was one, and it was not good for the call.
    pub(super) wrong: Counter,
}

impl Refusals {
    /// To be made after the recorder.
    pub(super) fn new() -> Self {
        describe_counter!(
            REFUSALS,
            Unit::Count,
            "Calls refused since their token was missing, or wrong: unknown, expired or of another API"
        );
        Self {
            missing: counter!(REFUSALS, "Reason" => "missing"),
            wrong: counter!(REFUSALS, "Reason" => "wrong"),
        }
    }
}
