//! The models and settings of a server, kept in files from one start to the next
//! (*torchserve-contract* 2.7).
//!
//! [`folder`] names, finds and writes the files, [`document`] has their form. Which file is read is
//! decided with the other sources of settings; which of its models come back is decided here.

mod document;
mod folder;

use ts_serving::SavedModels;

pub(crate) use folder::{Files, Folder};

use crate::cli::Options;
use crate::settings::raw::{DEFAULT, Raw};
use crate::settings::{Environment, Settings, SettingsError};

/// What of an earlier server comes back.
#[derive(Debug, Default)]
pub(crate) struct Restoring {
    /// Its models, instead of those to load at start.
    pub(crate) models: Option<SavedModels>,
    /// What the operator should know about it.
    pub(crate) notices: Vec<String>,
}

impl Restoring {
    /// Decides which models come back: those of the file that was read, if it has some; with
    /// `restore_models` those of the newest snapshot, if a file was named that has none. `--models`
    /// comes before both.
    ///
    /// # Errors
    /// An archive of theirs is missing.
    pub(crate) fn decide(
        raw: &Raw,
        settings: &Settings,
        options: &Options,
        environment: &Environment,
    ) -> Result<Self, Vec<SettingsError>> {
        let mut notices = raw.notices.clone();
        notices.extend(unprotected(raw));
        let is_named = raw.file.as_ref().is_some_and(|file| file.is_named);
        let found = match &settings.saved_models {
            Some(models) => {
                let origin = raw.values.get(document::MODELS);
                let origin = origin.map_or(DEFAULT, |written| &written.origin);
                Some((models.clone(), origin.to_owned()))
            }
            None if is_named && !options.no_config_snapshots => {
                beside_named_file(settings, environment, &mut notices)
            }
            None => None,
        };
        let Some((models, origin)) = found else {
            return Ok(Self {
                models: None,
                notices,
            });
        };
        if !options.models.is_empty() {
            if !models.is_empty() {
                notices.push(format!(
                    "{} saved models ({origin}) are not restored, since `--models` says what to load",
                    models.len()
                ));
            }
            return Ok(Self {
                models: None,
                notices,
            });
        }
        let missing = models.missing(&settings.model_store);
        if !missing.is_empty() {
            let fault = |missing: ts_serving::MissingArchive| SettingsError::MissingArchive {
                model: missing.model,
                version: missing.version,
                archive: missing.archive,
                origin: origin.clone(),
            };
            return Err(missing.into_iter().map(fault).collect());
        }
        Ok(Self {
            models: Some(models),
            notices,
        })
    }
}

/// Says so where a flag of an earlier command line, kept in the snapshot that was found, leaves this
/// server open.
fn unprotected(raw: &Raw) -> Option<String> {
    let found = raw.file.as_ref().filter(|file| !file.is_named)?;
    let is_snapshot = raw.values.get(document::MODELS)?.origin != DEFAULT;
    let shown = found.path.display().to_string();
    let says = |key: &&str| {
        let written = raw.values.get(*key);
        written.is_some_and(|written| {
            written.origin.starts_with(&shown) && written.text.trim().eq_ignore_ascii_case("true")
        })
    };
    let open = ["disable_token_authorization", "enable_model_api"];
    let open: Vec<_> = open.into_iter().filter(says).collect();
    (is_snapshot && !open.is_empty()).then(|| {
        format!(
            "the snapshot `{shown}`, and not this command line, switches `{}` on. `--ts-config` with a \
             configuration file of yours, or `--ncs`, starts without it",
            open.join("` and `")
        )
    })
}

/// Reads the setting `model_snapshot`.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn parse_saved(text: &str) -> Result<Option<SavedModels>, String> {
    if text.trim().is_empty() {
        return Ok(None);
    }
    document::read_models(text).map(Some)
}

/// The saved models of a server whose configuration file was named and has none.
fn beside_named_file(
    settings: &Settings,
    environment: &Environment,
    notices: &mut Vec<String>,
) -> Option<(SavedModels, String)> {
    let newest = Folder::of(environment).newest();
    let (path, models) = newest.usable?;
    let shown = path.display();
    if settings.restore_models {
        notices.extend(newest.passed_over);
        return Some((models, shown.to_string()));
    }
    if !models.is_empty() {
        notices.push(format!(
            "{} saved models of `{shown}` are not restored, since a configuration file was named. \
             `restore_models=true` in it restores them",
            models.len()
        ));
    }
    None
}
