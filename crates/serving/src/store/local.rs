//! Archives that are on this machine already.

use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use futures_util::stream;
use reqwest::Url;
use tokio::io::AsyncReadExt as _;

use super::download::{Failure, Opened, Remote, Resume};
use crate::error::ServingError;

const READ_BYTES: usize = 256 << 10;

/// Finds a file or folder of the store by its name, or below the store by its path, or a folder
/// elsewhere.
///
/// # Errors
/// There is none.
pub(super) fn find(store: &Path, url: &str) -> Result<PathBuf, ServingError> {
    let not_found = || ServingError::NotInStore {
        url: url.to_owned(),
    };
    let given = Path::new(url);
    let name = given.file_name().ok_or_else(not_found)?;
    // Hidden are the files that are being written.
    if !name.as_encoded_bytes().starts_with(b".") {
        let below = given.is_relative().then(|| store.join(given));
        let found = [Some(store.join(name)), below].into_iter().flatten();
        if let Some(path) = found.into_iter().find(|path| may_be_model(path)) {
            return Ok(path);
        }
    }
    // A folder elsewhere is served in place; the store itself, or one around it, is no model.
    if given.is_dir() {
        let located = |path: &Path| {
            fs_err::canonicalize(path).map_err(|source| ServingError::Disk {
                path: path.to_owned(),
                source,
            })
        };
        let folder = located(given)?;
        if !located(store)?.starts_with(&folder) {
            return Ok(folder);
        }
    }
    if is_windows_path(url) {
        return Err(ServingError::BadRegistration(format!(
            "`{url}` is a path of another system; {}",
            super::SUPPORTED
        )));
    }
    Err(not_found())
}

/// A pipe or a device would be read for ever.
fn may_be_model(path: &Path) -> bool {
    fs_err::metadata(path).is_ok_and(|found| found.is_file() || found.is_dir())
}

fn is_windows_path(text: &str) -> bool {
    match text.as_bytes() {
        [b'\\', b'\\', ..] => true,
        [drive, b':', b'\\' | b'/', ..] => drive.is_ascii_alphabetic(),
        _ => false,
    }
}

/// A file of this machine that is copied into the store.
pub(super) struct LocalFile {
    path: PathBuf,
}

impl LocalFile {
    /// The file of a `file://` URL.
    ///
    /// # Errors
    /// The URL names another machine.
    pub(super) fn named(url: &Url) -> Result<Self, Failure> {
        let path = url.to_file_path();
        Ok(Self {
            path: path.map_err(|()| Failure::lasting("it names no file of this machine"))?,
        })
    }
}

impl Remote for LocalFile {
    async fn open(&self, _: Option<&Resume>) -> Result<Opened, Failure> {
        let lasting = |error: std::io::Error| Failure::lasting(error.to_string());
        let found = fs_err::metadata(&self.path).map_err(lasting)?;
        if !found.is_file() {
            // A device or a pipe never ends.
            return Err(Failure::lasting("it is not a file"));
        }
        let file = tokio::fs::File::open(&self.path).await.map_err(lasting)?;
        let body = stream::try_unfold(file, async |mut file| {
            let mut chunk = BytesMut::with_capacity(READ_BYTES);
            let read = file.read_buf(&mut chunk).await;
            let bytes = read.map_err(|error| error.to_string())?;
            Ok::<Option<(Bytes, _)>, String>((bytes > 0).then(|| (chunk.freeze(), file)))
        });
        Ok(Opened {
            start: 0,
            total: Some(found.len()),
            version: None,
            body: body.boxed(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_looked_for_in_the_store_and_a_folder_anywhere() {
        let root = tempfile::tempdir().unwrap();
        let root = fs_err::canonicalize(root.path()).unwrap();
        let store = root.join("store");
        for folder in ["store/folder", "store/sub/deep", "elsewhere/other"] {
            fs_err::create_dir_all(root.join(folder)).unwrap();
        }
        for file in [
            "store/m.mar",
            "store/sub/n.mar",
            "store/.0.part",
            "elsewhere/f.mar",
        ] {
            fs_err::write(root.join(file), "x").unwrap();
        }
        std::os::unix::fs::symlink(root.join("elsewhere/f.mar"), store.join("l.mar")).unwrap();
        std::os::unix::fs::symlink(root.join("elsewhere/none"), store.join("dangling")).unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, store.join("pipe"), rustix::fs::Mode::RUSR).unwrap();
        let shown = |path: &str| root.join(path).display().to_string();
        let found = [
            ("m.mar".to_owned(), "store/m.mar"),
            ("l.mar".to_owned(), "store/l.mar"),
            ("folder".to_owned(), "store/folder"),
            ("folder/".to_owned(), "store/folder"),
            ("any/m.mar".to_owned(), "store/m.mar"),
            ("sub/n.mar".to_owned(), "store/sub/n.mar"),
            ("sub/deep".to_owned(), "store/sub/deep"),
            (shown("store/folder"), "store/folder"),
            (shown("elsewhere/other"), "elsewhere/other"),
            (shown("elsewhere/other/"), "elsewhere/other"),
        ];
        for (url, path) in found {
            assert_eq!(find(&store, &url).unwrap(), root.join(path), "{url}");
        }
        let not_found = [
            "none".to_owned(),
            ".".to_owned(),
            "/".to_owned(),
            "pipe".to_owned(),
            "dangling".to_owned(),
            ".0.part".to_owned(),
            shown("store"),
            shown("elsewhere/f.mar"),
            root.display().to_string(),
        ];
        for url in not_found {
            let error = find(&store, &url).unwrap_err();
            assert!(
                matches!(error, ServingError::NotInStore { .. }),
                "{url}: {error}"
            );
        }
        for url in [r"C:\models\m.mar", "d:/none.mar", r"\\host\share\m.mar"] {
            let error = find(&store, url).unwrap_err().to_string();
            assert!(
                error.contains("`s3`") && error.contains("`https`"),
                "{error}"
            );
        }
    }
}
