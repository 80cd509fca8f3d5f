//! A file of the store that is being written. It is hidden until all of it is there and on disk; a
//! lock on it says that somebody still writes it, so that a server sweeps what dead ones left and
//! nothing else.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock};
use rustix::io::Errno;
use tokio::io::{AsyncSeekExt as _, AsyncWriteExt as _};

const ENDING: &str = ".part";

/// Names tried. Only another server's sweep can take one away, in the moment before it is locked.
const ATTEMPTS: usize = 3;

/// What became of a whole file.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// It has its name.
    Yes,
    /// Another file had the name first.
    NameTaken,
}

/// A file that is being written; deleted unless it is kept.
pub(super) struct Partial {
    path: PathBuf,
    file: tokio::fs::File,
}

impl Partial {
    /// An empty file in a folder of the store.
    ///
    /// # Errors
    /// Nothing can be made there.
    pub(super) fn create(folder: &Path) -> std::io::Result<Self> {
        for _ in 0..ATTEMPTS {
            let path = folder.join(format!(".{}{ENDING}", uuid::Uuid::new_v4().simple()));
            let file = fs_err::File::create_new(&path)?;
            match flock(&file, FlockOperation::LockExclusive) {
                // A file system without locks: nobody can take this one for a leftover then.
                Err(Errno::NOLCK | Errno::NOSYS | Errno::NOTSUP) => {}
                locked => locked?,
            }
            let locked = file.metadata()?.ino();
            if fs_err::metadata(&path).is_ok_and(|named| named.ino() == locked) {
                let file = tokio::fs::File::from_std(file.into_parts().0);
                return Ok(Self { path, file });
            }
        }
        Err(std::io::Error::other("new files disappear from it"))
    }

    /// Adds bytes at the end.
    ///
    /// # Errors
    /// The disk's.
    pub(super) async fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.file.write_all(bytes).await
    }

    /// Forgets what was written.
    ///
    /// # Errors
    /// The disk's.
    pub(super) async fn clear(&mut self) -> std::io::Result<()> {
        self.file.flush().await?;
        self.file.set_len(0).await?;
        self.file.rewind().await.map(drop)
    }

    /// Gives the file its name once all of it is on disk. Never replaces another file.
    ///
    /// # Errors
    /// The disk's.
    pub(super) async fn keep_as(mut self, target: &Path) -> std::io::Result<Kept> {
        self.file.flush().await?;
        self.file.sync_all().await?;
        match rename_anew(&self.path, target) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                return Ok(Kept::NameTaken);
            }
            result => result?,
        }
        // Not every file system can; the file is whole either way.
        if let Some(folder) = target.parent()
            && let Ok(folder) = tokio::fs::File::open(folder).await
        {
            let _best_effort = folder.sync_all().await;
        }
        Ok(Kept::Yes)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let _kept_or_swept = fs_err::remove_file(&self.path);
    }
}

fn rename_anew(from: &Path, to: &Path) -> std::io::Result<()> {
    match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // A file system without the flag. A link does not replace either; the first name goes when
        // the value is dropped.
        Err(Errno::INVAL | Errno::NOSYS) => fs_err::hard_link(from, to),
        result => Ok(result?),
    }
}

/// Removes what servers that no longer live were writing. Returns how many files there were.
pub(super) fn sweep(store: &Path) -> usize {
    let Ok(entries) = fs_err::read_dir(store) else {
        return 0;
    };
    let left = entries.flatten().filter(|entry| {
        let is_ours = entry.file_name().to_str().is_some_and(is_partial);
        // A living server holds the lock; what is another user's cannot be opened.
        is_ours
            && fs_err::File::open(entry.path()).is_ok_and(|file| {
                flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
                    && fs_err::remove_file(entry.path()).is_ok()
            })
    });
    left.count()
}

/// Whether a file of this name is one that was being written.
fn is_partial(name: &str) -> bool {
    let id = name
        .strip_prefix('.')
        .and_then(|name| name.strip_suffix(ENDING));
    id.is_some_and(|id| id.len() == 32 && id.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs_err::read_dir(folder).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort_unstable();
        names
    }

    impl Partial {
        /// One whose bytes go elsewhere.
        pub(in crate::store) fn onto(path: PathBuf, file: fs_err::File) -> Self {
            let file = tokio::fs::File::from_std(file.into_parts().0);
            Self { path, file }
        }
    }

    #[tokio::test]
    async fn a_file_has_its_name_only_when_it_is_whole_and_replaces_none() {
        let store = tempfile::tempdir().unwrap();
        let target = store.path().join("m.mar");
        let mut first = Partial::create(store.path()).unwrap();
        let mut second = Partial::create(store.path()).unwrap();
        first.write(b"half of another").await.unwrap();
        first.clear().await.unwrap();
        first.write(b"first").await.unwrap();
        second.write(b"second").await.unwrap();
        assert!(!target.exists());
        assert_eq!(first.keep_as(&target).await.unwrap(), Kept::Yes);
        assert_eq!(second.keep_as(&target).await.unwrap(), Kept::NameTaken);
        assert_eq!(fs_err::read(&target).unwrap(), b"first");
        assert_eq!(names(store.path()), ["m.mar"]);
    }

    #[test]
    fn a_dropped_one_leaves_nothing() {
        let store = tempfile::tempdir().unwrap();
        drop(Partial::create(store.path()).unwrap());
        assert_eq!(names(store.path()), [""; 0]);
    }

    #[test]
    fn only_files_of_the_dead_are_swept() {
        let store = tempfile::tempdir().unwrap();
        let living = Partial::create(store.path()).unwrap();
        let dead = format!(".{}.part", uuid::Uuid::new_v4().simple());
        for name in [dead.as_str(), ".notes.part", "m.mar"] {
            fs_err::write(store.path().join(name), "x").unwrap();
        }
        assert_eq!(sweep(store.path()), 1);
        assert!(living.path.exists());
        assert_eq!(names(store.path()).len(), 3, "{:?}", names(store.path()));
        assert_eq!(sweep(store.path()), 0);
        assert_eq!(sweep(&store.path().join("none")), 0);
    }
}
