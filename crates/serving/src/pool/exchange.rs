//! What a dispatcher and its worker say to each other once the model is loaded: batch after batch,
//! or steps of one that goes on. `conversation.rs` has the asynchronous way.

use std::time::{Duration, Instant};

use bytes::Bytes;
use ts_types::{InferRequest, Reply, RequestKind};
use ts_wire::frame::{
    BatchDone, BatchOutcome, Chunk, Exchange, ItemOutcome, MetricEvent, RunBatch, RunFailure,
    RunItem, RunPart, WorkerReply, WorkerRequest,
};
use ts_wire::{Channel, Departures, Sender, WireError};

use crate::course::Together;
use crate::error::ServingError;
use crate::job::{Job, Ran};
use crate::pool::dispatcher::{Dispatcher, End, REPLY_SLACK_BYTES, Worker};
use crate::pool::ranks::{Loss, Ranks};
use crate::queue::{Batch, Running, Taken};

/// How often a dispatcher that waits for its worker looks for callers that have left.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Set by a handler for a request that goes on.
const STREAM_NEXT: &str = "ts_stream_next";

/// One outcome for each request of a batch, in its order.
/// Ids that a line of a batch names.
const LOGGED_IDS: usize = 32;

pub(super) type Replies = Vec<Result<Reply, RunFailure>>;

/// A job that its worker has.
pub(super) struct Held {
    pub(super) job: Job,
    /// The worker was told that its caller has left.
    pub(super) told: bool,
    /// The worker has had its parts.
    known: bool,
    /// Its share in what runs, where it ends at a time of its own.
    #[expect(dead_code, reason = "held for its drop")]
    running: Option<Running>,
}

impl Held {
    pub(super) fn new(job: Job) -> Self {
        Self {
            job,
            told: false,
            known: false,
            running: None,
        }
    }

    /// One that ends at a time of its own.
    pub(super) fn single((job, running): (Job, Running)) -> Self {
        Self {
            running: Some(running),
            ..Self::new(job)
        }
    }

    /// Tells the worker, once, if nobody waits for the job any more.
    pub(super) fn tell_departure(&mut self, departures: &Departures) {
        if !self.told && self.job.is_abandoned() {
            departures.tell(self.job.request.id.as_str());
            self.told = true;
        }
    }

    /// Passes a part of the reply on.
    pub(super) fn part(&mut self, reply: Reply, ran: Ran, limit: usize, departures: &Departures) {
        if self.job.part(reply, ran, limit).is_err() {
            self.tell_departure(departures);
        }
    }
}

/// A batch that has run. Jobs that ended before it did are gone from it.
struct Round {
    held: Vec<Option<Held>>,
    ran: Ran,
    outcome: Result<Replies, RunFailure>,
}

impl Dispatcher {
    /// Hands requests to the worker until it is lost or the slot is to end.
    pub(super) fn serve(&self, worker: &mut Worker, unsuccessful: &mut u32) -> End {
        let ended = match self.spec.load.exchange {
            Exchange::Batches => self.serve_batches(worker, unsuccessful),
            Exchange::Continuous => self.serve_continuously(worker, unsuccessful),
            Exchange::Asynchronous => return self.converse(worker),
        };
        match ended {
            Err(end) => end,
        }
    }

    fn serve_batches(
        &self,
        worker: &mut Worker,
        unsuccessful: &mut u32,
    ) -> Result<std::convert::Infallible, End> {
        loop {
            let Batch { jobs, running } = self.next_batch(worker)?;
            self.run_batch(worker, jobs, &running, unsuccessful)?;
        }
    }

