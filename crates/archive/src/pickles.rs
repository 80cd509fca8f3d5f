//! Finds pickles among the files of a model by their content, whatever they are called: for
//! `load_policy=strict`. What cannot be looked into is refused too. A pickle in the middle of a file
//! that begins with something else is not found; the host refuses it when it is loaded.

mod opcodes;

use std::io::{self, Cursor, Read, Seek, SeekFrom};
use std::path::Path;

use flate2::read::{MultiGzDecoder, ZlibDecoder};
use fs_err as fs;

use crate::error::{ArchiveError, Doing, escaped};

/// Bytes of each file, or member of a file, that are looked at.
const SAMPLE_BYTES: u64 = 64 << 10;

/// The largest archive inside of an archive that is looked into, and how deep they may lie.
const MOST_NESTED_BYTES: u64 = 64 << 20;
const DEEPEST: usize = 3;

/// Compressed forms that are not opened here.
const CLOSED: &[(&[u8], &str)] = &[
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"\x5d\0\0\x80\0", "lzma"),
];

/// Fails if a file below `folder` is a pickle, holds one, or cannot be looked into. `archive` is the
/// name that errors show.
///
/// # Errors
/// [`ArchiveError::HoldsPickle`]; a file that cannot be read.
pub fn refuse_pickles(folder: &Path, archive: &Path) -> Result<(), ArchiveError> {
    let walk = walkdir::WalkDir::new(folder)
        .follow_links(true)
        .sort_by_file_name();
    for entry in walk {
        let entry = entry.map_err(io::Error::from).doing("list", folder)?;
        if !entry.file_type().is_file() {
            continue;
        }
        let path = entry.path();
        let mut file = fs::File::open(path).doing("open", path)?;
        if let Some(found) = look(&mut file, 0).doing("read", path)? {
            let below = path.strip_prefix(folder).unwrap_or(path);
            return Err(ArchiveError::HoldsPickle {
                archive: archive.to_owned(),
                member: escaped(&below.to_string_lossy()),
                found,
            });
        }
    }
    Ok(())
}

/// What it is, with its article, if it may not be there.
fn look<R: Read + Seek>(file: &mut R, depth: usize) -> io::Result<Option<String>> {
    let start = sample(file)?;
    file.seek(SeekFrom::Start(0))?;
    if start.starts_with(b"PK\x03\x04") {
        return Ok(in_zip(file, depth));
    }
    let unpacked = if start.starts_with(b"\x1f\x8b") {
        sample(&mut MultiGzDecoder::new(file)).ok()
    } else if is_zlib(&start) {
        sample(&mut ZlibDecoder::new(file)).ok()
    } else {
        return Ok(of_bytes(&start));
    };
    Ok(match unpacked {
        Some(inner) if inner.starts_with(b"PK\x03\x04") || inner.starts_with(b"\x1f\x8b") => {
            Some("an archive that is compressed once more".to_owned())
        }
        // Compressed or not: what begins like zlib may be something else.
        Some(inner) => of_bytes(&inner).or_else(|| of_bytes(&start)),
        None => of_bytes(&start),
    })
}

fn sample(file: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut start = Vec::new();
    file.take(SAMPLE_BYTES).read_to_end(&mut start)?;
    Ok(start)
}

fn is_zlib(start: &[u8]) -> bool {
    let [method, flags, ..] = *start else {
        return false;
    };
    method == 0x78 && (u16::from(method) * 256 + u16::from(flags)).is_multiple_of(31)
}

fn of_bytes(start: &[u8]) -> Option<String> {
    if opcodes::begins_like_pickle(start, start.len() as u64 == SAMPLE_BYTES) {
        return Some("a pickle".to_owned());
    }
    if holds_objects(start) {
        return Some("a numpy array of objects, which is a pickle".to_owned());
    }
    if start.get(257..262) == Some(b"ustar") {
        return Some("an archive (tar) that cannot be looked into".to_owned());
    }
    let closed = CLOSED.iter().find(|(magic, _)| start.starts_with(magic));
    closed.map(|(_, name)| format!("compressed ({name}), so that it cannot be looked into"))
}

