//! The syntax of `config.properties`: Java's, with `$$NAME$$` for environment variables.

use java_properties::{LineContent, PropertiesIter};

/// One `key=value` of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Line that it ends on, counted from 1.
    pub(crate) line: usize,
    /// The key.
    pub(crate) key: String,
    /// The value, unescaped.
    pub(crate) value: String,
}

/// Reads a file's text.
///
/// # Errors
/// The reader's words, which name the line.
pub(crate) fn parse(text: &str) -> Result<Vec<Entry>, String> {
    let mut entries = Vec::new();
    // The format is Latin-1 by definition, but people write UTF-8.
    for line in PropertiesIter::new_with_encoding(text.as_bytes(), encoding_rs::UTF_8) {
        let line = line.map_err(|error| error.to_string())?;
        let number = line.line_number();
        if let LineContent::KVPair(key, value) = line.consume_content() {
            entries.push(Entry {
                line: number,
                key,
                value,
            });
        }
    }
    Ok(entries)
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
        parse(text)
            .unwrap()
            .into_iter()
            .map(|entry| (entry.key, entry.value))
            .collect()
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
    fn a_pair_knows_its_line() {
        assert_eq!(parse("\n# c\na=1\n").unwrap()[0].line, 3);
    }

    #[test]
    fn a_broken_escape_is_told_with_its_line() {
        let error = parse("a=1\nb=\\uZZZZ\n").unwrap_err();
        assert!(error.contains('2'), "{error}");
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
