//! Registers the models that the operator named, before the server says that it has started.

use std::path::PathBuf;
use std::sync::Arc;

use ts_serving::{ManagementService, Readiness, Registration};
use ts_types::{ModelName, Version, with_causes};

use crate::redact;
use crate::settings::{StartupModel, StartupModels};

/// Registers the models one after the other, in the order given. One that fails is told in the log
/// and does not hold up the others.
///
/// Of several versions of one model the first is the default one, unless `defaults` has another.
///
/// `wait` waits for the workers of each before the next one.
pub(crate) async fn load(
    management: Arc<ManagementService>,
    models: StartupModels,
    store: PathBuf,
    defaults: Vec<(ModelName, Version)>,
    wait: bool,
) {
    let models = match models.resolve(&store) {
        Ok(models) => models,
        Err(error) => {
            tracing::error!("the model store cannot be listed: {error}");
            management.start_failed("all".to_owned(), None);
            return;
        }
    };
    let mut loaded = Vec::new();
    for StartupModel { name, url } in models {
        let registration = Registration {
            url: url.clone(),
            model_name: name.clone(),
            synchronous: wait,
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
                management.start_failed(name.unwrap_or_else(|| stem(&shown)), None);
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

/// Whether every model of the start came up (`exit_on_model_failure`).
///
/// # Errors
/// Which ones did not.
pub(crate) fn all_serve(readiness: &Readiness) -> anyhow::Result<()> {
    let told = readiness.obstacles.iter().map(|obstacle| {
        let version = obstacle.version.as_ref();
        let version = version
            .map(|version| format!(" {version}"))
            .unwrap_or_default();
        format!("`{}`{version} ({})", obstacle.model, obstacle.reason)
    });
    let told: Vec<_> = told.collect();
    anyhow::ensure!(
        told.is_empty(),
        "models did not come up: {}. The log has the reasons above; `exit_on_model_failure=false` \
         starts without them",
        told.join(", ")
    );
    Ok(())
}

/// What a model is most likely called whose archive could not be asked: as its file, without the
/// ending.
fn stem(url: &str) -> String {
    let path = url.split(['?', '#']).next().unwrap_or(url);
    let file = path
        .trim_end_matches('/')
        .rsplit('/')
        .next()
        .unwrap_or(path);
    let stem = file.rsplit_once('.').map_or(file, |(stem, _)| stem);
    stem.to_owned()
}

#[cfg(test)]
mod tests {
    use super::stem;

    #[test]
    fn a_model_is_called_as_its_file() {
        for (url, name) in [
            ("m.mar", "m"),
            ("folder/", "folder"),
            ("https://host/a/m.mar?***", "m"),
            ("s3://bucket/m.tar.gz", "m.tar"),
        ] {
            assert_eq!(stem(url), name, "{url}");
        }
    }
}
