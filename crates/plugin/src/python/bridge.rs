//! The calls into `ts._runtime.bridge`, with `ts._runtime.zygote` the only Python that Rust calls by
//! name.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use ts_host::{Backend, Batch, BatchResult};
use ts_wire::frame::{LoadFailure, LoadFailureKind, LoadModel};

use super::interpreter::PythonThread;
use super::{convert, raised};

const BRIDGE: &str = "ts._runtime.bridge";

/// Prepares output and logging of the process.
pub(crate) fn start_interpreter(py: Python<'_>) -> PyResult<()> {
    py.import(BRIDGE)?
        .call_method0(intern!(py, "start_interpreter"))
        .map(drop)
}

/// A worker's loaded handler.
pub(crate) struct Session {
    /// The bound method `Session.run`.
    run: Py<PyAny>,
    thread: PythonThread,
}

impl Session {
    /// Loads the model's handler.
    pub(crate) fn load(model: &LoadModel) -> Result<Self, LoadFailure> {
        let thread = PythonThread::register();
        let run = thread.attach(|py| {
            load(py, model)
                .unwrap_or_else(|error| Err(raised::load_failure(py, &model.model_name, &error)))
        })?;
        Ok(Self { run, thread })
    }
}

impl Backend for Session {
    fn run(&mut self, batch: &Batch<'_>) -> BatchResult {
        self.thread.attach(|py| {
            let ran = convert::items(py, batch)
                .and_then(|items| self.run.bind(py).call1((items,)))
                .and_then(|outcome| convert::outcome(&outcome, batch.items.len()));
            ran.unwrap_or_else(|error| BatchResult {
                items: Err(raised::run_failure(py, &error)),
                metrics: Vec::new(),
            })
        })
    }
}

impl Drop for Session {
    /// Frees the model now. An object that is let go outside the interpreter waits for the next
    /// attach of any thread, and in a host whose other workers are idle that may be never.
    fn drop(&mut self) {
        let Self { run, thread } = self;
        thread.attach(|py| drop(std::mem::replace(run, py.None())));
    }
}

fn load(py: Python<'_>, model: &LoadModel) -> PyResult<Result<Py<PyAny>, LoadFailure>> {
    let loaded = py
        .import(BRIDGE)?
        .call_method1(intern!(py, "load"), (spec(py, model)?,))?;
    let (session, kind, message): (Bound<'_, PyAny>, String, String) = loaded.extract()?;
    if !session.is_none() {
        return Ok(Ok(session.getattr(intern!(py, "run"))?.unbind()));
    }
    let kind = match kind.as_str() {
        "out_of_memory" => LoadFailureKind::OutOfMemory,
        "permanent" => LoadFailureKind::Permanent,
        "failed" => LoadFailureKind::Transient,
        unknown => {
            super::log(&format!(
                "the bridge to Python failed to load a model with the unknown kind `{unknown}`"
            ));
            LoadFailureKind::Transient
        }
    };
    Ok(Err(LoadFailure { kind, message }))
}

fn spec<'py>(py: Python<'py>, model: &LoadModel) -> PyResult<Bound<'py, PyDict>> {
    let spec = PyDict::new(py);
    spec.set_item("model_name", &model.model_name)?;
    spec.set_item("model_version", &model.model_version)?;
    // As text: paths reach handlers as `str`, and `&Path` would become a `pathlib.Path`.
    spec.set_item("model_dir", model.model_dir.as_os_str())?;
    spec.set_item("handler", &model.handler)?;
    spec.set_item("gpu_id", model.gpu_id)?;
    spec.set_item("batch_size", model.batch_size)?;
    spec.set_item("service_envelope", model.service_envelope.as_deref())?;
    spec.set_item("limit_max_image_pixels", model.limit_max_image_pixels)?;
    spec.set_item("decode_input_request", model.decode_input_request)?;
    spec.set_item("server_version", &model.server_version)?;
    spec.set_item("intra_op_threads", model.intra_op_threads)?;
    // A host serves one model version, so its working folder may be the model's.
    spec.set_item("change_dir", true)?;
    Ok(spec)
}
