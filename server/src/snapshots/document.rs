//! What a snapshot file holds: the settings in force, then the models as JSON in one line. The form
//! is TorchServe's, Java properties (*torchserve-contract* 2.7).

use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use ts_serving::SavedModels;

use crate::settings::properties;
use crate::settings::raw::{DEFAULT, Raw, find};

/// The key whose value has the models.
pub(super) const MODELS: &str = "model_snapshot";

/// Version of the members of our own in [`Document`]; TorchServe writes none.
const SCHEMA: u64 = 1;

/// The value of `model_snapshot`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(default)]
    name: String,
    #[serde(default = "some")]
    model_count: i64,
    #[serde(default)]
    created: i64,
    #[serde(default)]
    schema_version: u64,
    #[serde(default)]
    models: SavedModels,
}

/// Whoever leaves the count out has models.
fn some() -> i64 {
    1
}

/// Reads the value of `model_snapshot`, written by this server, by TorchServe or by hand.
///
/// # Errors
/// What is wrong with it.
pub(super) fn read_models(text: &str) -> Result<SavedModels, String> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Schema {
        #[serde(default)]
        schema_version: u64,
    }
    let words = |error: serde_json::Error| format!("the saved models cannot be read: {error}");
    // First, since a newer one may have anything else.
    let Schema { schema_version } = serde_json::from_str(text).map_err(words)?;
    if schema_version > SCHEMA {
        return Err(format!(
            "the saved models have schema version {schema_version}, and this server knows none \
             above {SCHEMA}. Start the newer server that wrote them"
        ));
    }
    let document: Document = serde_json::from_str(text).map_err(words)?;
    if document.model_count <= 0 {
        return Ok(SavedModels::default());
    }
    Ok(document.models)
}

/// Reads the models out of a whole file.
///
/// # Errors
/// What is wrong with it. A file that was cut off lacks its end, which has the models.
pub(super) fn read_file(text: &str) -> Result<SavedModels, String> {
    let mut models = None;
    for entry in properties::parse(text) {
        let entry =
            entry.map_err(|malformed| format!("line {}: {}", malformed.line, malformed.reason))?;
        if entry.key == MODELS {
            models = Some(entry);
        }
    }
    let models = models.ok_or_else(|| format!("it has no `{MODELS}`"))?;
    read_models(&models.value)
}

/// The lines of all settings that somebody wrote somewhere, and of the file they were read from. Not of
/// secrets: who wants them after a restart gives them again.
pub(super) fn settings(raw: &Raw) -> String {
    let mut lines = String::new();
    for (key, written) in &raw.values {
        // The models are written anew each time, and `tsConfigFile` says what this server read.
        let secret = find(key).is_some_and(|key| key.secret);
        if written.origin != DEFAULT && !secret && ![MODELS, "tsConfigFile"].contains(key) {
            line(&mut lines, key, &written.text);
        }
    }
    if let Some(file) = &raw.file {
        line(&mut lines, "tsConfigFile", &file.path.display().to_string());
    }
    lines
}

/// A whole file.
pub(super) fn compose(
    name: &str,
    created: jiff::Timestamp,
    settings: &str,
    models: &SavedModels,
) -> serde_json::Result<String> {
    let mut text = format!(
        "#Saved by the server, which reads it when it starts\n#{}\n{settings}",
        created.strftime("%a %b %d %H:%M:%S UTC %Y")
    );
    let document = Document {
        name: name.to_owned(),
        model_count: i64::try_from(models.len()).unwrap_or(i64::MAX),
        created: created.as_millisecond(),
        schema_version: SCHEMA,
        models: models.clone(),
    };
    // At the end: a file that was cut off has no models, rather than some.
    line(&mut text, MODELS, &serde_json::to_string_pretty(&document)?);
    Ok(text)
}

