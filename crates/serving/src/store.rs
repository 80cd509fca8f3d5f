//! From the `url` of a registration to a file or folder on this machine
//! (*torchserve-contract* 5.2).

use std::path::{Path, PathBuf};
use std::time::Duration;

use percent_encoding::percent_decode_str;
use regex::RegexSet;
use tokio::io::AsyncWriteExt;

use crate::config::ServingConfig;
use crate::error::ServingError;

const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// How long a download may stand still.
const READ_LIMIT: Duration = Duration::from_secs(60);
const MAX_REDIRECTS: usize = 5;

/// An archive that the registration brought into the store; deleted with the model.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) path: PathBuf,
}

/// Where an archive is.
#[derive(Debug)]
pub(crate) struct Located {
    pub(crate) path: PathBuf,
    pub(crate) fetched: Option<Fetched>,
}

/// Finds the archive that `url` names, fetching it into the store if it is elsewhere.
///
/// # Errors
/// [`ServingError`] as the contract's table has them; a part of a download is never left behind.
pub(crate) async fn locate(config: &ServingConfig, url: &str) -> Result<Located, ServingError> {
    if url.trim().is_empty() {
        return Err(ServingError::EmptyUrl);
    }
    if is_relative(url) {
        return Err(ServingError::RelativeUrl {
            url: url.to_owned(),
        });
    }
    let Some((scheme, _)) = url.split_once("://") else {
        return local(config, url);
    };
    match scheme.to_ascii_lowercase().as_str() {
        scheme @ ("http" | "https" | "file") => {
            check_allowed(&config.allowed_urls, url)?;
            if scheme == "file" {
                copy(config, url).await
            } else {
                download(config, url).await
            }
        }
        other => Err(ServingError::BadRegistration(format!(
            "the scheme `{other}` of `{url}` is not supported; supported are `http`, `https` and \
             `file`, and names of files and folders in the model store"
        ))),
    }
}

/// Whether any reading of the text climbs up: percent-encoding may be decoded more than once on
/// the way to a file.
fn is_relative(url: &str) -> bool {
    let mut text = url.to_owned();
    for _ in 0..3 {
        if text.contains("..") || text.contains('\0') {
            return true;
        }
        let decoded = percent_decode_str(&text).decode_utf8_lossy().into_owned();
        if decoded == text {
            return false;
        }
        text = decoded;
    }
    true
}

fn check_allowed(allowed: &RegexSet, url: &str) -> Result<(), ServingError> {
    if allowed.is_match(url) {
        Ok(())
    } else {
        Err(ServingError::UrlNotAllowed {
            url: url.to_owned(),
        })
    }
}

fn local(config: &ServingConfig, url: &str) -> Result<Located, ServingError> {
    let not_found = || ServingError::NotInStore {
        url: url.to_owned(),
    };
    let Some(store) = &config.model_store else {
        return Err(ServingError::NoStore);
    };
    let given = Path::new(url);
    let name = given.file_name().ok_or_else(not_found)?;
    let in_store = store.join(name);
    if in_store.exists() {
        return Ok(Located {
            path: in_store,
            fetched: None,
        });
    }
    // A folder elsewhere is served in place; the store itself, or one around it, is no model.
    if given.is_dir() {
        let folder = fs_err::canonicalize(given).map_err(|source| ServingError::Disk {
            path: given.to_owned(),
            source,
        })?;
        let store = fs_err::canonicalize(store).map_err(|source| ServingError::Disk {
            path: store.clone(),
            source,
        })?;
        if !store.starts_with(&folder) {
            return Ok(Located {
                path: folder,
                fetched: None,
            });
        }
    }
    Err(not_found())
}

/// The place in the store for what a URL brings.
fn target(config: &ServingConfig, url: &str) -> Result<PathBuf, ServingError> {
    let store = config.model_store.as_ref().ok_or(ServingError::NoStore)?;
    let path = url.split(['?', '#']).next().unwrap_or(url);
    let name = path.rsplit('/').next().unwrap_or_default();
    let name = percent_decode_str(name).decode_utf8_lossy().into_owned();
    if name.is_empty() || name.contains(['/', '\\']) || name.starts_with('.') {
        return Err(ServingError::BadRegistration(format!(
            "`{url}` does not end in a file name to store the archive under"
        )));
    }
    let path = store.join(&name);
    if path.exists() {
        return Err(ServingError::AlreadyInStore { name });
    }
    Ok(path)
}

