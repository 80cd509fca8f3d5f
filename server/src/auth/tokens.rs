//! The tokens and the file they are told in (*torchserve-contract* 5.7).

use std::io::{Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;

/// The file, in the folder that the server was started in.
pub(crate) const KEY_FILE: &str = "key_file.json";

/// Random bytes in a token. TorchServe has 6, which can be guessed.
const TOKEN_BYTES: usize = 24;

/// What a token is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// The inference API.
    Inference,
    /// The management API.
    Management,
    /// Replacing one of the others; never expires.
    Api,
}

/// Who sent a request, as far as its token tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bearer {
    /// No token, an unknown or an expired one.
    Nobody,
    /// The holder of this token.
    Of(TokenKind),
}

struct Token {
    text: String,
    expires: SystemTime,
}

struct Current {
    inference: Token,
    management: Token,
    api: String,
}

/// The tokens in force.
pub(crate) struct Tokens {
    lifetime: Duration,
    file: PathBuf,
    current: Mutex<Current>,
}

impl Tokens {
    /// Makes tokens and writes their file, which only the server's user can read.
    ///
    /// # Errors
    /// The file cannot be written, or the system has no randomness.
    pub(crate) fn create(file: PathBuf, lifetime: Duration) -> std::io::Result<Self> {
        let current = Current {
            inference: Token::fresh(lifetime)?,
            management: Token::fresh(lifetime)?,
            api: random_text()?,
        };
        let tokens = Self {
            lifetime,
            file,
            current: Mutex::new(current),
        };
        tokens.write(&tokens.current.lock())?;
        Ok(tokens)
    }

    /// Whose token the value of an `Authorization` header holds.
    pub(crate) fn bearer(&self, header: Option<&str>) -> Bearer {
        let Some(text) = header.and_then(|header| header.strip_prefix("Bearer ")) else {
            return Bearer::Nobody;
        };
        let text = text.trim_start();
        let current = self.current.lock();
        let now = SystemTime::now();
        if equal(text, &current.inference.text) && now < current.inference.expires {
            Bearer::Of(TokenKind::Inference)
        } else if equal(text, &current.management.text) && now < current.management.expires {
            Bearer::Of(TokenKind::Management)
        } else if equal(text, &current.api) {
            Bearer::Of(TokenKind::Api)
        } else {
            Bearer::Nobody
        }
    }

    /// Replaces a token. The new one is told in the file only.
    ///
    /// # Errors
    /// As for [`Tokens::create`]; the old token stays in force.
    pub(crate) fn renew(&self, kind: TokenKind) -> std::io::Result<()> {
        let mut current = self.current.lock();
        let fresh = Token::fresh(self.lifetime)?;
        let place = match kind {
            TokenKind::Inference => &mut current.inference,
            TokenKind::Management => &mut current.management,
            TokenKind::Api => {
                current.api = fresh.text;
                return self.write(&current);
            }
        };
        let old = std::mem::replace(place, fresh);
        let written = self.write(&current);
        if written.is_err() {
            match kind {
                TokenKind::Inference => current.inference = old,
                TokenKind::Management | TokenKind::Api => current.management = old,
            }
        }
        written
    }

    fn write(&self, current: &Current) -> std::io::Result<()> {
        let expiring = |token: &Token| serde_json::json!({"key": token.text, "expiration time": iso(token.expires)});
        let text = serde_json::to_string_pretty(&serde_json::json!({
            "management": expiring(&current.management),
            "inference": expiring(&current.inference),
            "API": {"key": current.api},
        }))?;
        // Written beside and renamed: a reader never sees half a file, and whoever holds an older
        // one open cannot read the new tokens.
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

impl Token {
    fn fresh(lifetime: Duration) -> std::io::Result<Self> {
        // A lifetime beyond what the clock can tell is for ever.
        let expires = SystemTime::now()
            .checked_add(lifetime)
            .unwrap_or(SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799));
        Ok(Self {
            text: random_text()?,
            expires,
        })
    }
}

fn random_text() -> std::io::Result<String> {
    let mut bytes = [0; TOKEN_BYTES];
    fs_err::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn iso(time: SystemTime) -> String {
    jiff::Timestamp::try_from(time)
        .map(|time| time.to_string())
        .unwrap_or_default()
}

/// Compares in a time that does not depend on where the texts differ.
fn equal(given: &str, expected: &str) -> bool {
    given.len() == expected.len()
        && given
            .bytes()
            .zip(expected.bytes())
            .fold(0, |diff, (a, b)| diff | (a ^ b))
            == 0
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn told(file: &std::path::Path, kind: &str) -> String {
        let text = fs_err::read_to_string(file).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        json[kind]["key"].as_str().unwrap().to_owned()
    }

    fn bearer(tokens: &Tokens, token: &str) -> Bearer {
        tokens.bearer(Some(&format!("Bearer {token}")))
    }

    #[test]
    fn the_file_tells_tokens_that_work_and_is_private() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(KEY_FILE);
        let tokens = Tokens::create(file.clone(), Duration::from_secs(60)).unwrap();
        assert_eq!(
            fs_err::metadata(&file).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let kinds = [
            ("inference", TokenKind::Inference),
            ("management", TokenKind::Management),
            ("API", TokenKind::Api),
        ];
        for (name, kind) in kinds {
            assert_eq!(bearer(&tokens, &told(&file, name)), Bearer::Of(kind));
        }
        let inference = told(&file, "inference");
        for wrong in ["", "Bearer", "Bearer ", "bearer x", &inference, "Bearer x"] {
            assert_eq!(tokens.bearer(Some(wrong)), Bearer::Nobody, "{wrong}");
        }
        assert_eq!(tokens.bearer(None), Bearer::Nobody);
    }

    #[test]
    fn a_renewed_token_replaces_the_old_one() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(KEY_FILE);
        let tokens = Tokens::create(file.clone(), Duration::from_secs(60)).unwrap();
        let old = told(&file, "management");
        tokens.renew(TokenKind::Management).unwrap();
        assert_eq!(bearer(&tokens, &old), Bearer::Nobody);
        let new = told(&file, "management");
        assert_eq!(bearer(&tokens, &new), Bearer::Of(TokenKind::Management));
    }

    #[test]
    fn a_token_expires_and_the_api_token_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(KEY_FILE);
        let tokens = Tokens::create(file.clone(), Duration::ZERO).unwrap();
        assert_eq!(bearer(&tokens, &told(&file, "inference")), Bearer::Nobody);
        assert_eq!(
            bearer(&tokens, &told(&file, "API")),
            Bearer::Of(TokenKind::Api)
        );
    }
}
