//! Members of a gzip-compressed tar.

use std::cell::Cell;
use std::io::{self, BufReader};
use std::path::Path;
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use fs_err as fs;
use tar::EntryType;

use super::limit::{Budget, Metered};
use super::{OnFault, OnMember, Stored, damaged, take, unsafe_member};
use crate::error::{ArchiveError, Doing, escaped};
use crate::member::{MemberFault, MemberTree};

pub(super) fn members(
    source: &Path,
    budget: &mut Budget,
    on_member: OnMember<'_>,
    on_fault: OnFault<'_>,
) -> Result<(), ArchiveError> {
    /// Header, long name and extensions of one member; they are kept in memory.
    const HEADER_BYTES: u64 = 1 << 20;
    let file = fs::File::open(source).doing("open", source)?;
    let allowance = Rc::new(Cell::new(HEADER_BYTES));
    let reader = Metered {
        inner: MultiGzDecoder::new(BufReader::new(file)),
        allowance: Rc::clone(&allowance),
    };
    let mut archive = tar::Archive::new(reader);
    let mut tree = MemberTree::default();
    for entry in archive
        .entries()
        .map_err(|error| damaged(source, None, error))?
    {
        let mut entry = entry.map_err(|error| damaged(source, None, error))?;
        budget.entry()?;
        allowance.set(u64::MAX);
        let kind = entry.header().entry_type();
        // Written by `git archive`; it holds remarks about the archive as a whole.
        if kind == EntryType::XGlobalHeader {
            budget.skip("global header", &mut entry)?;
        } else {
            let bytes = entry.path_bytes().into_owned();
            if let Ok(name) = String::from_utf8(bytes) {
                let stored = Stored {
                    is_folder: is_folder(kind, &name),
                    name: &name,
                    executable: entry.header().mode().is_ok_and(|mode| mode & 0o111 != 0),
                    compressed: None,
                };
                take(&stored, &mut entry, &mut tree, budget, on_member, on_fault)?;
            } else {
                let shown = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
                on_fault(unsafe_member(source, &shown, MemberFault::NotText))?;
                budget.skip(&escaped(&shown), &mut entry)?;
            }
        }
        allowance.set(HEADER_BYTES);
    }
    // To the end of the stream, or its checksum would never be looked at.
    allowance.set(HEADER_BYTES);
    io::copy(&mut archive.into_inner(), &mut io::sink())
        .map_err(|error| damaged(source, None, error))?;
    Ok(())
}

fn is_folder(kind: EntryType, name: &str) -> Result<bool, &'static str> {
    match kind {
        EntryType::Directory => Ok(true),
        // Before tar had folders, a name with a slash at its end was one.
        EntryType::Regular | EntryType::Continuous => Ok(name.ends_with('/')),
        EntryType::Symlink => Err("a symbolic link"),
        EntryType::Link => Err("a hard link"),
        EntryType::GNUSparse => Err("a sparse file"),
        EntryType::Fifo | EntryType::Char | EntryType::Block => Err("a device, pipe or socket"),
        _ => Err("of an unknown kind"),
    }
}
