//! Opening the plugin. No Rust type crosses this border: the plugin gets a descriptor and the
//! bytes of the set-up message, and returns a status.

use std::ffi::c_int;
use std::os::fd::{IntoRawFd, OwnedFd};
use std::path::Path;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
use ts_wire::frame::PythonPlaces;

use crate::HostError;

/// The torch that the plugin is compiled against; its C++ interface is that of one release. Stands
/// here because a plugin that meets another torch cannot even be opened.
pub const TORCH_VERSION: &str = "2.11.0";

/// Name of the plugin's one exported function.
pub const PLUGIN_ENTRY: &str = "ts_plugin_host";

/// Its type: control socket (which it owns from then on), set-up message, its length. Ends the
/// process when the server has gone and after a fault, which it reports first; a status that it
/// returns nevertheless is a fault unless it is 0.
pub type PluginEntry = unsafe extern "C" fn(c_int, *const u8, usize) -> c_int;

/// The plugin and what it needs, loaded.
pub(crate) struct Plugin {
    places: PythonPlaces,
    plugin: Library,
    _before: [Library; 2],
}

impl Plugin {
    /// Loads libpython, libtorch and the plugin.
    ///
    /// Each comes by its path before whatever needs it, since a loader left alone picks the
    /// libpython of the system, and finds no libtorch at all. libpython's symbols are global:
    /// extension modules expect to find them in the process. libtorch's are not, as in Python
    /// itself, so that they do not take the place of another extension module's. Of torch only the
    /// part is loaded that the plugin links: all of a CUDA build costs a host 185 MB and 0.3 s
    /// instead of 62 MB and 0.2 s, and whoever imports torch later gets the rest from the same
    /// folder.
    pub(crate) fn open(places: &PythonPlaces) -> Result<Self, HostError> {
        let torch_lib = torch_folder(places)?;
        let open = |path: &Path, flags| {
            // SAFETY: initialisers of libpython and of our own plugin run here. Both are the paths
            // that the server found and checked; no other thread of this process exists yet.
            #[expect(unsafe_code, reason = "loading the plugin is what this file is for")]
            unsafe { Library::open(Some(path), flags) }.map_err(|source| HostError::Library {
                path: path.to_owned(),
                source,
            })
        };
        let libpython = open(&places.libpython, RTLD_NOW | RTLD_GLOBAL)?;
        let torch = open(&torch_lib.join("libtorch_cpu.so"), RTLD_NOW | RTLD_LOCAL)?;
        let plugin = open(&places.plugin, RTLD_NOW | RTLD_LOCAL)?;
        Ok(Self {
            places: places.clone(),
            plugin,
            _before: [libpython, torch],
        })
    }

    /// Runs the host inside the plugin. The socket is given away even if this fails; a descriptor
    /// kept here would be open in every process that the plugin forks.
    pub(crate) fn run(&self, setup: &[u8], control: OwnedFd) -> Result<(), HostError> {
        // SAFETY: the plugin is built from this workspace and exports this function with this
        // type; the descriptor is handed over, the message outlives the call.
        #[expect(unsafe_code, reason = "calling the plugin is what this file is for")]
        let status = unsafe {
            let entry = self
                .plugin
                .get::<PluginEntry>(PLUGIN_ENTRY)
                .map_err(|source| HostError::Library {
                    path: self.places.plugin.clone(),
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
}

/// The folder of libtorch, if it is the release that the plugin needs.
fn torch_folder(places: &PythonPlaces) -> Result<&Path, HostError> {
    let (Some(folder), Some(found)) = (&places.torch_lib, &places.torch_version) else {
        return Err(HostError::NoTorch {
            wanted: TORCH_VERSION,
            executable: places.executable.clone(),
        });
    };
    // `2.11.0+cu130` and `2.11.0+cpu` have the same interface.
    if found.split('+').next() != Some(TORCH_VERSION) {
        return Err(HostError::TorchVersion {
            wanted: TORCH_VERSION,
            found: found.clone(),
            folder: folder.clone(),
            executable: places.executable.clone(),
        });
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(torch_version: Option<&str>) -> PythonPlaces {
        PythonPlaces {
            plugin: "/lib/libts_plugin.so".into(),
            executable: "/venv/bin/python".into(),
            prefix: "/venv".into(),
            libpython: "/lib/libpython.so".into(),
            torch_lib: torch_version.map(|_| "/venv/torch/lib".into()),
            torch_version: torch_version.map(str::to_owned),
            handlers: "/handlers".into(),
        }
    }

    #[test]
    fn every_build_of_the_pinned_torch_is_taken() {
        for version in [TORCH_VERSION, "2.11.0+cpu", "2.11.0+cu130"] {
            let places = places(Some(version));
            assert_eq!(
                torch_folder(&places).unwrap(),
                Path::new("/venv/torch/lib"),
                "{version}"
            );
        }
    }

    #[test]
    fn another_torch_is_told_in_one_line() {
        let error = torch_folder(&places(Some("2.12.0+cpu"))).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the plugin needs torch `2.11.0`, `/venv/torch/lib` is torch `2.12.0+cpu`; run \
             `/venv/bin/python -m pip install torch==2.11.0`"
        );
        assert!(torch_folder(&places(Some("2.11.01"))).is_err());
    }

    #[test]
    fn a_missing_torch_is_told_in_one_line() {
        let error = torch_folder(&places(None)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the plugin links torch `2.11.0`, even for models that do not use it, and \
             `/venv/bin/python` has none; run `/venv/bin/python -m pip install torch==2.11.0`"
        );
    }
}
