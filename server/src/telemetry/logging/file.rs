//! One log file: opened again when it was moved away, and followed by the next one when it is full
//! or of yesterday.

use std::io::{self, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err as fs;
use jiff::{Timestamp, civil::Date, tz::TimeZone};

use super::archive::Archives;
use super::queue::newlines;

/// How long after a failure the file is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// When a file is followed by the next one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Bytes that it may have.
    pub(super) bytes: u64,
    /// Old ones that are kept.
    pub(super) kept: usize,
}

/// When something is written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Moment {
    /// By the local calendar.
    pub(super) day: Date,
    /// For waiting.
    pub(super) instant: Instant,
}

/// What there is to tell of a file; each once, until it changes.
#[derive(Debug)]
pub(super) enum News {
    /// A full one was put aside.
    Rolled,
    /// It cannot be written.
    Failing {
        /// Where it should be.
        path: PathBuf,
        /// The system's words.
        reason: io::Error,
    },
    /// It is full, and cannot be put aside.
    NotRolled {
        /// Where it is.
        path: PathBuf,
        /// The system's words.
        reason: io::Error,
    },
    /// It can be written again; the line that says so comes first in it.
    WritableAgain {
        /// Lines that it does not have.
        lost: u64,
    },
}

/// The file as it was opened.
#[derive(Debug)]
struct Open {
    file: fs::File,
    /// Device and number, by which another file under the same name is told from it.
    identity: (u64, u64),
    bytes: u64,
    /// Of its first line, as far as one can tell.
    day: Date,
}

/// A log file.
#[derive(Debug)]
pub(super) struct LogFile {
    archives: Archives,
    limits: Limits,
    open: Option<Open>,
    lost: u64,
    /// After a failure, told already.
    retry: Option<Instant>,
    roll_again: Option<Instant>,
}

impl LogFile {
    /// A file that is not opened yet.
    pub(super) fn new(folder: &Path, name: &'static str, limits: Limits) -> Self {
        Self {
            archives: Archives {
                folder: folder.to_owned(),
                name,
                kept: limits.kept,
            },
            limits,
            open: None,
            lost: 0,
            retry: None,
            roll_again: None,
        }
    }

    /// What became of earlier files of this name.
    pub(super) fn archives(&self) -> &Archives {
        &self.archives
    }

    /// Makes the file, or goes on with the one that is there.
    ///
    /// # Errors
    /// Why not; it is tried again by itself.
    pub(super) fn open(&mut self, now: Moment) -> io::Result<()> {
        self.open = Some(self.reopened(now).inspect_err(|_| {
            self.retry = Some(now.instant + RETRY);
        })?);
        Ok(())
    }

    fn reopened(&self, now: Moment) -> io::Result<Open> {
        fs::create_dir_all(&self.archives.folder)?;
        let mut options = fs::OpenOptions::new();
        let options = options.read(true).append(true).create(true);
        let file = options.open(self.archives.live())?;
        let found = file.metadata()?;
        let day = match found.modified() {
            Ok(time) if found.len() > 0 => Timestamp::try_from(time).map_or(now.day, |time| {
                time.to_zoned_datetime(TimeZone::system()).date()
            }),
            _ => now.day,
        };
        let mut last = *b"\n";
        if let Some(before_end) = found.len().checked_sub(1) {
            file.file().read_exact_at(&mut last, before_end)?;
        }
        let mut open = Open {
            identity: (found.dev(), found.ino()),
            bytes: found.len(),
            day,
            file,
        };
        if last != *b"\n" {
            // A full disk, or a crash, has cut its last line.
            open.append(b"\n").1?;
        }
        Ok(open)
    }

    /// Writes lines, whatever it takes. `tell` gives the line that tells of those lost.
    pub(super) fn write(
        &mut self,
        mut lines: &[u8],
        now: Moment,
        mut tell: impl FnMut(News) -> Option<Vec<u8>>,
    ) {
        while !lines.is_empty() {
            let (written, outcome) = self.write_some(lines, now, &mut tell);
            lines = &lines[written..];
            if let Err(reason) = outcome {
                self.open = None;
                self.lost += newlines(lines);
                if self.retry.replace(now.instant + RETRY).is_none() {
                    let path = self.archives.live();
                    tell(News::Failing { path, reason });
                }
                return;
            }
        }
    }

