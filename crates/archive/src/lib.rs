//! Model archives: what they hold (`manifest`, `model_config`), reading them safely (`read`,
//! `unpack`, `inspect`, `verify`) and writing them (`pack`). Blocking file system code, no network,
//! no Python: a handler's source is looked at as text (`python`, `handler`).

mod error;
mod handler;
mod inspect;
mod manifest;
mod member;
mod model_config;
mod pack;
mod python;
mod read;
mod requirements;
mod unpack;
mod verify;

pub use error::{ArchiveError, Limit};
pub use handler::{DEFAULT_HANDLERS, HandlerFault, HandlerName, SHIPPED_HANDLERS, check_source};
pub use inspect::{Inspection, Member, inspect};
pub use manifest::{MANIFEST_PATH, Manifest, ManifestModel};
pub use member::{Collision, MemberFault, MemberPath, MemberTree};
pub use model_config::{ModelConfig, ParallelType};
pub use pack::{Entries, Format, Packing, Progress, pack};
pub use python::{Outline, is_identifier};
pub use requirements::check_requirements;
pub use unpack::{Artifact, ArtifactDir, UnpackLimits, placeholder, unpack};
pub use verify::{Problem, verify};
