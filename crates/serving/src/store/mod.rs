//! From the `url` of a registration to a file or folder on this machine
//! (*torchserve-contract* 5.2).
//!
//! `addresses` says where the server may be sent, `local` finds what is here already, and
//! `download` brings the rest into the store: from `http`, from an `object` store, or copied from
//! another folder. `partial` is the file that it writes.

mod addresses;
mod download;
mod http;
mod local;
mod object;
mod partial;

use std::path::{Path, PathBuf};

use percent_encoding::percent_decode_str;
use reqwest::Url;
use ts_archive::{Digest, MOST_SIGNATURE_BYTES, signature_path};

use self::addresses::{is_relative, may_fetch};
use self::download::{Bounds, Failure, Order};
use crate::config::ServingConfig;
use crate::error::ServingError;
use crate::management::Registration;

/// What a `url` may be.
const SUPPORTED: &str = "supported are `http`, `https`, `file`, `s3`, `gs`, `az` and `abfs(s)`, and \
                         names of files and folders in the model store";

/// An archive that the registration brought into the store; deleted with the model.
#[derive(Debug)]
pub(crate) struct Fetched {
    pub(crate) path: PathBuf,
}

impl Fetched {
    /// Deletes it, and the signature that came with it.
    ///
    /// # Errors
    /// The archive stays.
    pub(crate) fn remove(&self) -> std::io::Result<()> {
        let _may_have_none = fs_err::remove_file(signature_path(&self.path));
        fs_err::remove_file(&self.path)
    }
}

/// Where an archive is.
#[derive(Debug)]
pub(crate) struct Located {
    pub(crate) path: PathBuf,
    pub(crate) fetched: Option<Fetched>,
    /// The SHA-256 that it has to have.
    pub(crate) expected: Option<Digest>,
}

/// Finds the archive that a registration names, fetching it into the store if it is elsewhere.
///
/// # Errors
/// [`ServingError`] as the contract's table has them; a part of a download is never left behind.
pub(crate) async fn locate(
    config: &ServingConfig,
    registration: &Registration,
) -> Result<Located, ServingError> {
    if registration.url.trim().is_empty() {
        return Err(ServingError::EmptyUrl);
    }
    let (url, expected) = expected_digest(&registration.url, registration.sha256.as_deref())?;
    if is_relative(url) {
        return Err(ServingError::RelativeUrl {
            url: url.to_owned(),
        });
    }
    let parsed = remote_url(config, url)?;
    config.trust.check_given(url, expected)?;
    let store = config.model_store.as_deref().ok_or(ServingError::NoStore)?;
    let target = match &parsed {
        Some(parsed) => store.join(file_name(parsed)?),
        None => local::find(store, url)?,
    };
    let here = |path: PathBuf| Located {
        path,
        fetched: None,
        expected,
    };
    let Some(parsed) = &parsed else {
        return Ok(here(target));
    };
    let order = Order {
        url,
        stray_parameters: &registration.stray_parameters,
        shown: shown(parsed),
        target: &target,
        bounds: Bounds {
            bytes: config.max_download_bytes,
            time: config.download_limit,
        },
        expected,
    };
    if fs_err::symlink_metadata(&target).is_ok() {
        // A start with the same command line as the last one finds what that one brought.
        if !registration.at_startup {
            return Err(download::already_in_store(&target));
        }
        tracing::info!(
            url = order.shown,
            file = %target.display(),
            "not downloaded again: the archive is in the model store"
        );
        return Ok(here(target));
    }
    let has_signature = fetch_signature(config, registration, parsed, &order).await?;
    if let Err(error) = fetch(config, registration, parsed, &order).await {
        if has_signature {
            let _best_effort = fs_err::remove_file(signature_path(&target));
        }
        return Err(error);
    }
    Ok(Located {
        path: target.clone(),
        fetched: Some(Fetched { path: target }),
        expected,
    })
}

/// Finds again what a `url` named that is here and not fetched.
///
/// # Errors
/// It is gone.
pub(crate) fn find(store: &Path, url: &str) -> Result<PathBuf, ServingError> {
    local::find(store, without_digest(url))
}

/// The `url` without the digest that it may end in.
pub(crate) fn without_digest(url: &str) -> &str {
    url.rsplit_once("#sha256=").map_or(url, |(path, _)| path)
}

/// Removes the halves of archives that servers left in the store which no longer live.
pub(crate) fn sweep(store: &Path) {
    let swept = partial::sweep(store);
    if swept > 0 {
        tracing::info!("removed {swept} unfinished downloads of servers that did not end well");
    }
}

async fn fetch(
    config: &ServingConfig,
    registration: &Registration,
    url: &Url,
    order: &Order<'_>,
) -> Result<(), ServingError> {
    let failed = |failure: Failure| order.failed(&failure.reason);
    let allowed = &config.allowed_urls;
    match url.scheme() {
        "file" => {
            let file = local::LocalFile::named(url).map_err(failed)?;
            download::fetch(order, &file).await
        }
        "http" | "https" if registration.s3_sse_kms => {
            let object = object::Object::signed(allowed, url).map_err(failed)?;
            download::fetch(order, &object).await
        }
        "http" | "https" => {
            let file = http::Http::new(allowed, url).map_err(failed)?;
            download::fetch(order, &file).await
        }
        _ => {
            let object = object::Object::named(url, order.bounds).map_err(failed)?;
            download::fetch(order, &object).await
        }
    }
}

