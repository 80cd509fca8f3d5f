//! What the server tells of itself: logs and metrics.

mod context;
mod exporter;
mod logging;
mod system;

pub(crate) use context::RequestContext;
pub(crate) use exporter::{Exporter, ResponseCounts};
pub(crate) use logging::{
    Format, Log, LogFilter, LogFolders, LogSettings, MarkedLines, checked_filter,
};
pub(crate) use system::collect_host_metrics;
