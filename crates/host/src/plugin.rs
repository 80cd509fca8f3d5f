//! Opening the plugin. No Rust type crosses this border: the plugin gets a descriptor and the
//! bytes of the set-up message, and returns a status.

use std::ffi::c_int;
use std::os::fd::{IntoRawFd, OwnedFd};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
use ts_wire::frame::PythonPlaces;

use crate::HostError;

/// Name of the plugin's one exported function.
pub const PLUGIN_ENTRY: &str = "ts_plugin_host";

/// Its type: control socket (which it owns from then on), set-up message, its length. Returns 0
/// when the server has gone, anything else after a fault.
pub type PluginEntry = unsafe extern "C" fn(c_int, *const u8, usize) -> c_int;

/// Loads libpython and the plugin, and runs the host inside the latter.
///
/// libpython comes first and with global symbols: torch's and every other extension module expect
/// to find its symbols in the process, and a loader left alone picks whichever libpython the
/// system has.
pub(crate) fn run_plugin(
    places: &PythonPlaces,
    setup: &[u8],
    control: OwnedFd,
) -> Result<(), HostError> {
    let open = |path: &std::path::Path, flags| {
        // SAFETY: initialisers of libpython and of our own plugin run here. Both are the paths
        // that the server found and checked; no other thread of this process exists yet.
        #[expect(unsafe_code, reason = "loading the plugin is what this file is for")]
        unsafe { Library::open(Some(path), flags) }.map_err(|source| HostError::Library {
            path: path.to_owned(),
            source,
        })
    };
    let _libpython = open(&places.libpython, RTLD_NOW | RTLD_GLOBAL)?;
    let _torch = match &places.torch_lib {
        Some(folder) => Some(open(
            &folder.join("libtorch_python.so"),
            RTLD_NOW | RTLD_GLOBAL,
        )?),
        None => None,
    };
    let plugin = open(&places.plugin, RTLD_NOW | RTLD_LOCAL)?;
    // SAFETY: the plugin is built from this workspace and exports this function with this type;
    // the descriptor is handed over, the message outlives the call.
    #[expect(unsafe_code, reason = "calling the plugin is what this file is for")]
    let status = unsafe {
        let entry =
            plugin
                .get::<PluginEntry>(PLUGIN_ENTRY)
                .map_err(|source| HostError::Library {
                    path: places.plugin.clone(),
                    source,
                })?;
        entry(control.into_raw_fd(), setup.as_ptr(), setup.len())
    };
    if status == 0 {
        Ok(())
    } else {
        Err(HostError::Plugin(status))
    }
}
