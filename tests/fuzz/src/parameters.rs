//! Parameters of management calls, and what a registration and a scaling make of them.

use form_urlencoded::Serializer;
use ts_server::fuzzing::{self, Parsed};

/// What is read of a query string can be written as one.
pub fn query(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        check(fuzzing::query(text));
    }
}

/// A JSON body says what a query string with the same names says.
pub fn registration(data: &[u8]) {
    if let Ok(parsed) = fuzzing::json(data) {
        check(parsed);
    }
}

#[expect(clippy::needless_pass_by_value, reason = "both callers have made it")]
fn check(parsed: Parsed) {
    let mut written = Serializer::new(String::new());
    let query = written.extend_pairs(&parsed.0).finish();
    assert_eq!(fuzzing::query(&query), parsed);
}