/// One line, with the escapes that Java writes.
fn line(text: &mut String, key: &str, value: &str) {
    text.push_str(key);
    text.push('=');
    for (index, character) in value.chars().enumerate() {
        match character {
            // At the start it would be taken for padding.
            ' ' if index == 0 => text.push_str("\\ "),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            ':' | '=' | '#' | '!' | '\\' => text.extend(['\\', character]),
            // Java reads Latin-1; what has no escape of four digits is left as it is.
            '\0'..='\x1f' | '\x7f'..='\u{ffff}' => {
                // Writing to a string does not fail.
                let _written = write!(text, "\\u{:04X}", u32::from(character));
            }
            _ => text.push(character),
        }
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models(text: &str) -> SavedModels {
        serde_json::from_str(text).unwrap()
    }

    const TWO: &str = r#"{"noop": {
        "1.0": {"defaultVersion": true, "marName": "noop.mar", "minWorkers": 1, "maxWorkers": 1,
            "batchSize": 1, "maxBatchDelay": 100, "responseTimeout": 120, "startupTimeout": 120,
            "runtimeType": "python"},
        "2.0": {"defaultVersion": false, "marName": "a #!=:\\ ü模😀 b.mar", "minWorkers": 0,
            "maxWorkers": 3, "batchSize": 4, "maxBatchDelay": 5, "responseTimeout": 9,
            "startupTimeout": 8, "runtimeType": "echo", "url": "https://h/m.mar?a=1&b=$$HOME$$",
            "fetched": true, "autoscale": true, "jobQueueSize": 7, "handler": "h.py:f",
            "workerIsolation": "process"}}}"#;

    fn written() -> String {
        let created = jiff::Timestamp::from_millisecond(1_700_000_000_123).unwrap();
        compose("x.cfg", created, "model_store=/m\n", &models(TWO)).unwrap()
    }

    #[test]
    fn what_is_written_is_read_again() {
        assert_eq!(read_file(&written()).unwrap(), models(TWO));
    }

    #[test]
    fn the_form_is_that_of_torchserve() {
        let text = written();
        let mut lines = text.lines();
        assert!(lines.next().unwrap().starts_with('#'));
        assert_eq!(lines.next().unwrap(), "#Tue Nov 14 22:13:20 UTC 2023");
        assert_eq!(lines.next().unwrap(), "model_store=/m");
        // As its own tests read it: two escapes undone, then JSON. (The odd name has more.)
        let plain = text.replace("a \\#\\!\\=\\:\\\\\\\\ ", "");
        let value = plain.rsplit_once("model_snapshot=").unwrap().1;
        let value = value
            .replace("\\:", ":")
            .replace("\\n", "\n")
            .replace("\\=", "=");
        let json: serde_json::Value = serde_json::from_str(value.trim_end()).unwrap();
        assert_eq!(
            (&json["name"], &json["modelCount"]),
            (&"x.cfg".into(), &1.into())
        );
        assert_eq!(json["created"], 1_700_000_000_123_i64);
        let one = &json["models"]["noop"]["1.0"];
        assert_eq!(one["marName"], "noop.mar");
        assert_eq!(one["runtimeType"], "python");
        assert!(text.contains("\\n  \"modelCount\"\\: 1,\\n"), "{text}");
    }

    #[test]
    fn a_file_that_was_cut_off_anywhere_is_none() {
        let text = written();
        for (end, _) in text.char_indices() {
            // Without the newline at its end it is whole.
            if end < text.len() - 1 {
                assert!(read_file(&text[..end]).is_err(), "{}", &text[..end]);
            }
        }
    }

    #[test]
    fn models_written_by_hand_or_by_torchserve_are_read() {
        let entry = r#"{"defaultVersion": true, "marName": "m.mar", "minWorkers": 1,
            "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 10}"#;
        let with = |count: &str| format!(r#"{{{count}"models": {{"m": {{"1.0": {entry}}}}}}}"#);
        for count in ["", r#""modelCount": 1,"#, r#""modelCount": 7,"#] {
            assert_eq!(read_models(&with(count)).unwrap().len(), 1, "{count}");
        }
        let none = read_models(&with(r#""modelCount": 0,"#)).unwrap();
        assert!(none.is_empty());
        for bad in [
            "",
            "{",
            r#"{"models": {"m": {"1.0": {}}}}"#,
            r#"{"models": {"../m": {}}}"#,
        ] {
            assert!(read_models(bad).is_err(), "{bad}");
        }
        let newer = read_models(r#"{"schemaVersion": 2, "models": "elsewhere"}"#).unwrap_err();
        assert!(newer.contains("schema version 2"), "{newer}");
    }

    proptest::proptest! {
        #[test]
        fn any_setting_survives(value: String) {
            let mut text = String::new();
            line(&mut text, "key", &value);
            let entries: Vec<_> = properties::parse(&text).into_iter().map(Result::unwrap).collect();
            proptest::prop_assert_eq!(entries.len(), 1);
            proptest::prop_assert_eq!(&entries[0].value, &value);
        }
    }
}
