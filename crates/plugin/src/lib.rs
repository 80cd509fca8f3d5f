//! The only crate that knows torch and Python. A model host loads it at run time and calls its one
//! exported function, [`ts_plugin_host`]; nothing links it.
//!
//! - `python`: one interpreter per host, the calls into `ts._runtime.bridge`, and how requests and
//!   results cross the border.
//! - `torch`: the version pin and the thread count of a worker, the only uses of tch so far.
//! - `factory`: from a model's description to the backend that runs it.

mod error;
mod factory;
mod host;
mod python;
mod torch;

pub use host::ts_plugin_host;
