//! The metrics of the core: handles made once per server, model version and worker. Their names
//! stand in `ts_metrics::names`. Those of handlers are in `handler_metrics.rs`.

use std::time::Duration;

use ts_metrics::{Builtin, Metric, Metrics, hostname, names};
use ts_types::{ModelName, Version};

use crate::handler_metrics::Owner;
use crate::job::Timing;

/// Handles that all models share.
pub(crate) struct CoreMetrics {
    queue_time: Metric,
    worker_thread_time: Metric,
}

impl CoreMetrics {
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let hostname = hostname();
        let host = ["Host", hostname.as_str()];
        Self {
            queue_time: metrics.builtin(&names::QUEUE_TIME, &host),
            worker_thread_time: metrics.builtin(&names::WORKER_THREAD_TIME, &host),
        }
    }
}

/// Counters of requests that named a version, or of those that did not.
struct RequestCounters {
    requests: Metric,
    latency: Metric,
    queue_latency: Metric,
}

impl RequestCounters {
    fn new(metrics: &Metrics, model: &ModelName, version: &str) -> Self {
        let hostname = hostname();
        let labels = [model.as_str(), version, hostname.as_str()];
        Self {
            requests: metrics.builtin(&names::REQUESTS, &labels),
            latency: metrics.builtin(&names::LATENCY, &labels),
            queue_latency: metrics.builtin(&names::QUEUE_LATENCY, &labels),
        }
    }

    fn each(&self) -> [&Metric; 3] {
        [&self.requests, &self.latency, &self.queue_latency]
    }
}

/// Where the time of requests goes, and how full batches are.
struct Durations {
    request: Metric,
    queue: Metric,
    batch: Metric,
    handler: Metric,
    batch_size: Metric,
}

/// What Triton's clients look for. Only there with `triton_metrics`.
struct Triton {
    success: Metric,
    failure: Metric,
    count: Metric,
    exec_count: Metric,
    request: Metric,
    queue: Metric,
    input: Metric,
    infer: Metric,
    output: Metric,
    pending: Metric,
}

/// Workers of a version, by where they stand.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WorkerStates {
    pub(crate) starting: usize,
    pub(crate) ready: usize,
    pub(crate) waiting: usize,
    pub(crate) given_up: usize,
}

/// Handles for one model version. They leave the page with it.
pub(crate) struct ModelMetrics {
    /// Whose the metrics of its handler are.
    pub(crate) owner: Owner,
    by_version: RequestCounters,
    by_default: RequestCounters,
    durations: Durations,
    triton: Option<Box<Triton>>,
    queue_length: Metric,
    workers: [Metric; 4],
    streams_broken: Metric,
}

impl ModelMetrics {
    pub(crate) fn new(metrics: &Metrics, model: &ModelName, version: &Version) -> Self {
        let hostname = hostname();
        let model_labels = [model.as_str(), version.as_str()];
        let of = |what: &'static Builtin| metrics.builtin(what, &model_labels);
        let state =
            |state| metrics.builtin(&names::WORKERS, &[model.as_str(), version.as_str(), state]);
        let triton = || {
            Box::new(Triton {
                success: of(&names::TRITON_SUCCESS),
                failure: of(&names::TRITON_FAILURE),
                count: of(&names::TRITON_COUNT),
                exec_count: of(&names::TRITON_EXEC_COUNT),
                request: of(&names::TRITON_REQUEST),
                queue: of(&names::TRITON_QUEUE),
                input: of(&names::TRITON_INPUT),
                infer: of(&names::TRITON_INFER),
                output: of(&names::TRITON_OUTPUT),
                pending: of(&names::TRITON_PENDING),
            })
        };
        Self {
            owner: Owner::default(),
            by_version: RequestCounters::new(metrics, model, version.as_str()),
            by_default: RequestCounters::new(metrics, model, "default"),
            durations: Durations {
                request: of(&names::REQUEST_DURATION),
                queue: of(&names::QUEUE_DURATION),
                batch: of(&names::BATCH_DURATION),
                handler: of(&names::HANDLER_DURATION),
                batch_size: of(&names::BATCH_SIZE),
            },
            triton: metrics.for_triton().then(triton),
            queue_length: of(&names::QUEUE_LENGTH),
            workers: ["starting", "ready", "waiting", "given_up"].map(state),
            streams_broken: metrics.builtin(
                &names::BROKEN_STREAMS,
                &[model.as_str(), version.as_str(), &hostname],
            ),
        }
    }

