//! Every metric of the server itself: one table, which the page, the log, the default set and
//! docs/metrics.md are checked against.

use crate::series::Kind;

/// Whose metric it is by its name and form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// TorchServe's (*torchserve-contract* 6.3): `metrics_config` chooses among them, and
    /// `metrics_mode` sends them to the log.
    TorchServe,
    /// This server's own: on the page only.
    Own,
    /// Triton's: on the page with `triton_metrics=true`.
    Triton,
}

/// A metric of the server.
#[derive(Debug)]
pub struct Builtin {
    /// Its name.
    pub name: &'static str,
    /// What its values add up to.
    pub kind: Kind,
    /// Unit of its values.
    pub unit: &'static str,
    /// Names of its labels, in order.
    pub labels: &'static [&'static str],
    /// Whose it is.
    pub group: Group,
    /// What it says.
    pub about: &'static str,
    /// Upper bounds of a histogram's buckets.
    pub bounds: &'static [f64],
}

/// Buckets of handlers' histograms: those of TorchServe's client library.
pub const HANDLER_BOUNDS: &[f64] = &[
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
];

/// From half a millisecond to a minute.
const SECONDS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0,
];
const SIZES: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

const HOST: &[&str] = &["Level", "Hostname"];
const DEVICE: &[&str] = &["Level", "DeviceId", "Hostname"];
const REQUEST: &[&str] = &["model_name", "model_version", "hostname"];
const MODEL: &[&str] = &["model_name", "model_version"];
const TRITON: &[&str] = &["model", "version"];

impl Builtin {
    const fn torchserve(
        name: &'static str,
        kind: Kind,
        unit: &'static str,
        labels: &'static [&'static str],
        about: &'static str,
    ) -> Self {
        Self {
            name,
            kind,
            unit,
            labels,
            group: Group::TorchServe,
            about,
            bounds: &[],
        }
    }

    const fn own(
        name: &'static str,
        kind: Kind,
        unit: &'static str,
        labels: &'static [&'static str],
        about: &'static str,
    ) -> Self {
        Self {
            name,
            kind,
            unit,
            labels,
            group: Group::Own,
            about,
            bounds: &[],
        }
    }

    const fn histogram(
        name: &'static str,
        unit: &'static str,
        bounds: &'static [f64],
        about: &'static str,
    ) -> Self {
        Self {
            bounds,
            ..Self::own(name, Kind::Histogram, unit, MODEL, about)
        }
    }

    const fn triton(
        name: &'static str,
        kind: Kind,
        unit: &'static str,
        about: &'static str,
    ) -> Self {
        Self {
            group: Group::Triton,
            ..Self::own(name, kind, unit, TRITON, about)
        }
    }

    /// One of the three that `legacy` shows on the page and not in the log.
    pub(crate) fn is_legacy(&self) -> bool {
        [&REQUESTS, &LATENCY, &QUEUE_LATENCY]
            .iter()
            .any(|legacy| legacy.name == self.name)
    }
}

