//! From the `url` of a registration to a file or folder on this machine
//! (*torchserve-contract* 5.2).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use regex::RegexSet;
use reqwest::Url;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use tokio::io::AsyncWriteExt;
use url::Host;

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
            // Compared in the one spelling that is also fetched: `127.1` is `127.0.0.1` by then.
            let parsed = Url::parse(url).map_err(|error| {
                ServingError::BadRegistration(format!("`{url}` is not a URL: {error}"))
            })?;
            if !may_fetch(&config.allowed_urls, &parsed) {
                return Err(ServingError::UrlNotAllowed {
                    url: url.to_owned(),
                });
            }
            if scheme == "file" {
                copy(config, &parsed).await
            } else {
                download(config, &parsed).await
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

/// Whether the operator's list lets the server fetch from `url`.
///
/// Cloud metadata services and other link-local addresses hand out credentials to whoever asks from
/// this machine; the default list allows every host, so these need a pattern that names them. A user
/// name in a URL can make it look like another host's and is never allowed.
fn may_fetch(allowed: &RegexSet, url: &Url) -> bool {
    if !url.username().is_empty() || url.password().is_some() {
        return false;
    }
    if !allowed.is_match(url.as_str()) {
        return false;
    }
    let guarded = match url.host() {
        Some(Host::Ipv4(address)) => is_guarded(address.into()),
        Some(Host::Ipv6(address)) => is_guarded(address.into()),
        Some(Host::Domain(name)) => name
            .trim_end_matches('.')
            .eq_ignore_ascii_case("metadata.google.internal"),
        None => false,
    };
    !guarded || url.host_str().is_some_and(|host| is_named(allowed, host))
}

/// Whether a pattern of the list spells this host out, where a URL has its host.
fn is_named(allowed: &RegexSet, host: &str) -> bool {
    let escaped = regex::escape(host);
    allowed.patterns().iter().any(|pattern| {
        let host_part = pattern.split_once("//").map_or("", |(_, rest)| rest);
        let host_part = host_part.split('/').next().unwrap_or_default();
        host_part.contains(&escaped) || host_part.contains(host)
    })
}

/// Metadata services outside the link-local range: Alibaba's, Azure's, Oracle's.
const METADATA_SERVICES: [Ipv4Addr; 3] = [
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(192, 0, 0, 192),
];

fn is_guarded(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => address.is_link_local() || METADATA_SERVICES.contains(&address),
        IpAddr::V6(address) => {
            address.is_unicast_link_local()
                || address == Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)
        }
    }
}

/// Looks names up without the guarded addresses, so that a name cannot stand for one either, unless
/// the operator's list names it.
struct GuardedNames {
    allowed: RegexSet,
}

