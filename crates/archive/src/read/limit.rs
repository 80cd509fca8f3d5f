//! What reading may cost: bytes and entries that come out, and memory of the parsers.

use std::cell::Cell;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::damaged;
use crate::error::{ArchiveError, Doing, Limit};
use crate::unpack::UnpackLimits;

/// Counts what comes out. Nothing that the archive declares enters here.
pub(super) struct Budget {
    pub(super) archive: PathBuf,
    pub(super) archive_bytes: u64,
    pub(super) limits: UnpackLimits,
    pub(super) entries: u64,
    pub(super) bytes: u64,
}

impl Budget {
    fn over(&self, limit: Limit) -> ArchiveError {
        ArchiveError::OverLimit {
            archive: self.archive.clone(),
            limit,
        }
    }

    pub(super) fn entry(&mut self) -> Result<(), ArchiveError> {
        self.entries += 1;
        self.limit_entries(self.entries)
    }

    pub(super) fn limit_entries(&self, entries: u64) -> Result<(), ArchiveError> {
        if entries > self.limits.max_entries {
            return Err(self.over(Limit::Entries(self.limits.max_entries)));
        }
        Ok(())
    }

    fn grow(&mut self, member: &str, member_bytes: u64, by: u64) -> Result<(), ArchiveError> {
        self.bytes += by;
        let limits = &self.limits;
        if self.bytes > limits.max_total_bytes {
            return Err(self.over(Limit::TotalBytes(limits.max_total_bytes)));
        }
        if let Some(most) = limits.max_entry_bytes.filter(|most| member_bytes > *most) {
            let member = member.to_owned();
            return Err(self.over(Limit::EntryBytes {
                member,
                bytes: most,
            }));
        }
        if self.bytes > limits.ratio_free_bytes
            && self.bytes > self.archive_bytes.saturating_mul(limits.max_ratio)
        {
            return Err(self.over(Limit::Ratio(limits.max_ratio)));
        }
        Ok(())
    }

    pub(super) fn copy(
        &mut self,
        member: &str,
        data: &mut dyn Read,
        out: &mut dyn Write,
        target: &Path,
    ) -> Result<(), ArchiveError> {
        let mut buffer = vec![0; 128 << 10];
        let mut member_bytes = 0;
        loop {
            let read = match data.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(damaged(&self.archive, Some(member), error)),
            };
            member_bytes += read as u64;
            self.grow(member, member_bytes, read as u64)?;
            out.write_all(&buffer[..read]).doing("write", target)?;
        }
    }

    /// Reads past a member that was refused, still counting.
    pub(super) fn skip(&mut self, member: &str, data: &mut dyn Read) -> Result<(), ArchiveError> {
        self.copy(member, data, &mut io::sink(), Path::new(""))
    }
}

/// Bounds what a parser may read for its own bookkeeping, which it keeps in memory.
pub(super) struct Metered<R> {
    pub(super) inner: R,
    pub(super) allowance: Rc<Cell<u64>>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.allowance.get();
        if left == 0 && !buffer.is_empty() {
            return Err(io::Error::other(
                "its headers are larger than those of any real archive",
            ));
        }
        let most = buffer
            .len()
            .min(usize::try_from(left).unwrap_or(usize::MAX));
        let read = self.inner.read(&mut buffer[..most])?;
        self.allowance.set(left - read as u64);
        Ok(read)
    }
}

impl<R: Seek> Seek for Metered<R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.inner.seek(to)
    }
}
