//! The calls into `ts._runtime.zygote`: importing ahead, forking, and what a copy does first.

use pyo3::prelude::*;
use ts_host::{Fork, Interpreter};

use super::raised;

/// Python's part of being a zygote. Called on the host's first thread only, which is Python's main
/// thread: it is the one thread that exists in a copy.
pub(crate) const ZYGOTE: Interpreter = Interpreter {
    preload: |modules| {
        inside("importing ahead failed", |zygote| {
            zygote.call_method1("preload", (modules,))?.extract()
        })
    },
    conflict: |modules| {
        inside("looking for modules failed", |zygote| {
            zygote.call_method1("conflict", (modules,))?.extract()
        })
    },
    fork: || {
        inside("forking a host failed", |zygote| {
            Ok(match zygote.call_method0("fork")?.extract()? {
                0 => Fork::Host,
                pid => Fork::Zygote(pid),
            })
        })
    },
    adapt: |environment, threads| {
        inside("a forked host failed at its start", |zygote| {
            zygote
                .call_method1("adapt", (environment, threads))
                .map(drop)
        })
    },
};

fn inside<T>(
    title: &str,
    call: impl FnOnce(Bound<'_, PyModule>) -> PyResult<T>,
) -> Result<T, String> {
    Python::attach(|py| {
        py.import("ts._runtime.zygote")
            .and_then(call)
            .map_err(|error| raised::log(py, title, &error))
    })
}
