//! A member's path: relative, inside its folder, and claimed by one member only.
//!
//! Names are checked as text, before any of them touches a file system, with the rules of every
//! system an archive may have been made on: a name that is harmless here and not elsewhere is a
//! sign of an archive that was made to deceive.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use crate::error::escaped;

/// The longest path of a member, in bytes.
const MAX_PATH_BYTES: usize = 2048;
/// The longest single name that common file systems take, in bytes.
const MAX_NAME_BYTES: usize = 255;

/// Where a member of an archive goes: names joined by `/`, never absolute, never upwards.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberPath(String);

/// The rule that a member's name breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum MemberFault {
    /// Nothing is left of it.
    #[error("its name is empty")]
    Empty,
    /// Not UTF-8.
    #[error("its name is not UTF-8 text")]
    NotText,
    /// Starts at the root.
    #[error("its path is absolute")]
    Absolute,
    /// Starts with a drive.
    #[error("its path starts with a drive letter")]
    Drive,
    /// Has `..`.
    #[error("its path contains `..`")]
    Upwards,
    /// Has a NUL, newline or the like.
    #[error("its name contains a control character")]
    Control,
    /// `NUL`, `COM1` and their kind.
    #[error("its name is reserved for a device")]
    Device,
    /// Below `MAR-INF`, where only the manifest is.
    #[error("`MAR-INF` holds the manifest, which is always written anew")]
    Reserved,
    /// Too long.
    #[error("its path is longer than 2048 bytes, or a name in it longer than 255")]
    TooLong,
}

impl MemberPath {
    /// Checks a name as stored in an archive.
    ///
    /// Windows tools write `\` between folders; both separators are understood, so `..\x` is as
    /// upward as `../x`. `.` and doubled separators are dropped.
    ///
    /// # Errors
    /// [`MemberFault`] names the rule that was broken.
    pub fn parse(name: &str) -> Result<Self, MemberFault> {
        if name.len() > MAX_PATH_BYTES {
            return Err(MemberFault::TooLong);
        }
        if name.chars().any(char::is_control) {
            return Err(MemberFault::Control);
        }
        let name = name.replace('\\', "/");
        if name.starts_with('/') {
            return Err(MemberFault::Absolute);
        }
        if matches!(name.as_bytes(), [letter, b':', ..] if letter.is_ascii_alphabetic()) {
            return Err(MemberFault::Drive);
        }
        let mut parts = Vec::new();
        for part in name.split('/') {
            match part {
                "" | "." => {}
                ".." => return Err(MemberFault::Upwards),
                _ if part.len() > MAX_NAME_BYTES => return Err(MemberFault::TooLong),
                _ if is_device(part) => return Err(MemberFault::Device),
                _ => parts.push(part),
            }
        }
        if parts.is_empty() {
            return Err(MemberFault::Empty);
        }
        canonical_manifest_case(&mut parts);
        Ok(Self(parts.join("/")))
    }

    /// Checks a path of this machine, such as one found below a folder being packed.
    ///
    /// # Errors
    /// As [`MemberPath::parse`], and for names that are not UTF-8.
    pub fn from_path(path: &Path) -> Result<Self, MemberFault> {
        Self::parse(path.to_str().ok_or(MemberFault::NotText)?)
    }

    /// The path below `folder`, with `/` between its parts.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The place of this member below `folder`.
    pub fn below(&self, folder: &Path) -> PathBuf {
        folder.join(&self.0)
    }

    /// The paths of the folders that hold it, outermost first.
    fn folders(&self) -> impl Iterator<Item = &str> {
        self.0.match_indices('/').map(|(at, _)| &self.0[..at])
    }
}

impl fmt::Display for MemberPath {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&escaped(&self.0))
    }
}

/// Only the bare names: `aux.py` is an ordinary module on the systems that serve models.
fn is_device(name: &str) -> bool {
    let upper = name.to_ascii_uppercase();
    matches!(upper.as_str(), "CON" | "PRN" | "AUX" | "NUL")
        || matches!(upper.as_bytes(), [b'C', b'O', b'M', digit] | [b'L', b'P', b'T', digit]
            if digit.is_ascii_digit())
}

/// Tools of case-blind systems may change the case of the one path that the server looks for.
fn canonical_manifest_case(parts: &mut [&str]) {
    if let [folder, rest @ ..] = parts
        && folder.eq_ignore_ascii_case("MAR-INF")
    {
        *folder = "MAR-INF";
        if let [file] = rest
            && file.eq_ignore_ascii_case("MANIFEST.json")
        {
            *file = "MANIFEST.json";
        }
    }
}

/// Two members that cannot both exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Collision {
    /// The same path twice.
    #[error("both are `{0}`")]
    Twice(MemberPath),
    /// A path is a file, and a folder on the way to another file.
    #[error("`{file}` is a file, and the folder of `{below}`")]
    FileAndFolder {
        /// The file.
        file: MemberPath,
        /// The member below it.
        below: MemberPath,
    },
}

/// The members of one archive, each with a `T`, free of collisions.
#[derive(Debug, Clone)]
pub struct MemberTree<T> {
    files: BTreeMap<MemberPath, T>,
    /// Each folder with the first member that asked for it.
    folders: BTreeMap<String, MemberPath>,
}

