//! The echo backend: answers a request with its first part's value and type. It takes the time it
//! is told to ([`EchoBehaviour`]) and misbehaves when a request asks for it, so that the queue,
//! the pool and the edges are tested without torch or Python.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use ts_wire::frame::{
    BackendKind, EchoBehaviour, Exchange, LoadFailure, LoadFailureKind, LoadModel, LoadedModel,
    RunFailure,
};

use crate::{Backend, BackendFactory, Batch, BatchItem, BatchResult, Item, Output};

/// Header that makes the echo backend misbehave: `panic`, `abort`, `hang`, `raise`,
/// `raise-batch` (which fails the whole batch), `out-of-memory`, `status=<code>`,
/// `delay=<milliseconds>`.
const FAULT_HEADER: &str = "x-echo-fault";

/// Header with the number of the part, from 0, at which it misbehaves.
const FAULT_AT_HEADER: &str = "x-echo-fault-at";

/// Header with the process of a group that misbehaves; without it all do.
const FAULT_RANK_HEADER: &str = "x-echo-fault-rank";

/// Header that asks for a reply in this many parts: each is its number, the value and a newline.
const STREAM_HEADER: &str = "x-echo-stream";

/// Says under continuous batching whether a request comes again.
const STREAM_NEXT: &str = "ts_stream_next";

/// Builds echo backends, and nothing else.
pub struct EchoFactory;

impl BackendFactory for EchoFactory {
    fn load(
        &self,
        model: &LoadModel,
        output: &Arc<Output>,
    ) -> Result<Box<dyn Backend>, LoadFailure> {
        if model.backend != BackendKind::Echo {
            return Err(LoadFailure {
                kind: LoadFailureKind::Permanent,
                message: "this host runs the echo backend only; a Python model needs the plugin"
                    .to_owned(),
            });
        }
        let misbehaves = model.echo.load_rank.is_none_or(|rank| rank == model.rank);
        if misbehaves {
            std::thread::sleep(Duration::from_micros(model.echo.load_micros));
        }
        match &model.echo.load_error {
            Some(message) if misbehaves => Err(LoadFailure {
                kind: LoadFailureKind::Transient,
                message: message.clone(),
            }),
            _ => Ok(Box::new(Echo {
                behaviour: model.echo.clone(),
                output: Arc::clone(output),
                live: (model.exchange == Exchange::Continuous).then(HashMap::new),
            })),
        }
    }
}

struct Echo {
    behaviour: EchoBehaviour,
    output: Arc<Output>,
    /// Under continuous batching, the requests that come again.
    live: Option<HashMap<String, Live>>,
}

/// A request between two steps.
struct Live {
    step: usize,
    content_type: String,
    value: Vec<u8>,
}

impl Backend for Echo {
    fn describe(&self) -> LoadedModel {
        LoadedModel {
            side_effect_free: true,
        }
    }

    fn run(&mut self, batch: &Batch<'_>) -> BatchResult {
        match &mut self.live {
            None => run(&self.behaviour, &self.output, batch),
            Some(live) => step(&self.behaviour, &self.output, live, batch),
        }
    }

    fn start(&mut self, item: &BatchItem<'_>) {
        let (behaviour, output) = (self.behaviour.clone(), Arc::clone(&self.output));
        let id = item.request_id.to_owned();
        let owned = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            let pairs = pairs.iter();
            pairs
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect()
        };
        let headers = owned(&item.headers);
        let (name, content_type, value) = first_part(item);
        let (name, content_type) = (name.to_owned(), content_type.to_owned());
        let value = value.to_vec();
        let body = move || {
            let item = BatchItem {
                request_id: &id,
                headers: headers
                    .iter()
                    .map(|(k, v)| (k.as_str(), v.as_str()))
                    .collect(),
                parts: vec![(&name, &content_type, &value)],
            };
            let batch = Batch { items: vec![item] };
            let ran = catch_unwind(AssertUnwindSafe(|| run(&behaviour, &output, &batch)));
            let Ok(result) = ran else {
                // As a panic of a batch does.
                output.hang_up();
                return;
            };
            let item = result.items.map_or_else(Err, |mut items| {
                items.pop().unwrap_or(Err(RunFailure::LengthMismatch))
            });
            let _server_may_be_gone = output.answer(&id, &item, &result.metrics);
        };
        let spawned = std::thread::Builder::new()
            .name("echo".to_owned())
            .spawn(body);
        if spawned.is_err() {
            let failed = Err(RunFailure::OutOfMemory);
            let _server_may_be_gone = self.output.answer(item.request_id, &failed, &[]);
        }
    }

    /// A request that hangs looks for this itself.
    fn cancel(&mut self, _request_id: &str) {}
}

