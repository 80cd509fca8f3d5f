//! Why a host cannot start or go on. The text reaches the server in `HostReply::Failed` and stands
//! in the model's last failure.

use std::path::PathBuf;

use ts_wire::WireError;

/// A fault of a host.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The control socket failed.
    #[error("the control channel failed")]
    Control(#[from] WireError),
    /// A first message that sets nothing up.
    #[error("the host got `{got}` before its set-up")]
    NotSetUp {
        /// What came instead.
        got: &'static str,
    },
    /// A library could not be loaded.
    #[error("`{path}` could not be loaded")]
    Library {
        /// The library.
        path: PathBuf,
        /// The loader's words.
        #[source]
        source: libloading::Error,
    },
    /// The plugin came back with a fault; it has reported the reason itself.
    #[error("the plugin ended with status {0}")]
    Plugin(i32),
    /// A system call failed.
    #[error("{call} failed in a host")]
    System {
        /// The call.
        call: &'static str,
        /// Its error.
        #[source]
        source: std::io::Error,
    },
}
