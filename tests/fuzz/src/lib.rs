//! The fuzz targets. Each feeds bytes to a parser and asserts more than that it returns: limits
//! hold, what was read can be written and read again. A program in `src/bin` makes one of them a
//! fuzzer: linked alone, it has few counters of edges to look through after each input.
//!
//! `run.py` builds and runs them; docs/testing.md tells of it.

pub mod archives;
pub mod bodies;
pub mod models;
pub mod parameters;
pub mod settings;
