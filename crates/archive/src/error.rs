//! Every way in which an archive, or the wish to build one, can be wrong.

use std::io;
use std::path::{Path, PathBuf};

use ts_types::{Classify, ErrorClass, Invalid, Subject};

use crate::member::{Collision, MemberFault};
use crate::signature::{KeyId, SignatureFault};

/// Why an archive could not be read, unpacked or written.
///
/// The first sentence of the four manifest errors is TorchServe's, word for word: clients compare
/// it (*torchserve-contract* 3.1).
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// There is nothing at the path.
    #[error("`{}` does not exist; check the name", path.display())]
    NotFound {
        /// The path as given.
        path: PathBuf,
    },
    /// The file system refused.
    #[error("cannot {action} `{}`", path.display())]
    Io {
        /// What was being done, as a verb.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The file is no archive of the kind its name says.
    #[error("`{}` is not {expected}: {reason}", shown(archive))]
    NotAnArchive {
        /// The file.
        archive: PathBuf,
        /// What its name promises.
        expected: &'static str,
        /// What was found, and what to do.
        reason: String,
    },
    /// The archive breaks off or contradicts its own checksums.
    #[error(
        "`{}` is damaged{}; build it or fetch it again",
        shown(archive),
        member.as_deref().map(|name| format!(" at member `{name}`")).unwrap_or_default()
    )]
    Damaged {
        /// The archive.
        archive: PathBuf,
        /// The member being read, if reading got that far.
        member: Option<String>,
        /// What the reader found.
        source: io::Error,
    },
    /// A member's name could leave the folder or cannot be a file name.
    #[error("member `{member}` of `{}` is refused: {fault}", shown(archive))]
    UnsafeMember {
        /// The archive.
        archive: PathBuf,
        /// The name as stored, escaped for display.
        member: String,
        /// The rule it breaks.
        fault: MemberFault,
    },
    /// A member is something other than a file or a folder.
    #[error(
        "member `{member}` of `{}` is {kind}; only files and folders may be in an archive",
        shown(archive)
    )]
    ForbiddenKind {
        /// The archive.
        archive: PathBuf,
        /// The member.
        member: String,
        /// What it is, with its article.
        kind: &'static str,
    },
    /// Two members want the same place.
    #[error(
        "members of `{}` collide: {collision}; rename one of them",
        shown(archive)
    )]
    MembersCollide {
        /// The archive.
        archive: PathBuf,
        /// Which, and how.
        collision: Collision,
    },
    /// Over a limit while unpacking.
    #[error("`{}` is over a limit: {limit}", shown(archive))]
    OverLimit {
        /// The archive.
        archive: PathBuf,
        /// The limit.
        limit: Limit,
    },
    /// The manifest is not JSON, or a field has the wrong type.
    #[error(
        "Failed to parse signature.json. `MAR-INF/MANIFEST.json` of `{}` is not valid: {source}",
        shown(archive)
    )]
    ManifestSyntax {
        /// The archive.
        archive: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// The manifest has no `model` object.
    #[error(
        "Missing Model entry in manifest file. `MAR-INF/MANIFEST.json` of `{}` needs the object \
         `model`; pack the model again with torch-model-archiver",
        shown(archive)
    )]
    ModelEntryMissing {
        /// The archive.
        archive: PathBuf,
    },
    /// No usable model name.
    #[error(
        "Model name is not defined. Field `model.modelName` in the manifest of `{}` {state}; \
         register with `model_name=`, or pack the model again with `--model-name`",
        shown(archive)
    )]
    ModelNameUndefined {
        /// The archive.
        archive: PathBuf,
        /// `is missing` or `is empty`.
        state: &'static str,
    },
    /// The model version is the empty text.
    #[error(
        "Model version is not defined. Field `model.modelVersion` in the manifest of `{}` is \
         empty; remove the field to get `1.0`, or pack the model again with `--version`",
        shown(archive)
    )]
    ModelVersionUndefined {
        /// The archive.
        archive: PathBuf,
    },
    /// The runtime is missing or unknown.
    #[error(
        "Runtime is not defined or invalid. Field `runtime` in the manifest of `{}` {}; known are \
         `python`, `python3`, `LSP`",
        shown(archive),
        given.as_deref().map_or("is missing".to_owned(), |text| format!("is `{text}`"))
    )]
    RuntimeInvalid {
        /// The archive.
        archive: PathBuf,
        /// The text found.
        given: Option<String>,
    },
    /// A file field of the manifest points out of the archive.
    #[error(
        "field `model.{field}` in the manifest of `{}` is refused: {fault}",
        shown(archive)
    )]
    ManifestPath {
        /// The archive.
        archive: PathBuf,
        /// The field.
        field: &'static str,
        /// The rule it breaks.
        fault: MemberFault,
    },
    /// The manifest names a file that the archive lacks.
    #[error(
        "field `model.{field}` in the manifest of `{}` names `{file}`, which is not in the archive",
        shown(archive)
    )]
    NamedFileMissing {
        /// The archive.
        archive: PathBuf,
        /// The field.
        field: &'static str,
        /// The file.
        file: String,
    },
    /// The model's configuration file is not plain YAML.
    #[error("model configuration `{}`{} is not valid: {reason}", shown(path), line(*at_line))]
    ConfigInvalid {
        /// The file.
        path: PathBuf,
        /// The line, from 1, where known.
        at_line: Option<u64>,
        /// What is wrong.
        reason: String,
    },
    /// A requirement list holds something that is not a plain requirement.
    #[error(
        "requirement list `{}` line {at_line} is refused: {reason}",
        shown(path)
    )]
    RequirementRefused {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        at_line: usize,
        /// The rule it breaks.
        reason: String,
    },
    /// Two inputs would become one entry.
    #[error(
        "`{}` and `{}` collide in the archive: {collision}; rename one, or pass their folder and \
         `--keep-dirs`",
        first.display(), second.display()
    )]
    SourcesCollide {
        /// The input that came first.
        first: PathBuf,
        /// The one that collides with it.
        second: PathBuf,
        /// Which entries, and how.
        collision: Collision,
    },
    /// An input cannot have this name inside an archive.
    #[error("`{}` cannot be an archive entry: {fault}", path.display())]
    SourceName {
        /// The input.
        path: PathBuf,
        /// The rule it breaks.
        fault: MemberFault,
    },
    /// An input is not a regular file.
    #[error("`{}` is not a regular file", path.display())]
    SourceKind {
        /// The input.
        path: PathBuf,
    },
    /// An input was written to while it was being packed.
    #[error(
        "`{}` changed while it was packed: expected {expected} bytes, read {read}; pack again",
        path.display()
    )]
    SourceChanged {
        /// The input.
        path: PathBuf,
        /// Its size when packing began.
        expected: u64,
        /// Bytes found.
        read: u64,
    },
    /// A file of the model is a pickle, or might hide one, where none may be.
    #[error(
        "member `{member}` of `{}` is {found}, which `load_policy=strict` does not allow: weights must \
         be safetensors, TorchScript, ONNX or compiled ahead of time. Save them so, or let the server \
         have `load_policy=weights-only`",
        shown(archive)
    )]
    HoldsPickle {
        /// The archive.
        archive: PathBuf,
        /// The member.
        member: String,
        /// What it is, with its article.
        found: String,
    },
    /// Nobody that the server trusts has signed it.
    #[error(
        "`{}` is refused: {fault}. Trusted are {}; `torch-model-archiver sign` signs",
        shown(archive),
        listed(trusted)
    )]
    NotTrusted {
        /// The archive.
        archive: PathBuf,
        /// Why not.
        fault: SignatureFault,
        /// Whose signature would count.
        trusted: Vec<KeyId>,
    },
    /// A file that should hold a private key holds none.
    #[error(
        "`{}` holds no private key of Ed25519 in PKCS#8 PEM; `torch-model-archiver keygen` makes one",
        path.display()
    )]
    NoPrivateKey {
        /// The file.
        path: PathBuf,
    },
    /// The output is there already.
    #[error("{} already exists.\nPlease specify --force/-f option to overwrite the model archive \
             output file", path.display())]
    OutputExists {
        /// The output.
        path: PathBuf,
    },
    /// Overwriting was allowed, but what is there is not a model archive.
    #[error("`{}` is {found}, not {wanted}; it is not overwritten even with `--force`",
            path.display())]
    OutputKind {
        /// The output.
        path: PathBuf,
        /// What is there.
        found: &'static str,
        /// What may be overwritten.
        wanted: &'static str,
    },
    /// The zip writer refused.
    #[error("cannot write `{}`", path.display())]
    ZipWrite {
        /// The output.
        path: PathBuf,
        /// Why.
        source: zip::result::ZipError,
    },
}

