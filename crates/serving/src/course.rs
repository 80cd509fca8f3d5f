//! The course of a request, for a caller that wants to know of it whatever becomes of the request:
//! answered, failed, expired or given up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ts_types::Version;

use crate::job::Ran;

/// What a request has gone through so far; both ends see the same.
#[derive(Debug, Clone, Default)]
pub struct Course(Arc<Mutex<Milestones>>);

/// Where a request has been, and when. What is `None` has not happened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Milestones {
    /// Its body had been read, and it asked for its model.
    pub arrived: Option<Instant>,
    /// The version that it was given to.
    pub version: Option<Version>,
    /// A worker was handed the batch that it is in.
    pub handed_over: Option<Instant>,
    /// That worker's id.
    pub worker: Option<u32>,
    /// Requests in that batch.
    pub batch_requests: usize,
    /// Its worker answered it, with a part or with all of it, or was lost.
    pub answered: Option<Instant>,
    /// How much of that time its backend took, if the worker came to tell.
    pub handler: Option<Duration>,
}

impl Course {
    /// So far.
    pub fn milestones(&self) -> Milestones {
        self.0.lock().clone()
    }

    pub(crate) fn arrived(&self, at: Instant, version: &Version) {
        let mut seen = self.0.lock();
        seen.arrived = Some(at);
        seen.version = Some(version.clone());
    }

    /// The first time counts: steps of a batch that goes on, and halves of one that failed, are
    /// parts of it.
    pub(crate) fn handed_over(&self, at: Instant, worker: u32, requests: usize) {
        let mut seen = self.0.lock();
        if seen.handed_over.is_none() {
            seen.handed_over = Some(at);
            seen.worker = Some(worker);
            seen.batch_requests = requests;
        }
    }

    pub(crate) fn ran(&self, ran: Ran) {
        let mut seen = self.0.lock();
        seen.answered = Some(ran.answered);
        seen.handler = Some(ran.handler);
    }

    pub(crate) fn failed(&self) {
        let mut seen = self.0.lock();
        if seen.handed_over.is_some() && seen.handler.is_none() {
            seen.answered = Some(Instant::now());
        }
    }
}
