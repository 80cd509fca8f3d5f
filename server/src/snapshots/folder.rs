//! The folder of snapshots: the names of the files, which one is the newest, and how one is written
//! so that it is there as a whole or not at all.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use jiff::{Timestamp, ToSpan as _, civil::DateTime, tz::TimeZone};
use parking_lot::Mutex;
use ts_serving::{Occasion, SavedModels, SnapshotWriter};

use super::document;
use crate::settings::Environment;
use crate::settings::raw::Raw;

/// Snapshots that are kept. Every change writes one.
const KEPT: usize = 20;

/// How the time stands in a file's name, and how long that is.
const STAMP: &str = "%Y%m%d%H%M%S%3f";
const STAMP_DIGITS: usize = 17;

/// What the name of a file begins and ends with while it is written. The middle is another for each,
/// since several servers may write into one folder.
const UNFINISHED: (&str, &str) = (".snapshot-", ".part");

/// No file is written for so long: its server has ended.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// Times tried to find, before another server has it, the name that comes next.
const ATTEMPTS: usize = 20;

/// Where snapshots lie.
#[derive(Debug, Clone)]
pub(crate) struct Folder(PathBuf);

/// The newest snapshot.
#[derive(Debug, Default)]
pub(crate) struct Newest {
    /// The newest that can be read, and its models.
    pub(crate) usable: Option<(PathBuf, SavedModels)>,
    /// Newer ones that cannot, and why.
    pub(crate) passed_over: Vec<String>,
}

impl Folder {
    /// `config` below `LOG_LOCATION`, or below `logs` here.
    pub(crate) fn of(environment: &Environment) -> Self {
        Self(environment.log_folders().logs.join("config"))
    }

    /// Looks for the newest snapshot that can be read.
    pub(crate) fn newest(&self) -> Newest {
        let mut newest = Newest::default();
        for (_, path) in self.files() {
            let text = fs::read_to_string(&path).map_err(|error| error.to_string());
            match text.and_then(|text| document::read_file(&text)) {
                Ok(models) => {
                    newest.usable = Some((path, models));
                    break;
                }
                Err(reason) => newest.passed_over.push(format!(
                    "the snapshot `{}` is passed over: {reason}",
                    path.display()
                )),
            }
        }
        newest
    }

    /// The snapshots, the newest first. Files of other names are none of ours.
    fn files(&self) -> Vec<(Timestamp, PathBuf)> {
        let Ok(entries) = fs::read_dir(&self.0) else {
            return Vec::new();
        };
        let ours = |entry: io::Result<fs::DirEntry>| {
            let path = entry.ok()?.path();
            Some((stamp_of(path.file_name()?.to_str()?)?, path))
        };
        let mut files: Vec<_> = entries.filter_map(ours).collect();
        files.sort_unstable_by(|one, other| other.cmp(one));
        files
    }
}

/// The time in the name of a snapshot; `None` for any other file.
fn stamp_of(name: &str) -> Option<Timestamp> {
    let (digits, occasion) = name.strip_suffix(".cfg")?.split_once('-')?;
    if !["startup", "snapshot", "shutdown"].contains(&occasion)
        || digits.len() != STAMP_DIGITS
        || !digits.bytes().all(|byte| byte.is_ascii_digit())
    {
        return None;
    }
    let part = |from: usize, to: usize| digits.get(from..to)?.parse::<i16>().ok();
    let small = |from, to| i8::try_from(part(from, to)?).ok();
    let time = DateTime::new(
        part(0, 4)?,
        small(4, 6)?,
        small(6, 8)?,
        small(8, 10)?,
        small(10, 12)?,
        small(12, 14)?,
        i32::from(part(14, 17)?) * 1_000_000,
    );
    TimeZone::UTC.to_timestamp(time.ok()?).ok()
}

/// Writes the snapshots of one server.
#[derive(Debug)]
pub(crate) struct Files {
    folder: Folder,
    /// The lines of all settings.
    settings: String,
    /// A file that the operator named is not for us to delete.
    in_use: Option<PathBuf>,
    /// One at a time.
    writing: Mutex<()>,
}

