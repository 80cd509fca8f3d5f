//! The syntax of `config.properties`: Java's, with `$$NAME$$` for environment variables.

use java_properties::{LineContent, PropertiesIter};

/// One `key=value` of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Line that it begins on, counted from 1.
    pub(crate) line: usize,
    /// The key.
    pub(crate) key: String,
    /// The value, unescaped.
    pub(crate) value: String,
}

/// A line that is none of the format's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Malformed {
    /// Line that it begins on, counted from 1.
    pub(crate) line: usize,
    /// The reader's words.
    pub(crate) reason: String,
}

/// A file's text: UTF-8 as people write it, else Latin-1 as the format has it by definition.
pub(crate) fn decode(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes)
        .unwrap_or_else(|error| error.as_bytes().iter().copied().map(char::from).collect())
}

/// Reads a file's text, each line on its own, so that every malformed one is told.
pub(crate) fn parse(text: &str) -> Vec<Result<Entry, Malformed>> {
    let mut entries = Vec::new();
    // Some editors begin a file with a mark of its byte order.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    let mut lines = text.split('\n').enumerate();
    while let Some((index, first)) = lines.next() {
        // The library would look for escapes in comments, where `C:\users` is none.
        let written = first.trim_start_matches([' ', '\t', '\x0c']);
        if written.is_empty() || written.starts_with(['#', '!']) {
            continue;
        }
        let mut whole = first.to_owned();
        let mut last = first;
        while goes_on(last) {
            whole.push('\n');
            let Some((_, next)) = lines.next() else { break };
            whole.push_str(next);
            last = next;
        }
        let line = index + 1;
        let read = PropertiesIter::new_with_encoding(whole.as_bytes(), encoding_rs::UTF_8);
        for one in read {
            match one.map(java_properties::Line::consume_content) {
                Ok(LineContent::KVPair(key, value)) => {
                    entries.push(Ok(Entry { line, key, value }));
                }
                Ok(LineContent::Comment(_)) => {}
                Err(error) => {
                    let reason = reason(&error);
                    entries.push(Err(Malformed { line, reason }));
                    break;
                }
            }
        }
    }
    entries
}

/// Whether a line goes on with the next one: it ends with a backslash that is not itself escaped.
fn goes_on(line: &str) -> bool {
    let backslashes = line.bytes().rev().take_while(|byte| *byte == b'\\');
    backslashes.count() % 2 == 1
}

/// What is wrong; the library's own number of the line would count from that line.
fn reason(error: &java_properties::PropertiesError) -> String {
    let words = error.to_string();
    let words = words.split(" (line_number").next().unwrap_or_default();
    words.trim_end_matches('.').to_owned()
}

/// Puts environment variables in place of `$$NAME$$`.
///
/// # Errors
/// The name of a variable that is not set.
pub(crate) fn substitute(
    value: &str,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<String, String> {
    let mut result = String::with_capacity(value.len());
    let mut rest = value;
    while let Some((before, after)) = rest.split_once("$$") {
        let Some((name, after)) = after.split_once("$$") else {
            break;
        };
        result.push_str(before);
        result.push_str(&variable(name).ok_or_else(|| name.to_owned())?);
        rest = after;
    }
    result.push_str(rest);
    Ok(result)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(text: &str) -> Vec<(String, String)> {
        let entries = parse(text).into_iter().map(Result::unwrap);
        entries.map(|entry| (entry.key, entry.value)).collect()
    }

    #[test]
    fn the_forms_of_java_are_read() {
        let text =
            "# comment\n! too\r\na=1\nb : two words  \r\nc 3\nd=x\\\n   y\ne=\\u00fc ü\n\nf\n";
        let expected = [
            ("a", "1"),
            ("b", "two words  "),
            ("c", "3"),
            ("d", "xy"),
            ("e", "ü ü"),
            ("f", ""),
        ];
        let expected: Vec<_> = expected
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        assert_eq!(pairs(text), expected);
    }

    #[test]
    fn a_pair_knows_the_line_it_begins_on() {
        let read = parse("\n# c\\\na=1\\\r\n  2\r\nb=1");
        let lines: Vec<_> = read.into_iter().map(|one| one.unwrap().line).collect();
        assert_eq!(lines, [3, 5]);
    }

    #[test]
    fn every_malformed_line_is_told_and_the_others_are_read() {
        let read = parse("a=1\nb=\\uZZZZ\n# C:\\users\nc=\\\n \\u12\nd=2");
        let lines: Vec<_> = read
            .iter()
            .map(|one| match one {
                Ok(entry) => (entry.line, entry.key.as_str()),
                Err(malformed) => (malformed.line, malformed.reason.as_str()),
            })
            .collect();
        let not_hex = "Malformed \\uxxxx encoding: not hex";
        let too_few = "Malformed \\uxxxx encoding: not enough digits";
        assert_eq!(lines, [(1, "a"), (2, not_hex), (4, too_few), (6, "d")]);
    }

    #[test]
    fn a_mark_of_the_byte_order_and_a_last_backslash_are_no_part_of_anything() {
        assert_eq!(pairs("\u{feff}a=1\\"), [("a".to_owned(), "1".to_owned())]);
    }

    #[test]
    fn a_file_that_is_not_utf_8_is_latin_1() {
        assert_eq!(decode(b"a=\xfc".to_vec()), "a=ü");
        assert_eq!(decode("a=ü".into()), "a=ü");
    }

    #[test]
    fn variables_are_put_in_and_missing_ones_named() {
        let home = |name: &str| (name == "HOME").then(|| "/h".to_owned());
        assert_eq!(substitute("$$HOME$$/x-$$HOME$$", home).unwrap(), "/h/x-/h");
        assert_eq!(substitute("costs 5$$", home).unwrap(), "costs 5$$");
        assert_eq!(substitute("$$NOPE$$", home).unwrap_err(), "NOPE");
    }

    proptest::proptest! {
        #[test]
        fn any_value_survives_being_escaped(value in "\\PC{0,20}") {
            let escaped: String = value
                .chars()
                .map(|c| if c.is_ascii_alphanumeric() || !c.is_ascii() { c.to_string() } else { format!("\\{c}") })
                .collect();
            proptest::prop_assert_eq!(pairs(&format!("key={escaped}")), [("key".to_owned(), value)]);
        }

        #[test]
        fn any_text_is_read_or_refused(text: String) {
            let _either = parse(&text);
        }
    }
}