    /// Runs a batch and answers it. One that the handler raised on is run again in halves, if that
    /// may be, until only what it raises on is left.
    fn run_batch(
        &self,
        worker: &mut Worker,
        jobs: Vec<Job>,
        running: &Running,
        unsuccessful: &mut u32,
    ) -> Result<(), End> {
        let mut round = match self.round(worker, hold(jobs), unsuccessful)? {
            Some(round) => round,
            None => return Ok(()),
        };
        if round.outcome.is_ok() {
            running.took(round.ran.answered - round.ran.handed_over);
        }
        // Halves that wait, the next one last.
        let mut waiting: Vec<Vec<Job>> = Vec::new();
        loop {
            match round.outcome {
                Err(failure) if self.may_split(worker, &round.held, &failure) => {
                    tracing::debug!(
                        worker = self.name(),
                        request_id = ids(&round.held),
                        jobs = round.held.len(),
                        "a batch that failed is run in halves"
                    );
                    let mut first: Vec<Job> = jobs_of(round.held).collect();
                    let second = first.split_off(first.len().div_ceil(2));
                    waiting.extend([second, first]);
                }
                outcome => {
                    let lost = match &outcome {
                        Err(failure) => self.over_memory([failure]),
                        Ok(replies) => self.over_memory(failures_of(replies)),
                    };
                    answer(round.held, outcome, round.ran);
                    if let Some(failure) = lost {
                        self.put_back_all(waiting);
                        return Err(End::Lost(failure));
                    }
                }
            }
            round = loop {
                let Some(jobs) = waiting.pop() else {
                    return Ok(());
                };
                // Whoever's time is over meanwhile is not run again.
                let jobs: Vec<Job> = jobs.into_iter().filter(|job| !job.is_abandoned()).collect();
                if jobs.is_empty() {
                    continue;
                }
                match self.round(worker, hold(jobs), unsuccessful) {
                    Ok(Some(round)) => break round,
                    Ok(None) => {}
                    Err(end) => {
                        // The worker was lost with another half: these may have the next one.
                        self.put_back_all(waiting);
                        return Err(end);
                    }
                }
            };
        }
    }

    fn put_back_all(&self, waiting: Vec<Vec<Job>>) {
        for jobs in waiting {
            self.spec.queue.put_back(jobs);
        }
    }

    /// Whether a failed batch is run again in halves. Memory counts as the handler's failure: half
    /// a batch needs about half of it, and a single request that does not fit fails alone.
    fn may_split(&self, worker: &Worker, held: &[Option<Held>], failure: &RunFailure) -> bool {
        let wanted = self
            .spec
            .isolate_bad_requests
            .unwrap_or(worker.model.side_effect_free);
        let of_the_handler = matches!(
            failure,
            RunFailure::HandlerFailed
                | RunFailure::HandlerStatus { .. }
                | RunFailure::OutOfMemory
                | RunFailure::DeviceOutOfMemory
        );
        let untouched =
            |held: &Option<Held>| held.as_ref().is_some_and(|held| !held.job.has_begun());
        wanted && of_the_handler && held.len() > 1 && held.iter().all(untouched)
    }

    /// Repeats all live requests at each step; others join as there is room.
    fn serve_continuously(
        &self,
        worker: &mut Worker,
        unsuccessful: &mut u32,
    ) -> Result<std::convert::Infallible, End> {
        let mut live: Vec<Held> = Vec::new();
        let mut over_memory = None;
        loop {
            if live.is_empty()
                && let Some(failure) = over_memory
            {
                return Err(End::Lost(failure));
            }
            let kind = live.first().map(|held| held.job.request.kind);
            let joining = match kind {
                None => Some(self.next_batch(worker)?),
                Some(RequestKind::Describe) => None,
                // What is live is finished, however the slot or the worker is to end.
                Some(_) if self.control.stopping() || over_memory.is_some() => None,
                Some(kind) => {
                    let room = self.most_at_once().saturating_sub(live.len());
                    self.spec.queue.try_take(self.id, room, kind)
                }
            };
            let joining = joining.into_iter().flat_map(Batch::singly);
            live.extend(joining.map(Held::single));
            live.retain(|held| {
                let stays = !held.job.is_abandoned();
                if !stays {
                    let id = held.job.request.id.as_str();
                    tracing::info!(
                        request_id = id,
                        "Connection to client got closed; Removing job: {id}"
                    );
                }
                stays
            });
            if live.is_empty() {
                continue;
            }
            let Some(round) = self.round(worker, std::mem::take(&mut live), unsuccessful)? else {
                continue;
            };
            over_memory = over_memory.or_else(|| match &round.outcome {
                Err(failure) => self.over_memory([failure]),
                Ok(replies) => self.over_memory(failures_of(replies)),
            });
            live = self.step(worker, round);
        }
    }

