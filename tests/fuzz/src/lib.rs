//! What the fuzz targets in `bin/` share. Each target feeds bytes to one parser and asserts more
//! than that it returns: limits hold, what was read can be written and read again.
//!
//! `run.py` builds and runs them; docs/testing.md says how.

use std::path::Path;

use bytes::Bytes;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use ts_archive::{ArchiveError, UnpackLimits, inspect, unpack};
use ts_server::fuzzing::{self, Part};

/// Bytes and fields that a body may have.
pub const BODY_LIMITS: (usize, usize) = (2048, 8);

/// What one archive may unpack to.
pub fn unpack_limits() -> UnpackLimits {
    UnpackLimits {
        max_entries: 32,
        max_total_bytes: 256 << 10,
        max_entry_bytes: Some(128 << 10),
        max_ratio: 50,
        ratio_free_bytes: 32 << 10,
    }
}

/// A new folder for one target's files, emptied by who started it: the fuzzer never returns.
///
/// # Panics
/// There is no place for it.
pub fn scratch() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// What the time-outs of bodies run on.
///
/// # Panics
/// The system has no descriptors left.
pub fn clock() -> Runtime {
    let builder = Builder::new_current_thread().enable_time().build();
    builder.expect("a runtime without threads needs next to nothing")
}

/// Takes `size of the pieces, rest of the content type, line feed, body` for a body of the media
/// type `essence`, reads it in pieces and in one, and checks what both give.
///
/// # Panics
/// They differ, or a limit was passed.
pub fn check_body(clock: &Runtime, essence: &str, data: &[u8]) {
    let Some((&size, data)) = data.split_first() else {
        return;
    };
    let Some(end) = data.iter().position(|byte| *byte == b'\n') else {
        return;
    };
    let Ok(rest) = std::str::from_utf8(&data[..end]) else {
        return;
    };
    let content_type = format!("{essence}{rest}");
    let body = &data[end + 1..];
    let read = |size: usize| {
        let pieces = body.chunks(size.max(1)).map(Bytes::copy_from_slice);
        fuzzing::body(clock, &content_type, pieces.collect(), BODY_LIMITS)
    };
    let fields = read(usize::from(size));
    assert_eq!(fields, read(body.len()), "in pieces it is another body");
    if let Ok(fields) = fields {
        assert!(body.len() <= BODY_LIMITS.0, "{} bytes", body.len());
        check_fields(&fields);
    }
}

fn check_fields(fields: &[Part]) {
    assert!(fields.len() <= BODY_LIMITS.1, "{} fields", fields.len());
    for (index, field) in fields.iter().enumerate() {
        let again = fields[..index].iter().any(|other| other.name == field.name);
        assert!(!again, "`{}` is there twice", field.name);
    }
}

/// Writes an archive into the folder, reads it in every way there is, and checks that they agree,
/// that nothing is over the limits or outside of its folder, and that nothing is left.
///
/// # Panics
/// One of that is not so.
pub fn check_archive(folder: &Path, name: &str, data: &[u8]) {
    let (archive, models) = (folder.join(name), folder.join("models"));
    fs_err::write(&archive, data).expect("the scratch folder takes files");
    let limits = unpack_limits();
    let inspected = inspect(&archive, &limits);
    match unpack(&archive, &models, &limits) {
        Ok(artifact) => {
            let seen = inspected.expect("what can be unpacked can be inspected");
            let (files, bytes) = files_of(&artifact.dir);
            assert!(files.len() as u64 <= limits.max_entries, "{files:?}");
            assert!(bytes <= limits.max_total_bytes, "{bytes} bytes");
            assert!(files.len() <= seen.members.len(), "{files:?}");
            // A tar may have everything in one folder, which is left out.
            let listed = |file: &String| seen.members.iter().any(|it| it.path.ends_with(file));
            assert!(files.iter().all(listed), "{files:?}");
        }
        Err(error) => {
            let own = matches!(error, ArchiveError::Io { .. });
            assert!(!own, "what is wrong is the archive, not {error}");
        }
    }
    for (place, left) in [(&models, 0), (&folder.to_owned(), 2)] {
        let found = fs_err::read_dir(place).map_or(left, Iterator::count);
        assert!(found <= left, "files are left in {}", place.display());
    }
}

/// The files below a folder and their bytes. There is nothing but files and folders.
fn files_of(folder: &Path) -> (Vec<String>, u64) {
    let (mut files, mut bytes) = (Vec::new(), 0);
    for entry in walkdir::WalkDir::new(folder) {
        let entry = entry.expect("an unpacked folder can be read");
        let kind = entry.file_type();
        assert!(
            kind.is_dir() || kind.is_file(),
            "{}",
            entry.path().display()
        );
        if kind.is_file() {
            bytes += entry.metadata().expect("it is there").len();
            let below = entry.path().strip_prefix(folder).expect("it is below");
            files.push(below.to_string_lossy().into_owned());
        }
    }
    (files, bytes)
}
