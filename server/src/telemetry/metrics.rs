//! The server's own counters, and the thread that writes metrics to the log.

use std::sync::Arc;
use std::thread::JoinHandle;

use actix_web::http::StatusCode;
use ts_metrics::{Journal, Metric, Metrics, hostname, names};

/// Counts responses by the class of their status, and what is in work.
pub(crate) struct ResponseCounts {
    good: Metric,
    refused: Metric,
    other: Metric,
    in_flight: Metric,
}

impl ResponseCounts {
    /// Handles for counting.
    pub(crate) fn new(metrics: &Metrics) -> Self {
        let hostname = hostname();
        let host = ["Host", hostname.as_str()];
        Self {
            good: metrics.builtin(&names::REQUESTS_2XX, &host),
            refused: metrics.builtin(&names::REQUESTS_4XX, &host),
            other: metrics.builtin(&names::REQUESTS_5XX, &host),
            in_flight: metrics.builtin(&names::IN_FLIGHT, &[]),
        }
    }

    /// Counts one response, whatever made it.
    pub(crate) fn count(&self, status: StatusCode) {
        match status.as_u16() {
            200..300 => self.good.count(),
            400..500 => self.refused.count(),
            _ => self.other.count(),
        }
    }

    /// Counts a request whose client did not wait for its response, as its own fault.
    pub(crate) fn client_left(&self) {
        self.refused.count();
    }

    /// So many requests are in work now.
    pub(crate) fn in_flight(&self, requests: usize) {
        let requests = u32::try_from(requests).unwrap_or(u32::MAX);
        self.in_flight.record(f64::from(requests));
    }
}

/// The thread that makes log lines of updates. Dropping it writes what is left.
pub(crate) struct MetricLog {
    journal: Arc<Journal>,
    writer: Option<JoinHandle<()>>,
}

impl MetricLog {
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start(metrics: &Metrics) -> std::io::Result<Self> {
        let journal = Arc::clone(metrics.journal());
        let own = Arc::clone(&journal);
        let writer = std::thread::Builder::new()
            .name("metric-log".to_owned())
            .spawn(move || own.write())?;
        Ok(Self {
            journal,
            writer: Some(writer),
        })
    }
}

impl Drop for MetricLog {
    fn drop(&mut self) {
        self.journal.close();
        if let Some(writer) = self.writer.take() {
            // It ends by itself; if it panicked there is nobody left to tell.
            let _panicked = writer.join();
        }
    }
}
