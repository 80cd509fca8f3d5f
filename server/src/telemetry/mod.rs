//! What the server tells of itself: logs, metrics and traces.

mod context;
mod gpu;
mod logging;
mod metrics;
mod metrics_yaml;
mod system;
mod traces;

pub(crate) use context::RequestContext;
pub(crate) use gpu::{Gpus, Library};
pub(crate) use logging::{
    Format, Log, LogFilter, LogFolders, LogSettings, MarkedLines, checked_filter,
};
pub(crate) use metrics::{MetricLog, ResponseCounts};
pub(crate) use metrics_yaml::Declared;
pub(crate) use system::collect_host_metrics;
pub(crate) use traces::Traces;
