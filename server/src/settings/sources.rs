//! Where values come from, and which one wins: file, then command line, then environment when the
//! file switches that on (*torchserve-contract* 2.1, 2.2). The environment is read here only.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use config::{Config, ConfigError, Map, Source, Value};

use super::raw::{ConfigFile, DEFAULT, KEYS, Key, Raw, Written, find};
use super::{SettingsError, log4j, properties};
use crate::cli::Options;
use crate::snapshots::Folder;
use crate::telemetry::LogFolders;

/// Variables that begin as those of keys do and mean something else (*torchserve-contract* 1.7).
const OTHER_VARIABLES: &[&str] = &[
    "TS_BENCHMARK",
    "TS_CONFIG_FILE",
    "TS_REQUEST_SEQUENCE_END",
    "TS_REQUEST_SEQUENCE_ID",
    "TS_REQUEST_SEQUENCE_START",
];

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

    /// Variables that look like those of keys and are none, sorted.
    fn unknown_variables(&self) -> Vec<String> {
        let known = |name: &str| {
            let of_key = |key: &Key| key.from_environment && key.variable() == name;
            OTHER_VARIABLES.contains(&name) || KEYS.iter().any(of_key)
        };
        let ours = self.0.keys().filter(|name| name.starts_with("TS_"));
        let mut unknown: Vec<String> = ours.filter(|name| !known(name)).cloned().collect();
        unknown.sort_unstable();
        unknown
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

impl Environment {
    /// Where log files lie.
    pub(crate) fn log_folders(&self) -> LogFolders {
        let folder = |variable: &str| {
            let named = self.get(variable).filter(|folder| !folder.is_empty());
            let folder = PathBuf::from(named.unwrap_or("logs"));
            std::path::absolute(&folder).unwrap_or(folder)
        };
        LogFolders {
            logs: folder("LOG_LOCATION"),
            metrics: folder("METRICS_LOCATION"),
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
        .or_else(|| options.ts_config.clone().map(|path| (path, None)))
        .filter(|(path, _)| !path.as_os_str().is_empty());
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

/// Reads the file into a layer; everything else that is to be said of it goes into `raw`.
fn read_file(path: &Path, environment: &Environment, raw: &mut Raw) -> Layer {
    let mut layer = Layer::default();
    let shown = path.display();
    let bytes = match fs_err::read(path) {
        Ok(bytes) => bytes,
        Err(error) => {
            let path = shown.to_string();
            let reason = error.to_string();
            raw.faults.push(SettingsError::Unreadable { path, reason });
            return layer;
        }
    };
    let mut seen: HashMap<String, usize> = HashMap::new();
    for entry in properties::parse(&properties::decode(bytes)) {
        let properties::Entry { line, key, value } = match entry {
            Ok(entry) => entry,
            Err(properties::Malformed { line, reason }) => {
                let origin = format!("{shown} line {line}");
                raw.faults.push(SettingsError::Malformed { reason, origin });
                continue;
            }
        };
        let at = |line: usize| format!("{shown} line {line}");
        if let Some(before) = seen.insert(key.clone(), line) {
            raw.repeated.push((key.clone(), at(before), at(line)));
        }
        let origin = at(line);
        let Some(known) = find(&key) else {
            raw.unknown.push((key, origin));
            continue;
        };
        let value = if known.name == "model_snapshot" {
            // Names and URLs that callers gave.
            Ok(value)
        } else {
            properties::substitute(&value, |name| environment.get(name).map(str::to_owned))
        };
        match value {
            Ok(text) => layer.set(known.name, text, origin),
            Err(variable) => {
                raw.unusable.insert(known.name);
                raw.faults.push(SettingsError::NoVariable {
                    variable,
                    key,
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
        // An empty one is none, as with argparse.
        if let Some(path) = value.as_ref().filter(|path| !path.as_os_str().is_empty()) {
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

/// The variables that count; those that do not, and those that were meant to, go into `raw`.
fn environment_layer(environment: &Environment, file: &Layer, raw: &mut Raw) -> Layer {
    let mut layer = Layer::default();
    let switched_on = file.is_on("enable_envvars_config");
    for key in KEYS.iter().filter(|key| key.from_environment) {
        let variable = key.variable();
        let Some(value) = environment.get(&variable) else {
            continue;
        };
        let guarded = key.name == "allowed_urls" && !file.is_on("use_env_allowed_urls");
        if !key.variable_always_counts() && (!switched_on || guarded) {
            let switch = if switched_on {
                "use_env_allowed_urls"
            } else {
                "enable_envvars_config"
            };
            raw.unread_variables.push((variable, switch));
            continue;
        }
        // This one names a protocol instead of saying `true`.
        let value = match (key.name, value) {
            ("ts_open_inference_protocol", "oip") => "true",
            ("ts_open_inference_protocol", _) => "false",
            (_, value) => value,
        };
        layer.set(key.name, value, variable);
    }
    if switched_on {
        raw.unknown_variables = environment.unknown_variables();
    }
    layer
}

/// The files that options name and that are not there.
fn missing_files(options: &Options) -> impl Iterator<Item = SettingsError> {
    let files = [
        ("log-config", &options.log_config),
        ("cpp-log-config", &options.cpp_log_config),
    ];
    let missing = files.into_iter().filter_map(|(option, path)| {
        let path = path.as_ref()?;
        let absent = !path.as_os_str().is_empty() && !path.is_file();
        absent.then(|| SettingsError::Missing {
            option,
            what: "file",
            path: path.display().to_string(),
            origin: format!("--{option}"),
        })
    });
    missing.collect::<Vec<_>>().into_iter()
}

/// Reads everything and layers it. What could not be read is among the faults of what comes back.
pub(crate) fn load(options: &Options, environment: &Environment) -> Raw {
    let mut raw = Raw::default();
    let file = match config_file(options, environment, &mut raw.notices) {
        Ok(Some(file)) => {
            let layer = read_file(&file.path, environment, &mut raw);
            raw.file = Some(file);
            layer
        }
        Ok(None) => Layer::default(),
        Err(fault) => {
            raw.faults.push(fault);
            Layer::default()
        }
    };
    raw.faults.extend(missing_files(options));
    let mut defaults = Layer::default();
    for key in KEYS {
        defaults.set(key.name, key.default, DEFAULT);
    }
    let layered = Config::builder()
        .add_source(defaults)
        .add_source(file.clone())
        .add_source(command_line(options))
        .add_source(environment_layer(environment, &file, &mut raw))
        .build()
        .and_then(|config| config.collect());
    let layered = layered.unwrap_or_else(|error| {
        raw.faults.push(SettingsError::Unreadable {
            path: "the layers of settings".to_owned(),
            reason: error.to_string(),
        });
        Map::new()
    });
    for (name, value) in layered {
        let Some(key) = find(&name) else { continue };
        let origin = value.origin().unwrap_or(DEFAULT).to_owned();
        let text = value.into_string().unwrap_or_default();
        raw.values.insert(key.name, Written { text, origin });
    }
    let log_config = options.log_config.as_deref();
    log4j::apply(log_config.filter(|path| path.is_file()), &mut raw);
    raw
}

#[cfg(test)]
mod tests;
