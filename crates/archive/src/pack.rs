//! Writing archives: checked as a whole before the first byte, streamed in constant memory, and
//! published by one rename.
//!
//! The same input gives the same bytes: entries are sorted, times, owners and modes are fixed. The
//! manifest's `createdOn` would break that if it were the time of packing, so it is the time of the
//! newest input, or whatever the caller fixes with `SOURCE_DATE_EPOCH`.

mod date;
mod write;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use fs_err as fs;
use ts_types::ModelName;

use crate::error::{ArchiveError, Doing};
use crate::manifest::{MANIFEST_PATH, Manifest};
use crate::member::{Collision, MemberFault, MemberPath, MemberTree};
use crate::read::is_executable;

use self::date::date_text;
use self::write::{Feed, write_file, write_folder, write_tar, write_zip};

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

#[cfg(test)]
mod tests;