    /// Answers what a step of a continuous batch has brought; what goes on is left.
    fn step(&self, worker: &Worker, round: Round) -> Vec<Held> {
        let replies = match round.outcome {
            Ok(replies) => replies,
            Err(failure) => {
                answer(round.held, Err(failure), round.ran);
                return Vec::new();
            }
        };
        let limit = self.unread_limit();
        let mut live = Vec::with_capacity(round.held.len());
        for (held, reply) in round.held.into_iter().zip(replies) {
            let Some(mut held) = held else { continue };
            if let Ok(reply) = &reply {
                self.end_sequences(reply);
            }
            match reply {
                Ok(reply) if goes_on(&reply) => {
                    held.part(reply, round.ran, limit, &worker.departures);
                    held.known = true;
                    live.push(held);
                }
                Ok(reply) => held.job.succeed(reply, round.ran),
                Err(failure) => {
                    held.job.ran(round.ran);
                    held.job.fail(ServingError::Run(failure));
                }
            }
        }
        live
    }

    /// Ends the sequences that a handler names in a reply.
    fn end_sequences(&self, reply: &Reply) {
        if self.spec.scheduling.sequences.is_none() {
            return;
        }
        let name = &self.spec.load.sequence_headers.end;
        let named = |(key, _): &&(String, String)| key.eq_ignore_ascii_case(name);
        let ids = reply.headers.iter().filter(named);
        let ids = ids.flat_map(|(_, ids)| ids.split(';'));
        self.spec.queue.end_sequences(ids.map(str::trim));
    }

    /// Waits for the next batch.
    fn next_batch(&self, worker: &Worker) -> Result<Batch, End> {
        self.slots.work_ended(&self.control);
        let stop = || self.control.stopping() || !worker.host.is_alive();
        self.wait_for_batch(&stop).ok_or_else(|| {
            if self.ending() {
                return End::Asked;
            }
            let during = "while it was idle";
            let lost = self.lost(&worker.host, &WireError::Closed, during, Duration::ZERO);
            End::LostIdle(lost)
        })
    }

    /// Waits for a batch until `stop` says so. A worker that has had nothing to do for long asks
    /// whether it may go; then it is told to end.
    pub(super) fn wait_for_batch(&self, stop: &impl Fn() -> bool) -> Option<Batch> {
        let idle_until = || self.slots.idle_until(&self.control);
        loop {
            match self.spec.queue.take(self.id, stop, idle_until) {
                Taken::Batch(batch) => {
                    self.control.has_work();
                    self.slots.cut();
                    return Some(batch);
                }
                Taken::Idle => self.slots.leave_idle(self.id),
                Taken::Stopped => return None,
            }
        }
    }

    /// Requests that its worker may have in one exchange.
    pub(super) fn most_at_once(&self) -> usize {
        let size = self.spec.limits.read().batch_size;
        let continuous = self.spec.load.exchange == Exchange::Continuous;
        if continuous && self.spec.scheduling.sequences.is_some() {
            // Each may have a request that ends it beside the one that goes on.
            size.saturating_mul(2)
        } else {
            size
        }
    }

    /// Bytes that one message of its worker may have while it has this many requests, or fewer.
    pub(super) fn max_payload_bytes(&self, requests: usize) -> u64 {
        let one = self.spec.load.max_response_bytes;
        let most = self.most_at_once().max(requests);
        let all = one.saturating_mul(most as u64);
        all.saturating_add(REPLY_SLACK_BYTES)
    }

    /// Bytes of a reply in parts that may wait for its caller.
    pub(super) fn unread_limit(&self) -> usize {
        usize::try_from(self.spec.load.max_response_bytes).unwrap_or(usize::MAX)
    }

