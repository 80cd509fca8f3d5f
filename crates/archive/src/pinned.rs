//! A copy of an archive or folder that nobody else can change, so that what was checked is what is
//! unpacked: a digest or signature of a file says nothing about the file that has its name a moment
//! later.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use fs_err as fs;
use sha2::{Digest as _, Sha256};

use crate::digest::Digest;
use crate::error::{ArchiveError, Doing};
use crate::read::{self, Kind};
use crate::signature::Signed;
use crate::unpack::{Artifact, UnpackLimits, adopt, unpack, write_member};

/// A private copy, deleted when it is dropped.
pub struct Pinned {
    /// Open to its owner only.
    scratch: tempfile::TempDir,
    path: PathBuf,
    signed: Signed,
}

impl Pinned {
    /// Copies an archive or folder below `parent`.
    ///
    /// # Errors
    /// It is missing or cannot be copied; a folder that is over a limit, or holds what no archive may.
    pub fn copy(source: &Path, parent: &Path, limits: &UnpackLimits) -> Result<Self, ArchiveError> {
        let kind = read::kind(source)?;
        fs::create_dir_all(parent).doing("create", parent)?;
        let scratch = tempfile::Builder::new()
            .prefix(".pinned-")
            .tempdir_in(parent)
            .doing("create a temporary folder in", parent)?;
        // Under its own name, which errors show and which says what kind of archive it is.
        let path = scratch
            .path()
            .join(source.file_name().unwrap_or(source.as_os_str()));
        let signed = if kind == Kind::Folder {
            fs::create_dir(&path).doing("create", &path)?;
            Signed::Folder(digest_of_folder(source, limits, Some(&path))?)
        } else {
            let mut out = fs::File::create_new(&path).doing("create", &path)?;
            Signed::Archive(hash_file(source, &mut out)?)
        };
        Ok(Self {
            scratch,
            path,
            signed,
        })
    }

    /// What it is.
    pub fn signed(&self) -> Signed {
        self.signed
    }

    /// As [`unpack`], of the copy. A copied folder is the model's own from here on.
    ///
    /// # Errors
    /// As [`unpack`].
    pub fn unpack(self, parent: &Path, limits: &UnpackLimits) -> Result<Artifact, ArchiveError> {
        match self.signed {
            Signed::Archive(_) => unpack(&self.path, parent, limits),
            Signed::Folder(_) => {
                let artifact = adopt(&self.path, parent);
                drop(self.scratch);
                artifact
            }
        }
    }
}

/// What is to be signed of an archive or folder.
///
/// # Errors
/// As [`Pinned::copy`].
pub fn signed(source: &Path, limits: &UnpackLimits) -> Result<Signed, ArchiveError> {
    if read::kind(source)? == Kind::Folder {
        digest_of_folder(source, limits, None).map(Signed::Folder)
    } else {
        hash_file(source, &mut io::sink()).map(Signed::Archive)
    }
}

fn hash_file(source: &Path, out: &mut dyn Write) -> Result<Digest, ArchiveError> {
    let mut file = fs::File::open(source).doing("open", source)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    loop {
        let bytes = file.read(&mut buffer).doing("read", source)?;
        if bytes == 0 {
            return Ok(Digest::of(hash));
        }
        hash.update(&buffer[..bytes]);
        out.write_all(&buffer[..bytes]).doing("copy", source)?;
    }
}

/// The digest of a folder's list of members: a line `digest  path` for each file, sorted by path.
fn digest_of_folder(
    source: &Path,
    limits: &UnpackLimits,
    copy: Option<&Path>,
) -> Result<Digest, ArchiveError> {
    let mut lines = Vec::new();
    read::members(
        source,
        limits,
        &mut |member| {
            let name = member.path.as_str().to_owned();
            if member.is_folder {
                return copy.map_or(Ok(()), |tree| write_member(member, tree));
            }
            let digest = match copy {
                Some(tree) => {
                    let target = member.path.below(tree);
                    write_member(member, tree)?;
                    // Of the copy: what lies there is what is served.
                    Digest::of_file(&target).doing("read", &target)?
                }
                None => {
                    let mut hash = Sha256::new();
                    member.copy_to(&mut hash, Path::new(&name))?;
                    Digest::of(hash)
                }
            };
            lines.push((name, digest));
            Ok(())
        },
        &mut Err,
    )?;
    lines.sort_unstable();
    let mut hash = Sha256::new();
    for (name, digest) in lines {
        hash.update(format!("{digest}  {name}\n"));
    }
    Ok(Digest::of(hash))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(folder: &Path) -> PathBuf {
        let model = folder.join("m");
        fs::create_dir_all(model.join("MAR-INF")).unwrap();
        fs::write(
            model.join("MAR-INF/MANIFEST.json"),
            r#"{"runtime": "echo", "model": {"modelName": "m"}}"#,
        )
        .unwrap();
        fs::write(model.join("weights"), "first").unwrap();
        model
    }

    #[test]
    fn a_folder_is_served_from_the_copy_that_was_checked() {
        let folder = tempfile::tempdir().unwrap();
        let (model, work) = (model(folder.path()), folder.path().join("work"));
        let limits = UnpackLimits::default();
        let before = signed(&model, &limits).unwrap();
        let pinned = Pinned::copy(&model, &work, &limits).unwrap();
        assert_eq!(pinned.signed(), before);
        fs::write(model.join("weights"), "second").unwrap();
        assert_ne!(signed(&model, &limits).unwrap(), before);
        let artifact = pinned.unpack(&work, &limits).unwrap();
        assert_eq!(fs::read(artifact.dir.join("weights")).unwrap(), b"first");
        drop(artifact);
        assert_eq!(fs::read_dir(&work).unwrap().count(), 0);
        assert!(model.is_dir());
    }

    #[test]
    fn names_count_and_their_order_in_the_folder_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let model = model(folder.path());
        let limits = UnpackLimits::default();
        let before = signed(&model, &limits).unwrap();
        fs::rename(model.join("weights"), model.join("weights2")).unwrap();
        assert_ne!(signed(&model, &limits).unwrap(), before);
        fs::rename(model.join("weights2"), model.join("weights")).unwrap();
        fs::create_dir(model.join("empty")).unwrap();
        assert_eq!(signed(&model, &limits).unwrap(), before);
    }
}
