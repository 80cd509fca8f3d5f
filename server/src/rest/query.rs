//! Parameters of management calls: from the query string, or from a JSON body with the same names.
//! Read as leniently as TorchServe does (*torchserve-contract* 5.2, 5.3, 13.2).

use std::cell::RefCell;
use std::str::FromStr;

use actix_web::HttpResponse;
use actix_web::http::header::{HeaderName, HeaderValue};

use super::RestError;
use super::operations::Parameter;
use crate::settings::raw::nearest;

/// Bytes that a JSON body of parameters may have, and how deep it may nest: it is one object of
/// short texts, and the lenient parser descends as deep as it is led.
const MAX_JSON_BYTES: usize = 64 << 10;
const MAX_JSON_DEPTH: usize = 16;

/// Warnings told one by one; a client can give cause for any number.
const TOLD: usize = 5;

/// Characters of a client's own text that a warning repeats.
const SHOWN_CHARS: usize = 60;

/// Tells the caller what was not taken as it was written.
const WARNING: HeaderName = HeaderName::from_static("x-warning");

/// The longest name worth comparing with the known ones.
const COMPARED_BYTES: usize = 40;

/// Parameters by name; of several with one name the first counts.
#[derive(Debug)]
pub(crate) struct Parameters {
    given: Vec<(String, String)>,
    origin: Origin,
    warnings: RefCell<Warnings>,
}

/// Where parameters stood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// In the query, percent-encoded.
    Query,
    /// In a body, as they are.
    Body,
}

/// What a call is told besides its answer.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    told: Vec<String>,
    more: usize,
}

impl Warnings {
    /// Adds one, unless there are enough. The log has it too.
    pub(crate) fn add(&mut self, text: String) {
        if self.told.contains(&text) {
            return;
        }
        if self.told.len() < TOLD {
            tracing::warn!("{text}");
            self.told.push(text);
        } else {
            self.more += 1;
        }
    }

    /// Puts them into the response's header.
    pub(crate) fn tell(mut self, response: &mut HttpResponse) {
        if self.more > 0 {
            let more = format!("{} more", self.more);
            tracing::warn!("{more} of the call's parameters were not taken as written");
            self.told.push(more);
        }
        if self.told.is_empty() {
            return;
        }
        // What a header cannot carry is the client's, or a file's name.
        let plain = |c: char| if matches!(c, ' '..='~') { c } else { '?' };
        let text: String = self.told.join("; ").chars().map(plain).collect();
        if let Ok(value) = HeaderValue::try_from(text) {
            response.headers_mut().insert(WARNING, value);
        }
    }
}

/// A client's text, shortened, and without what would break a line.
pub(crate) fn shown(text: &str) -> String {
    let escaped = text.chars().take(SHOWN_CHARS).flat_map(char::escape_debug);
    let mut shown: String = escaped.collect();
    if text.chars().nth(SHOWN_CHARS).is_some() {
        shown.push_str("...");
    }
    shown
}

impl Parameters {
    /// Reads a query string.
    pub(crate) fn of_query(query: &str) -> Self {
        let given = form_urlencoded::parse(query.as_bytes()).into_owned();
        Self::new(given.collect(), Origin::Query)
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
        Ok(Self::new(named.collect(), Origin::Body))
    }

    fn new(given: Vec<(String, String)>, origin: Origin) -> Self {
        Self {
            given,
            origin,
            warnings: RefCell::default(),
        }
    }

    /// Where they stood.
    pub(crate) fn origin(&self) -> Origin {
        self.origin
    }

