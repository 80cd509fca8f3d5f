//! Signatures of archives: Ed25519 over the SHA-256 of what is signed, in a file beside it whose name
//! has `.sig` added. Keys are PEM files as openssl makes and reads them: PKCS#8 the private ones,
//! SPKI the public ones.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::pkcs8::{
    DecodePrivateKey as _, DecodePublicKey as _, EncodePrivateKey as _, EncodePublicKey as _,
    KeypairBytes,
};
use ed25519_dalek::{Signature, Signer as _, SigningKey, VerifyingKey};
use fs_err as fs;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::digest::Digest;
use crate::error::{ArchiveError, Doing};

/// What precedes the digest in the bytes that are signed: a signature of one thing is none of
/// another.
const OF_ARCHIVE: &[u8] = b"flambeau model archive, sha256, v1\n";
const OF_FOLDER: &[u8] = b"flambeau model folder, sha256 of the list of members, v1\n";

/// The largest signature, or file of keys, that is read.
pub const MOST_SIGNATURE_BYTES: u64 = 64 << 10;

const BEGIN: &str = "-----BEGIN PUBLIC KEY-----";
const END: &str = "-----END PUBLIC KEY-----";

/// What is signed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signed {
    /// The bytes of a file.
    Archive(Digest),
    /// The names and digests of a folder's files.
    Folder(Digest),
}

impl Signed {
    fn message(self) -> Vec<u8> {
        let (domain, digest) = match self {
            Self::Archive(digest) => (OF_ARCHIVE, digest),
            Self::Folder(digest) => (OF_FOLDER, digest),
        };
        [domain, digest.as_ref()].concat()
    }
}

/// Which key, in 16 hexadecimal digits of the SHA-256 of the public one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyId(String);

impl KeyId {
    fn of(key: &VerifyingKey) -> Self {
        let hash = Sha256::digest(key.as_bytes());
        Self(hash[..8].iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a signature does not count.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SignatureFault {
    /// There is none.
    #[error("it has no signature")]
    Missing,
    /// The file holds something else.
    #[error("its signature is not one that `torch-model-archiver sign` makes: {0}")]
    Malformed(String),
    /// Nobody trusts whoever signed it.
    #[error("it is signed by the key `{0}`, which is not trusted")]
    UnknownKey(String),
    /// It is of something else.
    #[error(
        "it is not what the key `{0}` signed: it was changed since, or has another's signature"
    )]
    Mismatch(KeyId),
}

/// The content of a `.sig` file.
#[derive(Serialize, Deserialize)]
struct Written {
    algorithm: String,
    key: String,
    signature: String,
}

const ALGORITHM: &str = "ed25519";

/// The place of a signature.
pub fn signature_path(source: &Path) -> PathBuf {
    // A folder's name may end in a slash.
    let source: PathBuf = source.components().collect();
    let mut name = source.into_os_string();
    name.push(".sig");
    name.into()
}

/// The signature beside an archive or folder, if there is one.
///
/// # Errors
/// It cannot be read.
pub fn read_signature(source: &Path) -> Result<Option<String>, ArchiveError> {
    let path = signature_path(source);
    match fs::File::open(&path) {
        Ok(file) => read_text(file, &path).map(Some),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).doing("open", &path),
    }
}

