//! How the batches of a model version come about, in plain data: what was measured, what follows
//! from it, and why each batch was cut.

use std::collections::BTreeMap;
use std::time::Duration;

use ts_types::Gather;

use crate::fit::BatchCost;

/// What `GET /models/{m}/batching` tells.
#[derive(Debug, Clone, PartialEq)]
pub struct Batching {
    /// Requests in a batch at most.
    pub batch_size: usize,
    /// Upper bound of a wait for company.
    pub max_delay: Duration,
    /// When there is such a wait.
    pub gather: Gather,
    /// Sizes that the model likes.
    pub preferred_sizes: Vec<usize>,
    /// What a batch costs; `None` until batches of two sizes have run.
    pub cost: Option<BatchCost>,
    /// Batches that the cost was taken from.
    pub samples: usize,
    /// How many requests are worth waiting for now.
    pub target: usize,
    /// Batches by the reason for which they were cut.
    pub cuts: Vec<(&'static str, u64)>,
    /// Batches by size.
    pub sizes: BTreeMap<usize, u64>,
    /// Waits for company.
    pub holds: u64,
    /// How long they took together.
    pub held: Duration,
    /// Requests not run since they would have been late.
    pub late: u64,
    /// Requests that wait.
    pub waiting: usize,
    /// Batches that run.
    pub running_batches: usize,
    /// Requests in them.
    pub running_jobs: usize,
    /// Workers that wait for a request.
    pub idle_workers: usize,
    /// How long a request that came now would wait, where the cost is known.
    pub predicted_wait: Option<Duration>,
    /// Sequences under way, and sequences that wait for one to end.
    pub sequences: Option<(usize, usize)>,
}
