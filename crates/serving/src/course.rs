//! The course of a request, for a caller that wants to know of it whatever becomes of the request:
//! answered, failed, expired or given up.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use ts_types::Version;

use crate::job::{Job, Ran};

/// What a request has gone through so far; both ends see the same.
#[derive(Debug, Clone)]
pub struct Course {
    name: Arc<str>,
    seen: Arc<Mutex<Milestones>>,
}

/// The batch that a request is handed over in.
#[derive(Debug, Clone, Default)]
pub(crate) struct Together {
    /// Its requests.
    pub(crate) requests: usize,
    /// The names of those whose callers follow them.
    pub(crate) names: Arc<[Arc<str>]>,
}

impl Together {
    /// Of these requests; what nobody follows costs nothing here.
    pub(crate) fn of<'j>(jobs: impl ExactSizeIterator<Item = &'j Job>) -> Self {
        let requests = jobs.len();
        let courses = jobs.filter_map(|job| job.course.as_ref());
        let names: Vec<_> = courses.map(|course| Arc::clone(&course.name)).collect();
        Self {
            requests,
            names: if names.is_empty() {
                Arc::default()
            } else {
                names.into()
            },
        }
    }
}

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
    /// Names of those of them that are followed, its own among them.
    pub batch_names: Arc<[Arc<str>]>,
    /// Its worker answered it, with a part or with all of it, or was lost.
    pub answered: Option<Instant>,
    /// How much of that time its backend took, if the worker came to tell.
    pub handler: Option<Duration>,
}

impl Course {
    /// Of a request that its caller knows by this name.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self {
            name: name.into(),
            seen: Arc::default(),
        }
    }

    /// What its caller knows it by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// So far.
    pub fn milestones(&self) -> Milestones {
        self.seen.lock().clone()
    }

    pub(crate) fn arrived(&self, at: Instant, version: &Version) {
        let mut seen = self.seen.lock();
        seen.arrived = Some(at);
        seen.version = Some(version.clone());
    }

    /// The first time counts: steps of a batch that goes on, and halves of one that failed, are
    /// parts of it.
    pub(crate) fn handed_over(&self, at: Instant, worker: u32, batch: &Together) {
        let mut seen = self.seen.lock();
        if seen.handed_over.is_none() {
            seen.handed_over = Some(at);
            seen.worker = Some(worker);
            seen.batch_requests = batch.requests;
            seen.batch_names = Arc::clone(&batch.names);
        }
    }

    pub(crate) fn ran(&self, ran: Ran) {
        let mut seen = self.seen.lock();
        seen.answered = Some(ran.answered);
        seen.handler = Some(ran.handler);
    }

    pub(crate) fn failed(&self) {
        let mut seen = self.seen.lock();
        if seen.handed_over.is_some() && seen.handler.is_none() {
            seen.answered = Some(Instant::now());
        }
    }
}
