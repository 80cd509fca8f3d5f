//! Parameters of management calls: from the query string, or from a JSON body with the same names.
//! Read as leniently as TorchServe does (*torchserve-contract* 5.2, 5.3, 13.2).

use std::str::FromStr;

use super::RestError;
use crate::settings::raw::nearest;

/// Bytes that a JSON body of parameters may have, and how deep it may nest: it is one object of
/// short texts, and the lenient parser descends as deep as it is led.
const MAX_JSON_BYTES: usize = 64 << 10;
const MAX_JSON_DEPTH: usize = 16;

/// Unknown parameters told one by one; a client can name any number.
const TOLD: usize = 5;

/// The longest name worth comparing with the known ones.
const COMPARED_BYTES: usize = 40;

/// Parameters by name; of several with one name the first counts.
#[derive(Debug, Default)]
pub(crate) struct Parameters(Vec<(String, String)>);

impl Parameters {
    /// Reads a query string.
    pub(crate) fn of_query(query: &str) -> Self {
        Self(
            form_urlencoded::parse(query.as_bytes())
                .into_owned()
                .collect(),
        )
    }

    /// Reads a JSON object, or what people write for one: single quotes, bare keys. Numbers and
    /// truth values count as their text.
    ///
    /// # Errors
    /// The parser's words.
    pub(crate) fn of_json(body: &[u8]) -> Result<Self, RestError> {
        let bad = |reason: String| RestError::BadJson { reason };
        if body.len() > MAX_JSON_BYTES {
            return Err(bad(format!("it is over {MAX_JSON_BYTES} bytes")));
        }
        let text = std::str::from_utf8(body).map_err(|error| bad(error.to_string()))?;
        if depth(text) > MAX_JSON_DEPTH {
            return Err(bad(format!("it nests deeper than {MAX_JSON_DEPTH}")));
        }
        let object = serde_json::from_str(text).or_else(|strict: serde_json::Error| {
            json5::from_str(text).map_err(|_| bad(strict.to_string()))
        })?;
        let serde_json::Value::Object(members) = object else {
            return Err(bad("it is another kind of value".to_owned()));
        };
        let text = |value: serde_json::Value| match value {
            serde_json::Value::Null => None,
            serde_json::Value::String(text) => Some(text),
            other => Some(other.to_string()),
        };
        let named = members
            .into_iter()
            .filter_map(|(name, value)| Some((name, text(value)?)));
        Ok(Self(named.collect()))
    }

    /// The text of a parameter.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(given, _)| given == name)
            .map(|(_, value)| value.as_str())
    }

    /// Every value of a parameter.
    pub(crate) fn all<'p>(&'p self, name: &'p str) -> impl Iterator<Item = &'p str> {
        self.0
            .iter()
            .filter(move |(given, _)| given == name)
            .map(|(_, value)| value.as_str())
    }

    /// A whole number; what is none counts as absent.
    pub(crate) fn number(&self, name: &str) -> Option<i64> {
        self.get(name)
            .and_then(|text| i64::from_str(text.trim()).ok())
    }

    /// Whether a parameter says `true`; what is absent counts as `default`.
    pub(crate) fn flag(&self, name: &str, default: bool) -> bool {
        self.get(name)
            .map_or(default, |text| text.eq_ignore_ascii_case("true"))
    }

    /// Parameters that nothing reads.
    pub(crate) fn unknown(&self, known: &[&str]) -> impl Iterator<Item = (&str, &str)> {
        self.0
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .filter(|(name, _)| !known.contains(name))
    }

    /// Warns of parameters that nothing reads.
    pub(crate) fn warn_unknown(&self, known: &[&str]) {
        let unknown = || self.unknown(known);
        for (name, _) in unknown().take(TOLD) {
            let shown = shown(name);
            let near = if name.len() > COMPARED_BYTES {
                None
            } else {
                nearest(name, known.iter().copied())
            };
            match near {
                Some(near) => tracing::warn!(
                    "unknown query parameter `{shown}` is ignored. Did you mean `{near}`?"
                ),
                None => tracing::warn!("unknown query parameter `{shown}` is ignored"),
            }
        }
        let more = unknown().count().saturating_sub(TOLD);
        if more > 0 {
            tracing::warn!("{more} more unknown query parameters are ignored");
        }
    }

    /// The parameters as pairs.
    pub(crate) fn into_pairs(self) -> Vec<(String, String)> {
        self.0
    }
}

/// A name as it is told. It is the client's: shortened, and without what would break the line.
pub(crate) fn shown(name: &str) -> String {
    name.chars().take(60).flat_map(char::escape_debug).collect()
}

/// How deep brackets nest at most. Those inside texts count too: a parameter has few.
fn depth(text: &str) -> usize {
    let mut open = 0_usize;
    let mut deepest = 0;
    for byte in text.bytes() {
        match byte {
            b'[' | b'{' => {
                open += 1;
                deepest = deepest.max(open);
            }
            b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

#[cfg(test)]
mod tests {
    #[test]
    fn json_that_nests_without_end_is_refused_before_it_is_parsed() {
        for unit in ["[", "{a:", "[1,[", "{'a':["] {
            for body in [unit.repeat(10_000), format!("{{'url': {}", unit.repeat(30))] {
                let refused = Parameters::of_json(body.as_bytes());
                assert!(matches!(refused, Err(RestError::BadJson { .. })), "{unit}");
            }
        }
    }

    use super::*;

    #[test]
    fn what_is_no_number_counts_as_absent() {
        let query = Parameters::of_query("a=7&b=dd&c=&d=-1&e=1.5&a=8&f=99999999999999999999");
        let number = |name| query.number(name);
        assert_eq!((number("a"), number("d")), (Some(7), Some(-1)));
        for absent in ["b", "c", "e", "f", "g"] {
            assert_eq!(number(absent), None, "{absent}");
        }
    }

    #[test]
    fn only_the_word_is_true() {
        let query = Parameters::of_query("a=TRUE&b=1&c=-1");
        assert!(query.flag("a", false) && !query.flag("b", true) && !query.flag("c", true));
        assert!(query.flag("d", true) && !query.flag("d", false));
    }

    #[test]
    fn json_is_read_as_people_write_it() {
        let forms = [
            r#"{"url": "x.mar", "initial_workers": 1, "synchronous": true, "handler": null}"#,
            "{'url': 'x.mar', 'initial_workers': '1', 'synchronous': 'true'}",
            "{url: 'x.mar', initial_workers: \"1\", synchronous: true,}",
        ];
        for form in forms {
            let json = Parameters::of_json(form.as_bytes()).unwrap();
            assert_eq!(json.get("url"), Some("x.mar"), "{form}");
            assert_eq!(json.number("initial_workers"), Some(1), "{form}");
            assert!(json.flag("synchronous", false), "{form}");
            assert_eq!(json.get("handler"), None, "{form}");
        }
    }

    #[test]
    fn json_that_is_none_is_refused() {
        for bad in [&b"{"[..], b"", b"[]", b"1", b"\xff"] {
            let error = Parameters::of_json(bad).unwrap_err();
            assert!(matches!(error, RestError::BadJson { .. }), "{error:?}");
        }
    }
}
