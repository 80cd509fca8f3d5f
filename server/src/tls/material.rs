//! The private key and its certificates: out of a key store, out of PEM files, or generated.

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use p12_keystore::{Certificate, Pkcs12Archive};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use secrecy::{ExposeSecret as _, SecretString};

use super::{Source, TlsError};

/// Bytes that a file of key material may have; a bundle of every public authority has a quarter.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// What files of Java's own types begin with.
const JKS: [&[u8]; 2] = [&[0xfe, 0xed, 0xfe, 0xed], &[0xce, 0xce, 0xce, 0xce]];

/// The pair that a source has, checked: they belong together and are valid now.
pub(super) fn read(
    source: &Source,
    provider: &CryptoProvider,
) -> Result<Arc<CertifiedKey>, TlsError> {
    let (chain, key, key_file, chain_file) = match source {
        Source::Keystore { file, password } => {
            let (chain, key) = of_keystore(file, password)?;
            (chain, key, file, file)
        }
        Source::Pem { key, chain } => (
            certificates("certificate_file", chain)?,
            private_key(key)?,
            key,
            chain,
        ),
        Source::Generated { names } => return generated(names, provider),
    };
    let pair = CertifiedKey::from_der(chain, key, provider).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => TlsError::Mismatch {
            key: key_file.clone(),
            certificate: chain_file.clone(),
        },
        other => TlsError::Refused(other),
    })?;
    if let Some(first) = pair.cert.first() {
        valid_now(chain_file, first)?;
    }
    Ok(Arc::new(pair))
}

/// The certificates of a PEM file, in its order.
pub(super) fn certificates(
    setting: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let text = bytes(setting, path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let found = found.map_err(|error| TlsError::Malformed {
        setting,
        path: path.to_owned(),
        reason: error.to_string(),
    })?;
    if found.is_empty() {
        return Err(TlsError::NoCertificate {
            setting,
            path: path.to_owned(),
        });
    }
    Ok(found)
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let text = bytes("private_key_file", path)?;
    let path = || path.to_owned();
    // Both the form of PKCS#8 and the older one that says so in a line of its own.
    let encrypted = |mark: &[u8]| text.windows(mark.len()).any(|part| part == mark);
    if encrypted(b"BEGIN ENCRYPTED PRIVATE KEY") || encrypted(b"Proc-Type: 4,ENCRYPTED") {
        return Err(TlsError::EncryptedKey { path: path() });
    }
    PrivateKeyDer::from_pem_slice(&text).map_err(|error| match error {
        rustls::pki_types::pem::Error::NoItemsFound => TlsError::NoKey { path: path() },
        other => TlsError::Malformed {
            setting: "private_key_file",
            path: path(),
            reason: other.to_string(),
        },
    })
}

/// The first key of a key store, as in TorchServe, with the certificates that lead from its own to
/// an authority.
fn of_keystore(
    path: &Path,
    password: &SecretString,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), TlsError> {
    let data = bytes("keystore", path)?;
    if JKS.iter().any(|magic| data.starts_with(magic)) {
        return Err(TlsError::Jks {
            path: path.to_owned(),
        });
    }
    let archive = Pkcs12Archive::from_pkcs12(&data, password.expose_secret());
    let archive = archive.map_err(|error| match error {
        p12_keystore::error::Error::MacError(_) => TlsError::WrongPassword {
            path: path.to_owned(),
        },
        other => TlsError::Malformed {
            setting: "keystore",
            path: path.to_owned(),
            reason: format!("it cannot be read as PKCS#12: {other}"),
        },
    })?;
    let Some(entry) = archive.keys.first() else {
        return Err(TlsError::NoKeyEntry {
            path: path.to_owned(),
        });
    };
    let certificates: Vec<_> = archive.certs.iter().collect();
    let id = entry.local_key_id.as_ref();
    let of_key = certificates.iter().find(|certificate| {
        let own = certificate.local_key_id.as_deref();
        own.is_some() && own == id.map(AsRef::as_ref)
    });
    // Some tools write no ids: then there is one pair, and it is checked like any other.
    let Some(of_key) = of_key.or_else(|| certificates.first()) else {
        return Err(TlsError::NoCertificate {
            setting: "keystore",
            path: path.to_owned(),
        });
    };
    let all: Vec<&Certificate> = certificates.iter().map(|found| &found.cert).collect();
    let chain = chain(&of_key.cert, &all);
    let key = PrivatePkcs8KeyDer::from(entry.key.as_der().to_vec());
    Ok((chain, key.into()))
}

/// From a certificate to the one that nobody of these has issued.
fn chain(first: &Certificate, all: &[&Certificate]) -> Vec<CertificateDer<'static>> {
    let mut chain = vec![first];
    while let Some(&last) = chain.last()
        && let Some(issuer) = all.iter().find(|one| one.subject() == last.issuer())
        && !chain.contains(issuer)
    {
        chain.push(issuer);
    }
    let der = |one: &Certificate| CertificateDer::from(one.as_der().to_vec());
    chain.into_iter().map(der).collect()
}

fn generated(names: &[String], provider: &CryptoProvider) -> Result<Arc<CertifiedKey>, TlsError> {
    let generated = rcgen::generate_simple_self_signed(names.to_vec());
    let rcgen::CertifiedKey { cert, signing_key } = generated.map_err(TlsError::NotGenerated)?;
    let key = PrivatePkcs8KeyDer::from(signing_key.serialize_der());
    let pair = CertifiedKey::from_der(vec![cert.der().clone()], key.into(), provider);
    Ok(Arc::new(pair.map_err(TlsError::Refused)?))
}

fn valid_now(path: &Path, certificate: &CertificateDer<'_>) -> Result<(), TlsError> {
    let parsed = x509_parser::parse_x509_certificate(certificate);
    let (_, parsed) = parsed.map_err(|error| TlsError::Malformed {
        setting: "certificate_file",
        path: path.to_owned(),
        reason: error.to_string(),
    })?;
    let validity = parsed.validity();
    if validity.is_valid() {
        return Ok(());
    }
    Err(TlsError::NotValidNow {
        path: path.to_owned(),
        from: validity.not_before.to_string(),
        to: validity.not_after.to_string(),
    })
}

/// The bytes of a file that is one, and that is no larger than key material is.
fn bytes(setting: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    let unreadable = |source| TlsError::Unreadable { setting, source };
    let not_a_file = || TlsError::NotAFile {
        setting,
        path: path.to_owned(),
        limit: MAX_FILE_BYTES,
    };
    // Opening a pipe would wait for its writer.
    if !fs_err::metadata(path).map_err(unreadable)?.is_file() {
        return Err(not_a_file());
    }
    let file = fs_err::File::open(path).map_err(unreadable)?;
    let mut bytes = Vec::new();
    let read = file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes);
    if read.map_err(unreadable)? as u64 > MAX_FILE_BYTES {
        return Err(not_a_file());
    }
    Ok(bytes)
}
