//! Keys that the server makes itself, and the file they are told in (*torchserve-contract* 5.7).

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use parking_lot::RwLock;
use secrecy::{ExposeSecret as _, SecretString};

use super::keys::{Bearer, Key, Keys, TokenKind};

/// The file, in the folder that the server was started in.
pub(crate) const KEY_FILE: &str = "key_file.json";

/// Random bytes in a key. TorchServe has 6, which can be guessed.
const KEY_BYTES: usize = 24;

/// The server's own keys: one of each kind.
pub(crate) struct OwnKeys {
    lifetime: Duration,
    file: PathBuf,
    keys: RwLock<Keys>,
}

impl OwnKeys {
    /// Makes keys and writes their file, which only the server's user can read.
    ///
    /// # Errors
    /// The file cannot be written, or the system has no randomness.
    pub(crate) fn create(file: PathBuf, lifetime: Duration) -> io::Result<Self> {
        let keys = Keys(vec![
            expiring(TokenKind::Management, lifetime)?,
            expiring(TokenKind::Inference, lifetime)?,
            Key {
                kind: TokenKind::Api,
                text: random_text()?,
                expires: None,
            },
        ]);
        let own = Self {
            lifetime,
            file,
            keys: RwLock::new(keys),
        };
        own.write(&own.keys.read())?;
        Ok(own)
    }

    pub(super) fn bearer(&self, header: Option<&str>) -> Bearer {
        self.keys.read().bearer(header, SystemTime::now())
    }

    /// Replaces a key. The new one is told in the file only.
    ///
    /// # Errors
    /// As for [`OwnKeys::create`]; the old key stays in force.
    pub(super) fn renew(&self, kind: TokenKind) -> io::Result<()> {
        let fresh = expiring(kind, self.lifetime)?;
        let mut keys = self.keys.write();
        let Some(place) = keys.0.iter().position(|key| key.kind == kind) else {
            return Ok(());
        };
        let old = std::mem::replace(&mut keys.0[place], fresh);
        self.write(&keys).inspect_err(|_| keys.0[place] = old)
    }

    fn write(&self, keys: &Keys) -> io::Result<()> {
        let mut told = serde_json::Map::new();
        for key in &keys.0 {
            let name = match key.kind {
                TokenKind::Management => "management",
                TokenKind::Inference => "inference",
                TokenKind::Api => "API",
            };
            let mut entry = serde_json::json!({"key": key.text.expose_secret()});
            if let Some(expires) = key.expires {
                entry["expiration time"] = iso(expires).into();
            }
            told.insert(name.to_owned(), entry);
        }
        let text = serde_json::to_string_pretty(&told)?;
        // Written beside and renamed: a reader never sees half a file, and whoever holds an older
        // one open cannot read the new keys.
        let beside = self
            .file
            .with_extension(format!("{}.tmp", std::process::id()));
        let _leftover = fs_err::remove_file(&beside);
        let mut file = std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&beside)?;
        file.write_all(text.as_bytes())?;
        fs_err::rename(beside, &self.file)
    }
}

fn expiring(kind: TokenKind, lifetime: Duration) -> io::Result<Key> {
    // A lifetime beyond what the clock can tell is for ever.
    let expires = SystemTime::now()
        .checked_add(lifetime)
        .unwrap_or(SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799));
    Ok(Key {
        kind,
        text: random_text()?,
        expires: Some(expires),
    })
}

fn random_text() -> io::Result<SecretString> {
    let mut bytes = [0; KEY_BYTES];
    fs_err::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(text.into())
}

fn iso(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time)
        .map(|time| time.to_string())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    use super::*;

    fn told(file: &Path, kind: &str) -> String {
        let text = fs_err::read_to_string(file).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json[kind]["key"].as_str().unwrap().to_owned()
    }

    fn bearer(keys: &OwnKeys, key: &str) -> Bearer {
        keys.bearer(Some(&format!("Bearer {key}")))
    }

    fn made(lifetime: Duration) -> (tempfile::TempDir, PathBuf, OwnKeys) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(KEY_FILE);
        let keys = OwnKeys::create(file.clone(), lifetime).unwrap();
        (folder, file, keys)
    }

    #[test]
    fn the_file_tells_keys_that_work_and_is_private() {
        let (_folder, file, keys) = made(Duration::from_secs(60));
        let mode = fs_err::metadata(&file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        for (name, kind) in [
            ("inference", TokenKind::Inference),
            ("management", TokenKind::Management),
            ("API", TokenKind::Api),
        ] {
            assert_eq!(bearer(&keys, &told(&file, name)), Bearer::of(kind));
        }
        // It may be given to the next server as its operator's.
        let text = fs_err::read_to_string(&file).unwrap();
        assert_eq!(Keys::of_file(&text).unwrap().0.len(), 3);
    }

    #[test]
    fn a_renewed_key_replaces_the_old_one() {
        let (folder, file, keys) = made(Duration::from_secs(60));
        let old = told(&file, "management");
        keys.renew(TokenKind::Management).unwrap();
        assert_eq!(bearer(&keys, &old), Bearer::NOBODY);
        let new = told(&file, "management");
        assert_eq!(bearer(&keys, &new), Bearer::of(TokenKind::Management));
        drop(folder);
        keys.renew(TokenKind::Management).unwrap_err();
        assert_eq!(
            bearer(&keys, &new),
            Bearer::of(TokenKind::Management),
            "a key that nobody was told of replaces none"
        );
    }

    #[test]
    fn a_key_expires_and_that_of_the_api_does_not() {
        let (_folder, file, keys) = made(Duration::ZERO);
        assert_eq!(bearer(&keys, &told(&file, "inference")), Bearer::NOBODY);
        let api = Bearer::of(TokenKind::Api);
        assert_eq!(bearer(&keys, &told(&file, "API")), api);
    }
}
