//! Writing archives: checked as a whole before the first byte, streamed in constant memory, and
//! published by one rename.
//!
//! The same input gives the same bytes: entries are sorted, times, owners and modes are fixed. The
//! manifest's `createdOn` would break that if it were the time of packing, so it is the time of the
//! newest input, or whatever the caller fixes with `SOURCE_DATE_EPOCH`.

use std::collections::BTreeMap;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use flate2::Compression;
use flate2::write::GzEncoder;
use fs_err as fs;
use ts_types::ModelName;
use zip::write::SimpleFileOptions;

use crate::error::{ArchiveError, Doing};
use crate::manifest::{MANIFEST_PATH, Manifest};
use crate::member::{Collision, MemberFault, MemberPath, MemberTree};
use crate::read::is_executable;
use crate::unpack::create;

/// The earliest time that a zip archive can hold, 1980-01-01: every entry gets it.
const ENTRY_TIME: u64 = 315_532_800;

/// The form an archive is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `<name>.mar`, deflated.
    Mar,
    /// `<name>.mar`, stored: for weights, which hardly compress.
    ZipStore,
    /// `<name>.tar.gz`, everything below a folder `<name>`.
    Tgz,
    /// The folder `<name>`, not archived at all.
    Folder,
}

impl Format {
    /// The file or folder that a model of this name becomes.
    pub fn output_name(self, model: &ModelName) -> String {
        match self {
            Self::Mar | Self::ZipStore => format!("{model}.mar"),
            Self::Tgz => format!("{model}.tar.gz"),
            Self::Folder => model.to_string(),
        }
    }
}

/// The inputs of an archive: each entry's path and the file that its content comes from.
#[derive(Debug, Clone, Default)]
pub struct Entries {
    tree: MemberTree<PathBuf>,
}

impl Entries {
    /// Adds the file `source` as `path`. Adding the same file to the same path twice is no clash.
    ///
    /// # Errors
    /// When another input has that path, or needs it as a folder; both inputs are named.
    pub fn add(&mut self, path: MemberPath, source: PathBuf) -> Result<(), ArchiveError> {
        if path.as_str().split('/').next() == Some("MAR-INF") {
            return Err(ArchiveError::SourceName {
                path: source,
                fault: MemberFault::Reserved,
            });
        }
        let Err(collision) = self.tree.add_file(path, source.clone()) else {
            return Ok(());
        };
        let earlier = match &collision {
            Collision::Twice(path) => self.tree.get(path),
            Collision::FileAndFolder { file, below } => {
                self.tree.get(file).or_else(|| self.tree.get(below))
            }
        };
        let first = earlier.cloned().unwrap_or_default();
        if matches!(collision, Collision::Twice(_)) && is_same_file(&first, &source) {
            return Ok(());
        }
        Err(ArchiveError::SourcesCollide {
            first,
            second: source,
            collision,
        })
    }

    /// The file behind an entry.
    pub fn source(&self, path: &MemberPath) -> Option<&Path> {
        self.tree.get(path).map(PathBuf::as_path)
    }
}

fn is_same_file(left: &Path, right: &Path) -> bool {
    matches!((fs::canonicalize(left), fs::canonicalize(right)), (Ok(a), Ok(b)) if a == b)
}

/// An archive to be written.
#[derive(Debug, Clone)]
pub struct Packing {
    /// Names the output and the top folder of a tar.
    pub name: ModelName,
    /// Written as given, except that a missing `createdOn` is filled in.
    pub manifest: Manifest,
    /// Everything but the manifest.
    pub entries: Entries,
    /// The form.
    pub format: Format,
    /// The folder that the output goes to; it must exist.
    pub folder: PathBuf,
    /// Whether an earlier output may be replaced.
    pub overwrite: bool,
    /// Seconds since 1970 for `createdOn`, instead of the newest input's.
    pub created: Option<u64>,
}

/// How far packing is, in bytes of the inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes packed.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// One entry, checked.
struct Item {
    content: Content,
    size: u64,
    executable: bool,
}

enum Content {
    File(PathBuf),
    Bytes(Vec<u8>),
}