/// Torch's files are zip archives, and so are numpy's `.npz`.
fn in_zip<R: Read + Seek>(file: &mut R, depth: usize) -> Option<String> {
    let mut archive = match zip::ZipArchive::new(file) {
        Ok(archive) => archive,
        Err(error) => return Some(format!("a zip archive that cannot be read ({error})")),
    };
    let names: Vec<String> = archive
        .file_names()
        .filter_map(|name| Some(name.ok()?.into_owned()))
        .collect();
    if is_torch_script(&names) {
        return None;
    }
    (0..archive.len()).find_map(|index| {
        let mut member = match archive.by_index(index) {
            Ok(member) => member,
            Err(error) => {
                return Some(format!("a zip archive that cannot be read ({error})"));
            }
        };
        let name = escaped(&member.name().unwrap_or_default());
        if name == "data.pkl" || name.ends_with("/data.pkl") {
            return Some(format!("a file of `torch.save`, with the pickle `{name}`"));
        }
        let size = member.size();
        let mut bytes = Vec::new();
        let found = (&mut member)
            .take(SAMPLE_BYTES)
            .read_to_end(&mut bytes)
            .and_then(|_| {
                if !(bytes.starts_with(b"PK\x03\x04") || bytes.starts_with(b"\x1f\x8b")) {
                    return look(&mut Cursor::new(bytes.as_slice()), depth);
                }
                if depth + 1 >= DEEPEST || size > MOST_NESTED_BYTES {
                    let reason =
                        "an archive that lies too deep, or is too large, to be looked into";
                    return Ok(Some(reason.to_owned()));
                }
                // Its size is its own word, so the limit holds for what comes.
                (&mut member)
                    .take(MOST_NESTED_BYTES)
                    .read_to_end(&mut bytes)?;
                look(&mut Cursor::new(bytes.as_slice()), depth + 1)
            });
        match found {
            Ok(found) => found.map(|found| format!("an archive whose member `{name}` is {found}")),
            Err(error) => Some(format!("a zip archive that cannot be read ({error})")),
        }
    })
}

/// By the records that torch itself goes by. Its reader of these builds nothing but tensors and what
/// the script defines.
fn is_torch_script(names: &[String]) -> bool {
    let Some((root, _)) = names.first().and_then(|name| name.split_once('/')) else {
        return false;
    };
    let (constants, code) = (format!("{root}/constants.pkl"), format!("{root}/code/"));
    names.contains(&constants) && names.iter().any(|name| name.starts_with(&code))
}

/// Whether it is a `.npy` file whose type has Python objects in it.
fn holds_objects(start: &[u8]) -> bool {
    let header = match start {
        [0x93, b'N', b'U', b'M', b'P', b'Y', 1, _, _, _, rest @ ..]
        | [
            0x93,
            b'N',
            b'U',
            b'M',
            b'P',
            b'Y',
            _,
            _,
            _,
            _,
            _,
            _,
            rest @ ..,
        ] => rest,
        _ => return false,
    };
    let end = header.iter().position(|byte| *byte == b'\n');
    let header = String::from_utf8_lossy(&header[..end.unwrap_or(header.len())]);
    let Some((_, description)) = header.split_once("descr") else {
        // Not what numpy writes; whatever reads it may see objects.
        return true;
    };
    // Names of fields follow a parenthesis, types do not.
    let after_key = description.get(1..).unwrap_or_default();
    let quoted: Vec<&str> = after_key.split(['\'', '"']).collect();
    let types = quoted.iter().enumerate().filter(|(index, _)| {
        let after_parenthesis = index
            .checked_sub(1)
            .is_some_and(|before| quoted[before].trim_end().ends_with('('));
        index % 2 == 1 && !after_parenthesis
    });
    types
        .map(|(_, text)| text.trim_start_matches(['<', '>', '=', '|']))
        .any(|text| text.starts_with(['O', 'o']))
}

#[cfg(test)]
mod tests;
