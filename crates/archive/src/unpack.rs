//! From an archive to a folder that a worker can run in.
//!
//! Everything is written into a fresh folder beside the final one, which gets its name only when
//! all of it is there and its manifest and configuration were read: a failure leaves nothing.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use fs_err as fs;

use crate::error::{ArchiveError, Doing};
use crate::manifest::Manifest;
use crate::model_config::ModelConfig;
use crate::read::{self, Incoming, Kind};

/// What one archive may unpack to. Sizes are counted while unpacking; what the archive says about
/// itself is never believed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnpackLimits {
    /// Files and folders at most, the folders that files only imply included. Default: 100,000.
    pub max_entries: u64,
    /// Bytes at most, all members together. Default: 64 GiB, as weights are large.
    pub max_total_bytes: u64,
    /// Bytes of one member at most. Default: none beyond the total.
    pub max_entry_bytes: Option<u64>,
    /// How many times its own size the archive may unpack to, once it is past
    /// [`UnpackLimits::ratio_free_bytes`]. Default: 1000, just under what deflate can reach.
    pub max_ratio: u64,
    /// Bytes for which the ratio is not asked: small files of one repeated byte are harmless.
    /// Default: 64 MiB.
    pub ratio_free_bytes: u64,
}

impl Default for UnpackLimits {
    fn default() -> Self {
        Self {
            max_entries: 100_000,
            max_total_bytes: 64 << 30,
            max_entry_bytes: None,
            max_ratio: 1000,
            ratio_free_bytes: 64 << 20,
        }
    }
}

/// A model ready to be loaded. The folder lives as long as this value: keep it in an `Arc`, and
/// the folder goes with the last user.
#[derive(Debug)]
pub struct Artifact {
    /// The model's folder; derefs to its path.
    pub dir: ArtifactDir,
    /// What the archive says about itself.
    pub manifest: Manifest,
    /// The configuration that the manifest names.
    pub config: Option<ModelConfig>,
}

/// The folder of an artifact. One that was unpacked is deleted on drop; one that the user owns
/// stays.
#[derive(Debug)]
pub struct ArtifactDir {
    path: PathBuf,
    owned: bool,
}

impl ArtifactDir {
    /// The absolute path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the folder is ours, to be deleted with this value.
    pub fn is_owned(&self) -> bool {
        self.owned
    }
}

impl Deref for ArtifactDir {
    type Target = Path;
    fn deref(&self) -> &Path {
        &self.path
    }
}