fn read_text(file: fs::File, path: &Path) -> Result<String, ArchiveError> {
    let mut bytes = Vec::new();
    file.take(MOST_SIGNATURE_BYTES)
        .read_to_end(&mut bytes)
        .doing("read", path)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Public keys of those whose signatures count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustedKeys(Vec<VerifyingKey>);

impl TrustedKeys {
    /// Reads the keys of files, and of all files `*.pem` and `*.pub` in folders.
    ///
    /// # Errors
    /// Something that cannot be read, or holds no public key.
    pub fn read<'p>(paths: impl Iterator<Item = &'p Path>) -> Result<Self, String> {
        let mut keys = Vec::new();
        for path in paths {
            let told = |reason: String| format!("`{}` {reason}", path.display());
            let files = if path.is_dir() {
                let entries = fs::read_dir(path).map_err(|error| told(error.to_string()))?;
                let mut files: Vec<_> = entries
                    .flatten()
                    .map(|entry| entry.path())
                    .filter(|path| {
                        path.extension()
                            .is_some_and(|end| end == "pem" || end == "pub")
                    })
                    .collect();
                files.sort_unstable();
                files
            } else {
                vec![path.to_owned()]
            };
            let before = keys.len();
            for file in files {
                let text = fs::File::open(&file)
                    .map_err(|error| error.to_string())
                    .and_then(|opened| {
                        read_text(opened, &file).map_err(|error| error.to_string())
                    })?;
                Self::add(&mut keys, &text)
                    .map_err(|reason| format!("`{}`: {reason}", file.display()))?;
            }
            if keys.len() == before {
                return Err(told(format!("holds no public key (`{BEGIN}`)")));
            }
        }
        Ok(Self(keys))
    }

    fn add(keys: &mut Vec<VerifyingKey>, text: &str) -> Result<(), String> {
        let mut rest = text;
        while let Some(at) = rest.find(BEGIN) {
            let length = rest[at..]
                .find(END)
                .ok_or_else(|| "a public key has no end".to_owned())?;
            let end = at + length + END.len();
            let key = VerifyingKey::from_public_key_pem(&rest[at..end])
                .map_err(|error| format!("a public key is not one of Ed25519: {error}"))?;
            keys.push(key);
            rest = &rest[end..];
        }
        Ok(())
    }

    /// Whether nobody is trusted.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Their ids, for messages.
    pub fn ids(&self) -> Vec<KeyId> {
        self.0.iter().map(KeyId::of).collect()
    }

    /// Whose valid signature this is.
    ///
    /// # Errors
    /// Nobody's that is trusted, or of something else.
    pub fn check(&self, signed: Signed, signature: Option<&str>) -> Result<KeyId, SignatureFault> {
        let text = signature.ok_or(SignatureFault::Missing)?;
        let malformed = |reason: &str| SignatureFault::Malformed(reason.to_owned());
        let written: Written =
            serde_json::from_str(text).map_err(|error| malformed(&error.to_string()))?;
        if written.algorithm != ALGORITHM {
            return Err(malformed("its algorithm is not `ed25519`"));
        }
        let bytes = BASE64
            .decode(&written.signature)
            .map_err(|error| malformed(&error.to_string()))?;
        let bytes = Signature::from_slice(&bytes).map_err(|_| malformed("it is not 64 bytes"))?;
        let key = self.0.iter().find(|key| KeyId::of(key).0 == written.key);
        let key =
            key.ok_or_else(|| SignatureFault::UnknownKey(crate::error::escaped(&written.key)))?;
        let id = KeyId::of(key);
        match key.verify_strict(&signed.message(), &bytes) {
            Ok(()) => Ok(id),
            Err(_) => Err(SignatureFault::Mismatch(id)),
        }
    }
}

/// A private key.
pub struct PrivateKey(SigningKey);

impl PrivateKey {
    /// A new one, and its two files: the private one for its owner's eyes only.
    ///
    /// # Errors
    /// One of the files exists, or cannot be written.
    pub fn create(private: &Path, public: &Path) -> Result<Self, ArchiveError> {
        let mut seed = [0; 32];
        let urandom = Path::new("/dev/urandom");
        fs::File::open(urandom)
            .and_then(|mut file| file.read_exact(&mut seed))
            .doing("read", urandom)?;
        let key = SigningKey::from_bytes(&seed);
        let unencodable = |path: &Path| {
            std::io::Error::other(format!("the key has no form for `{}`", path.display()))
        };
        // Without the public half, which older versions of openssl do not read in this place.
        let pair = KeypairBytes {
            secret_key: key.to_bytes(),
            public_key: None,
        };
        let text = pair
            .to_pkcs8_pem(LineEnding::LF)
            .map_err(|_| unencodable(private))
            .doing("write", private)?;
        let public_text = key
            .verifying_key()
            .to_public_key_pem(LineEnding::LF)
            .map_err(|_| unencodable(public))
            .doing("write", public)?;
        write_new(private, 0o600, &text)?;
        if let Err(error) = write_new(public, 0o644, &public_text) {
            let _best_effort = fs::remove_file(private);
            return Err(error);
        }
        Ok(Self(key))
    }

