//! Model archives: what they hold (`manifest`, `model_config`), reading them safely (`read`,
//! `unpack`, `inspect`, `verify`), writing them (`pack`), and what is known of whoever made them
//! (`digest`, `signature`, `pinned`, `pickles`). Blocking file system code, no network,
//! no Python: a handler's source is looked at as text (`python`, `handler`).

mod digest;
mod error;
mod handler;
mod inspect;
mod manifest;
mod member;
mod model_config;
mod pack;
mod pickles;
mod pinned;
mod python;
mod read;
mod requirements;
mod signature;
mod unpack;
mod verify;

pub use digest::Digest;
pub use error::{ArchiveError, Limit};
pub use handler::{DEFAULT_HANDLERS, HandlerFault, HandlerName, SHIPPED_HANDLERS, check_source};
pub use inspect::{Inspection, Member, inspect};
pub use manifest::{MANIFEST_PATH, Manifest, ManifestModel};
pub use member::{Collision, MemberFault, MemberPath, MemberTree};
pub use model_config::{ModelConfig, ParallelType};
pub use pack::{Entries, Format, Packing, Progress, pack};
pub use pickles::refuse_pickles;
pub use pinned::{Pinned, signed};
pub use python::{Outline, is_identifier};
pub use requirements::check_requirements;
pub use signature::{
    KeyId, MOST_SIGNATURE_BYTES, PrivateKey, SignatureFault, Signed, TrustedKeys, read_signature,
    signature_path,
};
pub use unpack::{Artifact, ArtifactDir, UnpackLimits, placeholder, unpack};
pub use verify::{Problem, strict_problem, verify};
