//! URLs as they may be shown: without what can be a secret of whoever gave them.

use std::borrow::Cow;

/// What stands for it.
pub(crate) const HIDDEN: &str = "***";

/// The text without a URL's query, which may be a signature, and without its user's name and
/// password. A text that is no URL is returned as it is.
pub(crate) fn url(text: &str) -> Cow<'_, str> {
    let Some((scheme, rest)) = text.split_once("://") else {
        return Cow::Borrowed(text);
    };
    let (place, query) = match rest.split_once('?') {
        Some((place, _)) => (place, "?***"),
        None => (rest, ""),
    };
    let host_end = place.find('/').unwrap_or(place.len());
    match place[..host_end].rfind('@') {
        Some(at) => Cow::Owned(format!("{scheme}://{HIDDEN}{}{query}", &place[at..])),
        None if query.is_empty() => Cow::Borrowed(text),
        None => Cow::Owned(format!("{scheme}://{place}{query}")),
    }
}

/// A sentence whose URLs are as [`url`] shows them.
pub(crate) fn sentence(text: &str) -> String {
    let word = |word| {
        let end = |c: char| c.is_whitespace() || matches!(c, ':' | ',' | ';' | ')' | '`' | '"');
        let address = str::trim_end_matches(word, end);
        [url(address), Cow::Borrowed(&word[address.len()..])].concat()
    };
    text.split_inclusive(char::is_whitespace)
        .map(word)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_may_be_secret_is_hidden() {
        for (given, shown) in [
            ("https://h/m.mar?sig=s&t=1", "https://h/m.mar?***"),
            ("m=https://h/m.mar?sig=s", "m=https://h/m.mar?***"),
            ("https://u:p@h/m.mar", "https://***@h/m.mar"),
            ("https://u:p@q@h?a/b@c", "https://***@h?***"),
            ("https://h/a@b.mar#sha256=0", "https://h/a@b.mar#sha256=0"),
            ("m.mar", "m.mar"),
            ("what?.mar", "what?.mar"),
        ] {
            assert_eq!(url(given), shown, "{given}");
        }
    }

    #[test]
    fn a_sentence_keeps_all_but_what_may_be_secret() {
        for (given, shown) in [
            (
                "from: https://h/m?sig=s: no answer",
                "from: https://h/m?***: no answer",
            ),
            (
                "`http://a:b@h/` or http://h?k, ok?",
                "`http://***@h/` or http://h?***, ok?",
            ),
            ("no address:  none\n", "no address:  none\n"),
        ] {
            assert_eq!(sentence(given), shown, "{given}");
        }
    }
}