    /// Reads one.
    ///
    /// # Errors
    /// It cannot be read, or is none.
    pub fn read(path: &Path) -> Result<Self, ArchiveError> {
        let text = fs::File::open(path)
            .doing("open", path)
            .and_then(|file| read_text(file, path))?;
        let key = SigningKey::from_pkcs8_pem(&text).map_err(|_| ArchiveError::NoPrivateKey {
            path: path.to_owned(),
        })?;
        Ok(Self(key))
    }

    /// Its id.
    pub fn id(&self) -> KeyId {
        KeyId::of(&self.0.verifying_key())
    }

    /// Writes the signature beside what is signed, in the place of an earlier one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn sign(&self, source: &Path, signed: Signed) -> Result<PathBuf, ArchiveError> {
        let written = Written {
            algorithm: ALGORITHM.to_owned(),
            key: self.id().to_string(),
            signature: BASE64.encode(self.0.sign(&signed.message()).to_bytes()),
        };
        let path = signature_path(source);
        let text = serde_json::to_string(&written).map_err(std::io::Error::from);
        text.and_then(|text| fs::write(&path, text + "\n"))
            .doing("write", &path)?;
        Ok(path)
    }
}

fn write_new(path: &Path, mode: u32, text: &str) -> Result<(), ArchiveError> {
    use fs_err::os::unix::fs::OpenOptionsExt as _;
    fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .doing("create", path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn digest(text: &str) -> Digest {
        Digest::of(Sha256::new_with_prefix(text))
    }

    fn keys(folder: &Path, name: &str) -> (PrivateKey, PathBuf) {
        let (private, public) = (folder.join(name), folder.join(format!("{name}.pub")));
        (PrivateKey::create(&private, &public).unwrap(), public)
    }

    #[test]
    fn only_what_a_trusted_key_signed_counts() {
        let folder = tempfile::tempdir().unwrap();
        let (ours, public) = keys(folder.path(), "ours");
        let (theirs, _) = keys(folder.path(), "theirs");
        let trusted = TrustedKeys::read([public.as_path()].into_iter()).unwrap();
        assert_eq!(trusted.ids(), [ours.id()]);
        let archive = folder.path().join("m.mar");
        let signed = Signed::Archive(digest("a"));
        assert_eq!(
            trusted.check(signed, None).unwrap_err(),
            SignatureFault::Missing
        );
        ours.sign(&archive, signed).unwrap();
        let text = read_signature(&archive).unwrap();
        assert_eq!(trusted.check(signed, text.as_deref()), Ok(ours.id()));
        let of_another = Err(SignatureFault::Mismatch(ours.id()));
        for other in [Signed::Archive(digest("b")), Signed::Folder(digest("a"))] {
            assert_eq!(trusted.check(other, text.as_deref()), of_another);
        }
        // Their signature under our name.
        theirs.sign(&archive, signed).unwrap();
        let text = read_signature(&archive).unwrap().unwrap();
        let unknown = SignatureFault::UnknownKey(theirs.id().to_string());
        assert_eq!(trusted.check(signed, Some(&text)), Err(unknown));
        let forged = text.replace(&theirs.id().to_string(), &ours.id().to_string());
        assert_eq!(trusted.check(signed, Some(&forged)), of_another);
        for bad in ["", "{}", "null", &text.replace("ed25519", "none")] {
            let fault = trusted.check(signed, Some(bad)).unwrap_err();
            assert!(matches!(fault, SignatureFault::Malformed(_)), "{bad}");
        }
    }

    #[test]
    fn keys_are_kept_apart_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let (key, public) = keys(folder.path(), "k");
        let private = folder.path().join("k");
        let mode = fs::metadata(&private).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(PrivateKey::read(&private).unwrap().id(), key.id());
        assert!(PrivateKey::read(&public).is_err());
        assert!(
            PrivateKey::create(&private, &public).is_err(),
            "never replaced"
        );
        let (other, _) = keys(folder.path(), "other");
        let both = TrustedKeys::read([folder.path()].into_iter()).unwrap();
        assert_eq!(both.ids(), [key.id(), other.id()]);
        for not in [private, folder.path().join("none")] {
            assert!(TrustedKeys::read([not.as_path()].into_iter()).is_err());
        }
    }
}