/// Writes the archive and returns its path. `progress` hears of every step.
///
/// # Errors
/// When an input is missing or unreadable, the output exists, or the disk refuses. There is never a
/// half-written output: it gets its name when it is complete.
pub fn pack(
    packing: &Packing,
    progress: &mut dyn FnMut(Progress),
) -> Result<PathBuf, ArchiveError> {
    let output = packing
        .folder
        .join(packing.format.output_name(&packing.name));
    check_output(&output, packing)?;
    let items = check_inputs(packing)?;
    let total = items.values().map(|item| item.size).sum();
    let mut feed = Feed {
        done: 0,
        total,
        progress,
    };
    match packing.format {
        Format::Mar => write_file(&output, packing, |out| {
            write_zip(
                out,
                &output,
                &items,
                zip::CompressionMethod::Deflated,
                &mut feed,
            )
        }),
        Format::ZipStore => write_file(&output, packing, |out| {
            write_zip(
                out,
                &output,
                &items,
                zip::CompressionMethod::Stored,
                &mut feed,
            )
        }),
        Format::Tgz => write_file(&output, packing, |out| {
            write_tar(out, &output, &packing.name, &items, &mut feed)
        }),
        Format::Folder => write_folder(&output, packing, &items, &mut feed),
    }?;
    Ok(output)
}

/// Refuses early what the final rename would refuse late, and more: with `--force`, a folder is
/// replaced only if it is a packed model, lest a model named like a source folder should delete it.
fn check_output(output: &Path, packing: &Packing) -> Result<(), ArchiveError> {
    let metadata = match fs::symlink_metadata(output) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).doing("look at", output),
    };
    if !packing.overwrite {
        return Err(ArchiveError::OutputExists {
            path: output.to_owned(),
        });
    }
    let found = if metadata.is_dir() {
        "a folder"
    } else {
        "a file"
    };
    let wanted = if packing.format == Format::Folder {
        if metadata.is_dir() && output.join(MANIFEST_PATH).is_file() {
            return Ok(());
        }
        "a folder with a manifest"
    } else {
        if !metadata.is_dir() {
            return Ok(());
        }
        "a file"
    };
    Err(ArchiveError::OutputKind {
        path: output.to_owned(),
        found,
        wanted,
    })
}

/// Opens every input once, so that nothing is written if one of them cannot be read.
fn check_inputs(packing: &Packing) -> Result<BTreeMap<String, Item>, ArchiveError> {
    let mut newest = 0;
    let mut items = BTreeMap::new();
    for (path, source) in packing.entries.tree.files() {
        let file = match fs::File::open(source) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(ArchiveError::NotFound {
                    path: source.clone(),
                });
            }
            Err(error) => return Err(error).doing("open", source),
        };
        let metadata = file.metadata().doing("read", source)?;
        if !metadata.is_file() {
            return Err(ArchiveError::SourceKind {
                path: source.clone(),
            });
        }
        newest = newest.max(seconds(
            metadata.modified().doing("read the time of", source)?,
        ));
        let item = Item {
            content: Content::File(source.clone()),
            size: metadata.len(),
            executable: is_executable(&metadata),
        };
        items.insert(path.as_str().to_owned(), item);
    }
    let mut manifest = packing.manifest.clone();
    if manifest.created_on.is_none() {
        manifest.created_on = Some(date_text(packing.created.unwrap_or(newest)));
    }
    let bytes = manifest.to_json();
    let size = bytes.len() as u64;
    let item = Item {
        content: Content::Bytes(bytes),
        size,
        executable: false,
    };
    items.insert(MANIFEST_PATH.to_owned(), item);
    Ok(items)
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// `dd/mm/YYYY HH:MM:SS` in UTC.
fn date_text(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{day:02}/{month:02}/{year:04} {hour:02}:{minute:02}:{second:02}")
}

/// The date of a day counted from 1970, by the calendar's cycle of 400 years. Years begin in March
/// here, so that the leap day is the last of its year.
fn civil_date(days: u64) -> (u64, u64, u64) {
    /// Days from the first of March of year 0 to 1970.
    const SHIFT: u64 = 719_468;
    const DAYS_OF_CYCLE: u64 = 146_097;
    let day = days.saturating_add(SHIFT);
    let (cycle, day) = (day / DAYS_OF_CYCLE, day % DAYS_OF_CYCLE);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    (cycle * 400 + year + carry, month, day)
}

/// Sends inputs to the output, telling of the progress and holding each input to its size.
struct Feed<'a> {
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(Progress),
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
fn write_file(
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

fn write_zip(
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

fn write_tar(
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
fn write_folder(
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

#[cfg(test)]
mod tests;
