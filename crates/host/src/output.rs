//! What a worker says of its requests: parts of replies while they run, their outcome at the end.
//! Shared with whatever threads a handler has, so it also knows which requests still run: whatever
//! comes for one that has ended goes no further.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ts_wire::frame::{
    BatchDone, BatchOutcome, Chunk, ItemOutcome, ItemReply, MetricEvent, RequestDone, RunFailure,
    WorkerReply,
};
use ts_wire::{Departed, HangUp, Sender, WireError};

use crate::{BatchItem, BatchResult, Item, Metric};

/// A worker's way to the server.
pub struct Output {
    sender: Mutex<Sender>,
    hang_up: HangUp,
    departed: Departed,
    running: Mutex<HashMap<String, Running>>,
    max_response_bytes: u64,
    rank: u32,
}

/// A request that a worker has.
#[derive(Debug)]
struct Running {
    /// Since when.
    since: Instant,
    /// Nobody waits for its reply any more.
    left: bool,
    /// It is to be broken off.
    cancelled: bool,
    /// It has failed; nothing more of it is sent.
    failed: bool,
}

/// What became of parts of replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// Parts that were dropped: of a request that has ended, that never was, or that had another
    /// part in the same call.
    pub dropped: usize,
    /// Nobody waits for any of the requests any more.
    pub all_left: bool,
}

impl Output {
    /// Takes the sending half of the worker's channel. Of a group, only `rank` 0
    /// sends replies and metrics.
    pub fn new(sender: Sender, departed: Departed, max_response_bytes: u64, rank: u32) -> Self {
        Self {
            hang_up: sender.hang_up(),
            sender: Mutex::new(sender),
            departed,
            running: Mutex::default(),
            max_response_bytes,
            rank,
        }
    }

    /// Sends a part of the replies to some requests, more of which follow. A failure instead of a
    /// part ends its request.
    ///
    /// # Errors
    /// [`WireError::Closed`] when the server is gone.
    pub fn chunks(&self, parts: &[(&str, &Result<Item, RunFailure>)]) -> Result<Sent, WireError> {
        if self.rank > 0 {
            return Ok(Sent {
                dropped: 0,
                all_left: false,
            });
        }
        // Held until all is sent: nothing may follow the end of a request.
        let mut running = self.running();
        self.note_departures(&mut running);
        let mut sent = Sent {
            dropped: 0,
            all_left: true,
        };
        let mut bodies = Vec::with_capacity(parts.len());
        let mut chunks: Vec<Chunk<'_>> = Vec::with_capacity(parts.len());
        for (request_id, part) in parts {
            let repeated = chunks.iter().any(|chunk| chunk.request_id == *request_id);
            let Some(request) = running.get_mut(*request_id).filter(|_| !repeated) else {
                sent.dropped += 1;
                continue;
            };
            sent.all_left &= request.left;
            if request.left || request.failed {
                continue;
            }
            let outcome = self.outcome(part, &mut bodies);
            request.failed = matches!(outcome, ItemOutcome::Failed(_));
            chunks.push(Chunk {
                request_id,
                ran_micros: micros(request.since.elapsed()),
                outcome,
            });
        }
        if sent.dropped == parts.len() {
            sent.all_left = false;
        }
        if !chunks.is_empty() {
            self.sender()
                .send_inline(&WorkerReply::Chunks(chunks), &bodies)?;
        }
        Ok(sent)
    }

    /// Which process of its group this is.
    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    /// Whether the caller of a request has left; `None` for one that does not run.
    pub fn has_left(&self, request_id: &str) -> Option<bool> {
        let mut running = self.running();
        self.note_departures(&mut running);
        running.get(request_id).map(|request| request.left)
    }

    /// Whether a request is to be broken off.
    pub(crate) fn is_cancelled(&self, request_id: &str) -> bool {
        let running = self.running();
        running
            .get(request_id)
            .is_none_or(|request| request.cancelled)
    }

