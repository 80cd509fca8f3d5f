//! Starting the one interpreter of a process, and being inside it.

use std::ffi::{CStr, CString};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyList;
use ts_wire::frame::PythonPlaces;

use super::{bridge, raised};
use crate::error::PluginError;

/// Major and minor version of the Python that the plugin was compiled for. pyo3 reads the layout of
/// CPython's structures from that version's headers.
const BUILT_FOR: &str = env!("TS_BUILT_FOR_PYTHON");

/// Starts the interpreter and prepares it for handlers. Called once, on the host's first thread,
/// which is Python's main thread from then on and no longer holds the interpreter's lock.
pub(crate) fn start(places: &PythonPlaces) -> Result<(), PluginError> {
    check_version(&places.executable)?;
    initialize(&places.executable)?;
    Python::attach(|py| {
        check_prefix(py, &places.prefix).map_err(|error| bridge_fault(py, places, &error))??;
        prepare(py, &places.handlers).map_err(|error| bridge_fault(py, places, &error))
    })
}

fn check_version(executable: &Path) -> Result<(), PluginError> {
    // SAFETY: may be called before initialisation, and returns a static text.
    #[expect(unsafe_code, reason = "pyo3 cannot ask before the interpreter runs")]
    let version = unsafe { CStr::from_ptr(ffi::Py_GetVersion()) }.to_string_lossy();
    let mut numbers = version.split('.');
    let found = format!(
        "{}.{}",
        numbers.next().unwrap_or_default(),
        numbers.next().unwrap_or_default()
    );
    if found == BUILT_FOR {
        return Ok(());
    }
    Err(PluginError::PythonVersion {
        wanted: BUILT_FOR,
        found,
        executable: executable.to_owned(),
    })
}

/// What `python` does at its start, as if it had been called by the environment's path.
fn initialize(executable: &Path) -> Result<(), PluginError> {
    let path = CString::new(executable.as_os_str().as_bytes()).map_err(|_| PluginError::Path {
        path: executable.to_owned(),
    })?;
    let check = |status: ffi::PyStatus| {
        // SAFETY: CPython made the status; its texts are static.
        #[expect(unsafe_code, reason = "reading what CPython returned")]
        unsafe {
            if ffi::PyStatus_Exception(status) == 0 {
                return Ok(());
            }
            let message = if status.err_msg.is_null() {
                "no reason given".to_owned()
            } else {
                CStr::from_ptr(status.err_msg)
                    .to_string_lossy()
                    .into_owned()
            };
            Err(PluginError::Interpreter {
                executable: executable.to_owned(),
                message,
            })
        }
    };
    let mut pre = MaybeUninit::<ffi::PyPreConfig>::uninit();
    let mut config = MaybeUninit::<ffi::PyConfig>::uninit();
    let config = config.as_mut_ptr();
    // SAFETY: each structure is filled by its initialiser before a member is set; texts are copied
    // by CPython and end in a zero; no interpreter exists yet in this process, and no other thread
    // uses Python. `PyEval_SaveThread` gives up the lock that the initialisation took.
    #[expect(
        unsafe_code,
        reason = "pyo3 starts interpreters without a configuration"
    )]
    unsafe {
        ffi::PyPreConfig_InitPythonConfig(pre.as_mut_ptr());
        let pre = pre.assume_init_mut();
        pre.parse_argv = 0;
        // Bodies, archives and logs are UTF-8 whatever the locale of the server's environment.
        pre.utf8_mode = 1;
        pre.coerce_c_locale = 0;
        check(ffi::Py_PreInitialize(pre))?;

        // The environment is honoured (PYTHONPATH, PYTHONHASHSEED, PYTHONWARNINGS, ...), since it
        // is how operators configure Python. A misplaced PYTHONHOME fails here or at the prefix.
        ffi::PyConfig_InitPythonConfig(config);
        (*config).parse_argv = 0;
        // Signals are for the server to decide about, and Python would only run its handlers on a
        // thread that waits for the server.
        (*config).install_signal_handlers = 0;
        // A crash in native code of a model still ends the process, but first writes to the model
        // log which Python line each thread was in.
        (*config).faulthandler = 1;
        // Both, or the environment is not found and, worse, nothing fails: `program_name` decides
        // where `pyvenv.cfg` is looked for, `executable` what handlers see and start.
        let status =
            ffi::PyConfig_SetBytesString(config, &raw mut (*config).program_name, path.as_ptr());
        let result = check(status)
            .and_then(|()| {
                check(ffi::PyConfig_SetBytesString(
                    config,
                    &raw mut (*config).executable,
                    path.as_ptr(),
                ))
            })
            .and_then(|()| check(ffi::Py_InitializeFromConfig(config)));
        ffi::PyConfig_Clear(config);
        result?;
        ffi::PyEval_SaveThread();
    }
    Ok(())
}

