//! Exceptions that reach Rust. Those of a handler come back as data, so whatever is raised here is
//! a fault of our own, or memory that ran out: it goes to the log with its traceback, and fails
//! the batch or the load.

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use ts_wire::frame::{LoadFailure, LoadFailureKind, RunFailure};

/// Writes the traceback under a title in one go, and returns the exception as one line.
///
/// Not `PyErr::print`: that goes through `sys.stderr`, which a handler may have replaced, and ends
/// the process for a `SystemExit`.
pub(crate) fn log(py: Python<'_>, title: &str, error: &PyErr) -> String {
    let traceback = error
        .traceback(py)
        .and_then(|traceback| pyo3::types::PyTracebackMethods::format(&traceback).ok())
        .unwrap_or_default();
    super::log(&format!("{title}\n{traceback}{error}"));
    let line = error.to_string();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The failure of a batch for an exception of the bridge.
pub(crate) fn run_failure(py: Python<'_>, error: &PyErr) -> RunFailure {
    log(py, "the bridge to Python failed on a batch", error);
    if error.is_instance_of::<PyMemoryError>(py) {
        RunFailure::OutOfMemory
    } else {
        RunFailure::HandlerFailed
    }
}

/// The failure of a load for an exception of the bridge.
pub(crate) fn load_failure(py: Python<'_>, model: &str, error: &PyErr) -> LoadFailure {
    let title = format!("the bridge to Python failed while loading model {model}");
    LoadFailure {
        message: log(py, &title, error),
        kind: if error.is_instance_of::<PyMemoryError>(py) {
            LoadFailureKind::OutOfMemory
        } else {
            LoadFailureKind::Transient
        },
    }
}
