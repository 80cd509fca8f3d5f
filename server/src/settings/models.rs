//! Which models are loaded at start (*torchserve-contract* 1.6), and the `models` property (2.6).

use std::collections::HashMap;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use serde_json::{Map, Value};
use ts_serving::ModelOverrides;
use ts_types::{DeviceType, ModelName, Version};

use super::raw::did_you_mean;

/// One model to load at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StartupModel {
    /// Name that replaces the manifest's.
    pub(crate) name: Option<String>,
    /// Archive, folder or URL.
    pub(crate) url: String,
}

/// The models to load at start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum StartupModels {
    /// Everything in the store.
    All,
    /// These, in order.
    Listed(Vec<StartupModel>),
}

impl StartupModels {
    /// Reads items between commas. Blanks around an item and empty items are skipped.
    pub(crate) fn parse(text: &str) -> Self {
        if text.trim().eq_ignore_ascii_case("ALL") {
            return Self::All;
        }
        let items = text
            .split(',')
            .map(str::trim)
            .filter(|item| !item.is_empty());
        Self::Listed(items.map(StartupModel::parse).collect())
    }

    /// The models, with `ALL` spelt out.
    ///
    /// # Errors
    /// The store cannot be read.
    pub(crate) fn resolve(&self, store: &Path) -> std::io::Result<Vec<StartupModel>> {
        match self {
            Self::Listed(models) => Ok(models.clone()),
            Self::All => {
                let mut names = Vec::new();
                for entry in fs_err::read_dir(store)? {
                    let entry = entry?;
                    let Ok(name) = entry.file_name().into_string() else {
                        continue;
                    };
                    let archive = [".mar", ".model", ".tar.gz"];
                    let loadable = archive.iter().any(|ending| name.ends_with(ending))
                        || entry.path().is_dir();
                    if loadable && !name.starts_with('.') {
                        names.push(name);
                    }
                }
                names.sort_unstable();
                Ok(names
                    .into_iter()
                    .map(|url| StartupModel { name: None, url })
                    .collect())
            }
        }
    }
}

impl StartupModel {
    fn parse(item: &str) -> Self {
        // A URL without a name may have a `=` of its own, in its query or its digest.
        match item
            .split_once('=')
            .filter(|(name, _)| !name.contains(['/', ':', '#']))
        {
            Some((name, url)) => Self {
                name: Some(name.to_owned()),
                url: url.to_owned(),
            },
            None => Self {
                name: None,
                url: item.to_owned(),
            },
        }
    }
}

/// Overrides by model and version.
pub(crate) type PerModel = HashMap<ModelName, HashMap<Version, ModelOverrides>>;

/// The keys of one version in the `models` property.
const KEYS: &[&str] = &[
    "minWorkers",
    "maxWorkers",
    "batchSize",
    "maxBatchDelay",
    "responseTimeout",
    "startupTimeout",
    "deviceType",
    "deviceIds",
    "defaultVersion",
];

/// Those that TorchServe writes there too, or accepts, and that say nothing here.
const IGNORED: &[&str] = &["marName", "runtimeType", "parallelLevel", "parallelType"];

/// Greatest number of workers, and of anything that is counted in thousandths of a second.
const MOST_WORKERS: u64 = 4096;
const MOST_SECONDS: u64 = 2_147_483;
const MOST_MILLISECONDS: u64 = MOST_SECONDS * 1000;
const LARGEST_BATCH: u64 = 1_000_000;

/// Reads the `models` property.
///
/// # Errors
/// Every fault, each with its place as `model/version/key`.
pub(crate) fn parse_overrides(text: &str) -> Result<PerModel, Vec<String>> {
    if text.trim().is_empty() {
        return Ok(PerModel::new());
    }
    let value = serde_json::from_str(text).map_err(|error| vec![not_json(text, &error)])?;
    let mut reader = Reader::default();
    let mut models = PerModel::new();
    for (name, value) in reader.object("", value) {
        let model = reader.known(&name, ModelName::new(name.as_str()));
        let mut versions = HashMap::new();
        for (number, value) in reader.object(&name, value) {
            let place = format!("{name}/{number}");
            let version = reader.known(&place, Version::new(number.as_str()));
            let fields = reader.object(&place, value);
            let overrides = reader.overrides(&place, &fields);
            versions.extend(version.map(|version| (version, overrides)));
        }
        let defaults = versions.values().filter(|one| one.default_version);
        if defaults.count() > 1 {
            let fault = format!("{name}: more than one version has `defaultVersion`");
            reader.faults.push(fault);
        }
        models.extend(model.map(|model| (model, versions)));
    }
    if reader.faults.is_empty() {
        Ok(models)
    } else {
        Err(reader.faults)
    }
}

/// The keys of versions that nothing knows, one text for each.
pub(crate) fn unknown_keys(text: &str) -> impl Iterator<Item = String> {
    let models: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
    models.into_iter().flat_map(|(model, versions)| {
        let versions = versions.as_object().cloned().unwrap_or_default();
        versions.into_iter().flat_map(move |(version, fields)| {
            let fields = fields.as_object().cloned().unwrap_or_default();
            let place = format!("{model}/{version}");
            fields.into_iter().filter_map(move |(key, _)| {
                if KEYS.contains(&key.as_str()) || IGNORED.contains(&key.as_str()) {
                    return None;
                }
                let meant = did_you_mean(&key, KEYS.iter().copied());
                Some(format!("unknown key `{place}/{key}` is ignored{meant}"))
            })
        })
    })
}

