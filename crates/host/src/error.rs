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
    /// The environment has no torch.
    #[error(
        "the plugin links torch `{wanted}`, even for models that do not use it, and `{}` has \
         none; run `{} -m pip install torch=={wanted}`", executable.display(), executable.display()
    )]
    NoTorch {
        /// The torch that the plugin is compiled against.
        wanted: &'static str,
        /// The environment's interpreter.
        executable: PathBuf,
    },
    /// The environment has another torch.
    #[error(
        "the plugin needs torch `{wanted}`, `{}` is torch `{found}`; run `{} -m pip install \
         torch=={wanted}`", folder.display(), executable.display()
    )]
    TorchVersion {
        /// The torch that the plugin is compiled against.
        wanted: &'static str,
        /// The torch that was found.
        found: String,
        /// Where.
        folder: PathBuf,
        /// The environment's interpreter.
        executable: PathBuf,
    },
    /// The plugin came back with a fault; it has reported the reason itself.
    #[error("the plugin ended with status {0}")]
    Plugin(i32),
    /// A copy of the zygote could not be made a host.
    #[error("a forked host could not take up its work: {0}")]
    NotAdapted(String),
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

impl HostError {
    pub(crate) fn system(call: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |errno| Self::System {
            call,
            source: errno.into(),
        }
    }
}
