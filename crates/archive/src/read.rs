//! The one reader of archives: unpacking, inspecting and verifying all see members through it, so
//! they cannot disagree about what is allowed.

mod limit;
mod tar;
mod zip;

use std::io::{self, Read, Write};
use std::path::Path;

use fs_err as fs;

use self::limit::Budget;
use crate::error::{ArchiveError, Doing, escaped};
use crate::member::{MemberFault, MemberPath, MemberTree};
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
        Kind::Zip => zip::members(source, &mut budget, on_member, on_fault),
        Kind::Tar => tar::members(source, &mut budget, on_member, on_fault),
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