/// Where the text ceases to be JSON: the file's lines are one by now, so only what stands before
/// the place helps to find it.
fn not_json(text: &str, error: &serde_json::Error) -> String {
    let words = error.to_string();
    let words = words.split(" at line ").next().unwrap_or_default();
    let line = text.lines().nth(error.line().saturating_sub(1));
    let before = line
        .and_then(|line| line.get(..error.column()))
        .unwrap_or("");
    let skipped = before.chars().count().saturating_sub(30);
    let end: String = before.chars().skip(skipped).collect();
    format!("not JSON: {words} at the end of `{end}`")
}

/// Takes values out of the property and keeps the faults.
#[derive(Default)]
struct Reader {
    faults: Vec<String>,
}

impl Reader {
    fn fault(&mut self, place: &str, is: &Value, not: &str) {
        let separator = if place.is_empty() { "" } else { ": " };
        self.faults
            .push(format!("{place}{separator}`{is}` is not {not}"));
    }

    fn object(&mut self, place: &str, value: Value) -> Map<String, Value> {
        match value {
            Value::Object(map) => map,
            other => {
                self.fault(place, &other, "a JSON object");
                Map::new()
            }
        }
    }

    fn known<T, E: std::fmt::Display>(&mut self, place: &str, name: Result<T, E>) -> Option<T> {
        let told = name.map_err(|error| self.faults.push(format!("{place}: {error}")));
        told.ok()
    }

