//! What the server tells of itself: logs and metrics.

mod exporter;
mod logging;
mod system;

pub(crate) use exporter::{Exporter, ResponseCounts};
pub(crate) use logging::{Log, with_causes};
pub(crate) use system::collect_host_metrics;
