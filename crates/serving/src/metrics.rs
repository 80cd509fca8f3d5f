//! The metrics of the core: their names, and handles made once per model version
//! (*torchserve-contract* 6.3). Those of handlers are in `handler_metrics.rs`.

use std::time::Duration;

use metrics::{
    Counter, Gauge, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram,
    gauge, histogram,
};
use ts_types::{ModelName, Version};
use ts_wire::frame::MetricKind;

const REQUESTS: &str = "ts_inference_requests_total";
const LATENCY: &str = "ts_inference_latency_microseconds";
const QUEUE_LATENCY: &str = "ts_queue_latency_microseconds";
const BROKEN_STREAMS: &str = "ts_streams_broken_total";
const QUEUE_TIME: &str = "QueueTime";
const WORKER_THREAD_TIME: &str = "WorkerThreadTime";
const WORKER_LOAD_TIME: &str = "WorkerLoadTime";

/// Tells the recorder what the names mean. Called once, before the first model.
pub(crate) fn describe() {
    let counters = [
        (
            REQUESTS,
            Unit::Count,
            "Torchserve prometheus counter metric with unit: Count",
        ),
        (
            LATENCY,
            Unit::Microseconds,
            "Torchserve prometheus counter metric with unit: Microseconds",
        ),
        (
            QUEUE_LATENCY,
            Unit::Microseconds,
            "Torchserve prometheus counter metric with unit: Microseconds",
        ),
        (
            BROKEN_STREAMS,
            Unit::Count,
            "Replies in parts that were broken off after their first part",
        ),
    ];
    for (name, unit, text) in counters {
        describe_counter!(name, unit, text);
    }
    for name in [QUEUE_TIME, WORKER_THREAD_TIME, WORKER_LOAD_TIME] {
        describe_gauge!(
            name,
            Unit::Milliseconds,
            "Torchserve prometheus gauge metric with unit: Milliseconds"
        );
    }
}

/// Counters of requests that named a version, or of those that did not.
struct RequestCounters {
    requests: Counter,
    latency: Counter,
    queue_latency: Counter,
}

impl RequestCounters {
    fn new(model: &ModelName, version: &str) -> Self {
        let labels = [
            ("model_name", model.to_string()),
            ("model_version", version.to_owned()),
            ("hostname", hostname()),
        ];
        Self {
            requests: counter!(REQUESTS, &labels),
            latency: counter!(LATENCY, &labels),
            queue_latency: counter!(QUEUE_LATENCY, &labels),
        }
    }
}

/// Handles for one model version.
pub(crate) struct ModelMetrics {
    by_version: RequestCounters,
    by_default: RequestCounters,
    queue_time: Gauge,
    worker_thread_time: Gauge,
    streams_broken: Counter,
    hostname: String,
}

impl ModelMetrics {
    pub(crate) fn new(model: &ModelName, version: &Version) -> Self {
        let host_labels = [("Level", "Host".to_owned()), ("Hostname", hostname())];
        Self {
            by_version: RequestCounters::new(model, version.as_str()),
            by_default: RequestCounters::new(model, "default"),
            queue_time: gauge!(QUEUE_TIME, &host_labels),
            worker_thread_time: gauge!(WORKER_THREAD_TIME, &host_labels),
            streams_broken: counter!(
                BROKEN_STREAMS,
                "model_name" => model.to_string(),
                "model_version" => version.to_string(),
                "hostname" => hostname()
            ),
            hostname: hostname(),
        }
    }

    fn counters(&self, version_named: bool) -> &RequestCounters {
        if version_named {
            &self.by_version
        } else {
            &self.by_default
        }
    }

    /// A request has arrived.
    pub(crate) fn arrived(&self, version_named: bool) {
        self.counters(version_named).requests.increment(1);
    }

    /// A request has been answered with a reply of the model.
    pub(crate) fn answered(&self, version_named: bool, total: Duration, queued: Duration) {
        let counters = self.counters(version_named);
        counters.latency.increment(micros(total));
        counters.queue_latency.increment(micros(queued));
        self.queue_time.set(queued.as_secs_f64() * 1e3);
    }

    /// A reply was broken off after its first part.
    pub(crate) fn stream_broken(&self) {
        self.streams_broken.increment(1);
    }

    /// A batch has been answered; `overhead` is what the dispatcher added to the backend's time.
    pub(crate) fn batch_done(&self, overhead: Duration) {
        self.worker_thread_time.set(overhead.as_secs_f64() * 1e3);
    }

    /// A worker came up.
    pub(crate) fn worker_loaded(&self, worker: &str, took: Duration) {
        let labels = [
            ("WorkerName", worker.to_owned()),
            ("Level", "Host".to_owned()),
            ("Hostname", self.hostname.clone()),
        ];
        gauge!(WORKER_LOAD_TIME, &labels).set(took.as_secs_f64() * 1e3);
    }
}

/// Names that no handler can take.
pub(crate) const RESERVED_NAMES: [&str; 21] = [
    REQUESTS,
    LATENCY,
    QUEUE_LATENCY,
    BROKEN_STREAMS,
    QUEUE_TIME,
    WORKER_THREAD_TIME,
    WORKER_LOAD_TIME,
    "Requests2XX",
    "Requests4XX",
    "Requests5XX",
    "CPUUtilization",
    "MemoryUsed",
    "MemoryAvailable",
    "MemoryUtilization",
    "DiskUsage",
    "DiskAvailable",
    "DiskUtilization",
    "GPUUtilization",
    "GPUMemoryUtilization",
    "GPUMemoryUsed",
    "ts_workers",
];

/// One series of a handler's metric.
pub(crate) enum HandlerSeries {
    Counter {
        handle: Counter,
        /// Handlers count in fractions, the recorder in whole numbers: the sum is kept here, and
        /// its whole part is shown.
        total: f64,
    },
    Gauge(Gauge),
    Histogram(Histogram),
}

impl HandlerSeries {
    /// Gives a handler's metric TorchServe's help text.
    pub(crate) fn describe(name: &str, kind: MetricKind, unit: &str) {
        let name = name.to_owned();
        let text = |kind: &str| format!("Torchserve prometheus {kind} metric with unit: {unit}");
        match kind {
            MetricKind::Counter => describe_counter!(name, text("counter")),
            MetricKind::Gauge => describe_gauge!(name, text("gauge")),
            MetricKind::Histogram => describe_histogram!(name, text("histogram")),
        }
    }

    pub(crate) fn new(name: &str, kind: MetricKind, labels: &[(String, String)]) -> Self {
        let name = name.to_owned();
        match kind {
            MetricKind::Counter => Self::Counter {
                handle: counter!(name, labels),
                total: 0.0,
            },
            MetricKind::Gauge => Self::Gauge(gauge!(name, labels)),
            MetricKind::Histogram => Self::Histogram(histogram!(name, labels)),
        }
    }

    pub(crate) fn update(&mut self, value: f64) {
        match self {
            Self::Counter { handle, total } => {
                *total += value;
                handle.absolute(*total as u64);
            }
            Self::Gauge(handle) => handle.set(value),
            Self::Histogram(handle) => handle.record(value),
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Name of this machine, a label of every metric.
pub fn hostname() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}
