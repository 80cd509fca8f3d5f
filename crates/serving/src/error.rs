//! What can go wrong in the core. Texts that TorchServe documents are kept word for word
//! (*torchserve-contract* 4.6, 5.2–5.6).

use std::path::PathBuf;
use std::time::Duration;

use ts_archive::ArchiveError;
use ts_types::{Classify, ErrorClass, IdError, InferRequest, Invalid, ModelName, Subject, Version};
use ts_wire::frame::RunFailure;

/// A failure of the core, as its caller may see it; causes hang below it and go to the log only.
#[derive(Debug, thiserror::Error)]
pub enum ServingError {
    /// No model of this name.
    #[error("Model not found: {model}")]
    ModelNotFound {
        /// The name.
        model: String,
    },
    /// The model has no such version.
    #[error("Model version: {version} does not exist for model: {model}")]
    VersionNotFound {
        /// The model.
        model: ModelName,
        /// The version.
        version: Version,
    },
    /// Set-default names a version that does not exist; TorchServe words it differently.
    #[error("Model version {version} does not exist for model {model}")]
    NoSuchDefault {
        /// The model.
        model: ModelName,
        /// The version.
        version: Version,
    },
    /// The request was not taken.
    #[error("{}", refusal_text(model, version.as_ref()))]
    Refused {
        /// The model.
        model: ModelName,
        /// The version, if the request named one.
        version: Option<Version>,
        /// Why.
        reason: Refusal,
        /// After how long another try may succeed; zero means that nobody knows.
        retry_after: Duration,
    },
    /// A describe request for a model without workers.
    #[error(
        "Model \"{model}\" has no worker to serve describe request. Please use scale workers API \
         to add workers."
    )]
    NoWorkerToDescribe {
        /// The model.
        model: ModelName,
    },
    /// The batch or this item of it failed.
    #[error("{}", run_failure_text(.0))]
    Run(RunFailure),
    /// The worker ended before it answered.
    #[error("Worker died.")]
    WorkerDied {
        /// It was killed for memory, as far as one can tell.
        out_of_memory: bool,
    },
    /// Nothing came of this one request in time, while its worker serves others.
    #[error("no answer within the model's `responseTimeout` of {} s", limit.as_secs())]
    NoResponse {
        /// The limit.
        limit: Duration,
    },
    /// A caller that does not read the parts of its reply.
    #[error(
        "more than {limit} bytes of the reply were not read. Read faster, or raise \
         `max_response_size` in the server's configuration"
    )]
    ReadTooSlowly {
        /// Bytes that may wait.
        limit: usize,
    },
    /// The worker could not be reached or was not ready, and the model is being taken away.
    #[error("model `{model}` was unregistered before the request ran")]
    Unregistered {
        /// The model.
        model: ModelName,
    },
    /// Not answered within `clientTimeoutInMills`.
    #[error("no answer within the model's limit of {} ms", limit.as_millis())]
    Expired {
        /// The limit.
        limit: Duration,
    },
    /// A registration without the `url` parameter, or with an unusable one.
    #[error("{0}")]
    BadRegistration(String),
    /// An empty `url`.
    #[error("empty url")]
    EmptyUrl,
    /// A name that is none.
    #[error(transparent)]
    BadId(#[from] IdError),
    /// A relative path in a URL.
    #[error("Relative path is not allowed in url: {url}")]
    RelativeUrl {
        /// The URL.
        url: String,
    },
    /// A URL that the operator does not allow.
    #[error("Given URL {url} does not match any allowed URL(s)")]
    UrlNotAllowed {
        /// The URL.
        url: String,
    },
    /// Nothing in the store under this name.
    #[error("Model not found at: {url}")]
    NotInStore {
        /// What was asked for.
        url: String,
    },
    /// There is no store.
    #[error("Model store has not been configured.")]
    NoStore,
    /// A download would overwrite a file of the store.
    #[error("Model file already exists {name}")]
    AlreadyInStore {
        /// The file's name.
        name: String,
    },
    /// A download failed.
    #[error("Failed to download archive from: {url}: {reason}")]
    Download {
        /// The URL.
        url: String,
        /// Why.
        reason: String,
    },
    /// An archive is not the one that was asked for.
    #[error("the archive at `{url}` has the sha256 {found}, not {expected}")]
    DigestMismatch {
        /// Where it is.
        url: String,
        /// What was asked for.
        expected: String,
        /// What it has.
        found: String,
    },
    /// The store takes no files.
    #[error("the archive cannot be written into the model store `{store}`: {reason}")]
    StoreUnwritable {
        /// The store.
        store: PathBuf,
        /// Why.
        reason: std::io::Error,
    },
    /// An archive that cannot be used.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A runtime that this server does not have.
    #[error("{0}")]
    Runtime(String),
    /// The version is registered already.
    #[error("Model version {version} is already registered for model {model}")]
    AlreadyRegistered {
        /// The model.
        model: ModelName,
        /// The version.
        version: Version,
    },
    /// Workers did not come up.
    #[error("Failed to start workers for model {model} version: {version}. {}", cause.text)]
    WorkerStart {
        /// The model.
        model: ModelName,
        /// The version.
        version: Version,
        /// What the first failing worker said.
        cause: StartFailure,
    },
    /// `max_worker` below `min_worker`.
    #[error("max_worker cannot be less than min_worker.")]
    WorkerRange,
    /// More workers than a version may have.
    #[error(
        "{workers} workers are over the limit of {limit} for one version of a model. Ask for fewer, or \
         raise `batch_size`"
    )]
    TooManyWorkers {
        /// Asked for.
        workers: usize,
        /// The limit.
        limit: usize,
    },
    /// A limit that this model cannot change while it is served.
    #[error("`{parameter}` cannot change while the model is served: {reason}")]
    FixedLimit {
        /// As in the call.
        parameter: &'static str,
        /// Why, and what to do.
        reason: String,
    },
    /// The default version cannot go while others exist.
    #[error("Cannot remove default version for model {model}")]
    DefaultInUse {
        /// The model.
        model: ModelName,
    },
    /// Workers did not end in time.
    #[error("Timed out while cleaning resources: {model}")]
    CleanupTimeout {
        /// The model.
        model: ModelName,
    },
    /// The server is stopping.
    #[error("the server is shutting down")]
    ShuttingDown,
    /// A place on disk that cannot be used.
    #[error("`{path}` cannot be used")]
    Disk {
        /// The place.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A batch that is too large to travel, or for which shared memory could not be had.
    #[error("the request could not be handed to a worker: {reason}")]
    NotHandedOver {
        /// Why.
        reason: String,
    },
    /// A version whose workers did not end when it was unregistered.
    #[error("model `{model}` is being removed; unregister it again")]
    BeingRemoved {
        /// The model.
        model: ModelName,
    },
}

