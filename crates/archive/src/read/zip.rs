//! Members of a zip archive.

use std::cell::Cell;
use std::collections::HashSet;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;
use std::rc::Rc;

use fs_err as fs;
use zip::result::ZipError;

use super::limit::{Budget, Metered};
use super::{OnFault, OnMember, Stored, damaged, forbidden, take, unsafe_member};
use crate::error::{ArchiveError, Doing, escaped};
use crate::member::{Collision, MemberFault, MemberPath, MemberTree};

pub(super) fn members(
    source: &Path,
    budget: &mut Budget,
    on_member: OnMember<'_>,
    on_fault: OnFault<'_>,
) -> Result<(), ArchiveError> {
    /// Bytes of a directory entry of a zip archive that are sure to hold a real name.
    const DIRECTORY_ENTRY_BYTES: u64 = 512;
    let file = fs::File::open(source).doing("open", source)?;
    let allowance = Rc::new(Cell::new(
        budget
            .limits
            .max_entries
            .saturating_mul(DIRECTORY_ENTRY_BYTES)
            .saturating_add(1 << 20),
    ));
    let reader = Metered {
        inner: BufReader::new(file),
        allowance: Rc::clone(&allowance),
    };
    let mut zip = zip::ZipArchive::new(reader).map_err(|error| zip_error(source, None, error))?;
    allowance.set(u64::MAX);
    if zip.has_duplicate_names() {
        on_fault(duplicate_name(source, &mut zip))?;
    }
    let mut tree = MemberTree::default();
    for index in 0..zip.len() {
        budget.entry()?;
        let name = zip.name_for_index(index);
        let name = match name {
            Some(Ok(name)) => name.into_owned(),
            _ => {
                on_fault(unsafe_member(
                    source,
                    &format!("#{index}"),
                    MemberFault::NotText,
                ))?;
                continue;
            }
        };
        let encrypted = zip
            .by_index_raw(index)
            .is_ok_and(|member| member.encrypted());
        if encrypted {
            on_fault(forbidden(source, &name, "encrypted"))?;
            continue;
        }
        let mut member = match zip.by_index(index) {
            Ok(member) => member,
            Err(error) => {
                on_fault(zip_error(source, Some(&name), error))?;
                continue;
            }
        };
        let mode = member.unix_mode().unwrap_or(0);
        let stored = Stored {
            name: &name,
            is_folder: match mode & 0o170_000 {
                0 | 0o100_000 | 0o040_000 => Ok(member.is_dir() || mode & 0o170_000 == 0o040_000),
                0o120_000 => Err("a symbolic link"),
                _ => Err("a device, pipe or socket"),
            },
            executable: mode & 0o111 != 0,
            compressed: Some(member.compressed_size()),
        };
        take(&stored, &mut member, &mut tree, budget, on_member, on_fault)?;
    }
    Ok(())
}

fn zip_error(archive: &Path, member: Option<&str>, error: ZipError) -> ArchiveError {
    let member = member.map(escaped);
    match error {
        ZipError::CompressionMethodNotSupported(method) => ArchiveError::NotAnArchive {
            archive: archive.to_owned(),
            expected: "a zip archive that is deflated or stored",
            reason: format!(
                "member `{}` uses compression method {method}; pack it again",
                member.unwrap_or_default()
            ),
        },
        error => damaged(archive, member.as_deref(), error.into()),
    }
}

/// Finds the name that occurs twice: the zip reader keeps one member per name and only tells that
/// there were more.
fn duplicate_name<R: Read + Seek>(source: &Path, zip: &mut zip::ZipArchive<R>) -> ArchiveError {
    let walk = || -> io::Result<Option<String>> {
        let mut file = BufReader::new(fs::File::open(source)?);
        file.seek(SeekFrom::Start(zip.central_directory_start()))?;
        let mut seen = HashSet::new();
        loop {
            let mut header = [0; 46];
            file.read_exact(&mut header)?;
            if header[..4] != *b"PK\x01\x02" {
                return Ok(None);
            }
            let length = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
            let mut name = vec![0; usize::from(length(28))];
            file.read_exact(&mut name)?;
            file.seek_relative(i64::from(length(30)) + i64::from(length(32)))?;
            if !seen.insert(name.clone()) {
                return Ok(Some(String::from_utf8_lossy(&name).into_owned()));
            }
        }
    };
    match walk().ok().flatten().as_deref().map(MemberPath::parse) {
        Some(Ok(path)) => ArchiveError::MembersCollide {
            archive: source.to_owned(),
            collision: Collision::Twice(path),
        },
        _ => ArchiveError::NotAnArchive {
            archive: source.to_owned(),
            expected: "a model archive",
            reason: "two members have the same name; pack it again".to_owned(),
        },
    }
}
