//! Keys that the operator chose: values of settings, and a file that is read again when it changes.

use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::RwLock;
use secrecy::SecretString;

use super::keys::{Bearer, Key, Keys, TokenKind, check};

/// How often a request may look whether the file has changed.
const LOOKED_AT_EVERY: Duration = Duration::from_secs(1);

/// The largest file of keys that is read.
const MOST_BYTES: u64 = 1 << 20;

/// Where the operator's keys are.
#[derive(Debug, Clone, Default)]
pub(crate) struct KeySources {
    /// `token_file`.
    pub(crate) file: Option<PathBuf>,
    /// `inference_token` and `management_token`.
    pub(crate) fixed: Vec<(TokenKind, SecretString)>,
}

impl KeySources {
    /// Whether the operator chose none.
    pub(crate) fn is_empty(&self) -> bool {
        self.file.is_none() && self.fixed.is_empty()
    }

    /// The keys of one setting: text between commas.
    ///
    /// # Errors
    /// One that can be none; never with its text.
    pub(crate) fn add(&mut self, kind: TokenKind, text: &str) -> Result<(), String> {
        let keys = text.split(',').map(str::trim).filter(|key| !key.is_empty());
        for key in keys {
            let key = SecretString::from(key);
            check(&key).map_err(|reason| format!("a key of it {reason}"))?;
            self.fixed.push((kind, key));
        }
        Ok(())
    }
}

/// The operator's keys.
pub(crate) struct GivenKeys {
    fixed: Keys,
    file: Option<KeyFile>,
}

struct KeyFile {
    path: PathBuf,
    state: RwLock<State>,
}

struct State {
    keys: Keys,
    stamp: Option<Stamp>,
    looked_at: Instant,
}

/// What changes with a file's content, or with the file that a link leads to.
type Stamp = (u64, u64, u64, i64, i64);

impl GivenKeys {
    /// Reads the file, if there is one.
    ///
    /// # Errors
    /// It cannot be read, or holds no keys.
    pub(crate) fn read(sources: KeySources) -> Result<Self, String> {
        let fixed = sources.fixed.into_iter().map(|(kind, text)| Key {
            kind,
            text,
            expires: None,
        });
        let file = sources.file.map(|path| {
            let (keys, stamp) = read_file(&path)?;
            let state = RwLock::new(State {
                keys,
                stamp,
                looked_at: Instant::now(),
            });
            Ok::<_, String>(KeyFile { path, state })
        });
        let given = Self {
            fixed: Keys(fixed.collect()),
            file: file.transpose()?,
        };
        for (kind, name) in [
            (TokenKind::Inference, "inference"),
            (TokenKind::Management, "management"),
        ] {
            let in_file = |file: &KeyFile| !file.state.read().keys.lacks(kind);
            if given.fixed.lacks(kind) && !given.file.as_ref().is_some_and(in_file) {
                tracing::warn!("no key for the {name} API was given, so nobody can use it");
            }
        }
        Ok(given)
    }

    pub(super) fn bearer(&self, header: Option<&str>) -> Bearer {
        let now = SystemTime::now();
        let fixed = self.fixed.bearer(header, now);
        match &self.file {
            Some(file) => fixed.and(file.bearer(header, now)),
            None => fixed,
        }
    }
}

impl KeyFile {
    fn bearer(&self, header: Option<&str>, now: SystemTime) -> Bearer {
        if self.state.read().looked_at.elapsed() >= LOOKED_AT_EVERY {
            self.look_again();
        }
        self.state.read().keys.bearer(header, now)
    }

    /// Takes the keys of a file that has changed. Of one that cannot be read the old keys stay: half a
    /// rotation must not lock everybody out.
    fn look_again(&self) {
        let mut state = self.state.write();
        // Another request may have been first.
        if state.looked_at.elapsed() < LOOKED_AT_EVERY {
            return;
        }
        state.looked_at = Instant::now();
        let stamp = stamp(&self.path);
        if stamp == state.stamp {
            return;
        }
        let shown = self.path.display();
        match read_file(&self.path) {
            Ok((keys, stamp)) => {
                tracing::info!(
                    "`{shown}` has changed; its {} keys are in force",
                    keys.0.len()
                );
                (state.keys, state.stamp) = (keys, stamp);
            }
            Err(reason) => {
                tracing::error!(
                    "`{shown}` has changed, and the keys it had stay in force: {reason}"
                );
                state.stamp = stamp;
            }
        }
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let found = fs_err::metadata(path).ok()?;
    Some((
        found.dev(),
        found.ino(),
        found.len(),
        found.ctime(),
        found.ctime_nsec(),
    ))
}

fn read_file(path: &Path) -> Result<(Keys, Option<Stamp>), String> {
    // Before the content: what is written in between is read again.
    let stamp = stamp(path);
    let mut text = String::new();
    fs_err::File::open(path)
        .and_then(|file| file.take(MOST_BYTES + 1).read_to_string(&mut text))
        .map_err(|error| error.to_string())?;
    if text.len() as u64 > MOST_BYTES {
        return Err(format!("it is larger than {MOST_BYTES} bytes"));
    }
    Ok((Keys::of_file(&text)?, stamp))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(key: &str) -> String {
        format!(r#"{{"inference": {{"key": "{key}"}}}}"#)
    }

    #[test]
    fn settings_and_the_file_count_together_and_the_file_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        fs_err::write(&path, told("first-key")).unwrap();
        let mut sources = KeySources {
            file: Some(path.clone()),
            ..KeySources::default()
        };
        sources
            .add(TokenKind::Inference, "fixed-one, fixed-two")
            .unwrap();
        let keys = GivenKeys::read(sources).unwrap();
        let good = |key: &str| {
            // As if the time had passed.
            let file = keys.file.as_ref().unwrap();
            file.state.write().looked_at -= LOOKED_AT_EVERY;
            keys.bearer(Some(&format!("Bearer {key}"))) == Bearer::of(TokenKind::Inference)
        };
        assert!(good("first-key") && good("fixed-one") && good("fixed-two"));
        let beside = folder.path().join("beside");
        fs_err::write(&beside, told("second-key")).unwrap();
        fs_err::rename(&beside, &path).unwrap();
        assert!(good("second-key") && !good("first-key") && good("fixed-one"));
        fs_err::write(&path, "{").unwrap();
        assert!(good("second-key"), "what cannot be read replaces nothing");
        fs_err::remove_file(&path).unwrap();
        assert!(good("second-key"));
        fs_err::write(&path, told("third-key")).unwrap();
        assert!(good("third-key") && !good("second-key"));
    }

    #[test]
    fn a_file_that_is_none_ends_the_start() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().join("none"), folder.path().to_owned()] {
            let sources = KeySources {
                file: Some(path),
                ..KeySources::default()
            };
            assert!(GivenKeys::read(sources).is_err());
        }
        let mut sources = KeySources::default();
        let reason = sources
            .add(TokenKind::Api, "long-enough,short")
            .unwrap_err();
        assert!(
            !reason.contains("short,") && !reason.contains("`short`"),
            "{reason}"
        );
    }
}
