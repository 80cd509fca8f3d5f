//! Model archives: what they hold (`manifest`, `model_config`), reading them safely (`read`,
//! `unpack`, `inspect`, `verify`) and writing them (`pack`). Blocking file system code, no network,
//! no Python: a handler's source is looked at as text.

mod error;
mod manifest;
mod member;
mod model_config;
mod read;
mod unpack;

pub use error::{ArchiveError, Limit};
pub use manifest::{MANIFEST_PATH, Manifest, ManifestModel};
pub use member::{Collision, MemberFault, MemberPath, MemberTree};
pub use model_config::{ModelConfig, ParallelType};
pub use unpack::{Artifact, ArtifactDir, UnpackLimits, unpack};