/// Deletes what servers that ended were writing.
fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else {
        return;
    };
    let is_abandoned = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let written = entry.metadata().and_then(|found| found.modified());
        let age = written.ok().and_then(|written| written.elapsed().ok());
        name.starts_with(UNFINISHED.0)
            && name.ends_with(UNFINISHED.1)
            && age.is_some_and(|age| age >= ABANDONED_AFTER)
    };
    for entry in entries.flatten().filter(is_abandoned) {
        let _may_be_gone = fs::remove_file(entry.path());
    }
}

impl Files {
    /// For a server with these settings.
    pub(crate) fn new(environment: &Environment, raw: &Raw) -> Self {
        let absolute = |path: &PathBuf| std::path::absolute(path).ok();
        Self {
            folder: Folder::of(environment),
            settings: document::settings(raw),
            in_use: raw.file.as_ref().and_then(|file| absolute(&file.path)),
            writing: Mutex::new(()),
        }
    }

    /// Deletes the oldest snapshots.
    fn prune(&self, files: &[(Timestamp, PathBuf)]) {
        // The new one counts too.
        for (_, path) in files.iter().skip(KEPT - 1) {
            if self.in_use.as_ref() != Some(path)
                && let Err(error) = fs::remove_file(path)
            {
                tracing::debug!("an old snapshot stays: {error}");
            }
        }
    }
}

impl SnapshotWriter for Files {
    fn write(&self, models: &SavedModels, occasion: Occasion) -> io::Result<()> {
        let _alone = self.writing.lock();
        fs::create_dir_all(&self.folder.0)?;
        if occasion == Occasion::Startup {
            sweep(&self.folder.0);
        }
        let mut attempts = 1..ATTEMPTS;
        loop {
            match self.write_next(models, occasion) {
                Err(taken)
                    if taken.kind() == io::ErrorKind::AlreadyExists
                        && attempts.next().is_some() => {}
                written => return written,
            }
        }
    }
}

