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
use crate::settings::raw::Raw;
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
    /// The models of the file cannot be read, or an archive of theirs is missing.
    pub(crate) fn decide(
        raw: &Raw,
        settings: &Settings,
        options: &Options,
        environment: &Environment,
    ) -> Result<Self, Vec<SettingsError>> {
        let mut notices = raw.notices.clone();
        let found = match raw.values.get(document::MODELS) {
            Some(written) if !written.text.trim().is_empty() => {
                let models = document::read_models(&written.text).map_err(|reason| {
                    vec![SettingsError::Value {
                        key: document::MODELS,
                        reason,
                        origin: written.origin.clone(),
                    }]
                })?;
                Some((models, written.origin.clone()))
            }
            _ if raw.file.as_ref().is_some_and(|file| file.is_named)
                && !options.no_config_snapshots =>
            {
                beside_named_file(settings, environment, &mut notices)
            }
            _ => None,
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
