//! The four forms on disk. Each is built beside its final name and renamed when it is complete.

use std::collections::BTreeMap;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use fs_err as fs;
use ts_types::ModelName;
use zip::write::SimpleFileOptions;

use super::{Content, Item, Packing, Progress};
use crate::error::{ArchiveError, Doing};
use crate::manifest::MANIFEST_PATH;
use crate::unpack::create;

/// The earliest time that a zip archive can hold, 1980-01-01: every entry gets it.
const ENTRY_TIME: u64 = 315_532_800;

/// Sends inputs to the output, telling of the progress and holding each input to its size.
pub(super) struct Feed<'a> {
    pub(super) done: u64,
    pub(super) total: u64,
    pub(super) progress: &'a mut dyn FnMut(Progress),
}

impl Feed<'_> {
    /// Lets `write` copy the item's content; `output` is the name that write errors show.
    fn send(
        &mut self,
        item: &Item,
        output: &Path,
        write: impl FnOnce(&mut dyn Read) -> io::Result<()>,
    ) -> Result<(), ArchiveError> {
        let reader: Box<dyn Read> = match &item.content {
            Content::Bytes(bytes) => Box::new(bytes.as_slice()),
            Content::File(path) => {
                let file = fs::File::open(path).doing("open", path)?;
                Box::new(BufReader::with_capacity(256 << 10, file))
            }
        };
        let mut source = Source {
            feed: self,
            item,
            reader,
            read: 0,
            fault: None,
        };
        let written = write(&mut source);
        match source.fault {
            Some(fault) => Err(fault),
            None => written.doing("write", output),
        }
    }

    fn step(&mut self, bytes: u64) {
        self.done += bytes;
        (self.progress)(Progress {
            done: self.done,
            total: self.total,
        });
    }
}

/// The content of one input on its way. A fault of the input is kept here with its type, as a
/// writer that meets it can only pass on an I/O error.
struct Source<'a, 'progress> {
    feed: &'a mut Feed<'progress>,
    item: &'a Item,
    reader: Box<dyn Read + 'a>,
    read: u64,
    fault: Option<ArchiveError>,
}

impl Read for Source<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let path = match &self.item.content {
            Content::Bytes(_) => Path::new(MANIFEST_PATH),
            Content::File(path) => path,
        };
        let read = match self.reader.read(buffer) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Err(error),
            Err(source) => {
                let path = path.to_owned();
                self.fault = Some(ArchiveError::Io {
                    action: "read",
                    path,
                    source,
                });
                return Err(io::Error::other("an input cannot be read"));
            }
        };
        self.read += read as u64;
        if self.read > self.item.size || (read == 0 && self.read < self.item.size) {
            self.fault = Some(ArchiveError::SourceChanged {
                path: path.to_owned(),
                expected: self.item.size,
                read: self.read,
            });
            return Err(io::Error::other("an input changed"));
        }
        self.feed.step(read as u64);
        Ok(read)
    }
}

/// Writes one output file beside its final name, then renames it.
pub(super) fn write_file(
    output: &Path,
    packing: &Packing,
    write: impl FnOnce(&mut BufWriter<&std::fs::File>) -> Result<(), ArchiveError>,
) -> Result<(), ArchiveError> {
    use std::os::unix::fs::PermissionsExt;
    let file = tempfile::Builder::new()
        .prefix(&format!(".{}-", packing.name))
        // Temporary files are private by default; an archive is as readable as any other file.
        .permissions(std::fs::Permissions::from_mode(0o644))
        .tempfile_in(&packing.folder)
        .doing("create a file in", &packing.folder)?;
    let mut out = BufWriter::with_capacity(1 << 20, file.as_file());
    write(&mut out)?;
    out.flush().doing("write", output)?;
    drop(out);
    let persisted = if packing.overwrite {
        file.persist(output)
    } else {
        file.persist_noclobber(output)
    };
    match persisted {
        Ok(_) => Ok(()),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => {
            Err(ArchiveError::OutputExists {
                path: output.to_owned(),
            })
        }
        Err(error) => Err(error.error).doing("create", output),
    }
}

pub(super) fn write_zip(
    out: impl Write + Seek,
    output: &Path,
    items: &BTreeMap<String, Item>,
    method: zip::CompressionMethod,
    feed: &mut Feed<'_>,
) -> Result<(), ArchiveError> {
    let refused = |source| ArchiveError::ZipWrite {
        path: output.to_owned(),
        source,
    };
    let mut zip = zip::ZipWriter::new(out);
    for (path, item) in items {
        let options = SimpleFileOptions::default()
            .compression_method(method)
            .last_modified_time(zip::DateTime::default())
            .unix_permissions(mode(item))
            .large_file(needs_zip64(item.size));
        zip.start_file(path.as_str(), options).map_err(refused)?;
        feed.send(item, output, |content| {
            io::copy(content, &mut zip).map(drop)
        })?;
    }
    zip.finish()
        .map_err(refused)?
        .flush()
        .doing("write", output)
}

/// Content that does not compress grows a little when deflated, so the large form begins before
/// 4 GiB.
fn needs_zip64(size: u64) -> bool {
    size.saturating_add(size / 1000).saturating_add(1 << 16) > u64::from(u32::MAX)
}

fn mode(item: &Item) -> u32 {
    if item.executable { 0o755 } else { 0o644 }
}

pub(super) fn write_tar(
    out: impl Write,
    output: &Path,
    name: &ModelName,
    items: &BTreeMap<String, Item>,
    feed: &mut Feed<'_>,
) -> Result<(), ArchiveError> {
    let mut tar = tar::Builder::new(GzEncoder::new(out, Compression::default()));
    for (path, item) in items {
        let mut header = tar::Header::new_gnu();
        header.set_size(item.size);
        header.set_mode(mode(item));
        header.set_mtime(ENTRY_TIME);
        header.set_uid(0);
        header.set_gid(0);
        header.set_entry_type(tar::EntryType::Regular);
        let path = format!("{name}/{path}");
        feed.send(item, output, |content| {
            tar.append_data(&mut header, path, content)
        })?;
    }
    tar.into_inner()
        .and_then(GzEncoder::finish)
        .and_then(|mut out| out.flush())
        .doing("write", output)
}

/// Builds the folder beside its final name. One that it replaces is moved aside first and goes with
/// the temporary folder, or comes back if the new one cannot take its place.
pub(super) fn write_folder(
    output: &Path,
    packing: &Packing,
    items: &BTreeMap<String, Item>,
    feed: &mut Feed<'_>,
) -> Result<(), ArchiveError> {
    let scratch = tempfile::Builder::new()
        .prefix(&format!(".{}-", packing.name))
        .tempdir_in(&packing.folder)
        .doing("create a folder in", &packing.folder)?;
    let fresh = scratch.path().join("new");
    for (path, item) in items {
        let target = fresh.join(path);
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder).doing("create", folder)?;
        }
        let mut file = create(&target, item.executable)?;
        feed.send(item, &target, |content| {
            io::copy(content, &mut file).map(drop)
        })?;
    }
    let replaced = scratch.path().join("old");
    let replaces = fs::symlink_metadata(output).is_ok();
    if replaces {
        if !packing.overwrite {
            return Err(ArchiveError::OutputExists {
                path: output.to_owned(),
            });
        }
        fs::rename(output, &replaced).doing("move aside", output)?;
    }
    fs::rename(&fresh, output)
        .doing("create", output)
        .inspect_err(|_| {
            if replaces {
                let _ = fs::rename(&replaced, output);
            }
        })
}
