//! Registers the models that the operator named, before the server says that it has started.

use std::path::PathBuf;
use std::sync::Arc;

use ts_serving::{ManagementService, Registration};
use ts_types::{ModelName, Version, with_causes};

use crate::redact;
use crate::settings::{StartupModel, StartupModels};

/// Registers the models one after the other, in the order given. One that fails is told in the log
/// and does not hold up the others.
///
/// Of several versions of one model the first is the default one, unless `defaults` has another.
pub(crate) async fn load(
    management: Arc<ManagementService>,
    models: StartupModels,
    store: PathBuf,
    defaults: Vec<(ModelName, Version)>,
) {
    let models = match models.resolve(&store) {
        Ok(models) => models,
        Err(error) => {
            tracing::warn!("the model store cannot be listed: {error}");
            return;
        }
    };
    let mut loaded = Vec::new();
    for StartupModel { name, url } in models {
        let registration = Registration {
            url: url.clone(),
            model_name: name,
            at_startup: true,
            ..Registration::default()
        };
        let shown = redact::url(&url);
        match management.register(registration).await {
            Ok(registered) => {
                let (model, version) = (&registered.outcome.model, &registered.outcome.version);
                tracing::info!("Model {model} loaded. version: {version}, url: {shown}");
                loaded.push((registered.outcome.model, registered.outcome.version));
            }
            Err(error) => {
                let reason = with_causes(&error).replace(&url, &shown);
                tracing::error!("Failed to load model: {shown}: {reason}");
            }
        }
    }
    for (model, version) in defaults {
        // Others of the `models` property are there for registrations to come.
        if !loaded.iter().any(|(name, _)| *name == model) {
            continue;
        }
        if let Err(error) = management.set_default_of_start(&model, &version) {
            tracing::error!(
                "`models` marks version {version} of {model} as the default one: {}",
                with_causes(&error)
            );
        }
    }
}