impl AsRef<Path> for ArtifactDir {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

impl Drop for ArtifactDir {
    fn drop(&mut self) {
        if self.owned {
            // Nobody is left to tell, and the temporary folder is emptied at the next start.
            let _ = fs::remove_dir_all(&self.path);
        }
    }
}

/// Makes the model at `source` ready to load.
///
/// `.mar` and `.zip` files are zip archives, every other file is a gzip-compressed tar. They are
/// unpacked below `parent`, into a new folder with a random name of 32 hexadecimal digits. A folder
/// is used where it is: never copied, never deleted.
///
/// # Errors
/// When the archive is missing, damaged, unsafe or over a limit, or its manifest or configuration
/// is not valid. Nothing is left below `parent` then.
pub fn unpack(
    source: &Path,
    parent: &Path,
    limits: &UnpackLimits,
) -> Result<Artifact, ArchiveError> {
    if read::kind(source)? == Kind::Folder {
        let path = std::path::absolute(model_root(source)?).doing("find", source)?;
        return describe(ArtifactDir { path, owned: false }, source);
    }
    fs::create_dir_all(parent).doing("create", parent)?;
    let scratch = tempfile::Builder::new()
        .prefix(".unpack-")
        .tempdir_in(parent)
        .doing("create a temporary folder in", parent)?;
    // The temporary folder itself is private to this user; what workers see is made like any other.
    let tree = scratch.path().join("model");
    fs::create_dir(&tree).doing("create", &tree)?;
    read::members(
        source,
        limits,
        &mut |member| write_member(member, &tree),
        &mut Err,
    )?;
    let root = match read::kind(source)? {
        Kind::Zip => tree,
        Kind::Tar | Kind::Folder => model_root(&tree)?,
    };
    let parent = std::path::absolute(parent).doing("find", parent)?;
    let path = parent.join(uuid::Uuid::new_v4().simple().to_string());
    fs::rename(&root, &path).doing("rename", &root)?;
    describe(ArtifactDir { path, owned: true }, source)
}

/// Moves an unpacked model below `parent`, where it goes with its last user.
pub(crate) fn adopt(folder: &Path, parent: &Path) -> Result<Artifact, ArchiveError> {
    let parent = std::path::absolute(parent).doing("find", parent)?;
    let path = parent.join(uuid::Uuid::new_v4().simple().to_string());
    let root = model_root(folder)?;
    fs::rename(&root, &path).doing("rename", &root)?;
    describe(ArtifactDir { path, owned: true }, folder)
}

/// A model without a file, in a new folder below `parent`: stands for an archive that cannot be read.
///
/// # Errors
/// The folder cannot be made.
pub fn placeholder(parent: &Path, manifest: Manifest) -> Result<Artifact, ArchiveError> {
    let parent = std::path::absolute(parent).doing("find", parent)?;
    let path = parent.join(uuid::Uuid::new_v4().simple().to_string());
    fs::create_dir_all(&path).doing("create", &path)?;
    Ok(Artifact {
        dir: ArtifactDir { path, owned: true },
        manifest,
        config: None,
    })
}

/// Reads what the folder says about itself. On an error the folder goes with `dir`.
fn describe(dir: ArtifactDir, source: &Path) -> Result<Artifact, ArchiveError> {
    let manifest = Manifest::read_of(&dir, source)?;
    let config = match &manifest.model.config_file {
        Some(file) if dir.join(file).is_file() => Some(ModelConfig::read(&dir.join(file))?),
        Some(file) => {
            return Err(ArchiveError::NamedFileMissing {
                archive: source.to_owned(),
                field: "configFile",
                file: file.clone(),
            });
        }
        None => None,
    };
    Ok(Artifact {
        dir,
        manifest,
        config,
    })
}

/// The folder that holds `MAR-INF`: the given one or, as TorchServe's own tar files and SageMaker
/// have it, the only thing inside it. Where neither does, an only sub-folder is taken as well.
pub(crate) fn model_root(folder: &Path) -> Result<PathBuf, ArchiveError> {
    if folder.join("MAR-INF").is_dir() {
        return Ok(folder.to_owned());
    }
    let mut entries = fs::read_dir(folder).doing("list", folder)?;
    match (
        entries.next().transpose().doing("list", folder)?,
        entries.next(),
    ) {
        (Some(only), None) if only.path().is_dir() => Ok(only.path()),
        _ => Ok(folder.to_owned()),
    }
}

pub(crate) fn write_member(member: Incoming<'_>, tree: &Path) -> Result<(), ArchiveError> {
    let target = member.path.below(tree);
    if member.is_folder {
        return fs::create_dir_all(&target).doing("create", &target);
    }
    if let Some(folder) = target.parent() {
        fs::create_dir_all(folder).doing("create", folder)?;
    }
    let mut file = create(&target, member.executable)?;
    member.copy_to(&mut file, &target)
}

/// A new file with one of the two modes that members may have. It must not exist: nothing in a
/// fresh folder may be overwritten or followed.
pub(crate) fn create(path: &Path, executable: bool) -> Result<fs::File, ArchiveError> {
    use fs_err::os::unix::fs::OpenOptionsExt;
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(if executable { 0o755 } else { 0o644 })
        .open(path)
        .doing("create", path)
}

#[cfg(test)]
mod tests;