    /// The text of a parameter.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.given
            .iter()
            .find(|(given, _)| given == name)
            .map(|(_, value)| value.as_str())
    }

    /// Every value of a parameter.
    pub(crate) fn all<'p>(&'p self, name: &'p str) -> impl Iterator<Item = &'p str> {
        self.given
            .iter()
            .filter(move |(given, _)| given == name)
            .map(|(_, value)| value.as_str())
    }

    /// A whole number; what is none counts as absent.
    pub(crate) fn number(&self, name: &str) -> Option<i64> {
        let text = self.get(name)?.trim();
        let number = i64::from_str(text).ok();
        if number.is_none() && !text.is_empty() {
            self.warn(format!(
                "`{name}` is `{}`, which is not a whole number; it is left out",
                shown(text)
            ));
        }
        number
    }

    /// Whether a parameter says `true`; what is absent counts as `default`.
    pub(crate) fn flag(&self, name: &str, default: bool) -> bool {
        let Some(text) = self.get(name) else {
            return default;
        };
        let on = text.eq_ignore_ascii_case("true");
        if !on && !text.eq_ignore_ascii_case("false") {
            self.warn(format!(
                "`{name}` is `{}`, which is taken for `false`",
                shown(text)
            ));
        }
        on
    }

    /// Parameters that nothing reads.
    pub(crate) fn unknown(&self, known: &[Parameter]) -> impl Iterator<Item = &str> {
        let is_known = |name: &str| known.iter().any(|parameter| parameter.name == name);
        let names = self.given.iter().map(|(name, _)| name.as_str());
        names.filter(move |name| !is_known(name))
    }

    /// Notes what the caller is to know.
    pub(crate) fn warn(&self, text: String) {
        self.warnings.borrow_mut().add(text);
    }

    /// Notes the parameters that nothing reads.
    pub(crate) fn warn_unknown(&self, known: &[Parameter]) {
        let what = match self.origin {
            Origin::Query => "query parameter",
            Origin::Body => "member of the body",
        };
        for name in self.unknown(known) {
            let near = if name.len() > COMPARED_BYTES {
                None
            } else {
                nearest(name, known.iter().map(|parameter| parameter.name))
            };
            let name = shown(name);
            self.warn(match near {
                Some(near) => {
                    format!("unknown {what} `{name}` is ignored. Did you mean `{near}`?")
                }
                None => format!("unknown {what} `{name}` is ignored"),
            });
        }
    }

    /// Everything noted so far.
    pub(crate) fn warnings(self) -> Warnings {
        self.warnings.into_inner()
    }

    /// The parameters as pairs.
    pub(crate) fn into_pairs(self) -> Vec<(String, String)> {
        self.given
    }
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
    use super::*;
    use crate::rest::operations::SCALING;

    #[test]
    fn json_that_nests_without_end_is_refused_before_it_is_parsed() {
        for unit in ["[", "{a:", "[1,[", "{'a':["] {
            for body in [unit.repeat(10_000), format!("{{'url': {}", unit.repeat(30))] {
                let refused = Parameters::of_json(body.as_bytes());
                assert!(matches!(refused, Err(RestError::BadJson { .. })), "{unit}");
            }
        }
    }

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
    fn what_was_not_taken_as_written_is_told_in_a_header() {
        let told = |query: &str| {
            let query = Parameters::of_query(query);
            query.warn_unknown(SCALING);
            let (_number, _flag) = (query.number("min_worker"), query.flag("synchronous", true));
            let mut response = HttpResponse::Ok().finish();
            query.warnings().tell(&mut response);
            let header = response.headers().get("x-warning");
            header.map(|value| value.to_str().unwrap().to_owned())
        };
        assert_eq!(told("min_worker=2&synchronous=FALSE"), None);
        assert_eq!(told("min_worker="), None);
        assert_eq!(
            told("min_workers=3").unwrap(),
            "unknown query parameter `min_workers` is ignored. Did you mean `min_worker`?"
        );
        assert_eq!(
            told("min_worker=two&synchronous=-1").unwrap(),
            "`min_worker` is `two`, which is not a whole number; it is left out; `synchronous` is \
             `-1`, which is taken for `false`"
        );
        let hostile = told("a%0d%0ab%00ü=1").unwrap();
        assert!(hostile.contains("`a\\r\\nb\\0?`"), "{hostile}");
        let many: String = (0..500)
            .map(|n| format!("{n}{}=1&", "x".repeat(90)))
            .collect();
        let many = told(&many).unwrap();
        assert!(many.len() < 1_000 && many.ends_with("; 495 more"), "{many}");
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