    /// A field that is neither absent nor null.
    fn field<T>(
        &mut self,
        place: &str,
        fields: &Map<String, Value>,
        key: &str,
        kind: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Option<T> {
        let value = fields.get(key).filter(|value| !value.is_null())?;
        let field = read(value);
        if field.is_none() {
            self.fault(&format!("{place}/{key}"), value, kind);
        }
        field
    }

    fn whole(
        &mut self,
        place: &str,
        fields: &Map<String, Value>,
        key: &str,
        most: u64,
    ) -> Option<u64> {
        let kind = format!("a whole number from 0 to {most}");
        self.field(place, fields, key, &kind, |value| {
            // TorchServe's reader takes numbers in quotes too.
            let number = match value {
                Value::String(text) => text.parse().ok(),
                other => other.as_u64(),
            };
            number.filter(|number| *number <= most)
        })
    }

    fn overrides(&mut self, place: &str, fields: &Map<String, Value>) -> ModelOverrides {
        let count = |number: Option<u64>| number.and_then(|number| usize::try_from(number).ok());
        let above_zero = |number: Option<u64>| number.filter(|number| *number > 0);
        let min_workers = count(self.whole(place, fields, "minWorkers", MOST_WORKERS));
        let max_workers = count(self.whole(place, fields, "maxWorkers", MOST_WORKERS));
        if let (Some(min), Some(max)) = (min_workers, max_workers)
            && min > max
        {
            self.faults.push(format!(
                "{place}: `minWorkers` is {min} and `maxWorkers` only {max}"
            ));
        }
        let seconds = |number: Option<u64>| above_zero(number).map(Duration::from_secs);
        ModelOverrides {
            min_workers,
            max_workers,
            batch_size: count(above_zero(self.whole(
                place,
                fields,
                "batchSize",
                LARGEST_BATCH,
            ))),
            max_batch_delay: self
                .whole(place, fields, "maxBatchDelay", MOST_MILLISECONDS)
                .map(Duration::from_millis),
            response_timeout: seconds(self.whole(place, fields, "responseTimeout", MOST_SECONDS)),
            startup_timeout: seconds(self.whole(place, fields, "startupTimeout", MOST_SECONDS)),
            device_type: self.field(place, fields, "deviceType", "`cpu` or `gpu`", |value| {
                serde_json::from_value::<DeviceType>(value.clone()).ok()
            }),
            device_ids: self.field(
                place,
                fields,
                "deviceIds",
                "a list of device ids",
                |value| serde_json::from_value(value.clone()).ok(),
            ),
            default_version: self
                .field(
                    place,
                    fields,
                    "defaultVersion",
                    "`true` or `false`",
                    |value| match value {
                        Value::String(text) => bool::from_str(text).ok(),
                        other => other.as_bool(),
                    },
                )
                .unwrap_or(false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(text: &str) -> Vec<(Option<String>, String)> {
        match StartupModels::parse(text) {
            StartupModels::All => panic!("`{text}` was read as ALL"),
            StartupModels::Listed(models) => models
                .into_iter()
                .map(|model| (model.name, model.url))
                .collect(),
        }
    }

    #[test]
    fn names_archives_and_urls_are_told_apart() {
        let named = |name: &str, url: &str| (Some(name.to_owned()), url.to_owned());
        let plain = |url: &str| (None, url.to_owned());
        assert_eq!(
            listed("a.mar,b=c.mar"),
            [plain("a.mar"), named("b", "c.mar")]
        );
        assert_eq!(listed("a.mar, b.mar,,"), [plain("a.mar"), plain("b.mar")]);
        assert_eq!(
            listed("https://h/x.mar?k=v"),
            [plain("https://h/x.mar?k=v")]
        );
        assert_eq!(listed("n=https://h/x?k=v"), [named("n", "https://h/x?k=v")]);
        assert_eq!(listed("x.mar#sha256=0"), [plain("x.mar#sha256=0")]);
        assert_eq!(listed("n=x.mar#sha256=0"), [named("n", "x.mar#sha256=0")]);
        assert_eq!(listed("none"), [plain("none")]);
        assert_eq!(listed(""), []);
    }

    #[test]
    fn all_means_every_visible_archive_and_folder() {
        let store = tempfile::tempdir().unwrap();
        for file in ["b.mar", "a.tar.gz", ".hidden.mar", "README.md"] {
            fs_err::write(store.path().join(file), "").unwrap();
        }
        fs_err::create_dir(store.path().join("folder")).unwrap();
        let models = StartupModels::parse("aLl").resolve(store.path()).unwrap();
        let urls: Vec<_> = models.iter().map(|model| model.url.as_str()).collect();
        assert_eq!(urls, ["a.tar.gz", "b.mar", "folder"]);
    }

    #[test]
    fn overrides_are_read_and_zero_means_unset() {
        let text = r#"{"noop": {"1.0": {"minWorkers": 1, "batchSize": 0, "maxBatchDelay": 5,
            "responseTimeout": 0, "defaultVersion": true, "marName": "noop.mar"}}}"#;
        assert_eq!(unknown_keys(text).count(), 0);
        let read = parse_overrides(text).unwrap();
        let one = &read[&ModelName::new("noop").unwrap()][&Version::new("1.0").unwrap()];
        let expected = ModelOverrides {
            min_workers: Some(1),
            max_batch_delay: Some(Duration::from_millis(5)),
            default_version: true,
            ..ModelOverrides::default()
        };
        assert_eq!(*one, expected);
        let text = r#"{"noop": {"1.0": {"deviceType": "gpu", "deviceIds": [1, 0]}}}"#;
        let read = parse_overrides(text).unwrap();
        let one = &read[&ModelName::new("noop").unwrap()][&Version::new("1.0").unwrap()];
        assert_eq!(
            (one.device_type, one.device_ids.as_deref()),
            (Some(DeviceType::Gpu), Some(&[1, 0][..]))
        );
    }

    #[test]
    fn every_fault_is_told_with_its_place() {
        let text = r#"{"noop": {"1.0": {"minWorkers": -1, "deviceIds": [-1], "deviceType": "neuron",
            "batchSize": "many", "maxWorkers": "2", "defaultVersion": true},
            "2.0": {"minWorkers": 2, "maxWorkers": 1, "defaultVersion": true}, "3.0": 4},
            "a/b": {}, "c": {"..": {}}}"#;
        let faults = parse_overrides(text).unwrap_err();
        for told in [
            "noop/1.0/minWorkers: `-1` is not a whole number from 0 to 4096",
            "noop/1.0/deviceIds: `[-1]` is not a list of device ids",
            r#"noop/1.0/deviceType: `"neuron"` is not `cpu` or `gpu`"#,
            r#"noop/1.0/batchSize: `"many"` is not a whole number from 0 to 1000000"#,
            "noop/2.0: `minWorkers` is 2 and `maxWorkers` only 1",
            "noop/3.0: `4` is not a JSON object",
            "noop: more than one version has `defaultVersion`",
        ] {
            assert!(
                faults.iter().any(|fault| fault == told),
                "{told}: {faults:#?}"
            );
        }
        assert_eq!(faults.len(), 9, "{faults:#?}");
    }

    #[test]
    fn text_that_is_no_json_is_told_by_what_stands_before() {
        let text = r#"{"noop": {"1.0": {"batchSize": 4 "maxWorkers": 1}}}"#;
        let faults = parse_overrides(text).unwrap_err();
        assert!(faults[0].starts_with("not JSON: "), "{faults:?}");
        assert!(faults[0].ends_with(r#""batchSize": 4 "`"#), "{faults:?}");
        let faults = parse_overrides("[]").unwrap_err();
        assert_eq!(faults, ["`[]` is not a JSON object"]);
    }

    #[test]
    fn an_unknown_key_is_told_with_the_nearest() {
        let text = r#"{"noop": {"1.0": {"minWorker": 1, "zzz": 1, "marName": "x"}}}"#;
        let told: Vec<_> = unknown_keys(text).collect();
        assert_eq!(
            told,
            [
                "unknown key `noop/1.0/minWorker` is ignored. Did you mean `minWorkers`?",
                "unknown key `noop/1.0/zzz` is ignored",
            ]
        );
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_or_refused(text: String) {
            let _either = parse_overrides(&text);
            let _told = unknown_keys(&text).count();
            let _models = StartupModels::parse(&text);
        }
    }
}
