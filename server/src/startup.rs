//! Registers the models that the operator named, before the server says that it has started.

use std::path::PathBuf;
use std::sync::Arc;

use ts_serving::{ManagementService, Registration};
use ts_types::with_causes;

use crate::settings::{StartupModel, StartupModels};

/// Registers the models one after the other, in the order given. One that fails is told in the log
/// and does not hold up the others.
pub(crate) async fn load(
    management: Arc<ManagementService>,
    models: StartupModels,
    store: PathBuf,
) {
    let models = match models.resolve(&store) {
        Ok(models) => models,
        Err(error) => {
            tracing::warn!("the model store cannot be listed: {error}");
            return;
        }
    };
    for StartupModel { name, url } in models {
        let registration = Registration {
            url: url.clone(),
            model_name: name,
            at_startup: true,
            ..Registration::default()
        };
        match management.register(registration).await {
            Ok(registered) => {
                let (model, version) = (&registered.outcome.model, &registered.outcome.version);
                tracing::info!("Model {model} loaded. version: {version}, url: {url}");
            }
            Err(error) => {
                tracing::error!("Failed to load model: {url}: {}", with_causes(&error));
            }
        }
    }
}
