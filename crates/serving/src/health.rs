//! Is the server ready, and is a model? Computed from the workers as they are at the moment of the
//! call, and the same for every dialect. No worker is asked.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use ts_types::{ModelName, Version};

use crate::error::ServingError;
use crate::management::ManagementService;
use crate::registry::Model;
use crate::snapshot;

/// How far the server is, and what its start could not register.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    started: AtomicBool,
    stopping: AtomicBool,
    failed: Mutex<Vec<Missing>>,
}

/// A model that the start was to register and could not.
#[derive(Debug)]
struct Missing {
    model: String,
    version: Option<Version>,
}

impl Progress {
    pub(crate) fn has_started(&self) {
        self.started.store(true, Ordering::SeqCst);
    }

    /// Whether the start was to register this and could not.
    pub(crate) fn misses(&self, model: &ModelName, version: &Version) -> bool {
        let is_it = |missing: &Missing| {
            let other = missing.version.as_ref().is_some_and(|of| of != version);
            missing.model == model.as_str() && !other
        };
        self.failed.lock().iter().any(is_it)
    }
}

/// Whether a server may be sent requests, and if not, why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readiness {
    /// Models of the start are still being registered.
    pub starting: bool,
    /// It was told to stop.
    pub stopping: bool,
    /// Models that cannot serve, sorted by name, those that the start could not register last.
    pub obstacles: Vec<Obstacle>,
}

impl Readiness {
    /// Whether nothing stands against it.
    pub fn is_ready(&self) -> bool {
        !self.starting && !self.stopping && self.obstacles.is_empty()
    }
}

/// A model that cannot serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// Its name, or what it would have been called.
    pub model: String,
    /// Its version, where that is known.
    pub version: Option<Version>,
    /// What it lacks.
    pub reason: &'static str,
}

impl ManagementService {
    /// Whether requests may be sent: the start is over, the server is to go on, and every model
    /// version that has a minimum of workers serves. One of the start that has not had its minimum
    /// yet is still loading; later a single worker will do, so that a lost one does not take the
    /// others out of service. One that was registered since counts once it has had its minimum, so
    /// that nobody takes a server that serves out of service by registering another model. A model
    /// in quarantine counts whatever its minimum.
    pub fn readiness(&self) -> Readiness {
        let progress = &self.core.progress;
        let models = self.core.registry.snapshot();
        let versions = models.values().flat_map(|model| model.versions.values());
        let of_models = versions.filter_map(|version| {
            Some(Obstacle {
                model: version.name.to_string(),
                version: Some(version.version.clone()),
                reason: version.pool.obstacle()?,
            })
        });
        let failed = progress.failed.lock();
        let is_missing = |missing: &&Missing| {
            let found = models
                .iter()
                .find(|(name, _)| name.as_str() == missing.model);
            // Somebody may have registered it since.
            !found.is_some_and(|(_, model)| match &missing.version {
                Some(version) => model.versions.contains_key(version),
                None => true,
            })
        };
        let of_the_start = failed.iter().filter(is_missing).map(|missing| Obstacle {
            model: missing.model.clone(),
            version: missing.version.clone(),
            reason: "not registered",
        });
        Readiness {
            starting: !progress.started.load(Ordering::SeqCst),
            stopping: progress.stopping.load(Ordering::SeqCst),
            obstacles: of_models.chain(of_the_start).collect(),
        }
    }

    /// Whether a request of this version, or of the default one, would be served.
    ///
    /// # Errors
    /// Unknown model or version.
    pub fn model_is_ready(
        &self,
        model: &ModelName,
        version: Option<&Version>,
    ) -> Result<bool, ServingError> {
        let found = self.core.registry.resolve(model, version)?;
        let stopping = self.core.progress.stopping.load(Ordering::SeqCst);
        Ok(!stopping && found.pool.can_serve())
    }

    /// Whether every model's default version has its minimum of healthy workers, and the server is
    /// to go on: what `/ping` tells (*torchserve-contract* 4.5). Workers that load or are being
    /// restarted count. A model in quarantine has none, whatever its minimum.
    pub fn healthy(&self) -> bool {
        let models = self.core.registry.snapshot();
        let mut defaults = models.values().filter_map(Model::default_version);
        let all = defaults.all(|version| {
            let minimum = version.pool.spec().limits.read().min_workers;
            version.pool.healthy_workers() >= minimum && version.pool.quarantine().is_none()
        });
        all && !self.core.progress.stopping.load(Ordering::SeqCst)
    }

    /// A model that the start was to register is not there: the server is not ready until somebody
    /// registers it.
    pub fn start_failed(&self, model: String, version: Option<Version>) {
        let missing = Missing { model, version };
        self.core.progress.failed.lock().push(missing);
    }

    /// The server will stop: from here on it is not ready, though it still serves. Models of the
    /// start that have not come will not come, and calls that wait for them are answered.
    pub fn stop_is_near(&self) {
        self.core.progress.stopping.store(true, Ordering::SeqCst);
        snapshot::break_off(&self.core);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_start_misses_is_known_by_its_name_and_by_its_version_if_that_is_known() {
        let [a, b] = ["a", "b"].map(|name| ModelName::new(name).unwrap());
        let [one, two] = ["1.0", "2.0"].map(|text| Version::new(text).unwrap());
        let progress = Progress::default();
        assert!(!progress.misses(&a, &one));
        for (model, version) in [("a", None), ("b", Some(one.clone()))] {
            let model = model.to_owned();
            progress.failed.lock().push(Missing { model, version });
        }
        assert!(progress.misses(&a, &one) && progress.misses(&a, &two));
        assert!(progress.misses(&b, &one) && !progress.misses(&b, &two));
    }
}
