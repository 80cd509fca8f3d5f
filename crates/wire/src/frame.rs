//! The messages. Those of the hot path borrow their texts from the receive buffer.
//!
//! A host has one *control* channel (its standard input at start) and one channel per worker, so
//! that a worker's replies never wait behind another's.
//!
//! | channel | server → host | host → server |
//! |---|---|---|
//! | control | [`HostSetup`], or [`ForkedSetup`] to a forked one; then [`ControlRequest`] | [`HostReply`] |
//! | control of the zygote | [`HostSetup`], then [`ZygoteRequest`] | [`HostReply`], then [`ZygoteReply`] |
//! | worker | [`WorkerRequest`] | [`WorkerReply`] |

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The first message to a new host.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HostSetup {
    /// What to load before any worker starts; `None` leaves the host with the echo backend.
    pub python: Option<PythonPlaces>,
    /// Serve no workers but fork hosts; see [`ZygoteRequest`].
    pub zygote: bool,
}

/// Where the Python side lives; found once by the server, see `serving::pool::python`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PythonPlaces {
    /// The plugin, built for this Python's minor version.
    pub plugin: PathBuf,
    /// The virtual environment's interpreter.
    pub executable: PathBuf,
    /// `sys.prefix` of that interpreter, compared after start: a wrong path does not fail, it
    /// silently loses the environment.
    pub prefix: PathBuf,
    /// The shared libpython.
    pub libpython: PathBuf,
    /// `torch/lib` of the wheel; `None` when torch is not installed.
    pub torch_lib: Option<PathBuf>,
    /// The torch version found there.
    pub torch_version: Option<String>,
    /// The folder that holds the `ts` package.
    pub handlers: PathBuf,
}

/// Server to host, on the control channel.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum ControlRequest {
    /// Start a worker thread on the socket that comes with this message.
    AddWorker {
        /// Names the thread.
        worker: u32,
    },
}

/// Host to server, on the control channel.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum HostReply {
    /// The host can take workers.
    Ready,
    /// It cannot, and will end.
    Failed {
        /// Why, in one line.
        message: String,
    },
}

/// Server to zygote, on its control channel. Each is answered by one [`ZygoteReply`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum ZygoteRequest {
    /// Import these modules, so that every host that is forked from now on has them.
    Preload {
        /// Their names.
        modules: Vec<String>,
    },
    /// Fork a host, whose control socket comes with this message.
    Fork {
        /// Modules that the model brings itself. The zygote's may not take their place.
        own_modules: Vec<String>,
    },
}

/// Zygote to server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ZygoteReply {
    /// The modules are imported, those apart that are installed and did not import.
    Preloaded {
        /// Why one did not, in one line each.
        failed: Vec<String>,
    },
    /// A host runs, as a child of the server.
    Forked {
        /// Its process.
        pid: u32,
    },
    /// A module that it has imported would take the place of the model's own.
    Declined {
        /// The module.
        module: String,
    },
    /// It cannot be forked from: a module has started threads, or the system refused.
    Refused {
        /// Why, in one line.
        message: String,
    },
}

/// Server to a forked host, its first messages: both outputs, then the beginning.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum ForkedSetup {
    /// The pipe that comes with this message is the standard output.
    Stdout,
    /// The pipe that comes with this message is the standard error.
    Stderr,
    /// Take this up and answer with [`HostReply`].
    Begin {
        /// Variables that differ from the zygote's, `None` for those to remove.
        environment: Vec<(String, Option<String>)>,
        /// Threads of numeric libraries that were loaded, and told to have one, before the fork.
        threads: u32,
    },
}

/// Server to worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum WorkerRequest<'a> {
    /// Build the backend. The first message on every worker channel; its descriptor is the worker's
    /// end of [`Departures`](crate::Departures).
    Load(Box<LoadModel>),
    /// Run one batch; the payload holds the parts' values, one after another.
    #[serde(borrow)]
    Run(RunBatch<'a>),
    /// Under [`Exchange::Asynchronous`]: break a request off; it has taken too long.
    Cancel {
        /// The request.
        request_id: &'a str,
    },
    /// End the thread.
    Stop,
}

