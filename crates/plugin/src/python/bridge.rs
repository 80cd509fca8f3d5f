//! The calls into `ts._runtime.bridge`, with `ts._runtime.zygote` the only Python that Rust calls by
//! name.

use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use ts_host::{Backend, Batch, BatchItem, BatchResult, Output};
use ts_wire::frame::{Exchange, LoadFailure, LoadFailureKind, LoadModel, LoadedModel, MetricKind};

use super::interpreter::PythonThread;
use super::{convert, output, raised};

const BRIDGE: &str = "ts._runtime.bridge";

/// Prepares output and logging of the process.
pub(crate) fn start_interpreter(py: Python<'_>) -> PyResult<()> {
    py.import(BRIDGE)?
        .call_method0(intern!(py, "start_interpreter"))
        .map(drop)
}

/// A worker's loaded handler: a `Session` of the bridge, or an `AsyncSession`.
pub(crate) struct Session {
    session: Py<PyAny>,
    /// Its bound method `run`, or `start`.
    run: Py<PyAny>,
    asynchronous: bool,
    model: LoadedModel,
    output: Arc<Output>,
    thread: PythonThread,
}

impl Session {
    /// Loads the model's handler.
    pub(crate) fn load(model: &LoadModel, output: &Arc<Output>) -> Result<Self, LoadFailure> {
        let thread = PythonThread::register();
        let asynchronous = model.exchange == Exchange::Asynchronous;
        let (session, run, loaded) = thread.attach(|py| {
            let run = if asynchronous { "start" } else { "run" };
            load(py, model, output, run)
                .unwrap_or_else(|error| Err(raised::load_failure(py, &model.model_name, &error)))
        })?;
        Ok(Self {
            session,
            run,
            asynchronous,
            model: loaded,
            output: Arc::clone(output),
            thread,
        })
    }
}

impl Backend for Session {
    fn describe(&self) -> LoadedModel {
        self.model
    }

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

    fn start(&mut self, item: &BatchItem<'_>) {
        self.thread.attach(|py| {
            let started =
                convert::item_tuple(py, item).and_then(|item| self.run.bind(py).call1((item,)));
            if let Err(error) = started {
                let failed = Err(raised::run_failure(py, &error));
                let answered = py.detach(|| self.output.answer(item.request_id, &failed, &[]));
                if let Err(error) = answered {
                    super::log(&format!("a request was not answered: {error}"));
                }
            }
        });
    }

    fn cancel(&mut self, request_id: &str) {
        self.thread.attach(|py| {
            let session = self.session.bind(py);
            if let Err(error) = session.call_method1(intern!(py, "cancel"), (request_id,)) {
                raised::log(py, "breaking a request off failed", &error);
            }
        });
    }
}

impl Drop for Session {
    /// Frees the model now. An object that is let go outside the interpreter waits for the next
    /// attach of any thread, and in a host whose other workers are idle that may be never.
    fn drop(&mut self) {
        let Self {
            session,
            run,
            asynchronous,
            thread,
            ..
        } = self;
        thread.attach(|py| {
            if *asynchronous && let Err(error) = session.bind(py).call_method0(intern!(py, "close"))
            {
                raised::log(py, "ending the event loop failed", &error);
            }
            drop(std::mem::replace(run, py.None()));
            drop(std::mem::replace(session, py.None()));
        });
    }
}

type Loaded = (Py<PyAny>, Py<PyAny>, LoadedModel);

fn load(
    py: Python<'_>,
    model: &LoadModel,
    output: &Arc<Output>,
    run: &str,
) -> PyResult<Result<Loaded, LoadFailure>> {
    let functions = output::functions(py, output)?;
    let loaded = py
        .import(BRIDGE)?
        .call_method1(intern!(py, "load"), (spec(py, model)?, functions))?;
    let (session, kind, message): (Bound<'_, PyAny>, String, String) = loaded.extract()?;
    if !session.is_none() {
        let loaded = LoadedModel {
            side_effect_free: session
                .getattr(intern!(py, "side_effect_free"))?
                .extract()?,
        };
        let run = session.getattr(run)?.unbind();
        return Ok(Ok((session.unbind(), run, loaded)));
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
    let exchange = match model.exchange {
        Exchange::Batches => "batches",
        Exchange::Continuous => "continuous",
        Exchange::Asynchronous => "asynchronous",
    };
    spec.set_item("exchange", exchange)?;
    spec.set_item("service_envelope", model.service_envelope.as_deref())?;
    spec.set_item("limit_max_image_pixels", model.limit_max_image_pixels)?;
    spec.set_item("decode_input_request", model.decode_input_request)?;
    spec.set_item("load_policy", &model.load_policy)?;
    spec.set_item("server_version", &model.server_version)?;
    let headers = &model.sequence_headers;
    let headers = (&headers.id, &headers.start, &headers.end);
    spec.set_item("sequence_headers", headers)?;
    let declared = model.declared_metrics.iter().map(|metric| {
        let kind = match metric.kind {
            MetricKind::Counter => "counter",
            MetricKind::Gauge => "gauge",
            MetricKind::Histogram => "histogram",
        };
        (&metric.name, kind, &metric.unit, &metric.dimensions)
    });
    spec.set_item("declared_metrics", declared.collect::<Vec<_>>())?;
    spec.set_item("intra_op_threads", model.intra_op_threads)?;
    // A host serves one model version, so its working folder may be the model's.
    spec.set_item("change_dir", true)?;
    Ok(spec)
}
