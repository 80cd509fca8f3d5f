//! The echo backend: answers a request with its first part's value and type. It takes the time it
//! is told to ([`EchoBehaviour`]) and misbehaves when a request asks for it, so that the queue,
//! the pool and the edges are tested without torch or Python.

use std::time::Duration;

use bytes::Bytes;
use ts_wire::frame::{
    BackendKind, EchoBehaviour, LoadFailure, LoadFailureKind, LoadModel, RunFailure,
};

use crate::{Backend, BackendFactory, Batch, BatchItem, BatchResult, Item};

/// Header that makes the echo backend misbehave: `panic`, `abort`, `hang`, `raise`,
/// `out-of-memory`, `status=<code>`.
const FAULT_HEADER: &str = "x-echo-fault";

/// Builds echo backends, and nothing else.
pub struct EchoFactory;

impl BackendFactory for EchoFactory {
    fn load(&self, model: &LoadModel) -> Result<Box<dyn Backend>, LoadFailure> {
        if model.backend != BackendKind::Echo {
            return Err(LoadFailure {
                kind: LoadFailureKind::Permanent,
                message: "this host runs the echo backend only; a Python model needs the plugin"
                    .to_owned(),
            });
        }
        std::thread::sleep(Duration::from_micros(model.echo.load_micros));
        match &model.echo.load_error {
            Some(message) => Err(LoadFailure {
                kind: LoadFailureKind::Transient,
                message: message.clone(),
            }),
            None => Ok(Box::new(Echo {
                behaviour: model.echo.clone(),
            })),
        }
    }
}

struct Echo {
    behaviour: EchoBehaviour,
}

impl Backend for Echo {
    fn run(&mut self, batch: &Batch<'_>) -> BatchResult {
        let size = batch.items.len();
        let micros = self.behaviour.batch_micros + self.behaviour.item_micros * size as u64;
        if micros > 0 {
            std::thread::sleep(Duration::from_micros(micros));
        }
        let items = batch.items.iter().map(|item| answer(item, size)).collect();
        BatchResult {
            items: Ok(items),
            metrics: Vec::new(),
        }
    }
}

fn answer(item: &BatchItem<'_>, batch_size: usize) -> Result<Item, RunFailure> {
    let header = |name| {
        item.headers
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| *value)
    };
    let mut status = 200;
    match header(FAULT_HEADER) {
        None => {}
        Some("panic") => panic!("a panic that request {} asked for", item.request_id),
        Some("abort") => std::process::abort(),
        Some("hang") => std::thread::sleep(Duration::from_secs(3600)),
        Some("raise") => return Err(RunFailure::HandlerFailed),
        Some("out-of-memory") => return Err(RunFailure::OutOfMemory),
        Some(other) => match other
            .strip_prefix("status=")
            .and_then(|code| code.parse().ok())
        {
            Some(code) => status = code,
            None => {
                let message = format!("unknown fault `{other}` in `{FAULT_HEADER}`");
                return Err(RunFailure::HandlerStatus { code: 400, message });
            }
        },
    }
    let (_, content_type, value) = item.parts.first().copied().unwrap_or(("body", "", &[]));
    let mut headers = vec![("x-batch-size".to_owned(), batch_size.to_string())];
    if !content_type.is_empty() {
        headers.push(("content-type".to_owned(), content_type.to_owned()));
    }
    Ok(Item {
        status,
        reason: String::new(),
        headers,
        body: Bytes::copy_from_slice(value),
    })
}