/// What a worker needs to build its backend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadModel {
    /// Registered name.
    pub model_name: String,
    /// Version.
    pub model_version: String,
    /// The unpacked archive.
    pub model_dir: PathBuf,
    /// Handler as the manifest or the registration spells it.
    pub handler: String,
    /// Which backend.
    pub backend: BackendKind,
    /// Accelerator leased to this worker.
    pub gpu_id: Option<u32>,
    /// Requests in one batch at most.
    pub batch_size: u32,
    /// How requests and replies follow one another.
    pub exchange: Exchange,
    /// Service envelope around the handler, if any.
    pub service_envelope: Option<String>,
    /// Keep the image library's guard against huge images.
    pub limit_max_image_pixels: bool,
    /// Decode JSON and text bodies before the handler sees them.
    pub decode_input_request: bool,
    /// What the model's files may make the worker build out of pickles: `any`, `weights-only` or
    /// `strict`.
    pub load_policy: String,
    /// Threads that one forward pass may use.
    pub intra_op_threads: u32,
    /// The server's version, as handlers see it.
    pub server_version: String,
    /// Headers that speak of sequences, for handlers that look at them.
    pub sequence_headers: SequenceHeaders,
    /// Metrics that handlers find declared.
    pub declared_metrics: Vec<MetricDeclaration>,
    /// Bytes that one reply may have.
    pub max_response_bytes: u64,
    /// Which process of a group it is. Only the replies of the first, 0, are wanted; the others say
    /// of each batch whether it ran.
    pub rank: u32,
    /// For the echo backend: how it behaves.
    pub echo: EchoBehaviour,
}

/// Names of the headers that speak of sequences, in lower case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequenceHeaders {
    /// Holds the sequence's id.
    pub id: String,
    /// `true` with the first request of a sequence.
    pub start: String,
    /// `true` with the last one.
    pub end: String,
}

impl Default for SequenceHeaders {
    fn default() -> Self {
        Self {
            id: "ts_request_sequence_id".to_owned(),
            start: "ts_request_sequence_start".to_owned(),
            end: "ts_request_sequence_end".to_owned(),
        }
    }
}

/// How requests and replies follow one another on a worker's channel.
///
/// | | requests | replies |
/// |---|---|---|
/// | `Batches` | one [`Run`](WorkerRequest::Run) at a time | [`Chunks`](WorkerReply::Chunks), then [`Done`](WorkerReply::Done) |
/// | `Continuous` | the same; a request whose reply said `ts_stream_next: true` comes again without parts | the same |
/// | `Asynchronous` | `Run` of one request each, without waiting | `Chunks`, and one [`Answered`](WorkerReply::Answered) for each request, in any order |
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Exchange {
    /// One batch after another.
    #[default]
    Batches,
    /// A batch that requests join and leave between its steps (`continuousBatching`).
    Continuous,
    /// Each request on its own, many at once (`asyncCommunication`).
    Asynchronous,
}

/// The backends a worker can hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum BackendKind {
    /// The user's Python handler.
    Python,
    /// Answers its input.
    Echo,
}

/// How the echo backend behaves, from the `echo` key of `model-config.yaml`: a batch of `n` takes
/// `batch_micros + n * item_micros`, and loading takes `load_micros`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase", deny_unknown_fields)]
pub struct EchoBehaviour {
    /// Time per batch.
    pub batch_micros: u64,
    /// Time per item.
    pub item_micros: u64,
    /// Time to load.
    pub load_micros: u64,
    /// Fail to load with this message.
    pub load_error: Option<String>,
    /// Of a group, only this process takes that time and fails.
    pub load_rank: Option<u32>,
}

/// One batch.
#[derive(Debug, Serialize, Deserialize)]
pub struct RunBatch<'a> {
    /// Callers of earlier requests have left, and nobody may have read that yet.
    pub departures: bool,
    /// The requests, in the order of their payloads.
    #[serde(borrow)]
    pub items: Vec<RunItem<'a>>,
}

/// One request of a batch.
#[derive(Debug, Serialize, Deserialize)]
pub struct RunItem<'a> {
    /// The server's id for it.
    pub request_id: &'a str,
    /// Headers for the handler.
    #[serde(borrow)]
    pub headers: Vec<(&'a str, &'a str)>,
    /// Fields of the body.
    #[serde(borrow)]
    pub parts: Vec<RunPart<'a>>,
}

/// One field of a request's body.
#[derive(Debug, Serialize, Deserialize)]
pub struct RunPart<'a> {
    /// The field's name.
    pub name: &'a str,
    /// Media type as sent.
    pub content_type: &'a str,
    /// Bytes it has in the payload.
    pub value_bytes: u64,
}

