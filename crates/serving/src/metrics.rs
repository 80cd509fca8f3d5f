//! The metrics of the core: their names, and handles made once per model version
//! (*torchserve-contract* 6.3). Series a handler records come in as events and are kept here, so a
//! worker that is replaced loses no counts.

use std::time::Duration;

use metrics::{Counter, Gauge, Unit, counter, describe_counter, describe_gauge, gauge, histogram};
use ts_types::{ModelName, Version};
use ts_wire::frame::{MetricEvent, MetricKind};

const REQUESTS: &str = "ts_inference_requests_total";
const LATENCY: &str = "ts_inference_latency_microseconds";
const QUEUE_LATENCY: &str = "ts_queue_latency_microseconds";
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

    /// Records what a handler has recorded.
    pub(crate) fn record(&self, events: Vec<HandlerMetric>) {
        for event in events {
            let HandlerMetric {
                name,
                value,
                kind,
                dimensions,
            } = event;
            let mut labels = dimensions;
            labels.push(("Hostname".to_owned(), self.hostname.clone()));
            match kind {
                // A recorder of whole numbers: TorchServe's counters are doubles, handlers count
                // events with them.
                MetricKind::Counter => counter!(name, &labels).increment(value.max(0.0) as u64),
                MetricKind::Gauge => gauge!(name, &labels).set(value),
                MetricKind::Histogram => histogram!(name, &labels).record(value),
            }
        }
    }
}

/// A metric event that has left the channel's buffer.
pub(crate) struct HandlerMetric {
    name: String,
    value: f64,
    kind: MetricKind,
    dimensions: Vec<(String, String)>,
}

impl HandlerMetric {
    pub(crate) fn of(event: &MetricEvent<'_>) -> Self {
        Self {
            name: event.name.to_owned(),
            value: event.value,
            kind: event.kind,
            dimensions: event
                .dimensions
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn hostname() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}
