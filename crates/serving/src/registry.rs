//! Which models and versions exist, and which version answers a request that names none.
//!
//! Readers take a snapshot; the one writer (`management.rs`) publishes a new one by a single swap,
//! so nobody ever sees half a change.

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use ts_archive::ArtifactDir;
use ts_types::{DeviceType, Isolation, ModelName, Runtime, Version};

use crate::error::ServingError;
use crate::pool::{Pool, Size};
use crate::store::Fetched;

/// A registered model version with all that belongs to it.
pub(crate) struct ModelVersion {
    pub(crate) name: ModelName,
    pub(crate) version: Version,
    pub(crate) url: String,
    /// The archive's file or folder, without the way to it.
    pub(crate) archive: String,
    /// What the registration said, where the archive would not say the same after a restart.
    pub(crate) given_handler: Option<String>,
    pub(crate) given_isolation: Option<Isolation>,
    /// SHA-256 given at registration, beside its URL.
    pub(crate) given_sha256: Option<String>,
    pub(crate) runtime: Runtime,
    pub(crate) device_type: Option<DeviceType>,
    pub(crate) device_ids: Option<Vec<u32>>,
    /// Workers where nobody says a number.
    pub(crate) automatic_workers: usize,
    pub(crate) loaded_at_startup: bool,
    pub(crate) pool: Pool,
    /// The size that was asked for last. The pool follows, at once or when it has drained.
    pub(crate) decided: Mutex<Decided>,
    /// The unpacked archive; its folder goes with the last user of this value.
    #[expect(dead_code, reason = "held for its drop")]
    pub(crate) folder: ArtifactDir,
    /// The archive's file in the store, if the registration brought it there.
    pub(crate) fetched: Option<Fetched>,
}

/// A size, and how many were decided before.
pub(crate) struct Decided {
    pub(crate) size: Size,
    pub(crate) number: u64,
}

/// A model: its versions and the default one. Never changed, only replaced.
#[derive(Clone)]
pub(crate) struct Model {
    pub(crate) default: Version,
    pub(crate) versions: BTreeMap<Version, Arc<ModelVersion>>,
}

impl Model {
    pub(crate) fn default_version(&self) -> Option<&Arc<ModelVersion>> {
        self.versions.get(&self.default)
    }
}

/// All models, sorted by name.
pub(crate) type Models = BTreeMap<ModelName, Model>;

/// The models in force.
#[derive(Default)]
pub(crate) struct Registry {
    models: ArcSwap<Models>,
}

impl Registry {
    /// The models as they are now.
    pub(crate) fn snapshot(&self) -> Arc<Models> {
        self.models.load_full()
    }

    /// Publishes a change. Only the holder of the writer's lock may call it.
    pub(crate) fn publish(&self, change: impl FnOnce(&mut Models)) {
        let mut models = Models::clone(&self.models.load());
        change(&mut models);
        self.models.store(Arc::new(models));
    }

    /// The version that answers a request.
    ///
    /// # Errors
    /// Unknown model or version.
    pub(crate) fn resolve(
        &self,
        model: &ModelName,
        version: Option<&Version>,
    ) -> Result<Arc<ModelVersion>, ServingError> {
        let models = self.models.load();
        let found = models
            .get(model)
            .ok_or_else(|| ServingError::ModelNotFound {
                model: model.to_string(),
            })?;
        let version = version.unwrap_or(&found.default);
        found
            .versions
            .get(version)
            .map(Arc::clone)
            .ok_or_else(|| ServingError::VersionNotFound {
                model: model.clone(),
                version: version.clone(),
            })
    }
}
