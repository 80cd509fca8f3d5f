//! What is in an archive, without unpacking it.

use std::io::{self, Read, Write};
use std::path::Path;

use fs_err as fs;
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::error::{ArchiveError, Doing};
use crate::manifest::MANIFEST_PATH;
use crate::read::{self, Kind};
use crate::unpack::{UnpackLimits, model_root};

/// What an archive holds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Inspection {
    /// `zip`, `tar` or `folder`.
    pub format: &'static str,
    /// The manifest as stored, if there is one.
    pub manifest: Option<serde_json::Value>,
    /// The files, in the order of the archive.
    pub members: Vec<Member>,
}

/// One file of an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Member {
    /// Its path in the archive.
    pub path: String,
    /// Its size, counted.
    pub size: u64,
    /// Its size inside the archive; only zip archives have one per member.
    pub compressed_size: Option<u64>,
    /// SHA-256 of its content, in hexadecimal digits.
    pub sha256: String,
}

/// Reads an archive to its end and lists it.
///
/// # Errors
/// As [`unpack`](crate::unpack), except that manifest and configuration are shown, not judged.
pub fn inspect(source: &Path, limits: &UnpackLimits) -> Result<Inspection, ArchiveError> {
    let kind = read::kind(source)?;
    let mut members = Vec::new();
    let mut manifest = None;
    read::members(
        source,
        limits,
        &mut |member| {
            if member.is_folder {
                return Ok(());
            }
            let path = member.path.as_str().to_owned();
            let compressed_size = member.compressed;
            let mut seen = Seen {
                digest: Sha256::new(),
                size: 0,
                kept: Vec::new(),
            };
            member.copy_to(&mut seen, source)?;
            if kind != Kind::Folder && is_manifest(&path, kind) {
                manifest = Some(std::mem::take(&mut seen.kept));
            }
            members.push(Member {
                path,
                size: seen.size,
                compressed_size,
                sha256: hexadecimal(&seen.digest.finalize()),
            });
            Ok(())
        },
        &mut Err,
    )?;
    if kind == Kind::Folder {
        manifest = read_manifest(&model_root(source)?.join(MANIFEST_PATH))?;
    }
    let manifest = manifest
        .map(|bytes| serde_json::from_slice(bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(&bytes)))
        .transpose()
        .map_err(|fault| ArchiveError::ManifestSyntax {
            archive: source.to_owned(),
            source: fault,
        })?;
    let format = match kind {
        Kind::Folder => "folder",
        Kind::Zip => "zip",
        Kind::Tar => "tar",
    };
    Ok(Inspection {
        format,
        manifest,
        members,
    })
}

fn is_manifest(path: &str, kind: Kind) -> bool {
    path == MANIFEST_PATH
        || kind == Kind::Tar
            && path
                .split_once('/')
                .is_some_and(|(_, below_top)| below_top == MANIFEST_PATH)
}

fn read_manifest(path: &Path) -> Result<Option<Vec<u8>>, ArchiveError> {
    let mut bytes = Vec::new();
    match fs::File::open(path) {
        Ok(file) => file
            .take(KEPT_BYTES)
            .read_to_end(&mut bytes)
            .doing("read", path)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).doing("open", path),
    };
    Ok(Some(bytes))
}

/// A manifest is shown up to this size.
const KEPT_BYTES: u64 = 1 << 20;

/// Digests what is written to it and keeps the beginning.
struct Seen {
    digest: Sha256,
    size: u64,
    kept: Vec<u8>,
}

impl Write for Seen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.digest.update(bytes);
        self.size += bytes.len() as u64;
        let room = (KEPT_BYTES as usize)
            .saturating_sub(self.kept.len())
            .min(bytes.len());
        self.kept.extend_from_slice(&bytes[..room]);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
