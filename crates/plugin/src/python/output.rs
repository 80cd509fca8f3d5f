//! What Python calls in Rust: a worker's [`Output`], as functions for the bridge. Any thread of a
//! handler may call them. The interpreter's lock is given up around whatever may wait.

use std::sync::Arc;

use pyo3::exceptions::{PyBrokenPipeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyList, PyString, PyTuple};
use ts_host::{Item, Output};
use ts_wire::WireError;
use ts_wire::frame::RunFailure;

use super::{convert, raised};

/// `(send, has_left, answer)`:
///
/// - `send([(request id, outcome)])` sends parts of replies and returns how many were dropped, and
///   whether all callers have left;
/// - `has_left(request id)` is `None` for a request that does not run;
/// - `answer(request id, outcome)` ends one request with what `Session.run` would return for it.
pub(crate) fn functions<'py>(
    py: Python<'py>,
    output: &Arc<Output>,
) -> PyResult<Bound<'py, PyTuple>> {
    let sender = Arc::clone(output);
    let send =
        PyCFunction::new_closure(py, Some(c"send"), None, move |args, _| send(&sender, args))?;
    let asked = Arc::clone(output);
    let has_left = PyCFunction::new_closure(py, Some(c"has_left"), None, move |args, _| {
        has_left(&asked, args)
    })?;
    let answering = Arc::clone(output);
    let answer = PyCFunction::new_closure(py, Some(c"answer"), None, move |args, _| {
        answer(&answering, args)
    })?;
    (send, has_left, answer).into_pyobject(py)
}

fn send(output: &Output, args: &Bound<'_, PyTuple>) -> PyResult<(usize, bool)> {
    let py = args.py();
    let list = args.get_item(0)?;
    let list = list.cast::<PyList>()?;
    let mut parts: Vec<(String, Result<Item, RunFailure>)> = Vec::with_capacity(list.len());
    for part in list.iter() {
        let part = part.cast::<PyTuple>()?;
        parts.push((id(&part.get_item(0)?)?, convert::reply(&part.get_item(1)?)));
    }
    let sent = py.detach(move || {
        let parts: Vec<_> = parts.iter().map(|(id, part)| (id.as_str(), part)).collect();
        output.chunks(&parts)
    });
    let sent = sent.map_err(|error| gone(&error))?;
    Ok((sent.dropped, sent.all_left))
}

fn has_left(output: &Output, args: &Bound<'_, PyTuple>) -> PyResult<Option<bool>> {
    let id = id(&args.get_item(0)?)?;
    Ok(args.py().detach(|| output.has_left(&id)))
}

fn answer(output: &Output, args: &Bound<'_, PyTuple>) -> PyResult<()> {
    let py = args.py();
    let id = id(&args.get_item(0)?)?;
    let result = convert::outcome(&args.get_item(1)?, 1);
    let (item, metrics) = match result {
        Ok(result) => {
            let item = result.items.and_then(|mut items| items.remove(0));
            (item, result.metrics)
        }
        Err(error) => (Err(raised::run_failure(py, &error)), Vec::new()),
    };
    py.detach(move || output.answer(&id, &item, &metrics))
        .map_err(|error| gone(&error))
}

fn id(value: &Bound<'_, PyAny>) -> PyResult<String> {
    match value.cast::<PyString>() {
        Ok(id) => Ok(id.to_string_lossy().into_owned()),
        Err(_) => Err(PyTypeError::new_err("a request id is a text")),
    }
}

fn gone(error: &WireError) -> PyErr {
    PyBrokenPipeError::new_err(error.to_string())
}
