//! Where values come from, and which one wins: file, then command line, then environment when the
//! file switches that on (*torchserve-contract* 2.1, 2.2). The environment is read here only.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use config::{Config, ConfigError, Map, Source, Value};

use super::raw::{ConfigFile, DEFAULT, KEYS, Raw, Written, find};
use super::{SettingsError, properties};
use crate::cli::Options;
use crate::snapshots::Folder;

/// The process's environment, read once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Environment(HashMap<String, String>);

impl Environment {
    /// What this process was started with. Values that are not UTF-8 cannot be settings.
    pub(crate) fn of_process() -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self(std::env::vars_os().filter_map(text).collect())
    }

    /// The value of a variable.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    /// Where Python's `tempfile` would put files: the pid file lies there.
    pub(crate) fn shared_temp_dir(&self) -> PathBuf {
        let names = ["TMPDIR", "TEMP", "TMP"];
        let usable = names
            .iter()
            .filter_map(|name| self.get(name))
            .find(|dir| !dir.is_empty() && Path::new(dir).is_dir());
        PathBuf::from(usable.unwrap_or("/tmp"))
    }

    /// Where this server's own temporary files lie.
    ///
    /// # Errors
    /// `TEMP` names no folder.
    pub(crate) fn temp_dir(&self) -> Result<PathBuf, SettingsError> {
        match self.get("TEMP").filter(|dir| !dir.is_empty()) {
            Some(dir) if Path::new(dir).is_dir() => Ok(PathBuf::from(dir)),
            Some(dir) => Err(SettingsError::NoTempDir {
                path: dir.to_owned(),
            }),
            None => Ok(self.shared_temp_dir()),
        }
    }
}

#[cfg(test)]
impl<const N: usize> From<[(&str, &str); N]> for Environment {
    fn from(pairs: [(&str, &str); N]) -> Self {
        Self(
            pairs
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
        )
    }
}

