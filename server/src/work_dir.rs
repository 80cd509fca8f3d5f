//! The folder of this server's temporary files. A lock beside it says that its server lives, so
//! that what a killed server left is swept by the next one, and nothing else is.

use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use fs_err as fs;
use rustix::fs::{FlockOperation, flock};

const PREFIX: &str = "models-";
const LOCK: &str = ".lock";

/// Names tried for a folder. One process needs one, and leftovers of its number are few.
const ATTEMPTS: u32 = 1000;

/// Goes with this value.
pub(crate) struct WorkDir {
    path: PathBuf,
    lock_path: PathBuf,
    // Held as long as it is open; the system lets go of it however the process ends.
    _lock: fs::File,
}

impl WorkDir {
    /// Makes a folder of its own under `temp`, open to the server's user only.
    ///
    /// # Errors
    /// Nothing can be made there.
    pub(crate) fn create(temp: &Path) -> anyhow::Result<Self> {
        let pid = std::process::id();
        let name = |attempt| temp.join(format!("{PREFIX}{pid}-{attempt}{LOCK}"));
        let (lock_path, lock) = (0..ATTEMPTS)
            .map(name)
            .find_map(|path| lock_anew(&path).map(|lock| Some((path, lock?))).transpose())
            .context("every name for a temporary folder is taken")??;
        let path = folder_of(&lock_path);
        // What an earlier server of this number left here had its lock taken away.
        let _usually_absent = fs::remove_dir_all(&path);
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("`{}` cannot be made", path.display()))?;
        Ok(Self {
            path,
            lock_path,
            _lock: lock,
        })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for WorkDir {
    fn drop(&mut self) {
        // The core has emptied it; what is left after a failure goes now or at the next sweep.
        let _may_be_gone = fs::remove_dir_all(&self.path);
        let _swept_later = fs::remove_file(&self.lock_path);
    }
}

/// Makes and locks a file. `None` when there is one already, or when another server's sweep took
/// it for a leftover before it was locked.
fn lock_anew(path: &Path) -> anyhow::Result<Option<fs::File>> {
    let lock = match fs::File::create_new(path) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => return Ok(None),
        made => made?,
    };
    flock(&lock, FlockOperation::LockExclusive)
        .with_context(|| format!("`{}` cannot be locked", path.display()))?;
    let locked = lock.metadata()?.ino();
    let still_there = fs::metadata(path).is_ok_and(|named| named.ino() == locked);
    Ok(still_there.then_some(lock))
}

fn folder_of(lock_path: &Path) -> PathBuf {
    lock_path.with_extension("")
}

/// Removes what servers left here that no longer live. Returns how many there were.
pub(crate) fn sweep(temp: &Path) -> usize {
    let Ok(entries) = fs::read_dir(temp) else {
        return 0;
    };
    let mut swept = 0;
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if !name.starts_with(PREFIX) || !name.ends_with(LOCK) {
            continue;
        }
        let lock_path = entry.path();
        // Another user's lock cannot be opened, a living server's cannot be taken.
        let Ok(lock) = fs::File::open(&lock_path) else {
            continue;
        };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            continue;
        }
        let removed = fs::remove_dir_all(folder_of(&lock_path));
        let gone = match removed {
            Ok(()) => true,
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        };
        if gone && fs::remove_file(&lock_path).is_ok() {
            swept += 1;
        }
    }
    swept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dead_server_left_is_swept_and_nothing_else() {
        let temp = tempfile::tempdir().unwrap();
        let living = WorkDir::create(temp.path()).unwrap();
        let dead = temp.path().join("models-1-0");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join("weights"), "x").unwrap();
        fs::write(temp.path().join("models-1-0.lock"), "").unwrap();
        let others = temp.path().join("models-of-somebody");
        fs::create_dir(&others).unwrap();
        assert_eq!(sweep(temp.path()), 1);
        assert!(!dead.exists() && others.exists() && living.path().exists());
        assert_eq!(sweep(temp.path()), 0);
    }

    #[test]
    fn two_folders_of_one_process_differ_and_go_with_their_owner() {
        let temp = tempfile::tempdir().unwrap();
        let first = WorkDir::create(temp.path()).unwrap();
        let second = WorkDir::create(temp.path()).unwrap();
        assert_ne!(first.path(), second.path());
        drop((first, second));
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0);
    }
}