/// Runs a batch to its end, in as many steps as the longest stream in it.
fn run(behaviour: &EchoBehaviour, output: &Output, batch: &Batch<'_>) -> BatchResult {
    let size = batch.items.len();
    let mut results: Vec<Option<Result<Item, RunFailure>>> = vec![None; size];
    let steps = batch.items.iter().map(stream_length).max().unwrap_or(1);
    for step in 0..steps {
        take_time(
            behaviour,
            results.iter().filter(|item| item.is_none()).count(),
        );
        let mut chunks = Vec::new();
        for (item, result) in batch.items.iter().zip(&mut results) {
            if result.is_some() {
                continue;
            }
            if fault(item, step, output.rank()) == Some("raise-batch") {
                return failed(RunFailure::HandlerFailed);
            }
            let length = stream_length(item);
            let (_, content_type, value) = first_part(item);
            let made = answer(output, item, size, step, (content_type, value));
            if made.is_err() || step + 1 == length {
                *result = Some(made);
            } else {
                chunks.push((item.request_id, made));
            }
        }
        let parts: Vec<_> = chunks.iter().map(|(id, part)| (*id, part)).collect();
        if !parts.is_empty() && output.chunks(&parts).is_ok_and(|sent| sent.all_left) {
            return failed(RunFailure::HandlerFailed);
        }
    }
    let items = results
        .into_iter()
        .map(|result| result.unwrap_or(Err(RunFailure::LengthMismatch)));
    BatchResult {
        items: Ok(items.collect()),
        metrics: Vec::new(),
    }
}

/// One step of a continuous batch.
fn step(
    behaviour: &EchoBehaviour,
    output: &Output,
    live: &mut HashMap<String, Live>,
    batch: &Batch<'_>,
) -> BatchResult {
    take_time(behaviour, batch.items.len());
    // What the server no longer sends has left.
    live.retain(|id, _| batch.items.iter().any(|item| item.request_id == id));
    let items = batch.items.iter().map(|item| {
        let known = live.entry(item.request_id.to_owned()).or_insert_with(|| {
            let (_, content_type, value) = first_part(item);
            Live {
                step: 0,
                content_type: content_type.to_owned(),
                value: value.to_vec(),
            }
        });
        let part = (known.content_type.as_str(), known.value.as_slice());
        let mut made = answer(output, item, batch.items.len(), known.step, part);
        known.step += 1;
        if let Ok(item_made) = &mut made
            && stream_length(item) > 1
        {
            let next = (known.step < stream_length(item)).to_string();
            item_made.headers.push((STREAM_NEXT.to_owned(), next));
        }
        made
    });
    BatchResult {
        items: Ok(items.collect()),
        metrics: Vec::new(),
    }
}

fn failed(failure: RunFailure) -> BatchResult {
    BatchResult {
        items: Err(failure),
        metrics: Vec::new(),
    }
}

fn take_time(behaviour: &EchoBehaviour, items: usize) {
    let micros = behaviour.batch_micros + behaviour.item_micros * items as u64;
    if micros > 0 {
        std::thread::sleep(Duration::from_micros(micros));
    }
}

fn first_part<'a>(item: &BatchItem<'a>) -> (&'a str, &'a str, &'a [u8]) {
    item.parts.first().copied().unwrap_or(("body", "", &[]))
}

fn header<'a>(item: &BatchItem<'a>, name: &str) -> Option<&'a str> {
    let found = item.headers.iter().find(|(key, _)| *key == name);
    found.map(|(_, value)| *value)
}

/// Parts that the reply to a request has.
fn stream_length(item: &BatchItem<'_>) -> usize {
    let length = header(item, STREAM_HEADER).and_then(|length| length.parse().ok());
    length.unwrap_or(1).max(1)
}

fn fault<'a>(item: &BatchItem<'a>, step: usize, own_rank: u32) -> Option<&'a str> {
    let at = header(item, FAULT_AT_HEADER).and_then(|at| at.parse().ok());
    let rank = header(item, FAULT_RANK_HEADER).and_then(|rank| rank.parse::<u32>().ok());
    header(item, FAULT_HEADER)
        .filter(|_| at.unwrap_or(0) == step && rank.is_none_or(|rank| rank == own_rank))
}

fn answer(
    output: &Output,
    item: &BatchItem<'_>,
    batch_size: usize,
    step: usize,
    (content_type, value): (&str, &[u8]),
) -> Result<Item, RunFailure> {
    let mut status = 200;
    match fault(item, step, output.rank()) {
        None => {}
        Some("panic") => panic!("a panic that request {} asked for", item.request_id),
        Some("abort") => std::process::abort(),
        Some("hang") => {
            while !output.is_cancelled(item.request_id) {
                std::thread::sleep(Duration::from_millis(10));
            }
            return Err(RunFailure::HandlerFailed);
        }
        Some("raise") => return Err(RunFailure::HandlerFailed),
        Some("out-of-memory") => return Err(RunFailure::OutOfMemory),
        Some(other) => match other.split_once('=') {
            Some(("status", code)) if code.parse::<u16>().is_ok() => {
                status = code.parse().unwrap_or(status);
            }
            Some(("delay", millis)) if millis.parse::<u64>().is_ok() => {
                let millis = millis.parse().unwrap_or_default();
                std::thread::sleep(Duration::from_millis(millis));
            }
            _ => {
                let message = format!("unknown fault `{other}` in `{FAULT_HEADER}`");
                return Err(RunFailure::HandlerStatus { code: 400, message });
            }
        },
    }
    let mut headers = vec![("x-batch-size".to_owned(), batch_size.to_string())];
    if !content_type.is_empty() {
        headers.push(("content-type".to_owned(), content_type.to_owned()));
    }
    let body = if stream_length(item) == 1 {
        Bytes::copy_from_slice(value)
    } else {
        let number = format!("{step} ");
        Bytes::from([number.as_bytes(), value, b"\n"].concat())
    };
    Ok(Item {
        status,
        reason: String::new(),
        headers,
        body,
    })
}
