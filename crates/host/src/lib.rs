//! What runs inside a model host: the loop of a worker thread, the [`Backend`] it drives, and the
//! echo backend on which everything else is tested without torch or Python.
//!
//! A host is the server's own executable in its hidden `worker` command ([`run`]). It either
//! serves the echo backend itself, or loads the plugin and hands its control socket over through
//! one C function ([`PLUGIN_ENTRY`]); inside the plugin the same [`serve`] runs with a factory for
//! Python backends. Thread and process isolation differ only in how many workers a host is given.
//!
//! One host of a server is its zygote: it serves nothing, and forks hosts that are ready at once.

mod backend;
mod echo;
mod error;
mod host;
mod output;
mod plugin;
mod worker;
mod zygote;

pub use backend::{Backend, BackendFactory, Batch, BatchItem, BatchResult, Item, Metric};
pub use echo::EchoFactory;
pub use error::HostError;
pub use host::{run, serve};
pub use output::{Output, Sent};
pub use plugin::{PLUGIN_ENTRY, PluginEntry, TORCH_VERSION};
pub use zygote::{Fork, Interpreter, Variable, ZygoteEnd, serve_zygote, take_up};