/// Which limit of [`UnpackLimits`](crate::UnpackLimits) was hit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Limit {
    /// `max_entries`.
    #[error("more than {0} members")]
    Entries(u64),
    /// `max_total_bytes`.
    #[error("more than {0} bytes unpacked")]
    TotalBytes(u64),
    /// `max_entry_bytes`.
    #[error("member `{member}` is larger than {bytes} bytes")]
    EntryBytes {
        /// The member.
        member: String,
        /// The limit.
        bytes: u64,
    },
    /// `max_ratio`.
    #[error(
        "it unpacks to more than {0} times its own size; if that is meant, store it uncompressed \
         (`--archive-format zip-store`)"
    )]
    Ratio(u64),
}

impl Classify for ArchiveError {
    fn class(&self) -> ErrorClass {
        match self {
            Self::NotFound { .. } => ErrorClass::NotFound(Subject::Model),
            Self::Io { .. } | Self::ZipWrite { .. } => ErrorClass::Internal,
            Self::OverLimit { .. } => ErrorClass::TooLarge,
            Self::OutputExists { .. } | Self::OutputKind { .. } => ErrorClass::Conflict,
            Self::NotAnArchive { .. }
            | Self::Damaged { .. }
            | Self::UnsafeMember { .. }
            | Self::ForbiddenKind { .. }
            | Self::MembersCollide { .. }
            | Self::ManifestSyntax { .. }
            | Self::ModelEntryMissing { .. }
            | Self::ModelNameUndefined { .. }
            | Self::ModelVersionUndefined { .. }
            | Self::RuntimeInvalid { .. }
            | Self::ManifestPath { .. }
            | Self::NamedFileMissing { .. }
            | Self::ConfigInvalid { .. }
            | Self::SourcesCollide { .. }
            | Self::SourceName { .. }
            | Self::SourceKind { .. }
            | Self::HoldsPickle { .. }
            | Self::NotTrusted { .. }
            | Self::NoPrivateKey { .. }
            | Self::SourceChanged { .. } => ErrorClass::InvalidRequest(Invalid::Model),
            Self::RequirementRefused { .. } => ErrorClass::InvalidRequest(Invalid::Dependencies),
        }
    }
}

