//! What `torchserve config` prints: every key with its value and where that came from, then what
//! the log would warn about and what a start would fail for.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::SettingsError;
use super::raw::{Effect, KEYS, Raw};

/// For people. `notices` are about the models that come back.
pub(crate) fn text(raw: &Raw, notices: &[String], faults: &[SettingsError]) -> String {
    let mut text = match &raw.file {
        Some(file) => format!("configuration file: {}\n\n", file.path.display()),
        None => "configuration file: none\n\n".to_owned(),
    };
    let longest = KEYS.iter().map(|key| key.name.len()).max().unwrap_or(0);
    for (key, value, origin) in raw.shown() {
        let _infallible = writeln!(text, "{key:longest$}  {value:<24}  {origin}");
    }
    for warning in notices.iter().chain(&raw.warnings()) {
        let _infallible = write!(text, "\nwarning: {warning}");
    }
    for fault in faults {
        let _infallible = write!(text, "\nfault: {fault}");
    }
    text
}

/// For programs.
pub(crate) fn json(raw: &Raw, notices: &[String], faults: &[SettingsError]) -> Value {
    let settings = KEYS
        .iter()
        .zip(raw.shown())
        .map(|(key, (_, value, origin))| {
            json!({
                "key": key.name,
                "value": value,
                "origin": origin,
                "type": key.kind.describe(),
                "default": key.default,
                "variable": key.from_environment.then(|| key.variable()),
                "option": key.option,
                "in_force": key.effect == Effect::InForce,
            })
        });
    json!({
        "file": raw.file.as_ref().map(|file| &file.path),
        "settings": settings.collect::<Vec<_>>(),
        "warnings": notices.iter().chain(&raw.warnings()).collect::<Vec<_>>(),
        "faults": faults.iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}