impl Files {
    /// Writes the next file, unless another server has its name first.
    fn write_next(&self, models: &SavedModels, occasion: Occasion) -> io::Result<()> {
        let folder = &self.folder.0;
        let files = self.folder.files();
        // As exact as it stands in a name.
        let now = Timestamp::from_millisecond(Timestamp::now().as_millisecond());
        let now = now.map_err(io::Error::other)?;
        // Above all others, wherever the clock was when they were written.
        let stamp = match files.first() {
            Some((newest, _)) if *newest >= now => newest
                .checked_add(1.millisecond())
                .map_err(io::Error::other)?,
            _ => now,
        };
        let occasion = match occasion {
            Occasion::Startup => "startup",
            Occasion::Change => "snapshot",
            Occasion::Shutdown => "shutdown",
        };
        let name = format!("{}-{occasion}.cfg", stamp.strftime(STAMP));
        let text = document::compose(&name, now, &self.settings, models)?;
        // Readable for its owner only, as such files are made: settings may hold passwords. Gone if
        // it does not get its name.
        let mut file = tempfile::Builder::new()
            .prefix(UNFINISHED.0)
            .suffix(UNFINISHED.1)
            .tempfile_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        let kept = file.persist_noclobber(folder.join(name));
        kept.map_err(|refused| refused.error)?;
        // The name is part of the folder.
        fs::File::open(folder)?.sync_all()?;
        self.prune(&files);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(folder: &Path, in_use: Option<PathBuf>) -> Files {
        Files {
            folder: Folder(folder.to_owned()),
            settings: "model_store=/m\n".to_owned(),
            in_use,
            writing: Mutex::new(()),
        }
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string();
        let mut names: Vec<String> = entries.map(|entry| name(entry).unwrap()).collect();
        names.sort_unstable();
        names
    }

    #[test]
    fn only_names_of_snapshots_count() {
        let stamp = stamp_of("20231114221320123-startup.cfg").unwrap();
        assert_eq!(stamp.as_millisecond(), 1_700_000_000_123);
        for name in [
            "20231114221320123-startup.txt",
            "20231114221320123-other.cfg",
            "2023111422132012-startup.cfg",
            "20231314221320123-startup.cfg",
            "+0231114221320123-startup.cfg",
            "20231114221320123.cfg",
            "notes.cfg",
            ".snapshot-a1b2c3.part",
        ] {
            assert_eq!(stamp_of(name), None, "{name}");
        }
    }

    #[test]
    fn the_newest_is_the_one_written_last_wherever_the_clock_is() {
        let folder = tempfile::tempdir().unwrap();
        let ahead = folder.path().join("20991231235959999-shutdown.cfg");
        fs::write(&ahead, "").unwrap();
        let files = files(folder.path(), None);
        for occasion in [Occasion::Startup, Occasion::Change, Occasion::Shutdown] {
            files.write(&SavedModels::default(), occasion).unwrap();
            let newest = files.folder.newest();
            let path = newest.usable.unwrap().0.display().to_string();
            let written = match occasion {
                Occasion::Startup => "21000101000000000-startup.cfg",
                Occasion::Change => "21000101000000001-snapshot.cfg",
                Occasion::Shutdown => "21000101000000002-shutdown.cfg",
            };
            assert!(path.ends_with(written), "{path}");
        }
        assert_eq!(names(folder.path()).len(), 4);
    }

    #[test]
    fn servers_that_share_a_folder_lose_none_of_their_files() {
        let folder = tempfile::tempdir().unwrap();
        let writers = [(); 4].map(|()| files(folder.path(), None));
        std::thread::scope(|scope| {
            for writer in &writers {
                scope.spawn(|| {
                    for _ in 0..KEPT / 4 {
                        let models = SavedModels::default();
                        writer.write(&models, Occasion::Change).unwrap();
                    }
                });
            }
        });
        let names = names(folder.path());
        assert_eq!(names.len(), KEPT, "{names:?}");
        for name in names {
            let text = fs::read_to_string(folder.path().join(&name)).unwrap();
            assert!(document::read_file(&text).is_ok(), "{name}: {text}");
            assert!(
                text.contains(&name),
                "{name} has what another was to have: {text}"
            );
        }
    }

    #[test]
    fn what_a_server_that_ended_was_writing_is_swept() {
        let folder = tempfile::tempdir().unwrap();
        for name in [".snapshot-old.part", ".snapshot-new.part", "other.part"] {
            fs::write(folder.path().join(name), "half").unwrap();
        }
        let long_ago = std::time::SystemTime::now() - ABANDONED_AFTER;
        for name in [".snapshot-old.part", "other.part"] {
            let file = fs::File::options()
                .write(true)
                .open(folder.path().join(name));
            file.unwrap().into_parts().0.set_modified(long_ago).unwrap();
        }
        files(folder.path(), None)
            .write(&SavedModels::default(), Occasion::Startup)
            .unwrap();
        let left = names(folder.path());
        assert_eq!(left[..1], [".snapshot-new.part"], "{left:?}");
        assert_eq!(
            (left.len(), left[2].as_str()),
            (3, "other.part"),
            "{left:?}"
        );
    }

    #[test]
    fn a_damaged_newest_is_passed_over_and_told() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), None);
        files
            .write(&SavedModels::default(), Occasion::Startup)
            .unwrap();
        let good = files.folder.files()[0].1.clone();
        for name in [
            "20990101000000000-snapshot.cfg",
            "20990101000000001-startup.cfg",
        ] {
            fs::write(folder.path().join(name), "model_store=/m\nmodel_snap").unwrap();
        }
        fs::create_dir(folder.path().join("20990101000000002-startup.cfg")).unwrap();
        let newest = files.folder.newest();
        assert_eq!(newest.usable.unwrap().0, good);
        assert_eq!(newest.passed_over.len(), 3, "{:?}", newest.passed_over);
        assert!(newest.passed_over[0].contains("20990101000000002"));
    }

    #[test]
    fn old_ones_go_and_other_peoples_files_stay() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let foreign = ["20200101000000000-mine.cfg", "README", "x.cfg"];
        for name in foreign {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let in_use = folder.path().join("20200101000000000-startup.cfg");
        fs::write(&in_use, "").unwrap();
        let files = files(folder.path(), Some(in_use.clone()));
        for _ in 0..KEPT + 5 {
            files
                .write(&SavedModels::default(), Occasion::Change)
                .unwrap();
        }
        let left = names(folder.path());
        assert_eq!(left.len(), KEPT + foreign.len() + 1, "{left:?}");
        assert!(in_use.exists());
        let newest = files.folder.newest().usable.unwrap().0;
        let mode = fs::metadata(newest).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_an_error_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a file");
        fs::write(&file, "").unwrap();
        let files = files(&file.join("config"), None);
        let error = files
            .write(&SavedModels::default(), Occasion::Startup)
            .unwrap_err();
        assert!(error.to_string().contains("a file"), "{error}");
        assert!(files.folder.newest().usable.is_none());
    }
}