/// One layer of values, each with its origin.
#[derive(Debug, Clone, Default)]
struct Layer(Vec<(&'static str, Written)>);

impl Layer {
    fn set(&mut self, key: &'static str, text: impl Into<String>, origin: impl Into<String>) {
        self.0.push((
            key,
            Written {
                text: text.into(),
                origin: origin.into(),
            },
        ));
    }

    fn is_on(&self, key: &str) -> bool {
        let last = self.0.iter().rev().find(|(name, _)| *name == key);
        last.is_some_and(|(_, written)| written.text.trim().eq_ignore_ascii_case("true"))
    }
}

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Map<String, Value>, ConfigError> {
        let value = |(key, written): &(&str, Written)| {
            (
                (*key).to_owned(),
                Value::new(Some(&written.origin), written.text.clone()),
            )
        };
        Ok(self.0.iter().map(value).collect())
    }
}

/// Which file is read (*torchserve-contract* 2.2): the one that is named, else the newest snapshot,
/// else the one that lies here.
fn config_file(
    options: &Options,
    environment: &Environment,
    notices: &mut Vec<String>,
) -> Result<Option<ConfigFile>, SettingsError> {
    let named = environment
        .get("TS_CONFIG_FILE")
        .filter(|path| !path.is_empty())
        .map(|path| (PathBuf::from(path), Some("TS_CONFIG_FILE")))
        .or_else(|| options.ts_config.clone().map(|path| (path, None)));
    if let Some((path, named_by)) = named {
        if path.is_file() {
            let is_named = true;
            return Ok(Some(ConfigFile { path, is_named }));
        }
        return Err(SettingsError::NoConfigFile {
            path: path.display().to_string(),
            named_by,
        });
    }
    let is_named = false;
    let here = PathBuf::from("config.properties");
    if !options.no_config_snapshots {
        let newest = Folder::of(environment).newest();
        notices.extend(newest.passed_over);
        if let Some((path, _)) = newest.usable {
            if here.is_file() {
                notices.push(format!(
                    "settings are read from the snapshot `{}`, not from `config.properties`. \
                     `--ts-config config.properties` or `--ncs` changes that",
                    path.display()
                ));
            }
            return Ok(Some(ConfigFile { path, is_named }));
        }
    }
    Ok(here.is_file().then_some(ConfigFile {
        path: here,
        is_named,
    }))
}

fn read_file(
    path: &Path,
    environment: &Environment,
    unknown: &mut Vec<(String, String)>,
    faults: &mut Vec<SettingsError>,
) -> Layer {
    let mut layer = Layer::default();
    let shown = path.display().to_string();
    let entries = fs_err::read_to_string(path)
        .map_err(|error| error.to_string())
        .and_then(|text| properties::parse(&text));
    let entries = match entries {
        Ok(entries) => entries,
        Err(reason) => {
            faults.push(SettingsError::Unreadable {
                path: shown,
                reason,
            });
            return layer;
        }
    };
    for entry in entries {
        let origin = format!("{shown} line {}", entry.line);
        let variable = |name: &str| environment.get(name).map(str::to_owned);
        let value = if entry.key == "model_snapshot" {
            // Names and URLs that callers gave.
            Ok(entry.value)
        } else {
            properties::substitute(&entry.value, variable)
        };
        match (find(&entry.key), value) {
            (Some(key), Ok(text)) => layer.set(key.name, text, origin),
            (None, Ok(_)) => unknown.push((entry.key, origin)),
            (_, Err(variable)) => {
                faults.push(SettingsError::NoVariable {
                    variable,
                    key: entry.key,
                    origin,
                });
            }
        }
    }
    layer
}

fn command_line(options: &Options) -> Layer {
    let mut layer = Layer::default();
    let paths = [
        ("model_store", "--model-store", &options.model_store),
        (
            "workflow_store",
            "--workflow-store",
            &options.workflow_store,
        ),
        (
            "cpp_log_config",
            "--cpp-log-config",
            &options.cpp_log_config,
        ),
    ];
    for (key, option, value) in paths {
        if let Some(path) = value {
            layer.set(key, path.display().to_string(), option);
        }
    }
    if !options.models.is_empty() {
        layer.set("load_models", options.models.join(","), "--models");
    }
    if options.disable_token_auth {
        layer.set(
            "disable_token_authorization",
            "true",
            "--disable-token-auth",
        );
    }
    if options.enable_model_api {
        layer.set("enable_model_api", "true", "--enable-model-api");
    }
    if let Some(plugins) = &options.plugins_path {
        layer.set("plugins_path", plugins.as_str(), "--plugins-path");
    }
    layer
}

fn environment_layer(environment: &Environment, file: &Layer) -> Layer {
    let mut layer = Layer::default();
    if !file.is_on("enable_envvars_config") {
        return layer;
    }
    for key in KEYS.iter().filter(|key| key.from_environment) {
        if key.name == "allowed_urls" && !file.is_on("use_env_allowed_urls") {
            continue;
        }
        let variable = key.variable();
        if let Some(value) = environment.get(&variable) {
            layer.set(key.name, value, variable);
        }
    }
    layer
}

/// Reads everything and layers it.
///
/// # Errors
/// Every fault of the file; what could be read is not returned with them.
pub(crate) fn load(
    options: &Options,
    environment: &Environment,
) -> Result<Raw, Vec<SettingsError>> {
    let mut faults = Vec::new();
    let mut unknown = Vec::new();
    let mut notices = Vec::new();
    let config_file =
        config_file(options, environment, &mut notices).map_err(|fault| vec![fault])?;
    let file = match &config_file {
        Some(file) => read_file(&file.path, environment, &mut unknown, &mut faults),
        None => Layer::default(),
    };
    if !faults.is_empty() {
        return Err(faults);
    }
    let mut defaults = Layer::default();
    for key in KEYS {
        defaults.set(key.name, key.default, DEFAULT);
    }
    let layered = Config::builder()
        .add_source(defaults)
        .add_source(file.clone())
        .add_source(command_line(options))
        .add_source(environment_layer(environment, &file))
        .build()
        .and_then(|config| config.collect());
    let layered = match layered {
        Ok(layered) => layered,
        Err(error) => {
            let path = "the layers of settings".to_owned();
            return Err(vec![SettingsError::Unreadable {
                path,
                reason: error.to_string(),
            }]);
        }
    };
    let mut raw = Raw {
        unknown,
        file: config_file,
        notices,
        ..Raw::default()
    };
    for (name, value) in layered {
        let Some(key) = find(&name) else { continue };
        let origin = value.origin().unwrap_or(DEFAULT).to_owned();
        let text = value.into_string().unwrap_or_default();
        raw.values.insert(key.name, Written { text, origin });
    }
    Ok(raw)
}

#[cfg(test)]
mod tests;
