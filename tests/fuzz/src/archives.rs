//! The reader of archives, down to the files that it leaves.

use std::io::Write as _;
use std::path::Path;
use std::sync::LazyLock;

use flate2::Compression;
use flate2::write::GzEncoder;
use tempfile::TempDir;
use ts_archive::{ArchiveError, UnpackLimits, inspect, unpack};

/// What one archive may unpack to.
const LIMITS: UnpackLimits = UnpackLimits {
    max_entries: 32,
    max_total_bytes: 256 << 10,
    max_entry_bytes: Some(128 << 10),
    max_ratio: 50,
    ratio_free_bytes: 32 << 10,
};

static SCRATCH: LazyLock<TempDir> =
    LazyLock::new(|| tempfile::tempdir().expect("there is a place for temporary files"));

/// A `.mar`, as it is.
pub fn zip(data: &[u8]) {
    check("m.mar", data);
}

/// The data is what gzip gives back, since its checksum would refuse nearly every mutation; data
/// that begins like gzip is taken as it is.
pub fn tar(data: &[u8]) {
    if data.starts_with(b"\x1f\x8b") {
        return check("m.tar.gz", data);
    }
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(data).expect("memory takes bytes");
    check("m.tar.gz", &packed.finish().expect("memory takes bytes"));
}

/// All ways of reading agree, nothing is over the limits or outside of the folder, nothing is left,
/// and what is wrong is said to be the archive.
fn check(name: &str, data: &[u8]) {
    let (archive, parent) = (SCRATCH.path().join(name), SCRATCH.path().join("models"));
    fs_err::write(&archive, data).expect("the scratch folder takes files");
    let inspected = inspect(&archive, &LIMITS);
    match unpack(&archive, &parent, &LIMITS) {
        Ok(artifact) => {
            let seen = inspected.expect("what can be unpacked can be inspected");
            let (files, bytes) = files_of(&artifact.dir);
            assert!(files.len() as u64 <= LIMITS.max_entries, "{files:?}");
            assert!(bytes <= LIMITS.max_total_bytes, "{bytes} bytes");
            // A tar may have everything in one folder, which is left out.
            let listed = |file: &String| seen.members.iter().any(|it| it.path.ends_with(file));
            assert!(files.iter().all(listed), "{files:?}");
        }
        Err(error) => assert!(!matches!(error, ArchiveError::Io { .. }), "{error}"),
    }
    for (folder, own) in [(parent.as_path(), 0), (SCRATCH.path(), 2)] {
        let found = fs_err::read_dir(folder).map_or(own, Iterator::count);
        assert!(found <= own, "files are left in {}", folder.display());
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
