//! Metrics: families of series that others hold handles of, the page that shows them in
//! Prometheus' text format, and the lines that the log gets of them.
//!
//! A series lives as long as the handle it was made for: whoever stands for a model or a worker
//! holds its handles, and when it goes, its series go from the page. Updates touch one atomic value;
//! only the page and whoever makes or drops a handle take a lock.
//!
//! The macros of the crate `metrics` record here too ([`Metrics::install`]). The registry of
//! `metrics-exporter-prometheus` is not used, only its writing: it keeps every series until the
//! process ends, and a server whose models come and go would grow.

mod facade;
mod journal;
pub mod names;
mod number;
mod page;
mod registry;
mod series;

pub use facade::{Facade, InstalledElsewhere};
pub use journal::{Journal, LogTarget};
pub use names::{Builtin, Group};
pub use registry::{Family, Metrics, Mode, NameTaken};
pub use series::{Kind, Labels, Metric};

/// Name of this machine, a label of every metric.
pub fn hostname() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}
