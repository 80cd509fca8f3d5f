//! `config.properties`: what was read can be written and read again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_server::fuzzing;

fuzz_target!(|text: &str| {
    let Ok(pairs) = fuzzing::properties(text) else {
        return;
    };
    let line = |(key, value): &(String, String)| format!("{}={}\n", escaped(key), escaped(value));
    let again: String = pairs.iter().map(line).collect();
    assert_eq!(
        fuzzing::properties(&again).as_ref(),
        Ok(&pairs),
        "{again:?}"
    );
    for (_, value) in &pairs {
        let same = fuzzing::substitute(value, |name| Some(format!("$${name}$$")));
        assert_eq!(same.as_ref(), Ok(value));
        let set = fuzzing::substitute(value, |name| (name.len() > 2).then(String::new));
        assert!(set.map_or_else(|name| name.len() <= 2, |set| set.len() <= value.len()));
    }
});

/// A text in a form that means itself wherever it stands.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        match character {
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            plain if plain.is_ascii_alphanumeric() || !plain.is_ascii() => escaped.push(plain),
            special => escaped.extend(['\\', special]),
        }
    }
    escaped
}
