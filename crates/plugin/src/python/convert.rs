//! What crosses the border between Rust and Python, in both directions.

use bytes::Bytes;
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyList, PyString, PyTuple};
use ts_host::{Batch, BatchItem, BatchResult, Item, Metric};
use ts_wire::frame::{MetricKind, RunFailure};

/// Reply bodies from this size on stay in the memory that Python owns; shorter ones are copied,
/// which is cheaper than to give the object back to the interpreter later.
const BORROW_FROM_BYTES: usize = 4 << 10;

/// A batch as `Session.run` takes it: a list of `(request id, headers, parts)`.
pub(crate) fn items<'py>(py: Python<'py>, batch: &Batch<'_>) -> PyResult<Bound<'py, PyList>> {
    let items = PyList::empty(py);
    for item in &batch.items {
        items.append(item_tuple(py, item)?)?;
    }
    Ok(items)
}

/// One request of it.
pub(crate) fn item_tuple<'py>(
    py: Python<'py>,
    item: &BatchItem<'_>,
) -> PyResult<Bound<'py, PyTuple>> {
    let headers = PyDict::new(py);
    for (name, value) in &item.headers {
        headers.set_item(name, value)?;
    }
    let parts = PyList::empty(py);
    for (name, content_type, value) in &item.parts {
        parts.append((name, content_type, byte_array(py, value)?))?;
    }
    (item.request_id, headers, parts).into_pyobject(py)
}

/// The one copy of a request's value. `PyByteArray::new` would panic where memory is short, and
/// its fallible sister writes the memory twice.
fn byte_array<'py>(py: Python<'py>, value: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    let size = ffi::Py_ssize_t::try_from(value.len())?;
    // SAFETY: the pointer and the size are those of `value`, which CPython copies; it returns a
    // new object of our own, or null with an exception set.
    #[expect(unsafe_code, reason = "pyo3 has no fallible copy into a bytearray")]
    unsafe {
        let array = ffi::PyByteArray_FromStringAndSize(value.as_ptr().cast(), size);
        Bound::from_owned_ptr_or_err(py, array)
    }
}

/// What `Session.run` returned for `size` requests: `(kind, code, message, replies, metrics)`.
pub(crate) fn outcome(outcome: &Bound<'_, PyAny>, size: usize) -> PyResult<BatchResult> {
    let outcome = outcome.cast::<PyTuple>()?;
    let kind = outcome.get_item(0)?;
    let kind = kind.cast::<PyString>()?.to_str()?;
    let items = match kind {
        "ok" => {
            let replies = outcome.get_item(3)?;
            let replies = replies.cast::<PyList>()?;
            if replies.len() != size {
                return Err(PyTypeError::new_err(format!(
                    "{} replies for {size} requests",
                    replies.len()
                )));
            }
            Ok(replies.iter().map(|reply| self::reply(&reply)).collect())
        }
        kind => Err(failure(kind, outcome)?),
    };
    Ok(BatchResult {
        items,
        metrics: metrics(&outcome.get_item(4)?)?,
    })
}

/// A failure: `(kind, code, message, …)`.
fn failure(kind: &str, failure: &Bound<'_, PyTuple>) -> PyResult<RunFailure> {
    Ok(match kind {
        "handler_failed" => RunFailure::HandlerFailed,
        "handler_status" => RunFailure::HandlerStatus {
            code: handler_status(&failure.get_item(1)?),
            message: text(&failure.get_item(2)?)?,
        },
        "out_of_memory" => RunFailure::OutOfMemory,
        "device_out_of_memory" => RunFailure::DeviceOutOfMemory,
        "invalid_output" => RunFailure::NotAList,
        "batch_mismatch" => RunFailure::LengthMismatch,
        "unsupported_output" => RunFailure::UnsupportedOutput,
        unknown => {
            return Err(PyTypeError::new_err(format!("an unknown kind `{unknown}`")));
        }
    })
}