impl<T> Default for MemberTree<T> {
    fn default() -> Self {
        Self {
            files: BTreeMap::new(),
            folders: BTreeMap::new(),
        }
    }
}

impl<T> MemberTree<T> {
    /// Adds a file.
    ///
    /// # Errors
    /// The collision, and the path of the earlier member; nothing is added then.
    pub fn add_file(&mut self, path: MemberPath, value: T) -> Result<(), Collision> {
        if self.files.contains_key(&path) {
            return Err(Collision::Twice(path));
        }
        if let Some(below) = self.folders.get(path.as_str()) {
            return Err(Collision::FileAndFolder {
                file: path,
                below: below.clone(),
            });
        }
        self.claim_folders(&path)?;
        self.files.insert(path, value);
        Ok(())
    }

    /// Adds a folder; the same one may be added again.
    ///
    /// # Errors
    /// When a file has that path, or is on the way to it.
    pub fn add_folder(&mut self, path: &MemberPath) -> Result<(), Collision> {
        if self.files.contains_key(path) {
            return Err(Collision::FileAndFolder {
                file: path.clone(),
                below: path.clone(),
            });
        }
        self.claim_folders(path)?;
        self.folders
            .entry(path.as_str().to_owned())
            .or_insert_with(|| path.clone());
        Ok(())
    }

    fn claim_folders(&mut self, path: &MemberPath) -> Result<(), Collision> {
        for folder in path.folders() {
            let folder = MemberPath(folder.to_owned());
            if self.files.contains_key(&folder) {
                return Err(Collision::FileAndFolder {
                    file: folder,
                    below: path.clone(),
                });
            }
        }
        for folder in path.folders() {
            self.folders
                .entry(folder.to_owned())
                .or_insert_with(|| path.clone());
        }
        Ok(())
    }

    /// The file at `path`.
    pub fn get(&self, path: &MemberPath) -> Option<&T> {
        self.files.get(path)
    }

    /// Files and folders together, the folders that files only imply included.
    pub fn len(&self) -> usize {
        self.files.len() + self.folders.len()
    }

    /// Whether nothing was added.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All files, sorted by path.
    pub fn files(&self) -> impl ExactSizeIterator<Item = (&MemberPath, &T)> {
        self.files.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_out_of_the_folder_are_refused() {
        for (name, fault) in [
            ("../../x", MemberFault::Upwards),
            ("a/../../x", MemberFault::Upwards),
            ("a/..", MemberFault::Upwards),
            ("..\\..\\x", MemberFault::Upwards),
            ("a\\..\\x", MemberFault::Upwards),
            ("/tmp/x", MemberFault::Absolute),
            ("\\tmp\\x", MemberFault::Absolute),
            ("//host/share", MemberFault::Absolute),
            ("\\\\?\\C:\\x", MemberFault::Absolute),
            ("C:\\x", MemberFault::Drive),
            ("c:x", MemberFault::Drive),
            ("a\0b", MemberFault::Control),
            ("a\nb", MemberFault::Control),
            ("", MemberFault::Empty),
            ("./.", MemberFault::Empty),
            ("d/NUL", MemberFault::Device),
            ("com1", MemberFault::Device),
        ] {
            assert_eq!(MemberPath::parse(name), Err(fault), "{name:?}");
        }
        assert_eq!(
            MemberPath::parse(&"x/".repeat(2000)),
            Err(MemberFault::TooLong)
        );
        assert_eq!(
            MemberPath::parse(&"x".repeat(256)),
            Err(MemberFault::TooLong)
        );
    }

    #[test]
    fn ordinary_names_are_kept_and_foreign_spellings_are_normalised() {
        for (name, kept) in [
            ("model.pt", "model.pt"),
            ("./a//b/./c", "a/b/c"),
            ("lib\\mod.py", "lib/mod.py"),
            ("aux.py", "aux.py"),
            ("模型/a b.txt", "模型/a b.txt"),
            ("...", "..."),
            ("mar-inf\\manifest.JSON", "MAR-INF/MANIFEST.json"),
        ] {
            assert_eq!(MemberPath::parse(name).unwrap().as_str(), kept);
        }
    }

    #[test]
    fn a_path_is_a_file_once_or_a_folder() {
        let path = |name| MemberPath::parse(name).unwrap();
        let mut tree = MemberTree::default();
        tree.add_file(path("a/b"), 1).unwrap();
        tree.add_folder(&path("a")).unwrap();
        tree.add_folder(&path("a")).unwrap();
        assert_eq!(
            tree.add_file(path("a/b"), 2),
            Err(Collision::Twice(path("a/b")))
        );
        assert!(matches!(
            tree.add_file(path("a"), 2),
            Err(Collision::FileAndFolder { .. })
        ));
        assert!(matches!(
            tree.add_file(path("a/b/c"), 2),
            Err(Collision::FileAndFolder { .. })
        ));
        assert!(matches!(
            tree.add_folder(&path("a/b")),
            Err(Collision::FileAndFolder { .. })
        ));
        tree.add_file(path("A/b"), 3).unwrap();
        assert_eq!(tree.files().len(), 2);
    }
}