/// A wrong path loses the environment without an error; its prefix shows it.
fn check_prefix(py: Python<'_>, wanted: &Path) -> PyResult<Result<(), PluginError>> {
    let found: PathBuf = py.import("sys")?.getattr("prefix")?.extract()?;
    Ok(if found == wanted {
        Ok(())
    } else {
        Err(PluginError::Prefix {
            wanted: wanted.to_owned(),
            found,
        })
    })
}

fn prepare(py: Python<'_>, handlers: &Path) -> PyResult<()> {
    // First, so that our `ts` wins over a TorchServe that is installed in the same environment; as
    // text, since a `&Path` becomes a `pathlib.Path`, which the import system passes over.
    py.import("sys")?
        .getattr("path")?
        .cast::<PyList>()?
        .insert(0, handlers.as_os_str())?;
    // The thread that first imports `threading` is Python's main thread; a worker that came first
    // would be, and would be joined by libraries that look for it.
    py.import("threading")?;
    bridge::start_interpreter(py)
}

fn bridge_fault(py: Python<'_>, places: &PythonPlaces, error: &PyErr) -> PluginError {
    PluginError::Bridge {
        handlers: places.handlers.clone(),
        message: raised::log(py, "starting the `ts` package failed", error),
    }
}

/// The calling thread as the interpreter knows it.
///
/// Without it every attach would make a new Python thread state and delete it afterwards: some
/// microseconds a batch, and with the state go the handler's `threading.local` values.
pub(crate) struct PythonThread {
    ensured: ffi::PyGILState_STATE,
    /// A raw pointer also keeps this type, and so a backend that owns it, on its thread.
    state: *mut ffi::PyThreadState,
}

impl PythonThread {
    /// Registers the calling thread until the value is dropped. The interpreter runs.
    pub(crate) fn register() -> Self {
        // SAFETY: `start` has initialised the interpreter before any worker thread exists, and it
        // is never finalised. Ensure takes the lock, Save gives it up and keeps the state.
        #[expect(
            unsafe_code,
            reason = "pyo3 cannot keep a thread state between attaches"
        )]
        unsafe {
            let ensured = ffi::PyGILState_Ensure();
            Self {
                ensured,
                state: ffi::PyEval_SaveThread(),
            }
        }
    }

    /// Runs `inside` with the interpreter's lock.
    pub(crate) fn attach<R>(&self, inside: impl for<'py> FnOnce(Python<'py>) -> R) -> R {
        Python::attach(inside)
    }
}

impl Drop for PythonThread {
    fn drop(&mut self) {
        // SAFETY: the value cannot leave the thread that `register` ran on, and attaching in
        // between is balanced, so this undoes `register` step by step.
        #[expect(unsafe_code, reason = "the counterpart of `register`")]
        unsafe {
            ffi::PyEval_RestoreThread(self.state);
            ffi::PyGILState_Release(self.ensured);
        }
    }
}