impl ServingError {
    /// The error for a request that is not taken.
    pub(crate) fn refused(request: &InferRequest, reason: Refusal, retry_after: Duration) -> Self {
        Self::Refused {
            model: request.model.clone(),
            version: request.version.clone(),
            reason,
            retry_after,
        }
    }
}

/// Why a request was not taken. Clients see it in `x-refusal-reason`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The model has no workers.
    NoWorker,
    /// The queue has reached `job_queue_size`.
    QueueFull,
    /// The model is being taken away, or the server is stopping.
    Draining,
    /// The model takes requests only while a worker is idle, and none is.
    NoIdleWorker,
    /// The answer would come after the request's deadline or the model's latency goal.
    TooLate,
    /// As many sequences as the model keeps are under way.
    TooManySequences,
    /// As many requests of this sequence wait as may.
    SequenceQueueFull,
    /// The request's sequence has ended, or was never begun.
    SequenceOver,
    /// The model's workers only failed, and no more are started.
    Quarantined,
}

impl Refusal {
    /// The machine-readable form.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoWorker => "no-worker",
            Self::QueueFull => "queue-full",
            Self::Draining => "draining",
            Self::NoIdleWorker => "no-idle-worker",
            Self::TooLate => "too-late",
            Self::TooManySequences => "too-many-sequences",
            Self::SequenceQueueFull => "sequence-queue-full",
            Self::SequenceOver => "sequence-over",
            Self::Quarantined => "quarantined",
        }
    }
}

/// Why a worker did not come up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartFailure {
    /// One line.
    pub text: String,
    /// Memory ran out.
    pub out_of_memory: bool,
    /// Another try cannot help.
    pub permanent: bool,
}

