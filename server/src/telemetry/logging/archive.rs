//! What becomes of a file that was put aside: compressed, and deleted once there are newer ones
//! enough.
//!
//! It has the day in its name, as TorchServe's pattern gives it: `ts_log.30-Nov.log.gz`. A second
//! one of the same day gets a number, where TorchServe writes over the first:
//! `ts_log.30-Nov.1.log.gz`. Until it is compressed its name ends with `.log`, so whatever a server
//! that was killed has left is found and finished by the next one.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::SystemTime;

use flate2::{Compression, write::GzEncoder};
use fs_err as fs;
use jiff::civil::Date;

use super::file::LogFile;

const COMPRESSED: &str = ".gz";
const UNFINISHED: &str = ".part";

/// Where a file and its predecessors lie.
#[derive(Debug, Clone)]
pub(super) struct Archives {
    pub(super) folder: PathBuf,
    /// Without `.log`.
    pub(super) name: &'static str,
    /// How many are kept.
    pub(super) kept: usize,
}

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Archive {
    /// When its last line was written.
    modified: SystemTime,
    number: u32,
    day: String,
    path: PathBuf,
}

impl Archives {
    /// The file that is written.
    pub(super) fn live(&self) -> PathBuf {
        self.folder.join(format!("{}.log", self.name))
    }

    /// Gives the file, whose lines are of this day, the name under which it stays.
    pub(super) fn put_aside(&self, day: Date) -> io::Result<()> {
        let day = day.strftime("%d-%b").to_string();
        let of_day = self.all()?.into_iter().filter(|one| one.day == day);
        let next = of_day.map(|one| one.number.saturating_add(1)).max();
        let number = next.map_or_else(String::new, |number| format!(".{number}"));
        let to = self.folder.join(format!("{}.{day}{number}.log", self.name));
        fs::rename(self.live(), to)
    }

    /// Compresses what is not compressed yet, and deletes the oldest ones over the number kept.
    /// What fails is tried again the next time, and what is too old goes even so.
    fn tidy(&self) -> io::Result<()> {
        let mut all = self.all()?;
        all.sort_unstable();
        let too_many = all.len().saturating_sub(self.kept);
        for old in all.drain(..too_many) {
            fs::remove_file(old.path)?;
        }
        for one in all {
            if one.path.extension().is_some_and(|end| end == "log") {
                compress(&one)?;
            }
        }
        Ok(())
    }

    fn all(&self) -> io::Result<Vec<Archive>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            if let Some((day, number)) = entry.file_name().to_str().and_then(|n| self.parse(n)) {
                // It may have been deleted by another server of this folder.
                let Ok(found) = entry.metadata() else {
                    continue;
                };
                all.push(Archive {
                    modified: found.modified()?,
                    number,
                    day,
                    path: entry.path(),
                });
            }
        }
        Ok(all)
    }

    /// The day and number in the name of one of them; `None` for any other file.
    fn parse(&self, file: &str) -> Option<(String, u32)> {
        let rest = file.strip_prefix(self.name)?.strip_prefix('.')?;
        let rest = rest.strip_suffix(COMPRESSED).unwrap_or(rest);
        let rest = rest.strip_suffix(".log")?;
        let (day, number) = match rest.split_once('.') {
            Some((day, number)) => (day, number.parse().ok()?),
            None => (rest, 0),
        };
        let (date, month) = day.split_once('-')?;
        let is_day = date.len() == 2
            && date.bytes().all(|byte| byte.is_ascii_digit())
            && month.len() == 3
            && month.bytes().all(|byte| byte.is_ascii_alphabetic());
        is_day.then(|| (day.to_owned(), number))
    }
}

/// Puts the compressed file in the place of the plain one, which is deleted last.
fn compress(archive: &Archive) -> io::Result<()> {
    let ending = |end: &str| {
        let mut path = archive.path.clone().into_os_string();
        path.push(end);
        PathBuf::from(path)
    };
    let unfinished = ending(&[COMPRESSED, UNFINISHED].concat());
    let written = write_compressed(archive, &unfinished);
    if written.is_err() {
        // The disk is full; the plain file is as good.
        let _may_not_exist = fs::remove_file(&unfinished);
    }
    written?;
    fs::rename(&unfinished, ending(COMPRESSED))?;
    fs::remove_file(&archive.path)
}

fn write_compressed(archive: &Archive, to: &std::path::Path) -> io::Result<()> {
    let mut from = fs::File::open(&archive.path)?;
    let mut encoder = GzEncoder::new(fs::File::create(to)?, Compression::default());
    io::copy(&mut from, &mut encoder)?;
    let (file, _) = encoder.finish()?.into_parts();
    // By their times the oldest are told from the newest.
    file.set_modified(archive.modified)?;
    file.sync_all()
}

/// Starts the thread that tidies up, at once and whenever it is asked. It ends with whoever asks.
pub(super) fn start(files: &[LogFile]) -> io::Result<SyncSender<()>> {
    let archives: Vec<_> = files.iter().map(|file| file.archives().clone()).collect();
    let (ask, asked) = sync_channel(1);
    let _asked_already = ask.try_send(());
    std::thread::Builder::new()
        .name("log-archives".to_owned())
        .spawn(move || tidy_when_asked(&archives, &asked))?;
    Ok(ask)
}

fn tidy_when_asked(all: &[Archives], asked: &Receiver<()>) {
    let mut failing = false;
    while asked.recv().is_ok() {
        let outcomes: Vec<_> = all.iter().map(Archives::tidy).collect();
        let failed = outcomes.into_iter().find_map(|outcome| {
            // A folder that is not there has nothing to tidy.
            outcome
                .err()
                .filter(|error| error.kind() != io::ErrorKind::NotFound)
        });
        if let Some(error) = &failed
            && !failing
        {
            tracing::warn!("old log files are not all compressed and deleted: {error}");
        }
        failing = failed.is_some();
    }
}

#[cfg(test)]
mod tests;
