//! A worker thread: builds its backend, then runs one batch after another until its channel ends.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use ts_types::with_causes;
use ts_wire::frame::{Exchange, RunBatch, WorkerReply, WorkerRequest};
use ts_wire::{Channel, Departed, WireError};

use crate::{BackendFactory, Batch, BatchItem, HostError, Output};

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
        let channel = Channel::new(socket, MAX_BATCH_PAYLOAD_BYTES);
        let ended = catch_unwind(AssertUnwindSafe(|| work(channel, &*factory)));
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

fn work(channel: Channel, factory: &dyn BackendFactory) -> Result<(), WireError> {
    let (sender, mut receiver) = channel.split();
    let (model, departed) = {
        let incoming = receiver.receive(None)?;
        let model = match incoming.header()? {
            WorkerRequest::Load(model) => model,
            WorkerRequest::Stop => return Ok(()),
            WorkerRequest::Run(_) | WorkerRequest::Cancel { .. } => {
                return Err(WireError::Malformed("a batch before a model"));
            }
        };
        let departed = incoming
            .descriptor
            .ok_or(WireError::Malformed("a model without its second socket"))?;
        (model, Departed::new(departed))
    };
    let output = Output::new(sender, departed, model.max_response_bytes, model.rank);
    let output = Arc::new(output);
    let _ends_with_this_thread = HangUpAtEnd(&output);
    let mut backend = match factory.load(&model, &output) {
        Ok(backend) => backend,
        Err(failure) => return output.say(&WorkerReply::LoadFailed(failure)),
    };
    output.say(&WorkerReply::Loaded(backend.describe()))?;
    let asynchronous = model.exchange == Exchange::Asynchronous;
    loop {
        let (result, ran) = {
            let incoming = receiver.receive(None)?;
            match incoming.header()? {
                WorkerRequest::Run(run) => {
                    let departures = run.departures;
                    let batch = batch_of(run, incoming.payload)?;
                    output.begin(&batch.items, departures);
                    if asynchronous {
                        for item in &batch.items {
                            backend.start(item);
                        }
                        continue;
                    }
                    let begun = Instant::now();
                    let result = backend.run(&batch);
                    (result, begun.elapsed())
                }
                WorkerRequest::Cancel { request_id } => {
                    output.cancel(request_id);
                    backend.cancel(request_id);
                    continue;
                }
                WorkerRequest::Stop => return Ok(()),
                WorkerRequest::Load(_) => return Err(WireError::Malformed("a second model")),
            }
        };
        output.end(&result, ran)?;
    }
}

/// Closes the channel with its thread, whoever else still holds the output.
struct HangUpAtEnd<'o>(&'o Output);

impl Drop for HangUpAtEnd<'_> {
    fn drop(&mut self) {
        self.0.hang_up();
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

#[expect(
    clippy::print_stderr,
    reason = "a host's standard error is the model log"
)]
fn log(worker: u32, text: &str) {
    eprintln!("worker {worker}: {text}");
}