/// Worker to server.
#[derive(Debug, Serialize, Deserialize)]
pub enum WorkerReply<'a> {
    /// The backend is ready.
    Loaded(LoadedModel),
    /// The backend could not be built; the worker ends.
    LoadFailed(LoadFailure),
    /// The batch has run; the payload holds the replies' bodies, one after another.
    #[serde(borrow)]
    Done(BatchDone<'a>),
    /// Parts of replies, more of which follow; the payload holds their bodies. Never in the shared
    /// buffer, since nobody answers them.
    #[serde(borrow)]
    Chunks(Vec<Chunk<'a>>),
    /// One request has run, under [`Exchange::Asynchronous`].
    #[serde(borrow)]
    Answered(RequestDone<'a>),
}

/// What a loaded model says of itself.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadedModel {
    /// Its handler may be called again for a request that it has failed on.
    pub side_effect_free: bool,
}

/// A part of a request's reply, with more to follow, or the failure that ends it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Chunk<'a> {
    /// The request.
    pub request_id: &'a str,
    /// How long it has run.
    pub ran_micros: u64,
    /// The part. Status and headers of the first one are those of the reply.
    #[serde(borrow)]
    pub outcome: ItemOutcome<'a>,
}

/// Why a backend could not be built.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct LoadFailure {
    /// Whether another try may help.
    pub kind: LoadFailureKind,
    /// One line; the traceback is in the model log.
    pub message: String,
}

/// Whether another try to load may help.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadFailureKind {
    /// Memory ran out.
    OutOfMemory,
    /// It cannot succeed: no such handler, an import error.
    Permanent,
    /// It may succeed later.
    Transient,
}

/// A finished batch.
#[derive(Debug, Serialize, Deserialize)]
pub struct BatchDone<'a> {
    /// How long it ran in its backend.
    pub ran_micros: u64,
    /// What came of it.
    #[serde(borrow)]
    pub outcome: BatchOutcome<'a>,
    /// Metrics the handler recorded.
    #[serde(borrow)]
    pub metrics: Vec<MetricEvent<'a>>,
}

/// A finished request.
#[derive(Debug, Serialize, Deserialize)]
pub struct RequestDone<'a> {
    /// The request.
    pub request_id: &'a str,
    /// How long it ran in its backend.
    pub ran_micros: u64,
    /// What came of it; the payload holds the reply's body.
    #[serde(borrow)]
    pub outcome: ItemOutcome<'a>,
    /// Metrics the handler recorded.
    #[serde(borrow)]
    pub metrics: Vec<MetricEvent<'a>>,
}

/// What came of a batch.
#[derive(Debug, Serialize, Deserialize)]
pub enum BatchOutcome<'a> {
    /// One outcome per item, in the batch's order.
    #[serde(borrow)]
    Items(Vec<ItemOutcome<'a>>),
    /// The batch failed as a whole.
    Failed(RunFailure),
}

/// What came of one item.
#[derive(Debug, Serialize, Deserialize)]
pub enum ItemOutcome<'a> {
    /// An answer.
    #[serde(borrow)]
    Reply(ItemReply<'a>),
    /// This item failed, the others did not.
    Failed(RunFailure),
}

/// One answer.
#[derive(Debug, Serialize, Deserialize)]
pub struct ItemReply<'a> {
    /// HTTP status.
    pub status: u16,
    /// Reason phrase, often empty.
    pub reason: &'a str,
    /// Headers set by the handler.
    #[serde(borrow)]
    pub headers: Vec<(&'a str, &'a str)>,
    /// Bytes it has in the payload.
    pub body_bytes: u64,
}

/// Why a batch or an item failed (*torchserve-contract* 4.6).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum RunFailure {
    /// The handler raised.
    HandlerFailed,
    /// The handler chose a status and a text.
    HandlerStatus {
        /// The status.
        code: u16,
        /// The text.
        message: String,
    },
    /// Memory ran out.
    OutOfMemory,
    /// Memory of an accelerator ran out.
    DeviceOutOfMemory,
    /// The handler did not return a list.
    NotAList,
    /// The list's length is not the batch's.
    LengthMismatch,
    /// A result that cannot be sent.
    UnsupportedOutput,
    /// A reply over `max_response_size`.
    ReplyTooLarge {
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
}

/// One value of a metric that a handler recorded (*torchserve-contract* 6.6).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MetricEvent<'a> {
    /// Name.
    pub name: &'a str,
    /// Value.
    pub value: f64,
    /// Unit, as the handler wrote it.
    pub unit: &'a str,
    /// How values combine.
    pub kind: MetricKind,
    /// Labels.
    #[serde(borrow)]
    pub dimensions: Vec<(&'a str, &'a str)>,
    /// The requests that it concerns, for the log.
    pub request_ids: &'a str,
}

/// A metric of handlers that the operator has declared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetricDeclaration {
    /// Name.
    pub name: String,
    /// How values combine.
    pub kind: MetricKind,
    /// Unit, as it was written.
    pub unit: String,
    /// Names of the labels but the host's.
    pub dimensions: Vec<String>,
}

/// How the values of a metric combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MetricKind {
    /// They add up.
    Counter,
    /// The last one counts.
    Gauge,
    /// They are sorted into buckets.
    Histogram,
}