    /// Hands a batch over and waits until it has run, passing on the parts of replies that come
    /// before. `None` when it could not be handed over; its jobs are answered.
    fn round(
        &self,
        worker: &mut Worker,
        held: Vec<Held>,
        unsuccessful: &mut u32,
    ) -> Result<Option<Round>, End> {
        let batch = Together::of(held.iter().map(|one| &one.job));
        let mut held: Vec<Option<Held>> = held.into_iter().map(Some).collect();
        let handed_over = Instant::now();
        for one in held.iter().flatten() {
            one.job.handed_over(handed_over, self.id, &batch);
        }
        let (sender, receiver) = worker.channel.halves();
        let items = held.iter().flatten();
        let items = items.map(|held| (&held.job.request, held.known));
        let departures = worker.departures.were_told();
        // They may have changed since the worker was started.
        let limit = self.spec.limits.read().response_timeout;
        receiver.limit_payload(self.max_payload_bytes(held.len()));
        let ranks = &mut worker.ranks;
        ranks.limit_sending(limit);
        let handed = sender
            .limit(limit)
            .and_then(|()| hand_over(sender, ranks, items, Payload::Shared, departures));
        if let Err(error) = handed {
            return self.not_handed_over(worker, held, &error).map(|()| None);
        }
        // Starts anew with each part.
        let mut due = handed_over.checked_add(limit);
        let lost: Loss = loop {
            let incoming = match receiver.receive_within(pause_until(due)) {
                Ok(Some(incoming)) => incoming,
                Ok(None) if due.is_some_and(|due| Instant::now() >= due) => {
                    break ranks.silent(true);
                }
                Ok(None) => {
                    if let Err(loss) = ranks.look() {
                        break loss;
                    }
                    for held in held.iter_mut().flatten() {
                        held.tell_departure(&worker.departures);
                    }
                    continue;
                }
                Err(error) => break error.into(),
            };
            match incoming.header() {
                Ok(WorkerReply::Done(done)) => {
                    let answered = Instant::now();
                    let BatchDone {
                        outcome,
                        metrics,
                        ran_micros,
                    } = done;
                    let outcome = match replies(outcome, incoming.payload, held.len()) {
                        Ok(outcome) => outcome,
                        Err(error) => break error.into(),
                    };
                    if let Err(loss) = ranks.agree(outcome.as_ref().err(), due) {
                        break loss;
                    }
                    *unsuccessful = 0;
                    self.answered();
                    self.record(&metrics, held.len(), answered);
                    return Ok(Some(Round {
                        held,
                        ran: Ran {
                            handed_over,
                            answered,
                            handler: Duration::from_micros(ran_micros),
                        },
                        outcome,
                    }));
                }
                Ok(WorkerReply::Chunks(chunks)) => {
                    due = Instant::now().checked_add(limit);
                    let way = (handed_over, &worker.departures);
                    if let Err(error) = self.pass_on(&mut held, chunks, incoming.payload, way) {
                        break error.into();
                    }
                }
                Ok(_) => {
                    break WireError::Malformed("words of a worker that answer no batch").into();
                }
                Err(error) => break error.into(),
            }
        };
        *unsuccessful += 1;
        tracing::warn!(
            worker = self.name(),
            request_id = ids(&held),
            "Number or consecutive unsuccessful inference {unsuccessful}"
        );
        let failure = self.lost_to(&worker.host, &lost, "while it ran a batch", limit);
        for job in jobs_of(held) {
            job.fail(ServingError::WorkerDied {
                out_of_memory: failure.out_of_memory,
            });
        }
        Err(End::Lost(failure))
    }

    /// Answers, or puts back, what could not be handed over.
    fn not_handed_over(
        &self,
        worker: &Worker,
        held: Vec<Option<Held>>,
        error: &WireError,
    ) -> Result<(), End> {
        let limit = self.spec.limits.read().response_timeout;
        let lost = |during| Err(End::Lost(self.lost(&worker.host, error, during, limit)));
        if matches!(error, WireError::Closed) {
            // They never reached a worker, so another may have them; except those that it would
            // not know from the start.
            let (begun, fresh): (Vec<_>, Vec<_>) = jobs_of(held).partition(Job::has_begun);
            for job in begun {
                job.fail(ServingError::WorkerDied {
                    out_of_memory: false,
                });
            }
            self.spec.queue.put_back(fresh);
            return lost("before it took a batch");
        }
        if matches!(error, WireError::TimedOut) {
            for job in jobs_of(held) {
                job.fail(ServingError::WorkerDied {
                    out_of_memory: false,
                });
            }
            return lost("while it was handed a batch");
        }
        let reason = error.to_string();
        tracing::warn!(
            worker = self.name(),
            reason,
            request_id = ids(&held),
            "a batch cannot be handed over"
        );
        for job in jobs_of(held) {
            let reason = reason.clone();
            job.fail(ServingError::NotHandedOver { reason });
        }
        if error.is_before_sending() {
            // It is the batch that cannot travel, not the worker.
            return Ok(());
        }
        lost("while it was handed a batch")
    }

