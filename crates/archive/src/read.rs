//! The one reader of archives: unpacking, inspecting and verifying all see members through it, so
//! they cannot disagree about what is allowed.

use std::cell::Cell;
use std::collections::HashSet;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::rc::Rc;

use flate2::bufread::MultiGzDecoder;
use fs_err as fs;
use tar::EntryType;
use zip::result::ZipError;

use crate::error::{ArchiveError, Doing, Limit, escaped};
use crate::member::{Collision, MemberFault, MemberPath, MemberTree};
use crate::unpack::UnpackLimits;

/// What a path holds, by its name and its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A folder, used as it is.
    Folder,
    /// `.mar` or `.zip`.
    Zip,
    /// Any other file: gzip-compressed tar.
    Tar,
}

/// A member on its way out of an archive.
pub(crate) struct Incoming<'a> {
    pub(crate) path: MemberPath,
    pub(crate) is_folder: bool,
    pub(crate) executable: bool,
    /// Its size inside the archive, where the format has one per member.
    pub(crate) compressed: Option<u64>,
    data: &'a mut dyn Read,
    budget: &'a mut Budget,
}

impl Incoming<'_> {
    /// Copies the content within the limits; `target` is the name that write errors show.
    pub(crate) fn copy_to(self, out: &mut dyn Write, target: &Path) -> Result<(), ArchiveError> {
        self.budget
            .copy(&self.path.to_string(), self.data, out, target)
    }
}

type OnMember<'a> = &'a mut dyn FnMut(Incoming<'_>) -> Result<(), ArchiveError>;
type OnFault<'a> = &'a mut dyn FnMut(ArchiveError) -> Result<(), ArchiveError>;

/// Looks at a path without reading more than its first bytes.
pub(crate) fn kind(source: &Path) -> Result<Kind, ArchiveError> {
    let metadata = match fs::metadata(source) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(ArchiveError::NotFound {
                path: source.to_owned(),
            });
        }
        Err(error) => return Err(error).doing("open", source),
    };
    if metadata.is_dir() {
        return Ok(Kind::Folder);
    }
    let extension = source.extension().unwrap_or_default().to_ascii_lowercase();
    let (kind, expected) = if extension == "mar" || extension == "zip" {
        (Kind::Zip, "a zip archive")
    } else {
        (Kind::Tar, "a gzip-compressed tar archive")
    };
    let refuse = |reason: &str| {
        Err(ArchiveError::NotAnArchive {
            archive: source.to_owned(),
            expected,
            reason: reason.to_owned(),
        })
    };
    if !metadata.is_file() {
        return refuse("it is neither a file nor a folder");
    }
    let mut start = Vec::new();
    fs::File::open(source)
        .and_then(|file| file.take(4).read_to_end(&mut start))
        .doing("read", source)?;
    let found = match start.as_slice() {
        [] => return refuse("it is empty; build it or fetch it again"),
        [b'P', b'K', 3, 4] | [b'P', b'K', 5, 6] => Kind::Zip,
        [0x1f, 0x8b, ..] => Kind::Tar,
        _ => return refuse("it does not begin like one; build it or fetch it again"),
    };
    match (kind, found) {
        (Kind::Zip, Kind::Tar) => refuse("it begins like gzip; name it `.tar.gz`"),
        (Kind::Tar, Kind::Zip) => refuse("it begins like a zip archive; name it `.mar`"),
        _ => Ok(kind),
    }
}

/// Hands every member to `on_member`, in the order of the archive.
///
/// A member that is refused goes to `on_fault`, which ends the reading by giving the error back,
/// or swallows it to learn of the next. Damage and limits always end it.
pub(crate) fn members(
    source: &Path,
    limits: &UnpackLimits,
    on_member: OnMember<'_>,
    on_fault: OnFault<'_>,
) -> Result<(), ArchiveError> {
    let kind = kind(source)?;
    let size = fs::metadata(source).doing("open", source)?.len();
    let mut budget = Budget {
        archive: source.to_owned(),
        archive_bytes: size,
        limits: limits.clone(),
        entries: 0,
        bytes: 0,
    };
    match kind {
        Kind::Folder => folder_members(source, &mut budget, on_member, on_fault),
        Kind::Zip => zip_members(source, &mut budget, on_member, on_fault),
        Kind::Tar => tar_members(source, &mut budget, on_member, on_fault),
    }?;
    if kind != Kind::Folder && budget.entries == 0 {
        return Err(ArchiveError::NotAnArchive {
            archive: source.to_owned(),
            expected: "a model archive",
            reason: "it holds no members; build it again".to_owned(),
        });
    }
    Ok(())
}

/// Counts what comes out. Nothing that the archive declares enters here.
struct Budget {
    archive: std::path::PathBuf,
    archive_bytes: u64,
    limits: UnpackLimits,
    entries: u64,
    bytes: u64,
}

impl Budget {
    fn over(&self, limit: Limit) -> ArchiveError {
        ArchiveError::OverLimit {
            archive: self.archive.clone(),
            limit,
        }
    }