/// Fetches the signature that lies beside an archive, where signatures count. Returns whether there is
/// one.
async fn fetch_signature(
    config: &ServingConfig,
    registration: &Registration,
    archive: &Url,
    order: &Order<'_>,
) -> Result<bool, ServingError> {
    if config.trust.keys.is_empty() {
        return Ok(false);
    }
    let mut url = archive.clone();
    url.set_path(&format!("{}.sig", archive.path()));
    if !may_fetch(&config.allowed_urls, &url) {
        return Err(ServingError::UrlNotAllowed {
            url: url.to_string(),
        });
    }
    let signature = Order {
        url: url.as_str(),
        stray_parameters: order.stray_parameters,
        shown: shown(&url),
        target: &signature_path(order.target),
        bounds: Bounds {
            bytes: MOST_SIGNATURE_BYTES,
            time: order.bounds.time,
        },
        expected: None,
    };
    match fetch(config, registration, &url, &signature).await {
        Ok(()) => Ok(true),
        // Whether it may be missing is decided where it is looked for.
        Err(ServingError::Download { reason, .. }) if !config.trust.require_signature => {
            tracing::warn!(url = signature.shown, reason, "no signature was fetched");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// The `url` without the digest it may end in, and the digest the archive has to have.
pub(crate) fn expected_digest<'u>(
    url: &'u str,
    sha256: Option<&str>,
) -> Result<(&'u str, Option<Digest>), ServingError> {
    let read = |text: &str| text.parse().map_err(ServingError::BadRegistration);
    let given = sha256.map(read).transpose()?;
    let Some((url, text)) = url.rsplit_once("#sha256=") else {
        return Ok((url, given));
    };
    let of_url: Digest = read(text)?;
    match given {
        Some(given) if given != of_url => Err(ServingError::BadRegistration(format!(
            "the url asks for the sha256 {of_url} and the parameter for {given}"
        ))),
        _ => Ok((url, Some(of_url))),
    }
}

/// What is to be fetched; `None` for what is here already.
fn remote_url(config: &ServingConfig, url: &str) -> Result<Option<Url>, ServingError> {
    let Some((scheme, _)) = url.split_once("://") else {
        return Ok(None);
    };
    let scheme = scheme.to_ascii_lowercase();
    let is_object = object::SCHEMES.contains(&scheme.as_str());
    if !is_object && !["http", "https", "file"].contains(&scheme.as_str()) {
        return Err(ServingError::BadRegistration(format!(
            "the scheme `{scheme}` of `{url}` is not supported; {SUPPORTED}"
        )));
    }
    let mut parsed = Url::parse(url)
        .map_err(|error| ServingError::BadRegistration(format!("`{url}` is not a URL: {error}")))?;
    // Never sent, so not a part of what the list has to allow.
    parsed.set_fragment(None);
    // Compared in the one spelling that is also fetched: `127.1` is `127.0.0.1` by then.
    if !may_fetch(&config.allowed_urls, &parsed) {
        return Err(ServingError::UrlNotAllowed {
            url: url.to_owned(),
        });
    }
    Ok(Some(parsed))
}

/// The name in the store of what a URL brings: that of its path. Its query is no part of it.
fn file_name(url: &Url) -> Result<String, ServingError> {
    let name = url.path().rsplit('/').next().unwrap_or_default();
    let name = percent_decode_str(name).decode_utf8_lossy().into_owned();
    if name.is_empty() || name.contains(['/', '\\', '\0']) || name.starts_with('.') {
        return Err(ServingError::BadRegistration(format!(
            "`{url}` does not end in a file name to store the archive under"
        )));
    }
    Ok(name)
}

/// The URL for logs: its query may hold a signature.
fn shown(url: &Url) -> String {
    let mut shown = url.clone();
    shown.set_query(None);
    shown.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn a_digest_stands_in_the_url_or_beside_it() {
        let other = EMPTY.replace('e', "f");
        let with = format!("m.mar#sha256={EMPTY}");
        let digest = Some(EMPTY.parse().unwrap());
        let read = |url: &str, sha256| {
            expected_digest(url, sha256).map(|(url, digest)| (url.to_owned(), digest))
        };
        assert_eq!(read("m.mar", None).unwrap(), ("m.mar".to_owned(), None));
        assert_eq!(
            read("m.mar", Some(EMPTY)).unwrap(),
            ("m.mar".to_owned(), digest)
        );
        assert_eq!(read(&with, None).unwrap(), ("m.mar".to_owned(), digest));
        assert_eq!(
            read(&with, Some(EMPTY)).unwrap(),
            ("m.mar".to_owned(), digest)
        );
        let error = read(&with, Some(&other)).unwrap_err().to_string();
        assert!(error.contains(EMPTY) && error.contains(&other), "{error}");
        for (url, sha256) in [
            ("m.mar", Some("")),
            ("m.mar#sha256=", None),
            ("m#sha256=0", None),
        ] {
            assert!(read(url, sha256).is_err(), "{url}");
        }
    }

    #[test]
    fn an_archive_is_stored_under_the_name_in_the_path() {
        let name = |url: &str| file_name(&Url::parse(url).unwrap());
        let signature = "x".repeat(300);
        for url in [
            format!("https://h/a/m.mar?sig={signature}/n.mar"),
            "file:///a/m.mar".to_owned(),
            "s3://bucket/deep/m.mar".to_owned(),
            "http://h/m%2Emar".to_owned(),
        ] {
            assert_eq!(name(&url).unwrap(), "m.mar", "{url}");
        }
        for url in [
            "http://h/",
            "http://h",
            "http://h/a%2Fb",
            "http://h/.hidden",
            "s3://bucket",
        ] {
            assert!(name(url).is_err(), "{url}");
        }
        assert_eq!(
            shown(&Url::parse("https://h/a/m.mar?sig=secret").unwrap()),
            "https://h/a/m.mar"
        );
    }
}