/// The status that a handler raised; one outside HTTP's range is its mistake, and a failure.
fn handler_status(code: &Bound<'_, PyAny>) -> u16 {
    let code = code.extract().ok();
    code.filter(|code| (100..=999).contains(code))
        .unwrap_or(500)
}

/// One reply, `(status, reason, headers, body)`, or the failure of this one request,
/// `(kind, code, message)`. A status or a header that is none is the mistake of the handler for
/// this one request.
pub(crate) fn reply(reply: &Bound<'_, PyAny>) -> Result<Item, RunFailure> {
    item(reply).unwrap_or_else(|error| Err(super::raised::run_failure(reply.py(), &error)))
}

fn item(reply: &Bound<'_, PyAny>) -> PyResult<Result<Item, RunFailure>> {
    let reply = reply.cast::<PyTuple>()?;
    if reply.len() == 3 {
        let kind = reply.get_item(0)?;
        return failure(kind.cast::<PyString>()?.to_str()?, reply).map(Err);
    }
    Ok(Ok(Item {
        status: reply.get_item(0)?.extract()?,
        reason: text(&reply.get_item(1)?)?,
        headers: pairs(&reply.get_item(2)?)?,
        body: body(reply.get_item(3)?)?,
    }))
}

/// The bytes of a reply. Immutable ones are lent, not copied; a `bytearray` may still be changed
/// by the handler.
fn body(value: Bound<'_, PyAny>) -> PyResult<Bytes> {
    match value.cast_into::<PyBytes>() {
        Ok(bytes) if bytes.as_bytes().len() < BORROW_FROM_BYTES => {
            Ok(Bytes::copy_from_slice(bytes.as_bytes()))
        }
        // Its last reference is usually let go outside the interpreter, after the reply was sent;
        // pyo3 then keeps it for the next attach, so at most one batch of replies waits.
        Ok(bytes) => Ok(Bytes::from_owner(PyBackedBytes::from(bytes))),
        Err(refused) => {
            let other = refused.into_inner();
            Ok(Bytes::from(other.cast::<PyByteArray>()?.to_vec()))
        }
    }
}

/// Metrics: `(name, value, unit, kind, dimensions, request ids)`. The ids are for
/// the log.
fn metrics(list: &Bound<'_, PyAny>) -> PyResult<Vec<Metric>> {
    let list = list.cast::<PyList>()?;
    let mut metrics = Vec::with_capacity(list.len());
    for emitted in list.iter() {
        let emitted = emitted.cast::<PyTuple>()?;
        let kind = emitted.get_item(3)?;
        let kind = match kind.cast::<PyString>()?.to_str()? {
            "counter" => MetricKind::Counter,
            "gauge" => MetricKind::Gauge,
            "histogram" => MetricKind::Histogram,
            unknown => {
                // The batch has its answers; a metric is not worth losing them.
                super::log(&format!(
                    "a metric was dropped: the bridge to Python sent the unknown kind `{unknown}`"
                ));
                continue;
            }
        };
        metrics.push(Metric {
            name: text(&emitted.get_item(0)?)?,
            value: emitted.get_item(1)?.extract()?,
            unit: text(&emitted.get_item(2)?)?,
            kind,
            dimensions: pairs(&emitted.get_item(4)?)?,
            request_ids: text(&emitted.get_item(5)?)?,
        });
    }
    Ok(metrics)
}

fn pairs(list: &Bound<'_, PyAny>) -> PyResult<Vec<(String, String)>> {
    let list = list.cast::<PyList>()?;
    let mut pairs = Vec::with_capacity(list.len());
    for pair in list.iter() {
        let pair = pair.cast::<PyTuple>()?;
        pairs.push((text(&pair.get_item(0)?)?, text(&pair.get_item(1)?)?));
    }
    Ok(pairs)
}

/// A text for the wire. A lone surrogate, which Python's strings may hold and UTF-8 cannot, is
/// replaced.
fn text(value: &Bound<'_, PyAny>) -> PyResult<String> {
    Ok(value.cast::<PyString>()?.to_string_lossy().into_owned())
}