    /// Passes parts of replies on. A failure in place of one ends its job.
    fn pass_on(
        &self,
        held: &mut [Option<Held>],
        chunks: Vec<Chunk<'_>>,
        payload: &[u8],
        (handed_over, departures): (Instant, &Departures),
    ) -> Result<(), WireError> {
        let limit = self.unread_limit();
        let answered = Instant::now();
        each_part(chunks, payload, |id, handler, part| {
            let named = |held: &&mut Option<Held>| {
                let held = held.as_ref();
                held.is_some_and(|held| held.job.request.id.as_str() == id)
            };
            let Some(slot) = held.iter_mut().find(named) else {
                return;
            };
            match (part, slot) {
                (Ok(reply), Some(held)) => {
                    let ran = Ran {
                        handed_over,
                        answered,
                        handler,
                    };
                    held.part(reply, ran, limit, departures);
                }
                (Err(failure), slot) => {
                    if let Some(held) = slot.take() {
                        held.job.fail(ServingError::Run(failure));
                    }
                }
                (Ok(_), None) => {}
            }
        })
    }

    /// Records what a handler measured, and what the dispatcher added once its worker had answered.
    pub(super) fn record(&self, events: &[MetricEvent<'_>], size: usize, answered: Instant) {
        let (spec, surroundings) = (&self.spec, &self.spec.surroundings);
        let handlers = &surroundings.handler_metrics;
        handlers.record(&spec.metrics.owner, &spec.model, events);
        let core = &surroundings.core_metrics;
        spec.metrics.batch_done(core, size, answered.elapsed());
    }
}

/// How long to wait before looking around: not past the time that the worker has. The same in all
/// waits but the last ones.
fn pause_until(due: Option<Instant>) -> Duration {
    due.map_or(LOOK_EVERY, |due| {
        let left = due.saturating_duration_since(Instant::now());
        left.clamp(Duration::from_millis(1), LOOK_EVERY)
    })
}

fn hold(jobs: Vec<Job>) -> Vec<Held> {
    jobs.into_iter().map(Held::new).collect()
}

/// The requests of a batch, for the log; of many the first ones, and how many more there are.
fn ids(held: &[Option<Held>]) -> String {
    let all = held
        .iter()
        .flatten()
        .map(|held| held.job.request.id.as_str());
    let mut ids = all.clone().take(LOGGED_IDS).collect::<Vec<_>>().join(",");
    let more = all.count().saturating_sub(LOGGED_IDS);
    if more > 0 {
        ids.push_str(&format!(",+{more}"));
    }
    ids
}

fn jobs_of(held: Vec<Option<Held>>) -> impl Iterator<Item = Job> {
    held.into_iter().flatten().map(|held| held.job)
}

fn answer(held: Vec<Option<Held>>, outcome: Result<Replies, RunFailure>, ran: Ran) {
    match outcome {
        Err(failure) => {
            for job in jobs_of(held) {
                job.ran(ran);
                job.fail(ServingError::Run(failure.clone()));
            }
        }
        Ok(replies) => {
            for (held, reply) in held.into_iter().zip(replies) {
                let Some(Held { job, .. }) = held else {
                    continue;
                };
                match reply {
                    Ok(reply) => job.succeed(reply, ran),
                    Err(failure) => {
                        job.ran(ran);
                        job.fail(ServingError::Run(failure));
                    }
                }
            }
        }
    }
}

fn failures_of(replies: &Replies) -> impl Iterator<Item = &RunFailure> {
    replies.iter().filter_map(|reply| reply.as_ref().err())
}

fn goes_on(reply: &Reply) -> bool {
    let set = |(name, value): &(String, String)| {
        name.eq_ignore_ascii_case(STREAM_NEXT) && value.eq_ignore_ascii_case("true")
    };
    reply.headers.iter().any(set)
}

/// Has a worker that serves nobody yet answer a batch.
pub(super) fn ask(
    (channel, ranks): (&mut Channel, &mut Ranks),
    requests: &[InferRequest],
    deadline: Option<Instant>,
) -> Result<Result<Replies, RunFailure>, Loss> {
    let (sender, receiver) = channel.halves();
    let items = requests.iter().map(|request| (request, false));
    hand_over(sender, ranks, items, Payload::Shared, false)?;
    loop {
        let incoming = match receiver.receive(deadline) {
            Err(WireError::TimedOut) => return Err(ranks.silent(true)),
            incoming => incoming?,
        };
        match incoming.header()? {
            WorkerReply::Chunks(_) => {}
            WorkerReply::Done(done) => {
                let replies = replies(done.outcome, incoming.payload, requests.len())?;
                ranks.agree(replies.as_ref().err(), deadline)?;
                return Ok(replies);
            }
            WorkerReply::Answered(done) => {
                let reply = reply(done.outcome, &mut { incoming.payload })?;
                return Ok(Ok(vec![reply]));
            }
            WorkerReply::Loaded(_) | WorkerReply::LoadFailed(_) => {
                return Err(WireError::Malformed("a worker that loads twice").into());
            }
        }
    }
}

/// How the values of a request travel.
#[derive(Debug, Clone, Copy)]
pub(super) enum Payload {
    /// In the shared buffer if they are large: the worker has answered what came before.
    Shared,
    /// Through the socket.
    Inline,
}

impl Payload {
    pub(super) fn send(
        self,
        sender: &mut Sender,
        run: &WorkerRequest<'_>,
        values: &[&[u8]],
    ) -> Result<(), WireError> {
        match self {
            Self::Shared => sender.send_payload(run, values),
            Self::Inline => sender.send_inline(run, values),
        }
    }
}

/// Sends requests; one that the worker knows goes without its parts. `departures` is what
/// [`Departures::were_told`] says.
pub(super) fn hand_over<'j>(
    sender: &mut Sender,
    ranks: &mut Ranks,
    requests: impl Iterator<Item = (&'j InferRequest, bool)>,
    way: Payload,
    departures: bool,
) -> Result<(), WireError> {
    let mut values: Vec<&[u8]> = Vec::with_capacity(requests.size_hint().0);
    let items = requests.map(|(request, known)| {
        let parts = if known { &[][..] } else { &request.parts };
        let parts = parts.iter().map(|part| {
            values.push(&part.value);
            RunPart {
                name: &part.name,
                content_type: &part.content_type,
                value_bytes: part.value.len() as u64,
            }
        });
        RunItem {
            request_id: request.id.as_str(),
            parts: parts.collect(),
            headers: request
                .headers
                .iter()
                .map(|(k, v)| (k.as_str(), v.as_str()))
                .collect(),
        }
    });
    let run = WorkerRequest::Run(RunBatch {
        departures,
        items: items.collect(),
    });
    way.send(sender, &run, &values)?;
    ranks.hand_over(&run, &values, way);
    Ok(())
}

/// The replies of a finished batch of `jobs` requests, copied out of the channel's buffer.
fn replies(
    outcome: BatchOutcome<'_>,
    payload: &[u8],
    jobs: usize,
) -> Result<Result<Replies, RunFailure>, WireError> {
    let items = match outcome {
        BatchOutcome::Failed(failure) => return Ok(Err(failure)),
        BatchOutcome::Items(items) => items,
    };
    if items.len() != jobs {
        return Err(WireError::Malformed(
            "a reply for another number of requests",
        ));
    }
    let mut rest = payload;
    let items = items.into_iter().map(|item| reply(item, &mut rest));
    items.collect::<Result<_, _>>().map(Ok)
}

/// Calls `part` with each part of a reply, and how long its request had run.
pub(super) fn each_part(
    chunks: Vec<Chunk<'_>>,
    payload: &[u8],
    mut part: impl FnMut(&str, Duration, Result<Reply, RunFailure>),
) -> Result<(), WireError> {
    let mut rest = payload;
    for chunk in chunks {
        let ran = Duration::from_micros(chunk.ran_micros);
        part(chunk.request_id, ran, reply(chunk.outcome, &mut rest)?);
    }
    Ok(())
}

/// One reply, whose body is the next of the payload.
pub(super) fn reply(
    item: ItemOutcome<'_>,
    rest: &mut &[u8],
) -> Result<Result<Reply, RunFailure>, WireError> {
    let reply = match item {
        ItemOutcome::Failed(failure) => return Ok(Err(failure)),
        ItemOutcome::Reply(reply) => reply,
    };
    let bytes = usize::try_from(reply.body_bytes).unwrap_or(usize::MAX);
    let (body, after) = rest
        .split_at_checked(bytes)
        .ok_or(WireError::Malformed("bodies longer than their payload"))?;
    *rest = after;
    let headers = reply.headers.into_iter();
    Ok(Ok(Reply {
        status: reply.status,
        reason: reply.reason.to_owned(),
        headers: headers.map(|(k, v)| (k.to_owned(), v.to_owned())).collect(),
        body: Bytes::copy_from_slice(body),
    }))
}
