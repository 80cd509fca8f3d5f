//! `--extra-files`: files, patterns and folders, and where their contents go.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use fs_err as fs;
use glob::MatchOptions;
use ts_archive::{ArchiveError, Entries, MemberPath};

/// Folders that tools leave behind.
const LEFT_BEHIND: [&str; 2] = ["__MACOSX", "__pycache__"];

/// Adds every file that the comma-separated `list` means.
pub(crate) fn add(entries: &mut Entries, list: &str, keep_dirs: bool) -> Result<()> {
    for item in list
        .split(',')
        .map(str::trim)
        .filter(|item| !item.is_empty())
    {
        for path in expand(item)? {
            if fs::metadata(&path)?.is_dir() {
                add_folder(entries, &path, keep_dirs)?;
            } else {
                add_file(entries, &path)?;
            }
        }
    }
    Ok(())
}

/// Adds a file under its own name, without the folders it lies in.
pub(crate) fn add_file(entries: &mut Entries, path: &Path) -> Result<MemberPath> {
    let name = Path::new(path.file_name().unwrap_or_default());
    let member = member(name, path)?;
    entries.add(member.clone(), path.to_owned())?;
    Ok(member)
}

fn member(inside: &Path, source: &Path) -> Result<MemberPath> {
    MemberPath::from_path(inside).map_err(|fault| {
        ArchiveError::SourceName {
            path: source.to_owned(),
            fault,
        }
        .into()
    })
}

/// What an item means: a path that exists means itself, even if it could be read as a pattern.
fn expand(item: &str) -> Result<Vec<PathBuf>> {
    let path = PathBuf::from(item);
    if path.exists() {
        return Ok(vec![path]);
    }
    if !item.contains(['*', '?', '[']) {
        bail!(ArchiveError::NotFound { path });
    }
    let options = MatchOptions {
        case_sensitive: true,
        require_literal_separator: true,
        require_literal_leading_dot: true,
    };
    let matches = glob::glob_with(item, options)
        .with_context(|| format!("`{item}` is not a valid pattern"))?
        .collect::<Result<Vec<_>, _>>()
        .with_context(|| format!("cannot search for `{item}`"))?;
    if matches.is_empty() {
        bail!("pattern `{item}` matches no file; check it, or leave it out of --extra-files");
    }
    Ok(matches)
}

/// Adds the files below a folder. Hidden folders and those of [`LEFT_BEHIND`] are passed over,
/// but not the given one, which was asked for by name.
fn add_folder(entries: &mut Entries, folder: &Path, keep_dirs: bool) -> Result<()> {
    let top = if keep_dirs {
        // `.` and `..` have names too, once they are resolved.
        let real = fs::canonicalize(folder)?;
        PathBuf::from(real.file_name().unwrap_or_default())
    } else {
        PathBuf::new()
    };
    let walk = walkdir::WalkDir::new(folder)
        .follow_links(true)
        .sort_by_file_name()
        .into_iter()
        .filter_entry(|entry| {
            let name = entry.file_name().to_string_lossy();
            let passed_over = name.starts_with('.') || LEFT_BEHIND.contains(&name.as_ref());
            entry.depth() == 0 || !entry.file_type().is_dir() || !passed_over
        });
    for entry in walk {
        let entry = entry.with_context(|| format!("cannot read folder `{}`", folder.display()))?;
        if entry.file_type().is_dir() {
            continue;
        }
        let below = entry.path().strip_prefix(folder)?;
        let member = member(&top.join(below), entry.path())?;
        entries.add(member, entry.path().to_owned())?;
    }
    Ok(())
}
