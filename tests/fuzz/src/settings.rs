//! What an operator writes: configuration files and the values in them.

use std::sync::LazyLock;

use tempfile::TempDir;
use ts_server::fuzzing;

static SCRATCH: LazyLock<TempDir> =
    LazyLock::new(|| tempfile::tempdir().expect("there is a place for temporary files"));

/// What was read of a file can be written and read again; variables take the place of their names
/// and of nothing else.
pub fn properties(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let (pairs, _malformed) = fuzzing::properties(text);
    let line = |(key, value): &(String, String)| format!("{}={}\n", escaped(key), escaped(value));
    let again: String = pairs.iter().map(line).collect();
    assert_eq!(fuzzing::properties(&again), (pairs.clone(), 0), "{again:?}");
    for (_, value) in &pairs {
        let same = fuzzing::substitute(value, |name| Some(format!("$${name}$$")));
        assert_eq!(same.as_ref(), Ok(value));
        match fuzzing::substitute(value, |name| (name.len() > 2).then(String::new)) {
            Ok(set) => assert!(set.len() <= value.len()),
            Err(missing) => assert!(missing.len() <= 2, "`{missing}` is set"),
        }
    }
}

/// A text in a form that means itself wherever it stands.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for character in text.chars() {
        match character {
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            // Where a line begins it would be a mark of the byte order.
            '\u{feff}' => escaped.push_str("\\ufeff"),
            plain if plain.is_ascii_alphanumeric() || !plain.is_ascii() => escaped.push(plain),
            special => escaped.extend(['\\', special]),
        }
    }
    escaped
}

/// A whole file makes settings, or is refused in words.
pub fn settings(data: &[u8]) {
    let file = SCRATCH.path().join("config.properties");
    fs_err::write(&file, data).expect("the scratch folder takes files");
    let told = match fuzzing::settings(&file, SCRATCH.path()) {
        Ok(warnings) => warnings,
        Err(faults) => {
            assert!(!faults.is_empty(), "refused without a word");
            faults
        }
    };
    assert!(told.iter().all(|line| !line.is_empty()));
}

/// The `models` property, the models of a snapshot, and the list of models to load at start.
pub fn models(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    if let Err(faults) = fuzzing::models(text) {
        assert!(!faults.is_empty() && faults.iter().all(|fault| !fault.is_empty()));
    }
    if let Err(fault) = fuzzing::saved_models(text) {
        assert!(!fault.is_empty());
    }
    for (_, url) in fuzzing::startup_models(text).into_iter().flatten() {
        assert!(!url.contains(','), "`{url}` is several");
    }
}

/// An address that is understood is written in a form that is understood as well.
pub fn address(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    match fuzzing::address(text, 8080) {
        Ok(address) => assert_eq!(fuzzing::address(&address, 1), Ok(address)),
        Err(fault) => assert!(fault.contains(text), "{fault}"),
    }
}