    /// Ends a request that was started on its own. One that has ended already has its answer.
    ///
    /// # Errors
    /// [`WireError::Closed`] when the server is gone.
    pub fn answer(
        &self,
        request_id: &str,
        item: &Result<Item, RunFailure>,
        metrics: &[Metric],
    ) -> Result<(), WireError> {
        let mut running = self.running();
        let Some(request) = running.remove(request_id) else {
            return Ok(());
        };
        let mut bodies = Vec::with_capacity(1);
        let answered = WorkerReply::Answered(RequestDone {
            request_id,
            ran_micros: micros(request.since.elapsed()),
            outcome: self.outcome(item, &mut bodies),
            metrics: metrics.iter().map(event).collect(),
        });
        self.sender().send_inline(&answered, &bodies)
    }

    /// Ends the worker: the server sees its channel close.
    pub fn hang_up(&self) {
        // Not through a sender that may be in use: its thread may wait for a server that does not
        // read.
        self.hang_up.now();
    }

    /// Requests start to run. With `departures` there may be some of earlier ones to read away.
    pub(crate) fn begin(&self, items: &[BatchItem<'_>], departures: bool) {
        let mut running = self.running();
        if departures {
            self.note_departures(&mut running);
        }
        let since = Instant::now();
        running.extend(items.iter().map(|item| {
            let request = Running {
                since,
                left: false,
                cancelled: false,
                failed: false,
            };
            (item.request_id.to_owned(), request)
        }));
    }

    /// Marks a request as one to be broken off.
    pub(crate) fn cancel(&self, request_id: &str) {
        if let Some(request) = self.running().get_mut(request_id) {
            request.cancelled = true;
        }
    }

    /// Ends the batch, which has run for so long.
    pub(crate) fn end(&self, result: &BatchResult, ran: Duration) -> Result<(), WireError> {
        let mut running = self.running();
        running.clear();
        let mut bodies = Vec::new();
        let outcome = match &result.items {
            Err(failure) => BatchOutcome::Failed(failure.clone()),
            Ok(_) if self.rank > 0 => BatchOutcome::Items(Vec::new()),
            Ok(items) => {
                bodies.reserve(items.len());
                let outcomes = items.iter().map(|item| self.outcome(item, &mut bodies));
                BatchOutcome::Items(outcomes.collect())
            }
        };
        let metrics = result.metrics.iter().filter(|_| self.rank == 0);
        let done = WorkerReply::Done(BatchDone {
            ran_micros: micros(ran),
            outcome,
            metrics: metrics.map(event).collect(),
        });
        self.sender().send_payload(&done, &bodies)
    }

    /// Says anything else.
    pub(crate) fn say(&self, reply: &WorkerReply<'_>) -> Result<(), WireError> {
        self.sender().send(reply, None)
    }

    fn outcome<'a>(
        &self,
        item: &'a Result<Item, RunFailure>,
        bodies: &mut Vec<&'a [u8]>,
    ) -> ItemOutcome<'a> {
        match item {
            Err(failure) => ItemOutcome::Failed(failure.clone()),
            Ok(item) if item.body.len() as u64 > self.max_response_bytes => {
                ItemOutcome::Failed(RunFailure::ReplyTooLarge {
                    bytes: item.body.len() as u64,
                    limit: self.max_response_bytes,
                })
            }
            Ok(item) => {
                bodies.push(&item.body[..]);
                ItemOutcome::Reply(ItemReply {
                    status: item.status,
                    reason: &item.reason,
                    headers: borrow_pairs(&item.headers),
                    body_bytes: item.body.len() as u64,
                })
            }
        }
    }

    fn note_departures(&self, running: &mut HashMap<String, Running>) {
        self.departed.each(|request_id| {
            if let Some(request) = running.get_mut(request_id) {
                request.left = true;
            }
        });
    }

    // A panic elsewhere leaves both as they are meant to be.

    fn running(&self) -> MutexGuard<'_, HashMap<String, Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sender(&self) -> MutexGuard<'_, Sender> {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn event(metric: &Metric) -> MetricEvent<'_> {
    MetricEvent {
        name: &metric.name,
        value: metric.value,
        unit: &metric.unit,
        kind: metric.kind,
        dimensions: borrow_pairs(&metric.dimensions),
        request_ids: &metric.request_ids,
    }
}

fn borrow_pairs(pairs: &[(String, String)]) -> Vec<(&str, &str)> {
    pairs
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect()
}