    fn entry(&mut self) -> Result<(), ArchiveError> {
        self.entries += 1;
        self.limit_entries(self.entries)
    }

    fn limit_entries(&self, entries: u64) -> Result<(), ArchiveError> {
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

    fn copy(
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
    fn skip(&mut self, member: &str, data: &mut dyn Read) -> Result<(), ArchiveError> {
        self.copy(member, data, &mut io::sink(), Path::new(""))
    }
}

fn damaged(archive: &Path, member: Option<&str>, source: io::Error) -> ArchiveError {
    ArchiveError::Damaged {
        archive: archive.to_owned(),
        member: member.map(str::to_owned),
        source,
    }
}

fn unsafe_member(archive: &Path, name: &str, fault: MemberFault) -> ArchiveError {
    ArchiveError::UnsafeMember {
        archive: archive.to_owned(),
        member: escaped(name),
        fault,
    }
}

fn forbidden(archive: &Path, name: &str, kind: &'static str) -> ArchiveError {
    ArchiveError::ForbiddenKind {
        archive: archive.to_owned(),
        member: escaped(name),
        kind,
    }
}

/// A member's name and nature as its archive tells them.
struct Stored<'a> {
    name: &'a str,
    /// `Err` with what it is, when it is neither file nor folder.
    is_folder: Result<bool, &'static str>,
    executable: bool,
    compressed: Option<u64>,
}

/// Judges one member, the same way for every format, and hands it on.
fn take(
    stored: &Stored<'_>,
    data: &mut dyn Read,
    tree: &mut MemberTree<()>,
    budget: &mut Budget,
    on_member: OnMember<'_>,
    on_fault: OnFault<'_>,
) -> Result<(), ArchiveError> {
    let judged = judge(stored, tree, &budget.archive);
    // One deep path implies a thousand folders, each of which costs memory and an inode.
    budget.limit_entries(tree.len() as u64)?;
    match judged {
        Ok(None) => Ok(()),
        Ok(Some((path, is_folder))) => on_member(Incoming {
            path,
            is_folder,
            executable: stored.executable,
            compressed: stored.compressed,
            data,
            budget,
        }),
        Err(fault) => {
            on_fault(fault)?;
            budget.skip(&escaped(stored.name), data)
        }
    }
}

/// The member's checked path, `None` for an entry that stands for the archive's own root.
fn judge(
    stored: &Stored<'_>,
    tree: &mut MemberTree<()>,
    archive: &Path,
) -> Result<Option<(MemberPath, bool)>, ArchiveError> {
    let is_folder = stored
        .is_folder
        .map_err(|kind| forbidden(archive, stored.name, kind))?;
    let path = match MemberPath::parse(stored.name) {
        Ok(path) => path,
        Err(MemberFault::Empty) if is_folder => return Ok(None),
        Err(fault) => return Err(unsafe_member(archive, stored.name, fault)),
    };
    let added = if is_folder {
        tree.add_folder(&path)
    } else {
        tree.add_file(path.clone(), ())
    };
    added.map_err(|collision| ArchiveError::MembersCollide {
        archive: archive.to_owned(),
        collision,
    })?;
    Ok(Some((path, is_folder)))
}

/// The user's own folder: links are followed, as the server would.
fn folder_members(
    source: &Path,
    budget: &mut Budget,
    on_member: OnMember<'_>,
    on_fault: OnFault<'_>,
) -> Result<(), ArchiveError> {
    budget.limits.max_ratio = u64::MAX;
    let mut tree = MemberTree::default();
    let walk = walkdir::WalkDir::new(source)
        .min_depth(1)
        .follow_links(true)
        .sort_by_file_name();
    for entry in walk {
        let entry = entry.map_err(io::Error::from).doing("list", source)?;
        budget.entry()?;
        let below = entry.path().strip_prefix(source).unwrap_or(entry.path());
        let kind = entry.file_type();
        let stored = Stored {
            name: &below.to_string_lossy(),
            is_folder: if kind.is_dir() || kind.is_file() {
                Ok(kind.is_dir())
            } else {
                Err("a device, pipe or socket")
            },
            executable: is_executable(
                &entry
                    .metadata()
                    .map_err(io::Error::from)
                    .doing("read", entry.path())?,
            ),
            compressed: None,
        };
        let mut data: Box<dyn Read> = if kind.is_file() {
            Box::new(fs::File::open(entry.path()).doing("open", entry.path())?)
        } else {
            Box::new(io::empty())
        };
        take(&stored, &mut data, &mut tree, budget, on_member, on_fault)?;
    }
    Ok(())
}

/// Whether anybody may execute the file.
pub(crate) fn is_executable(metadata: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::PermissionsExt;
    metadata.permissions().mode() & 0o111 != 0
}

/// Bounds what a parser may read for its own bookkeeping, which it keeps in memory.
struct Metered<R> {
    inner: R,
    allowance: Rc<Cell<u64>>,
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

fn zip_members(
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

fn tar_members(
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
                    is_folder: tar_is_folder(kind, &name),
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

fn tar_is_folder(kind: EntryType, name: &str) -> Result<bool, &'static str> {
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
