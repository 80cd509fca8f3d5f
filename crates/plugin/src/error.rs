//! Why the plugin cannot start in a host. The text reaches the server in `HostReply::Failed`.

use std::path::PathBuf;

use ts_host::HostError;
use ts_wire::WireError;

/// A fault at the start of the plugin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PluginError {
    /// The host's message says nothing that can be set up.
    #[error("the plugin was given a set-up that it cannot read")]
    SetUp(#[source] WireError),
    /// The message names no Python.
    #[error("the plugin was given a set-up without Python")]
    NoPython,
    /// A path that Python's C interface cannot take.
    #[error("`{}` holds a zero byte", path.display())]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// libpython is of another minor version than the one that the plugin was built for.
    #[error(
        "the plugin is built for Python `{wanted}`, `{}` is Python `{found}`; build the plugin \
         with PYO3_PYTHON={}", executable.display(), executable.display()
    )]
    PythonVersion {
        /// The version that it was built for.
        wanted: &'static str,
        /// The version of libpython.
        found: String,
        /// Whose libpython it is.
        executable: PathBuf,
    },
    /// CPython refused to start.
    #[error(
        "Python did not start as `{}`: {message}; check the environment variable PYTHONHOME, the \
         model log shows where Python looked", executable.display()
    )]
    Interpreter {
        /// The interpreter of the environment.
        executable: PathBuf,
        /// CPython's words.
        message: String,
    },
    /// The interpreter runs in another environment than the server found.
    #[error(
        "Python started with prefix `{}` instead of `{}`; check the environment variable \
         PYTHONHOME and the file `pyvenv.cfg`", found.display(), wanted.display()
    )]
    Prefix {
        /// The environment that the server found.
        wanted: PathBuf,
        /// `sys.prefix` after start.
        found: PathBuf,
    },
    /// Our own Python raised: the `ts` package is missing or damaged.
    #[error("the `ts` package in `{}` did not start: {message}", handlers.display())]
    Bridge {
        /// Where it was looked for.
        handlers: PathBuf,
        /// What it raised.
        message: String,
    },
    /// A panic, which must not cross the C border.
    #[error("the plugin panicked; the model log has the details")]
    Panic,
    /// A descriptor of the control socket could not be had.
    #[error("the control socket could not be duplicated")]
    Socket(#[from] std::io::Error),
    /// The loop of the host failed.
    #[error(transparent)]
    Host(#[from] HostError),
}
