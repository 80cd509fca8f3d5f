//! TLS for listeners of any protocol: the key, its certificates, and the configuration of rustls,
//! which follows the files when they are renewed.

mod error;
mod material;

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::crypto::CryptoProvider;
use rustls::server::WebPkiClientVerifier;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{RootCertStore, ServerConfig};
use secrecy::SecretString;
use sha2::{Digest as _, Sha256};

pub(crate) use error::TlsError;

/// How often the files are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// What is spoken inside, the most wanted first.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];

/// Where the key and its certificates are from.
#[derive(Debug, Clone)]
pub(crate) enum Source {
    /// The first entry with a key of a PKCS#12 file.
    Keystore {
        /// The file.
        file: PathBuf,
        /// Its password.
        password: SecretString,
    },
    /// Two files in PEM.
    Pem {
        /// The private key.
        key: PathBuf,
        /// The certificates, the server's own first.
        chain: PathBuf,
    },
    /// Made at the start, signed by nobody.
    Generated {
        /// The names that the certificate is for.
        names: Vec<String>,
    },
}

/// What tells files from later ones of their names; none for one that is not there.
type Stamps = Vec<Option<[i64; 4]>>;

/// What TLS is set up from.
#[derive(Debug, Clone)]
pub(crate) struct TlsSettings {
    /// The server's key.
    pub(crate) source: Source,
    /// The authorities whose clients may connect; unset, any client may.
    pub(crate) client_ca: Option<PathBuf>,
}

impl TlsSettings {
    /// The files that it is made of.
    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        let (first, second) = match &self.source {
            Source::Keystore { file, .. } => (Some(file), None),
            Source::Pem { key, chain } => (Some(key), Some(chain)),
            Source::Generated { .. } => (None, None),
        };
        [first, second, self.client_ca.as_ref()]
            .into_iter()
            .flatten()
    }

    fn stamps(&self) -> Stamps {
        let stamp = |path: &PathBuf| {
            let found = fs_err::metadata(path).ok()?;
            let inode = found.ino().cast_signed();
            let size = found.size().cast_signed();
            Some([inode, size, found.mtime(), found.mtime_nsec()])
        };
        self.files().map(stamp).collect()
    }

    fn load(&self) -> Result<(Arc<ServerConfig>, Arc<CertifiedKey>), TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let pair = material::read(&self.source, &provider)?;
        let config = self.config(&provider, &pair)?;
        Ok((Arc::new(config), pair))
    }

    fn config(
        &self,
        provider: &Arc<CryptoProvider>,
        pair: &CertifiedKey,
    ) -> Result<ServerConfig, TlsError> {
        let builder = ServerConfig::builder_with_provider(Arc::clone(provider));
        let builder = builder
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
            .map_err(TlsError::Refused)?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let malformed = |reason: String| TlsError::Malformed {
                    setting: "client_ca_file",
                    path: path.clone(),
                    reason,
                };
                let mut roots = RootCertStore::empty();
                for certificate in material::certificates("client_ca_file", path)? {
                    roots
                        .add(certificate)
                        .map_err(|error| malformed(error.to_string()))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(
                    Arc::new(roots),
                    Arc::clone(provider),
                );
                let verifier = verifier.build();
                builder.with_client_cert_verifier(
                    verifier.map_err(|error| malformed(error.to_string()))?,
                )
            }
        };
        let key = SingleCertAndKey::from(pair.clone());
        let mut config = builder.with_cert_resolver(Arc::new(key));
        config.alpn_protocols = PROTOCOLS.map(<[u8]>::to_vec).to_vec();
        Ok(config)
    }
}

/// TLS as it is now; one for all listeners.
#[derive(Debug)]
pub(crate) struct Tls {
    settings: TlsSettings,
    config: ArcSwap<ServerConfig>,
    /// Of the files that were read first.
    first: Stamps,
}

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// Which file is wrong, and how.
    pub(crate) fn load(settings: TlsSettings) -> Result<Arc<Self>, TlsError> {
        // Before they are read: what changes meanwhile is read again.
        let first = settings.stamps();
        let (config, pair) = settings.load()?;
        if let Source::Generated { names } = &settings.source {
            tracing::warn!(
                "no certificate is configured (`certificate_file` and `private_key_file`, or \
                 `keystore`), so one was generated for {}. Clients cannot verify it but by its \
                 SHA-256 fingerprint, {}",
                names.join(", "),
                fingerprint(&pair)
            );
        }
        Ok(Arc::new(Self {
            settings,
            config: ArcSwap::new(config),
            first,
        }))
    }

    /// What the next connection is served with.
    pub(crate) fn config(&self) -> Arc<ServerConfig> {
        self.config.load_full()
    }

    /// Follows the files for as long as the process lives: what they hold next counts for the
    /// connections after it, unless it cannot be used.
    pub(crate) async fn follow(self: Arc<Self>) {
        if self.settings.files().next().is_none() {
            return;
        }
        let mut seen = self.first.clone();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let tls = Arc::clone(&self);
            let looked = tokio::task::spawn_blocking(move || tls.look(seen)).await;
            let Ok(stamps) = looked else { return };
            seen = stamps;
        }
    }

    /// Takes up files that are not those seen before, and returns which were seen.
    fn look(&self, seen: Stamps) -> Stamps {
        let stamps = self.settings.stamps();
        if stamps == seen {
            return seen;
        }
        match self.settings.load() {
            Ok((config, pair)) => {
                self.config.store(config);
                tracing::info!(
                    "the certificate was renewed; its SHA-256 fingerprint is {}",
                    fingerprint(&pair)
                );
            }
            Err(error) => tracing::warn!(
                "the renewed files of TLS cannot be used, so those before stay in use: {}",
                ts_types::with_causes(&error)
            ),
        }
        stamps
    }
}

/// As tools show it: pairs of digits between colons.
fn fingerprint(pair: &CertifiedKey) -> String {
    let digest = Sha256::digest(pair.cert.first().map_or(&[][..], |first| first.as_ref()));
    let pairs: Vec<_> = digest.iter().map(|byte| format!("{byte:02X}")).collect();
    pairs.join(":")
}

#[cfg(test)]
mod tests;