macro_rules! builtins {
    ($($(#[$doc:meta])* $id:ident = $value:expr;)+) => {
        $($(#[$doc])* pub static $id: Builtin = $value;)+
        /// All of them, in the order of docs/metrics.md.
        pub static ALL: &[&Builtin] = &[$(&$id),+];
    };
}

builtins! {
    /// Responses with a status from 200 to 299.
    REQUESTS_2XX = Builtin::torchserve("Requests2XX", Kind::Counter, "Count", HOST, "Responses with a status from 200 to 299, of all listeners");
    /// Responses with a status from 400 to 499.
    REQUESTS_4XX = Builtin::torchserve("Requests4XX", Kind::Counter, "Count", HOST, "Responses with a status from 400 to 499, and requests whose client did not wait for one");
    /// All other responses.
    REQUESTS_5XX = Builtin::torchserve("Requests5XX", Kind::Counter, "Count", HOST, "All other responses");
    /// Requests that arrived for a model.
    REQUESTS = Builtin::torchserve("ts_inference_requests_total", Kind::Counter, "Count", REQUEST, "Requests that arrived for a model; the version is `default` where none was named");
    /// Time of answered requests.
    LATENCY = Builtin::torchserve("ts_inference_latency_microseconds", Kind::Counter, "Microseconds", REQUEST, "Time of requests that were answered, from arrival to the end of the answer");
    /// Time that answered requests waited for a worker.
    QUEUE_LATENCY = Builtin::torchserve("ts_queue_latency_microseconds", Kind::Counter, "Microseconds", REQUEST, "The part of that until the batch was handed to a worker");
    /// The latter of the latest request.
    QUEUE_TIME = Builtin::torchserve("QueueTime", Kind::Gauge, "Milliseconds", HOST, "The same of the latest request");
    /// What the server added to the latest batch's time in its worker.
    WORKER_THREAD_TIME = Builtin::torchserve("WorkerThreadTime", Kind::Gauge, "Milliseconds", HOST, "What the server added to the latest batch once its worker had answered");
    /// How long a worker took to load.
    WORKER_LOAD_TIME = Builtin::torchserve("WorkerLoadTime", Kind::Gauge, "Milliseconds", &["WorkerName", "Level", "Hostname"], "How long a worker took to load its model; it goes with the worker");
    /// Share of all cores' time.
    CPU_UTILIZATION = Builtin::torchserve("CPUUtilization", Kind::Gauge, "Percent", HOST, "Share of the time of all cores since the last collection");
    /// Memory that is not available.
    MEMORY_USED = Builtin::torchserve("MemoryUsed", Kind::Gauge, "Megabytes", HOST, "Memory that is not available");
    /// Memory that is available.
    MEMORY_AVAILABLE = Builtin::torchserve("MemoryAvailable", Kind::Gauge, "Megabytes", HOST, "Memory that is available");
    /// Share of memory that is not available.
    MEMORY_UTILIZATION = Builtin::torchserve("MemoryUtilization", Kind::Gauge, "Percent", HOST, "Share of memory that is not available");
    /// Used space of the root filesystem.
    DISK_USAGE = Builtin::torchserve("DiskUsage", Kind::Gauge, "Gigabytes", HOST, "Used space of the filesystem of `/`");
    /// Its available space.
    DISK_AVAILABLE = Builtin::torchserve("DiskAvailable", Kind::Gauge, "Gigabytes", HOST, "Available space of it");
    /// Share of it that is used.
    DISK_UTILIZATION = Builtin::torchserve("DiskUtilization", Kind::Gauge, "Percent", HOST, "Share of it that is used");
    /// Share of time in which a device worked.
    GPU_UTILIZATION = Builtin::torchserve("GPUUtilization", Kind::Gauge, "Percent", DEVICE, "Share of the last second or so in which a GPU worked");
    /// Share of a device's memory that is used.
    GPU_MEMORY_UTILIZATION = Builtin::torchserve("GPUMemoryUtilization", Kind::Gauge, "Percent", DEVICE, "Share of its memory that is used");
    /// Used memory of a device.
    GPU_MEMORY_USED = Builtin::torchserve("GPUMemoryUsed", Kind::Gauge, "Megabytes", DEVICE, "Its used memory");

    /// Requests in work.
    IN_FLIGHT = Builtin::own("ts_requests_in_flight", Kind::Gauge, "Count", &[], "HTTP requests in work");
    /// Jobs in the queue of a version.
    QUEUE_LENGTH = Builtin::own("ts_queue_length", Kind::Gauge, "Count", MODEL, "Requests that wait for a worker");
    /// Workers of a version by state.
    WORKERS = Builtin::own("ts_workers", Kind::Gauge, "Count", &["model_name", "model_version", "state"], "Workers by state: starting, ready, waiting to be started again, given up");
    /// From arrival to answer.
    REQUEST_DURATION = Builtin::histogram("ts_request_duration_seconds", "Seconds", SECONDS, "From the arrival of a request that was answered until its whole answer");
    /// From arrival to the hand-over.
    QUEUE_DURATION = Builtin::histogram("ts_queue_duration_seconds", "Seconds", SECONDS, "From the arrival of a request that was answered until its batch was handed to a worker");
    /// The way to the worker and back.
    BATCH_DURATION = Builtin::histogram("ts_batch_duration_seconds", "Seconds", SECONDS, "From the hand-over of a batch until its worker's answer, for each of its requests");
    /// In the handler.
    HANDLER_DURATION = Builtin::histogram("ts_handler_duration_seconds", "Seconds", SECONDS, "The part of that in the handler, for each request");
    /// Requests of a batch.
    BATCH_SIZE = Builtin::histogram("ts_batch_size", "Count", SIZES, "Requests of a batch that has run");
    /// Replies in parts that were broken off.
    BROKEN_STREAMS = Builtin::own("ts_streams_broken_total", Kind::Counter, "Count", REQUEST, "Replies in parts that were broken off after their first part");
    /// Updates of a handler that found no room.
    SERIES_DROPPED = Builtin::own("ts_metric_series_dropped_total", Kind::Counter, "Count", &["metric"], "Updates of a handler's metric that are not recorded since it has too many combinations of labels");
    /// Spans that did not reach the collector.
    SPANS_DROPPED = Builtin::own("ts_spans_dropped_total", Kind::Counter, "Count", &[], "Spans that the collector did not take, or that found no room in the queue to it");
    /// Calls without a good token.
    TOKEN_REFUSALS = Builtin::own("ts_token_refusals_total", Kind::Counter, "Count", &["Reason"], "Calls refused since their token was missing, or wrong: unknown, expired or of another API");

    /// Requests with an answer.
    TRITON_SUCCESS = Builtin::triton("nv_inference_request_success", Kind::Counter, "Count", "Number of successful inference requests, all batch sizes");
    /// Requests with a failure.
    TRITON_FAILURE = Builtin::triton("nv_inference_request_failure", Kind::Counter, "Count", "Number of failed inference requests, all batch sizes");
    /// Requests that were run.
    TRITON_COUNT = Builtin::triton("nv_inference_count", Kind::Counter, "Count", "Number of inferences performed (does not include cached requests)");
    /// Batches that were run.
    TRITON_EXEC_COUNT = Builtin::triton("nv_inference_exec_count", Kind::Counter, "Count", "Number of model executions performed (does not include cached requests)");
    /// Total time of requests.
    TRITON_REQUEST = Builtin::triton("nv_inference_request_duration_us", Kind::Counter, "Microseconds", "Cumulative inference request duration in microseconds (includes cached requests)");
    /// Their time in the queue.
    TRITON_QUEUE = Builtin::triton("nv_inference_queue_duration_us", Kind::Counter, "Microseconds", "Cumulative inference queuing duration in microseconds (includes cached requests)");
    /// Their time on the way to the handler.
    TRITON_INPUT = Builtin::triton("nv_inference_compute_input_duration_us", Kind::Counter, "Microseconds", "Cumulative compute input duration in microseconds (does not include cached requests)");
    /// Their time in the handler.
    TRITON_INFER = Builtin::triton("nv_inference_compute_infer_duration_us", Kind::Counter, "Microseconds", "Cumulative compute inference duration in microseconds (does not include cached requests)");
    /// Their time from the worker's answer to the caller's.
    TRITON_OUTPUT = Builtin::triton("nv_inference_compute_output_duration_us", Kind::Counter, "Microseconds", "Cumulative inference compute output duration in microseconds (does not include cached requests)");
    /// Requests that wait.
    TRITON_PENDING = Builtin::triton("nv_inference_pending_request_count", Kind::Gauge, "Count", "Instantaneous number of pending requests awaiting execution per-model.");
}

/// The metrics of handlers that TorchServe's default file declares: name, unit, labels, all gauges.
pub const HANDLER_DEFAULTS: &[(&str, &str)] = &[("HandlerTime", "ms"), ("PredictionTime", "ms")];