    /// Writes as many lines as the file takes. Returns how many bytes it has taken, also where the
    /// next one failed.
    fn write_some(
        &mut self,
        lines: &[u8],
        now: Moment,
        tell: &mut impl FnMut(News) -> Option<Vec<u8>>,
    ) -> (usize, io::Result<()>) {
        if self.open.is_none() && self.retry.is_some_and(|retry| now.instant < retry) {
            self.lost += newlines(lines);
            return (lines.len(), Ok(()));
        }
        let ready = self
            .follow(now)
            .and_then(|()| self.room_for(lines, now, tell));
        let (some, open) = match (ready, &mut self.open) {
            (Ok(some), Some(open)) => (some, open),
            (Ok(_), None) => return (0, Err(io::ErrorKind::NotFound.into())),
            (Err(error), _) => return (0, Err(error)),
        };
        if self.retry.is_some() {
            let lost = self.lost;
            let gap = (lost > 0).then(|| tell(News::WritableAgain { lost }));
            if let Err(error) = open.append(&gap.flatten().unwrap_or_default()).1 {
                return (0, Err(error));
            }
            self.lost = 0;
            self.retry = None;
        }
        open.append(&lines[..some])
    }

    /// Opens the file where it is not open, or where somebody has moved or removed it.
    fn follow(&mut self, now: Moment) -> io::Result<()> {
        if let Some(open) = &mut self.open
            && let Ok(found) = fs::metadata(self.archives.live())
            && (found.dev(), found.ino()) == open.identity
        {
            // Others may write to it, or cut it.
            open.bytes = found.len();
            return Ok(());
        }
        self.open = Some(self.reopened(now)?);
        Ok(())
    }

    /// Returns how many bytes of these lines go into the file, which is the next one if this is
    /// full.
    fn room_for(
        &mut self,
        lines: &[u8],
        now: Moment,
        tell: &mut impl FnMut(News) -> Option<Vec<u8>>,
    ) -> io::Result<usize> {
        let Some(open) = &self.open else { return Ok(0) };
        let first = lines.iter().position(|byte| *byte == b'\n');
        let first = first.map_or(lines.len(), |end| end + 1);
        let is_full = open.bytes.saturating_add(first as u64) > self.limits.bytes;
        let is_due = open.bytes > 0 && (is_full || open.day != now.day);
        let mut written_so_far = open.bytes;
        if is_due {
            if self.roll_again.is_some_and(|again| now.instant < again) {
                return Ok(lines.len());
            }
            if let Err(reason) = self.archives.put_aside(open.day) {
                if self.roll_again.replace(now.instant + RETRY).is_none() {
                    let path = self.archives.live();
                    tell(News::NotRolled { path, reason });
                }
                return Ok(lines.len());
            }
            self.roll_again = None;
            tell(News::Rolled);
            self.open = Some(self.reopened(now)?);
            written_so_far = 0;
        }
        let room = self.limits.bytes.saturating_sub(written_so_far);
        let room = usize::try_from(room).unwrap_or(usize::MAX).min(lines.len());
        // A line longer than a whole file has one of its own.
        let whole = lines[..room].iter().rposition(|byte| *byte == b'\n');
        Ok(whole.map_or(first, |end| end + 1))
    }
}

impl Open {
    /// Returns how many bytes were written, also where the next one was not.
    fn append(&mut self, bytes: &[u8]) -> (usize, io::Result<()>) {
        let mut written = 0;
        while written < bytes.len() {
            match self.file.write(&bytes[written..]) {
                Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
                Ok(count) => {
                    written += count;
                    self.bytes += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (written, Err(error)),
            }
        }
        (written, Ok(()))
    }
}

#[cfg(test)]
mod tests;
