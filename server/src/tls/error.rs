//! What can be wrong with the files that TLS needs. No text of these holds a password or a key.

use std::path::PathBuf;

/// Key material that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    /// It cannot be read.
    #[error("the file of `{setting}` cannot be read")]
    Unreadable {
        /// The key that names the file.
        setting: &'static str,
        /// The system's words, with the path.
        source: std::io::Error,
    },
    /// Something that is no file, or one that is no key material by its size.
    #[error("`{}` (`{setting}`) is not a file of at most {limit} bytes", path.display())]
    NotAFile {
        /// The key that names it.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// Its greatest size.
        limit: u64,
    },
    /// No certificate in a PEM file.
    #[error(
        "`{}` (`{setting}`) has no certificate. It has to hold blocks of \
         `-----BEGIN CERTIFICATE-----`, the server's own first",
        path.display()
    )]
    NoCertificate {
        /// The key that names the file.
        setting: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// No private key in a PEM file.
    #[error(
        "`{}` (`private_key_file`) has no private key in PEM: PKCS#8, PKCS#1 or SEC1",
        path.display()
    )]
    NoKey {
        /// The file.
        path: PathBuf,
    },
    /// A private key that has a password of its own.
    #[error(
        "the private key in `{}` (`private_key_file`) is encrypted. Decrypt it \
         (`openssl pkcs8 -in KEY -out PLAIN`), or put key and certificate into a `keystore`",
        path.display()
    )]
    EncryptedKey {
        /// The file.
        path: PathBuf,
    },
    /// Blocks that are not what they say.
    #[error("`{}` (`{setting}`) is not valid: {reason}", path.display())]
    Malformed {
        /// The key that names the file.
        setting: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The password opens nothing.
    #[error("`keystore_pass` is not the password of `{}` (`keystore`)", path.display())]
    WrongPassword {
        /// The key store.
        path: PathBuf,
    },
    /// Java's own format.
    #[error(
        "`{path}` (`keystore`) is of Java's own type JKS. Convert it: `keytool -importkeystore \
         -srckeystore {path} -destkeystore {path}.p12 -deststoretype PKCS12`",
        path = path.display()
    )]
    Jks {
        /// The key store.
        path: PathBuf,
    },
    /// A key store of certificates only.
    #[error("`{}` (`keystore`) has no entry with a private key", path.display())]
    NoKeyEntry {
        /// The key store.
        path: PathBuf,
    },
    /// Key and certificate of two pairs.
    #[error(
        "the private key of `{}` does not belong to the first certificate of `{}`",
        key.display(),
        certificate.display()
    )]
    Mismatch {
        /// Where the key is from.
        key: PathBuf,
        /// Where the certificate is from.
        certificate: PathBuf,
    },
    /// Clients would refuse it.
    #[error("the certificate in `{}` is valid from {from} to {to}, not now", path.display())]
    NotValidNow {
        /// The file.
        path: PathBuf,
        /// Its first moment.
        from: String,
        /// Its last.
        to: String,
    },
    /// A certificate cannot be generated.
    #[error("no certificate could be generated")]
    NotGenerated(#[source] rcgen::Error),
    /// rustls refuses what it is given.
    #[error("TLS cannot be set up")]
    Refused(#[source] rustls::Error),
}
