//! Names that come from the network. Each type is checked when it is built, so whoever holds one
//! may use it in a path, a log line or a label without looking again.

use std::borrow::Borrow;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The longest model name or version, in bytes.
const MAX_ID_BYTES: usize = 200;

/// Why a text is not a model name or a version.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} `{shown}` is not valid: {reason}")]
pub struct IdError {
    what: &'static str,
    shown: String,
    reason: &'static str,
}

fn checked(what: &'static str, text: &str) -> Result<Arc<str>, IdError> {
    let reason = if text.is_empty() {
        "it is empty"
    } else if text.len() > MAX_ID_BYTES {
        "it is longer than 200 bytes"
    } else if text.starts_with(['-', '.']) {
        "it may not start with `-` or `.`"
    } else if text.contains(['/', '\\']) {
        "it may not contain `/` or `\\`"
    } else if text.chars().any(char::is_control) {
        "it may not contain control characters"
    } else {
        return Ok(Arc::from(text));
    };
    let shown = text.chars().take(60).flat_map(char::escape_debug).collect();
    Err(IdError {
        what,
        shown,
        reason,
    })
}

macro_rules! checked_id {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks `text`: 1 to 200 bytes, no `/`, `\` or control character, no leading `-` or
            /// `.`, so that it names one path segment and never an option.
            ///
            /// # Errors
            /// [`IdError`] says which rule was broken.
            pub fn new(text: &str) -> Result<Self, IdError> {
                checked($what, text).map(Self)
            }

            /// The text as given.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = IdError;
            fn try_from(text: String) -> Result<Self, IdError> {
                Self::new(&text)
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0.to_string()
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str(&self.0)
            }
        }
    };
}

checked_id! {
    /// The name a model is registered under.
    ModelName, "model name"
}

checked_id! {
    /// One loadable revision of a model. Opaque: `1` and `1.0` are two versions
    /// (*torchserve-contract* 5.6).
    Version, "model version"
}

/// The longest id that a client may give its request, in bytes.
const MAX_REQUEST_ID_BYTES: usize = 128;

/// The name of one request: a random UUID in text form, or what its client calls it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RequestId {
    text: Arc<str>,
    of_client: bool,
}

impl RequestId {
    /// A fresh random id.
    pub fn random() -> Self {
        let mut buffer = uuid::Uuid::encode_buffer();
        let text = uuid::Uuid::new_v4().hyphenated().encode_lower(&mut buffer);
        Self {
            text: Arc::from(&*text),
            of_client: false,
        }
    }

    /// What a client calls its request: 1 to 128 letters, digits and `-._:~+=@`, no point first.
    /// `None` for anything else. Lines of metrics and logs name requests, and so do files that
    /// handlers write: nothing in an id separates fields, quotes, or leads out of a folder.
    pub fn of_client(text: &str) -> Option<Self> {
        let sane = (1..=MAX_REQUEST_ID_BYTES).contains(&text.len())
            && !text.starts_with('.')
            && text
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-._:~+=@".contains(&byte));
        sane.then(|| Self {
            text: Arc::from(text),
            of_client: true,
        })
    }

    /// Another id, recognisable as this one: `<id>~` and 16 random digits.
    #[must_use]
    pub fn with_random_end(&self) -> Self {
        let (random, _) = uuid::Uuid::new_v4().as_u64_pair();
        Self {
            text: Arc::from(format!("{}~{random:016x}", self.text)),
            of_client: false,
        }
    }

    /// Whether a client chose it, so that another request may have it too.
    pub fn is_of_client(&self) -> bool {
        self.of_client
    }

    /// The text form, as in `x-request-id`.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_leave_a_folder_or_read_as_options_are_refused() {
        let long = "x".repeat(201);
        for bad in [
            "", "..", ".", ".hidden", "-f", "a/b", "a\\b", "a\0b", "a\nb", &long,
        ] {
            assert!(ModelName::new(bad).is_err(), "{bad:?} was accepted");
            assert!(Version::new(bad).is_err(), "{bad:?} was accepted");
        }
    }

    #[test]
    fn a_client_may_name_its_request_within_bounds() {
        let longest = "x".repeat(128);
        for sane in ["1", "a-b_c.D~", "Root=1-67891233:a+b@c", "-_x=", &longest] {
            assert_eq!(RequestId::of_client(sane).unwrap().as_str(), sane);
        }
        let long = "x".repeat(129);
        for other in [
            "",
            " ",
            "a b",
            "a\tb",
            "caf\u{e9}",
            "a,b",
            "a|#b",
            "a\"b",
            "a'b",
            "{a}",
            "a;b",
            "../b",
            "a/b",
            "a\\b",
            "..",
            "$(a)",
            "<a>",
            "%00",
            &long,
        ] {
            assert_eq!(RequestId::of_client(other), None, "{other:?}");
        }
    }

    #[test]
    fn ordinary_and_non_latin_names_are_kept_as_given() {
        for good in ["resnet-18", "a.b_c", "模型", "x y", "1.0"] {
            assert_eq!(ModelName::new(good).unwrap().as_str(), good);
        }
    }

    #[test]
    fn an_error_never_repeats_control_characters_or_long_input() {
        let text = ModelName::new(&format!("a\n{}", "b".repeat(500)))
            .unwrap_err()
            .to_string();
        assert!(!text.contains('\n') && text.len() < 200, "{text}");
    }
}
