//! A worker thread: builds its backend, then runs one batch after another until its channel ends.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ts_types::with_causes;
use ts_wire::frame::{
    BatchDone, BatchOutcome, ItemOutcome, ItemReply, LoadModel, MetricEvent, RunBatch, RunFailure,
    WorkerReply, WorkerRequest,
};
use ts_wire::{Channel, WireError};

use crate::{BackendFactory, Batch, BatchItem, BatchResult, HostError};

/// The server bounds every body before it queues it, so what it sends needs no second bound here.
const MAX_BATCH_PAYLOAD_BYTES: u64 = u64::MAX >> 1;

/// As much as the first thread of a process usually has. Python's limit on recursion counts on it,
/// and the two MiB of Rust's threads overflow before it is reached.
const STACK_BYTES: usize = 8 << 20;

/// Starts a worker on its socket. The thread ends, and the socket closes, when the server asks for
/// it, when the model cannot be loaded, and after a panic; the server tells these apart by what it
/// was told before.
pub(crate) fn spawn(
    worker: u32,
    socket: OwnedFd,
    factory: Arc<dyn BackendFactory>,
) -> Result<(), HostError> {
    let body = move || {
        let mut channel = Channel::new(socket, MAX_BATCH_PAYLOAD_BYTES);
        let ended = catch_unwind(AssertUnwindSafe(|| work(&mut channel, &*factory)));
        if let Ok(Err(error)) = ended
            && !matches!(error, WireError::Closed)
        {
            log(worker, &with_causes(&error));
        }
    };
    std::thread::Builder::new()
        .name(format!("worker-{worker}"))
        .stack_size(STACK_BYTES)
        .spawn(body)
        .map(drop)
        .map_err(|source| HostError::System {
            call: "spawning a worker thread",
            source,
        })
}

fn work(channel: &mut Channel, factory: &dyn BackendFactory) -> Result<(), WireError> {
    let model = match channel.receive(None)?.header()? {
        WorkerRequest::Load(model) => model,
        WorkerRequest::Run(_) => return Err(WireError::Malformed("a batch before a model")),
        WorkerRequest::Stop => return Ok(()),
    };
    let mut backend = match factory.load(&model) {
        Ok(backend) => backend,
        Err(failure) => return channel.send(&WorkerReply::LoadFailed(failure), None),
    };
    channel.send(&WorkerReply::Loaded, None)?;
    loop {
        let result = {
            let incoming = channel.receive(None)?;
            match incoming.header()? {
                WorkerRequest::Run(run) => backend.run(&batch_of(run, incoming.payload)?),
                WorkerRequest::Stop => return Ok(()),
                WorkerRequest::Load(_) => return Err(WireError::Malformed("a second model")),
            }
        };
        send_result(channel, &model, &result)?;
    }
}

/// Cuts the payload into the parts' values.
fn batch_of<'a>(run: RunBatch<'a>, payload: &'a [u8]) -> Result<Batch<'a>, WireError> {
    let mut rest = payload;
    let mut items = Vec::with_capacity(run.items.len());
    for item in run.items {
        let mut parts = Vec::with_capacity(item.parts.len());
        for part in item.parts {
            let bytes = usize::try_from(part.value_bytes).unwrap_or(usize::MAX);
            let (value, after) = rest
                .split_at_checked(bytes)
                .ok_or(WireError::Malformed("parts longer than their payload"))?;
            rest = after;
            parts.push((part.name, part.content_type, value));
        }
        items.push(BatchItem {
            request_id: item.request_id,
            headers: item.headers,
            parts,
        });
    }
    Ok(Batch { items })
}

fn send_result(
    channel: &mut Channel,
    model: &LoadModel,
    result: &BatchResult,
) -> Result<(), WireError> {
    let mut bodies = Vec::new();
    let outcome = match &result.items {
        Err(failure) => BatchOutcome::Failed(failure.clone()),
        Ok(items) => {
            bodies.reserve(items.len());
            let outcomes = items.iter().map(|item| match item {
                Err(failure) => ItemOutcome::Failed(failure.clone()),
                Ok(item) if item.body.len() as u64 > model.max_response_bytes => {
                    ItemOutcome::Failed(RunFailure::ReplyTooLarge {
                        bytes: item.body.len() as u64,
                        limit: model.max_response_bytes,
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
            });
            BatchOutcome::Items(outcomes.collect())
        }
    };
    let metrics = result.metrics.iter().map(|metric| MetricEvent {
        name: &metric.name,
        value: metric.value,
        unit: &metric.unit,
        kind: metric.kind,
        dimensions: borrow_pairs(&metric.dimensions),
    });
    let done = WorkerReply::Done(BatchDone {
        outcome,
        metrics: metrics.collect(),
    });
    channel.send_payload(&done, &bodies)
}

fn borrow_pairs(pairs: &[(String, String)]) -> Vec<(&str, &str)> {
    pairs
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect()
}

#[expect(
    clippy::print_stderr,
    reason = "a host's standard error is the model log"
)]
fn log(worker: u32, text: &str) {
    eprintln!("worker {worker}: {text}");
}
