//! What the server tells of itself: logs, metrics and traces.

mod context;
mod exporter;
mod logging;
mod system;
mod traces;

pub(crate) use context::RequestContext;
pub(crate) use exporter::{Exporter, ResponseCounts};
pub(crate) use logging::Log;
pub(crate) use system::collect_host_metrics;
pub(crate) use traces::Traces;
