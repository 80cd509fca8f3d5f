//! What the operator configured: taken as text ([`raw`]), layered by precedence ([`sources`]),
//! resolved to types with every fault told at once ([`resolve()`]).

mod address;
mod devices;
mod log4j;
mod models;
pub(crate) mod properties;
pub(crate) mod raw;
#[cfg(test)]
mod reference;
mod resolve;
pub(crate) mod show;
mod sources;

#[cfg(feature = "fuzzing")]
pub(crate) use address::DefaultPorts;
pub(crate) use address::{Address, scheme};
pub(crate) use devices::{VISIBLE, find as find_devices};
#[cfg(feature = "fuzzing")]
pub(crate) use models::parse_overrides;
pub(crate) use models::{StartupModel, StartupModels};
#[cfg(feature = "fuzzing")]
pub(crate) use properties::{parse as parse_properties, substitute};
pub(crate) use resolve::{Connections, Http, Machine, Settings, resolve};
pub(crate) use sources::{Environment, load};

use ts_types::{ModelName, Version};

/// Why the server cannot start with what it was told.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SettingsError {
    /// The configuration file is not there.
    #[error("--ts-config file not found: {path}{}", from(.named_by))]
    NoConfigFile {
        /// As given.
        path: String,
        /// Variable that named it, if it was not the option.
        named_by: Option<&'static str>,
    },
    /// The configuration file cannot be read.
    #[error("Invalid configuration: {path}: {reason}")]
    Unreadable {
        /// As given.
        path: String,
        /// The reader's words.
        reason: String,
    },
    /// A line of it that is none of the format's.
    #[error("Invalid configuration: {reason} ({origin})")]
    Malformed {
        /// The reader's words.
        reason: String,
        /// Where it stands.
        origin: String,
    },
    /// No store is named anywhere.
    #[error("Missing mandatory parameter --model-store")]
    NoModelStore,
    /// A folder or file that is not there.
    #[error("--{option} {what} not found: {path}{}{}", from_origin(.origin), as_it_is(.path))]
    Missing {
        /// The option that could have named it.
        option: &'static str,
        /// `directory` or `file`.
        what: &'static str,
        /// As given.
        path: String,
        /// Where it was given.
        origin: String,
    },
    /// `$$NAME$$` of a variable that is not set.
    #[error("Invalid configuration: Invalid Environment Variable {variable} in `{key}` ({origin})")]
    NoVariable {
        /// The variable.
        variable: String,
        /// The key whose value names it.
        key: String,
        /// Where that stands.
        origin: String,
    },
    /// A value that is not of its key's type, or out of bounds.
    #[error("Invalid configuration: {key}: {reason} ({origin}){hint}")]
    Value {
        /// The key.
        key: &'static str,
        /// What is wrong with the value.
        reason: String,
        /// Where it stands.
        origin: String,
        /// What may have been meant, as a sentence after it; or nothing.
        hint: String,
    },
    /// A saved model whose archive is not there any more. The first sentence is TorchServe's.
    #[error(
        "Model archive file for model :{model}, version :{version} not found in model store. Put \
         `{archive}` back, name the models to load with `--models`, or take the entry out of \
         `model_snapshot` ({origin})"
    )]
    MissingArchive {
        /// The model.
        model: ModelName,
        /// Its version.
        version: Version,
        /// Name of the file or folder.
        archive: String,
        /// Where the saved models stand.
        origin: String,
    },
    /// The folder for temporary files does not exist.
    #[error("Invalid temp directory: {path}, please check TEMP environment variable.")]
    NoTempDir {
        /// As given.
        path: String,
    },
}

fn from(variable: &Option<&'static str>) -> String {
    variable
        .map(|name| format!(" (from {name})"))
        .unwrap_or_default()
}

/// What a path cannot show by itself: the format keeps quotes and blanks at the end.
fn as_it_is(path: &str) -> String {
    let odd = |c: char| c.is_whitespace() || matches!(c, '"' | '\'');
    if path.starts_with(odd) || path.ends_with(odd) {
        format!(". Quotes and blanks around it belong to it: [{path}]")
    } else {
        String::new()
    }
}

fn from_origin(origin: &str) -> String {
    if origin.starts_with("--") {
        String::new()
    } else {
        format!(" ({origin})")
    }
}