    /// A request has arrived.
    pub(crate) fn arrived(&self, version_named: bool) {
        self.counters(version_named).requests.count();
    }

    fn counters(&self, version_named: bool) -> &RequestCounters {
        if version_named {
            &self.by_version
        } else {
            &self.by_default
        }
    }

    /// A request has been answered with a reply of the model, after so long in all.
    pub(crate) fn answered(
        &self,
        core: &CoreMetrics,
        version_named: bool,
        total: Duration,
        timing: &Timing,
    ) {
        let counters = self.counters(version_named);
        counters.latency.record(micros(total));
        counters.queue_latency.record(micros(timing.queue));
        core.queue_time.record(timing.queue.as_secs_f64() * 1e3);
        let durations = &self.durations;
        durations.request.record(total.as_secs_f64());
        durations.queue.record(timing.queue.as_secs_f64());
        let in_worker = timing.batch + timing.handler;
        durations.batch.record(in_worker.as_secs_f64());
        durations.handler.record(timing.handler.as_secs_f64());
        if let Some(triton) = &self.triton {
            triton.success.count();
            triton.request.record(micros(total));
            triton.queue.record(micros(timing.queue));
            triton.input.record(micros(timing.batch));
            triton.infer.record(micros(timing.handler));
            let after = total.saturating_sub(timing.queue + in_worker);
            triton.output.record(micros(after));
        }
    }

    /// A request that arrived was answered with a failure.
    pub(crate) fn failed(&self) {
        if let Some(triton) = &self.triton {
            triton.failure.count();
        }
    }

    /// A reply was broken off after its first part.
    pub(crate) fn stream_broken(&self) {
        self.streams_broken.count();
        self.failed();
    }

    /// A batch has been answered; `overhead` is what the dispatcher added to the backend's time.
    pub(crate) fn batch_done(&self, core: &CoreMetrics, size: usize, overhead: Duration) {
        core.worker_thread_time.record(overhead.as_secs_f64() * 1e3);
        self.durations.batch_size.record(count(size));
        if let Some(triton) = &self.triton {
            triton.count.record(count(size));
            triton.exec_count.count();
        }
    }

    /// What changes between two looks at the page.
    pub(crate) fn observe(&self, waiting: usize, workers: WorkerStates) {
        self.queue_length.record(count(waiting));
        if let Some(triton) = &self.triton {
            triton.pending.record(count(waiting));
        }
        let WorkerStates {
            starting,
            ready,
            waiting,
            given_up,
        } = workers;
        let counted = [starting, ready, waiting, given_up];
        for (metric, number) in self.workers.iter().zip(counted) {
            metric.record(count(number));
        }
    }

    /// The version is gone: so are its series, whoever still holds this.
    pub(crate) fn retire(&self) {
        let Durations {
            request,
            queue,
            batch,
            handler,
            batch_size,
        } = &self.durations;
        let durations = [request, queue, batch, handler, batch_size];
        let single = [&self.queue_length, &self.streams_broken];
        let all = self.by_version.each().into_iter();
        all.chain(self.by_default.each())
            .chain(durations)
            .chain(single)
            .chain(&self.workers)
            .for_each(Metric::retire);
        if let Some(triton) = &self.triton {
            triton.retire();
        }
    }
}

impl Triton {
    fn retire(&self) {
        let Self {
            success,
            failure,
            count,
            exec_count,
            request,
            queue,
            input,
            infer,
            output,
            pending,
        } = self;
        for metric in [
            success, failure, count, exec_count, request, queue, input, infer, output, pending,
        ] {
            metric.retire();
        }
    }
}

/// How long a worker took to load. The series goes with the worker that holds it.
pub(crate) fn worker_loaded(metrics: &Metrics, worker: &str, took: Duration) -> Metric {
    let hostname = hostname();
    let metric = metrics.builtin(&names::WORKER_LOAD_TIME, &[worker, "Host", &hostname]);
    metric.record((took.as_secs_f64() * 1e3).round());
    metric
}

#[expect(
    clippy::cast_precision_loss,
    reason = "what is counted here stays far below 2^53"
)]
fn count(number: usize) -> f64 {
    number as f64
}

/// Whole microseconds, as TorchServe counts them.
fn micros(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e6).floor()
}