fn refusal_text(model: &ModelName, version: Option<&Version>) -> String {
    // TorchServe's quotes are unbalanced with a version; clients match on the text.
    let version = version
        .map(|version| format!(" Version {version}\""))
        .unwrap_or_default();
    format!(
        "Model \"{model}\"{version} has no worker to serve inference request. Please use scale \
         workers API to add workers. If this is a sequence inference, please check if it is \
         closed, or expired; or exceeds maxSequenceJobQueueSize"
    )
}

fn run_failure_text(failure: &RunFailure) -> String {
    match failure {
        RunFailure::HandlerFailed => "Prediction failed".to_owned(),
        RunFailure::HandlerStatus { message, .. } => message.clone(),
        RunFailure::OutOfMemory | RunFailure::DeviceOutOfMemory => "Out of resources".to_owned(),
        RunFailure::NotAList => "Invalid model predict output".to_owned(),
        RunFailure::LengthMismatch => "number of batch response mismatched".to_owned(),
        RunFailure::UnsupportedOutput => "Unsupported model output data type.".to_owned(),
        RunFailure::ReplyTooLarge { bytes, limit } => format!(
            "the reply has {bytes} bytes, over the limit of {limit}. Raise `max_response_size` in \
             the server's configuration"
        ),
    }
}

impl Classify for ServingError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::ModelNotFound { .. }
            | Self::EmptyUrl
            | Self::RelativeUrl { .. }
            | Self::UrlNotAllowed { .. }
            | Self::NotInStore { .. }
            | Self::NoStore => ErrorClass::NotFound(Subject::Model),
            Self::VersionNotFound { .. } | Self::NoSuchDefault { .. } => {
                ErrorClass::NotFound(Subject::Version)
            }
            Self::Refused { .. } | Self::NoWorkerToDescribe { .. } | Self::ShuttingDown => {
                ErrorClass::Overloaded
            }
            Self::Run(failure) => match failure {
                RunFailure::HandlerStatus { code, .. } => ErrorClass::HandlerStatus(*code),
                RunFailure::OutOfMemory
                | RunFailure::DeviceOutOfMemory
                | RunFailure::ReplyTooLarge { .. } => ErrorClass::OutOfMemory,
                RunFailure::HandlerFailed
                | RunFailure::NotAList
                | RunFailure::LengthMismatch
                | RunFailure::UnsupportedOutput => ErrorClass::HandlerFailed,
            },
            Self::WorkerDied {
                out_of_memory: true,
            } => ErrorClass::OutOfMemory,
            Self::WorkerDied {
                out_of_memory: false,
            } => ErrorClass::WorkerLost,
            Self::NoResponse { .. } => ErrorClass::WorkerLost,
            Self::ReadTooSlowly { .. } => ErrorClass::Cancelled,
            Self::Unregistered { .. } => ErrorClass::Overloaded,
            Self::Expired { .. } => ErrorClass::DeadlineExceeded,
            Self::BadRegistration(_)
            | Self::BadId(_)
            | Self::WorkerRange
            | Self::TooManyWorkers { .. }
            | Self::FixedLimit { .. } => ErrorClass::InvalidRequest(Invalid::Request),
            Self::Runtime(_) => ErrorClass::InvalidRequest(Invalid::Request),
            Self::AlreadyInStore { .. }
            | Self::StoreUnwritable { .. }
            | Self::Disk { .. }
            | Self::NotHandedOver { .. } => ErrorClass::Internal,
            Self::Download { .. } | Self::DigestMismatch { .. } => {
                ErrorClass::InvalidRequest(Invalid::Download)
            }
            Self::Archive(error) => error.class(),
            Self::AlreadyRegistered { .. } | Self::BeingRemoved { .. } => ErrorClass::Conflict,
            Self::WorkerStart { cause, .. } if cause.out_of_memory => ErrorClass::OutOfMemory,
            Self::WorkerStart { .. } => ErrorClass::WorkerStart,
            Self::DefaultInUse { .. } => ErrorClass::Forbidden,
            Self::CleanupTimeout { .. } => ErrorClass::CleanupTimeout,
        }
    }
}
