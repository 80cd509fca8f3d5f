//! The one seam between a worker and what executes a model.

use std::sync::Arc;

use bytes::Bytes;
use ts_wire::frame::{LoadFailure, LoadModel, LoadedModel, MetricKind, RunFailure};

use crate::Output;

/// Runs batches. Owned by one worker thread and called by no other.
pub trait Backend {
    /// What the model says of itself.
    fn describe(&self) -> LoadedModel;

    /// Runs one batch. Failures of the model are part of the result; a panic ends the worker.
    fn run(&mut self, batch: &Batch<'_>) -> BatchResult;

    /// Starts one request and returns; [`Output::answer`] takes what comes of it. Called instead of
    /// [`Backend::run`] under [`Exchange::Asynchronous`](ts_wire::frame::Exchange::Asynchronous).
    fn start(&mut self, item: &BatchItem<'_>);

    /// Breaks a request off that was started; it still has to be answered.
    fn cancel(&mut self, request_id: &str);
}

/// Builds backends. Shared by the worker threads of a host.
pub trait BackendFactory: Send + Sync {
    /// Builds a backend inside the worker's own thread, where it stays. What it says before a batch
    /// ends goes to `output`.
    ///
    /// # Errors
    /// [`LoadFailure`] says whether another try may help.
    fn load(
        &self,
        model: &LoadModel,
        output: &Arc<Output>,
    ) -> Result<Box<dyn Backend>, LoadFailure>;
}

/// The requests of one batch; texts and values are borrowed from the receive buffer.
#[derive(Debug)]
pub struct Batch<'a> {
    /// At least one.
    pub items: Vec<BatchItem<'a>>,
}

/// One request.
#[derive(Debug, Clone)]
pub struct BatchItem<'a> {
    /// The server's id for it.
    pub request_id: &'a str,
    /// Headers, names in lower case.
    pub headers: Vec<(&'a str, &'a str)>,
    /// Fields of the body: name, media type, value.
    pub parts: Vec<(&'a str, &'a str, &'a [u8])>,
}

/// What came of a batch.
#[derive(Debug)]
pub struct BatchResult {
    /// One result per request, or one failure for them all.
    pub items: Result<Vec<Result<Item, RunFailure>>, RunFailure>,
    /// Metrics that the handler recorded.
    pub metrics: Vec<Metric>,
}

/// The answer to one request.
#[derive(Debug, Clone)]
pub struct Item {
    /// HTTP status.
    pub status: u16,
    /// Reason phrase, often empty.
    pub reason: String,
    /// Headers that the handler set.
    pub headers: Vec<(String, String)>,
    /// Body; may be memory that the interpreter owns.
    pub body: Bytes,
}

/// One value of a metric.
#[derive(Debug)]
pub struct Metric {
    /// Name.
    pub name: String,
    /// Value.
    pub value: f64,
    /// Unit as written.
    pub unit: String,
    /// How values combine.
    pub kind: MetricKind,
    /// Labels.
    pub dimensions: Vec<(String, String)>,
    /// The requests that it concerns, between commas.
    pub request_ids: String,
}