fn failed(url: &str) -> impl Fn(Box<dyn std::error::Error + Send + Sync>) -> ServingError + use<> {
    let url = url.to_owned();
    move |source| ServingError::Download {
        url: url.clone(),
        source,
    }
}

async fn copy(config: &ServingConfig, url: &str) -> Result<Located, ServingError> {
    let failed = failed(url);
    let target = target(config, url)?;
    let path = url.get("file://".len()..).unwrap_or_default();
    let source = PathBuf::from(percent_decode_str(path).decode_utf8_lossy().into_owned());
    let partial = Partial::beside(&target);
    let copied = {
        let to = partial.path.clone();
        tokio::task::spawn_blocking(move || fs_err::copy(source, to)).await
    };
    copied
        .map_err(|error| failed(error.into()))?
        .map_err(|error| failed(error.into()))?;
    partial
        .keep_as(&target)
        .map_err(|error| failed(error.into()))?;
    Ok(Located {
        path: target.clone(),
        fetched: Some(Fetched { path: target }),
    })
}

async fn download(config: &ServingConfig, url: &str) -> Result<Located, ServingError> {
    let failed = failed(url);
    let target = target(config, url)?;
    let allowed = config.allowed_urls.clone();
    // Fails where it was installed before, which is as good.
    let _installed = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder()
        .connect_timeout(CONNECT_LIMIT)
        .read_timeout(READ_LIMIT)
        // The operator's list holds for every address on the way, not only for the first.
        .redirect(reqwest::redirect::Policy::custom(move |attempt| {
            if attempt.previous().len() > MAX_REDIRECTS {
                return attempt.error("too many redirects");
            }
            if !allowed.is_match(attempt.url().as_str()) {
                return attempt.error("redirected to a URL that is not allowed");
            }
            attempt.follow()
        }))
        .build()
        .map_err(|error| failed(error.into()))?;
    let mut response = client
        .get(url)
        .send()
        .await
        .and_then(reqwest::Response::error_for_status)
        .map_err(|error| failed(error.without_url().into()))?;
    let partial = Partial::beside(&target);
    let mut file = tokio::fs::File::create(&partial.path)
        .await
        .map_err(|error| failed(error.into()))?;
    let mut bytes = 0;
    while let Some(chunk) = response
        .chunk()
        .await
        .map_err(|error| failed(error.without_url().into()))?
    {
        bytes += chunk.len() as u64;
        if bytes > config.max_download_bytes {
            let limit = config.max_download_bytes;
            return Err(failed(
                format!("it is larger than the limit of {limit} bytes").into(),
            ));
        }
        file.write_all(&chunk)
            .await
            .map_err(|error| failed(error.into()))?;
    }
    file.flush().await.map_err(|error| failed(error.into()))?;
    partial
        .keep_as(&target)
        .map_err(|error| failed(error.into()))?;
    Ok(Located {
        path: target.clone(),
        fetched: Some(Fetched { path: target }),
    })
}

/// A file that is being written; deleted unless it is kept.
struct Partial {
    path: PathBuf,
}

impl Partial {
    fn beside(target: &Path) -> Self {
        let name = format!(".{}.part", uuid::Uuid::new_v4().simple());
        Self {
            path: target.with_file_name(name),
        }
    }

    fn keep_as(self, target: &Path) -> std::io::Result<()> {
        // Fails rather than replaces, should another registration have been faster.
        fs_err::hard_link(&self.path, target)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let _never_created = fs_err::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_spelling_of_a_parent_folder_passes() {
        for url in [
            "../m.mar",
            "a/../m.mar",
            "file:///ok/../m.mar",
            "file:///ok/%2e%2e/m.mar",
            "file:///ok/%252e%252e/m.mar",
            "file:///ok/%25252e%25252e/m.mar",
            "m%00.mar",
        ] {
            assert!(is_relative(url), "{url} passed");
        }
        for url in [
            "m.mar",
            "file:///a/b.mar",
            "https://h/m.mar?sig=x%2By",
            "100%.mar",
        ] {
            assert!(!is_relative(url), "{url} was refused");
        }
    }
}
