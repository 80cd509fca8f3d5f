//! Keys and what they are good for: how a request shows one, how it is compared, and the form that
//! files tell keys in (*torchserve-contract* 5.7).

use std::time::{Duration, SystemTime};

use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use subtle::{Choice, ConstantTimeEq as _};

/// The fewest characters of a key that the operator chose: those of TorchServe's own.
const FEWEST_CHARACTERS: usize = 8;

/// What a token is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenKind {
    /// The inference API.
    Inference,
    /// The management API.
    Management,
    /// Replacing one of the others; never expires unless its file says so.
    Api,
}

/// What the sender of a request may do, as far as its token tells. The operator may have chosen one
/// key for several kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bearer(u8);

impl Bearer {
    /// No token, an unknown or an expired one.
    pub(crate) const NOBODY: Self = Self(0);

    /// The holder of one key.
    pub(crate) const fn of(kind: TokenKind) -> Self {
        Self(1 << kind as u8)
    }

    /// What two holders may do together.
    pub(super) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether one of its keys is of this kind.
    pub(crate) const fn holds(self, kind: TokenKind) -> bool {
        self.0 & Self::of(kind).0 != 0
    }
}

/// One key.
#[derive(Debug)]
pub(crate) struct Key {
    pub(super) kind: TokenKind,
    pub(super) text: SecretString,
    /// From when on it is good for nothing.
    pub(super) expires: Option<SystemTime>,
}

/// Keys that are in force together.
#[derive(Debug, Default)]
pub(crate) struct Keys(pub(super) Vec<Key>);

impl Keys {
    /// Whose key the value of an `Authorization` header holds. Every key is looked at to its end, so
    /// that the time tells nothing about any.
    pub(super) fn bearer(&self, header: Option<&str>, now: SystemTime) -> Bearer {
        let Some(shown) = header.and_then(shown_key) else {
            return Bearer::NOBODY;
        };
        let held = self.0.iter().fold(0, |held, key| {
            let same = shown.as_bytes().ct_eq(key.text.expose_secret().as_bytes());
            let alive = Choice::from(u8::from(key.expires.is_none_or(|end| now < end)));
            held | (Bearer::of(key.kind).0 * (same & alive).unwrap_u8())
        });
        Bearer(held)
    }

    /// Whether nobody can show a key of this kind.
    pub(super) fn lacks(&self, kind: TokenKind) -> bool {
        !self.0.iter().any(|key| key.kind == kind)
    }

    /// The keys of a file in the form of TorchServe's, where a kind may also have a list of them.
    pub(super) fn of_file(text: &str) -> Result<Self, String> {
        // The parser's words are not passed on: they could show a part of a key.
        let told: Told = serde_json::from_str(text).map_err(|error| {
            format!(
                "line {} is not of the form {{\"inference\": {{\"key\": …, \"expiration time\": …}}, \
                 \"management\": …, \"API\": …}}, where a kind may also have a list of keys",
                error.line()
            )
        })?;
        let kinds = [
            (TokenKind::Inference, "inference", told.inference),
            (TokenKind::Management, "management", told.management),
            (TokenKind::Api, "API", told.api),
        ];
        let mut keys = Vec::new();
        for (kind, name, listed) in kinds {
            for told in listed.map(OneOrMore::into_list).unwrap_or_default() {
                check(&told.key).map_err(|reason| format!("a key of `{name}` {reason}"))?;
                let expires = told.expires.map(|time| {
                    end_of(&time).ok_or_else(|| {
                        format!(
                            "the `expiration time` `{time}` of `{name}` is not a time such as \
                             `2030-01-31T12:00:00Z`"
                        )
                    })
                });
                keys.push(Key {
                    kind,
                    text: told.key,
                    expires: expires.transpose()?,
                });
            }
        }
        if keys.is_empty() {
            return Err("it holds no key".to_owned());
        }
        Ok(Self(keys))
    }
}

/// Whether this can be a key, and one that is not guessed at once.
pub(crate) fn check(key: &SecretString) -> Result<(), String> {
    let text = key.expose_secret();
    if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("has characters that cannot stand in a header, or blanks".to_owned());
    }
    if text.len() < FEWEST_CHARACTERS {
        return Err(format!(
            "has {} characters, fewer than {FEWEST_CHARACTERS}: it could be guessed",
            text.len()
        ));
    }
    Ok(())
}