/// Adds what was being done, and to what, to an I/O failure.
pub(crate) trait Doing<T> {
    fn doing(self, action: &'static str, path: &Path) -> Result<T, ArchiveError>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, action: &'static str, path: &Path) -> Result<T, ArchiveError> {
        self.map_err(|source| ArchiveError::Io {
            action,
            path: path.to_owned(),
            source,
        })
    }
}

/// The last part of a path: errors reach clients, who need not learn where the server keeps its
/// files.
fn shown(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    escaped(&name.to_string_lossy())
}

fn listed(keys: &[KeyId]) -> String {
    let names: Vec<_> = keys.iter().map(|key| format!("`{key}`")).collect();
    names.join(", ")
}

fn line(number: Option<u64>) -> String {
    number
        .map(|line| format!(" line {line}"))
        .unwrap_or_default()
}

/// A name from an archive in a form that cannot break a log line or flood it.
pub(crate) fn escaped(name: &str) -> String {
    const SHOWN_CHARS: usize = 120;
    let mut text: String = name
        .chars()
        .take(SHOWN_CHARS)
        .flat_map(escape_char)
        .collect();
    if name.chars().nth(SHOWN_CHARS).is_some() {
        text.push('…');
    }
    text
}

fn escape_char(character: char) -> Box<dyn Iterator<Item = char>> {
    if character.is_control() {
        Box::new(character.escape_default())
    } else {
        Box::new(std::iter::once(character))
    }
}