impl Resolve for GuardedNames {
    fn resolve(&self, name: Name) -> Resolving {
        let named = is_named(&self.allowed, name.as_str());
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            let usable: Vec<SocketAddr> = found
                .filter(|address| named || !is_guarded(address.ip()))
                .collect();
            if usable.is_empty() {
                return Err(format!("`{}` has no address that may be asked", name.as_str()).into());
            }
            Ok(Box::new(usable.into_iter()) as Addrs)
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

fn too_long(config: &ServingConfig) -> String {
    let limit = config.max_download_bytes;
    format!("it is larger than the limit of {limit} bytes; see `max_download_size`")
}

async fn copy(config: &ServingConfig, url: &Url) -> Result<Located, ServingError> {
    let failed = failed(url.as_str());
    let target = target(config, url.as_str())?;
    let source = url.to_file_path().map_err(|()| {
        ServingError::BadRegistration(format!("`{url}` names no file of this machine"))
    })?;
    let metadata = fs_err::metadata(&source).map_err(|error| failed(error.into()))?;
    if !metadata.is_file() {
        // A device or a pipe never ends.
        return Err(failed("it is not a file".into()));
    }
    if metadata.len() > config.max_download_bytes {
        return Err(failed(too_long(config).into()));
    }
    let partial = Partial::beside(&target);
    let copied = {
        let to = partial.path.clone();
        tokio::task::spawn_blocking(move || fs_err::copy(source, to)).await
    };
    copied
        .map_err(|error| failed(error.into()))?
        .map_err(|error| failed(error.into()))?;
    partial
        .keep_as(target)
        .map_err(|error| failed(error.into()))
}

async fn download(config: &ServingConfig, url: &Url) -> Result<Located, ServingError> {
    let failed = failed(url.as_str());
    let target = target(config, url.as_str())?;
    let allowed = config.allowed_urls.clone();
    // Fails where it was installed before, which is as good.
    let _installed = rustls::crypto::ring::default_provider().install_default();
    let client = reqwest::Client::builder()
        .connect_timeout(CONNECT_LIMIT)
        .read_timeout(READ_LIMIT)
        .dns_resolver(Arc::new(GuardedNames {
            allowed: allowed.clone(),
        }))
        // A proxy would look names up, and fetch, where nobody checks.
        .no_proxy()
        // The operator's list holds for every address on the way, not only for the first.
        .redirect(reqwest::redirect::Policy::custom(move |attempt| {
            if attempt.previous().len() > MAX_REDIRECTS {
                return attempt.error("too many redirects");
            }
            if !may_fetch(&allowed, attempt.url()) {
                return attempt.error("redirected to a URL that is not allowed");
            }
            attempt.follow()
        }))
        .build()
        .map_err(|error| failed(error.into()))?;
    let mut response = client
        .get(url.clone())
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
            return Err(failed(too_long(config).into()));
        }
        file.write_all(&chunk)
            .await
            .map_err(|error| failed(error.into()))?;
    }
    file.flush().await.map_err(|error| failed(error.into()))?;
    partial
        .keep_as(target)
        .map_err(|error| failed(error.into()))
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

    fn keep_as(self, target: PathBuf) -> std::io::Result<Located> {
        // Fails rather than replaces, should another registration have been faster.
        match rustix::fs::renameat_with(CWD, &self.path, CWD, &target, RenameFlags::NOREPLACE) {
            // A file system without the flag; the target was looked for before.
            Err(Errno::INVAL | Errno::NOSYS) => fs_err::rename(&self.path, &target)?,
            result => result?,
        }
        Ok(Located {
            path: target.clone(),
            fetched: Some(Fetched { path: target }),
        })
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
    fn addresses_that_hand_out_credentials_need_a_pattern_of_their_own() {
        let everything = RegexSet::new([r"^(?i:file://.*|http(s)?://.*)$"]).unwrap();
        let fetch = |allowed: &RegexSet, url: &str| may_fetch(allowed, &Url::parse(url).unwrap());
        for url in [
            "http://169.254.169.254/latest/m.mar",
            "http://2852039166/m.mar",
            "http://0xa9fea9fe/m.mar",
            "http://[::ffff:169.254.169.254]/m.mar",
            "http://[fe80::1]/m.mar",
            "http://[fd00:ec2::254]/m.mar",
            "http://metadata.google.internal/m.mar",
            "http://METADATA.google.internal./m.mar",
            "http://user@example.org/m.mar",
            "http://good.example:pass@169.254.169.254/m.mar",
        ] {
            assert!(!fetch(&everything, url), "{url}");
        }
        assert!(fetch(&everything, "https://example.org/m.mar?sig=1"));
        assert!(fetch(&everything, "http://127.0.0.1:9/m.mar"));
        let named = RegexSet::new([r"^http://169\.254\.169\.254/models/.*$"]).unwrap();
        assert!(fetch(&named, "http://169.254.169.254/models/m.mar"));
        // Mentioned, but not as the host.
        let beside = RegexSet::new([r"^http://.*/169\.254\.169\.254/.*$"]).unwrap();
        assert!(!fetch(
            &beside,
            "http://169.254.169.254/169.254.169.254/m.mar"
        ));
    }

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