/// The instant; what was before 1970 is over in any case.
fn end_of(time: &str) -> Option<SystemTime> {
    let time: jiff::Timestamp = time.parse().ok()?;
    let millis = u64::try_from(time.as_millisecond()).unwrap_or(0);
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(millis))
}

/// The key of a header that matches `^Bearer\s+(\S+)$`.
fn shown_key(header: &str) -> Option<&str> {
    let rest = header.strip_prefix("Bearer")?;
    let key = rest.trim_start();
    let parted = key.len() < rest.len();
    (parted && !key.is_empty() && !key.contains(char::is_whitespace)).then_some(key)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Told {
    inference: Option<OneOrMore>,
    management: Option<OneOrMore>,
    #[serde(rename = "API")]
    api: Option<OneOrMore>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMore {
    One(ToldKey),
    More(Vec<ToldKey>),
}

impl OneOrMore {
    fn into_list(self) -> Vec<ToldKey> {
        match self {
            Self::One(key) => vec![key],
            Self::More(keys) => keys,
        }
    }
}

#[derive(Deserialize)]
struct ToldKey {
    #[serde(deserialize_with = "secret")]
    key: SecretString,
    #[serde(rename = "expiration time")]
    expires: Option<String>,
}

fn secret<'de, D: serde::Deserializer<'de>>(from: D) -> Result<SecretString, D::Error> {
    String::deserialize(from).map(SecretString::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Keys {
        Keys::of_file(text).unwrap()
    }

    #[test]
    fn a_header_has_one_key_after_blanks() {
        let keys = keys(r#"{"inference": {"key": "inference-key"}}"#);
        let bearer = |header: &str| keys.bearer(Some(header), SystemTime::now());
        for good in [
            "Bearer inference-key",
            "Bearer   inference-key",
            "Bearer\tinference-key",
        ] {
            assert!(bearer(good).holds(TokenKind::Inference), "{good}");
        }
        for bad in [
            "",
            "Bearer",
            "Bearer ",
            "Bearerinference-key",
            "bearer inference-key",
            " Bearer inference-key",
            "Bearer inference-key x",
            "Bearer inference-ke",
            "Bearer inference-key-",
            "Basic inference-key",
            "inference-key",
        ] {
            assert_eq!(bearer(bad), Bearer::NOBODY, "{bad}");
        }
        assert_eq!(keys.bearer(None, SystemTime::now()), Bearer::NOBODY);
    }

    #[test]
    fn a_kind_may_have_several_keys_and_a_key_several_kinds() {
        let keys = keys(
            r#"{"inference": [{"key": "the-old-one", "expiration time": "2001-01-01T00:00:00Z"},
                              {"key": "the-new-one", "expiration time": "2999-01-01T00:00:00Z"},
                              {"key": "the-other-one"}],
                "management": {"key": "the-other-one"}}"#,
        );
        let of = |key: &str| keys.bearer(Some(&format!("Bearer {key}")), SystemTime::now());
        assert_eq!(of("the-old-one"), Bearer::NOBODY, "it has ended");
        assert_eq!(of("the-new-one"), Bearer::of(TokenKind::Inference));
        let both = of("the-other-one");
        assert!(both.holds(TokenKind::Inference) && both.holds(TokenKind::Management));
        assert!(!both.holds(TokenKind::Api) && keys.lacks(TokenKind::Api));
    }

    #[test]
    fn what_is_wrong_with_a_file_is_told_without_its_keys() {
        for bad in [
            "",
            "{}",
            "[]",
            r#"{"inference": "long-secret"}"#,
            r#"{"inferenc": {"key": "long-secret"}}"#,
            r#"{"inference": {"key": "secret"}}"#,
            r#"{"inference": {"key": "long secret"}}"#,
            r#"{"inference": {"key": "long-secret", "expiration time": "soon"}}"#,
        ] {
            let reason = Keys::of_file(bad).unwrap_err();
            assert!(!reason.contains("secret"), "{bad}: {reason}");
        }
        let shown = format!("{:?}", keys(r#"{"API": {"key": "long-secret"}}"#));
        assert!(
            !shown.contains("secret-") && !shown.contains("long"),
            "{shown}"
        );
    }
}
