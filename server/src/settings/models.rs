//! Which models are loaded at start (*torchserve-contract* 1.6), and the `models` property (2.6).

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use ts_serving::ModelOverrides;
use ts_types::{DeviceType, ModelName, Version};

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

/// The keys of one version in the `models` property. Others are accepted and ignored, as
/// TorchServe does.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct VersionSettings {
    min_workers: Option<usize>,
    max_workers: Option<usize>,
    batch_size: Option<usize>,
    max_batch_delay: Option<u64>,
    response_timeout: Option<u64>,
    startup_timeout: Option<u64>,
    device_type: Option<DeviceType>,
    device_ids: Option<Vec<u32>>,
}

/// Overrides by model and version.
pub(crate) type PerModel = HashMap<ModelName, HashMap<Version, ModelOverrides>>;

/// Reads the `models` property.
///
/// # Errors
/// The JSON reader's words, which name line and column.
pub(crate) fn parse_overrides(text: &str) -> Result<PerModel, String> {
    if text.trim().is_empty() {
        return Ok(PerModel::new());
    }
    let read: HashMap<ModelName, HashMap<Version, VersionSettings>> =
        serde_json::from_str(text).map_err(|error| error.to_string())?;
    let above_zero = |value: Option<u64>| value.filter(|value| *value > 0);
    let overrides = |settings: VersionSettings| ModelOverrides {
        min_workers: settings.min_workers,
        max_workers: settings.max_workers,
        batch_size: settings.batch_size.filter(|size| *size > 0),
        max_batch_delay: settings.max_batch_delay.map(Duration::from_millis),
        response_timeout: above_zero(settings.response_timeout).map(Duration::from_secs),
        startup_timeout: above_zero(settings.startup_timeout).map(Duration::from_secs),
        device_type: settings.device_type,
        device_ids: settings.device_ids,
    };
    let of_version = |(version, settings)| (version, overrides(settings));
    Ok(read
        .into_iter()
        .map(|(model, versions)| (model, versions.into_iter().map(of_version).collect()))
        .collect())
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
        let read = parse_overrides(text).unwrap();
        let one = &read[&ModelName::new("noop").unwrap()][&Version::new("1.0").unwrap()];
        let expected = ModelOverrides {
            min_workers: Some(1),
            max_batch_delay: Some(Duration::from_millis(5)),
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
        for refused in [
            r#""minWorkers": -1"#,
            r#""deviceIds": [-1]"#,
            r#""deviceType": "neuron""#,
        ] {
            let text = format!(r#"{{"noop": {{"1.0": {{{refused}}}}}}}"#);
            assert!(parse_overrides(&text).is_err(), "{refused}");
        }
    }
}
