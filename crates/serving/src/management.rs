//! Registration, scaling, description and removal of models. The only writer of the registry.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tracing::Instrument as _;
use ts_archive::{ArchiveError, Artifact, Manifest, ManifestModel};
use ts_types::{
    DeviceType, Isolation, ModelLimits, ModelName, Runtime, Scheduling, Version, with_causes,
};
use ts_wire::frame::Exchange;

use crate::Core;
use crate::config::ServingConfig;
use crate::error::{ServingError, StartFailure};
use crate::explain::Batching;
use crate::pool::{Pool, PoolSpec, Resizing, Size, Standing};
use crate::registry::{Decided, Model, ModelVersion};
use crate::snapshot::{self, SavedModels, SavedVersion};
use crate::store::Located;
use crate::{spec, store, trust};

/// Bytes that a registration's URL may have; signed ones of object stores stay well below.
const MAX_URL_BYTES: usize = 8192;

/// Workers that one version may have: as many as `default_workers_per_model` may say. Each has a
/// thread in the server, which ends with the whole process where the system has no more of them.
const MAX_WORKERS: usize = 4096;

/// A registration as a caller asks for it; what is `None` comes from the archive, then the
/// `models` property, then the defaults.
#[derive(Debug, Clone, Default)]
pub struct Registration {
    /// Where the archive is: a name in the store, a folder, or a URL.
    pub url: String,
    /// The SHA-256 that the archive has to have, in hexadecimal (`sha256`).
    pub sha256: Option<String>,
    /// Sign the download as S3 wants it (`s3_sse_kms`).
    pub s3_sse_kms: bool,
    /// Names of parameters that nobody knows, where they may be parts of a URL that was not
    /// percent-encoded.
    pub stray_parameters: Vec<String>,
    /// Name to register under.
    pub model_name: Option<String>,
    /// Handler that replaces the manifest's.
    pub handler: Option<String>,
    /// Runtime that replaces the manifest's.
    pub runtime: Option<Runtime>,
    /// `batch_size`.
    pub batch_size: Option<usize>,
    /// `max_batch_delay`.
    pub max_batch_delay: Option<Duration>,
    /// `response_timeout`.
    pub response_timeout: Option<Duration>,
    /// `startup_timeout`.
    pub startup_timeout: Option<Duration>,
    /// `initial_workers`.
    pub initial_workers: Option<usize>,
    /// `autoscale`: let the load decide how many workers there are.
    pub autoscale: Option<bool>,
    /// `worker_isolation`.
    pub isolation: Option<Isolation>,
    /// Wait until the workers are up, and take the registration back if they do not come up.
    pub synchronous: bool,
    /// The registration comes from the command line or the configuration, not from a client.
    pub at_startup: bool,
    /// The version, and what is known of it, that an earlier server had.
    pub restored: Option<(Version, SavedVersion)>,
}

impl Registration {
    /// Whether the server is to have it before anybody asks: from the command line, the
    /// configuration or a snapshot.
    fn is_of_the_start(&self) -> bool {
        self.at_startup || self.restored.is_some()
    }
}

/// What a change came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change<T> {
    /// The outcome.
    pub outcome: T,
    /// Why the change does not outlive the server, if it does not.
    pub unsaved: Option<String>,
}

/// What a registration came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registered {
    /// The name it is registered under.
    pub model: ModelName,
    /// Its version.
    pub version: Version,
    /// Workers asked for.
    pub workers: usize,
    /// Whether they are all up; with no workers there is nothing to wait for.
    pub ready: bool,
}

/// Limits that change while the workers stay; what is `None` stays too.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LiveLimits {
    /// Requests in one batch at most, at least 1.
    pub batch_size: Option<usize>,
    /// How long a worker may wait for more requests.
    pub max_batch_delay: Option<Duration>,
    /// How long one batch may run.
    pub response_timeout: Option<Duration>,
    /// Requests that may wait at once.
    pub job_queue_size: Option<usize>,
}

/// New bounds for a pool, and new limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scaling {
    /// The number of workers changes; if not, only `limits` counts.
    pub resizes: bool,
    /// Limits to change.
    pub limits: LiveLimits,
    /// Workers at least; `None` is 1, or leaves it as it is if `autoscale` is switched on.
    pub min_workers: Option<usize>,
    /// Workers at most; `None` is the least, or leaves room for growth if `autoscale` is switched
    /// on.
    pub max_workers: Option<usize>,
    /// Let the load decide between the two; `None` leaves it as it is.
    pub autoscale: Option<bool>,
    /// Where no worker is to be left: how long they go on answering what waits before it is
    /// refused.
    pub drain: Option<Duration>,
    /// Wait until the pool has the size asked for.
    pub synchronous: bool,
}

/// What a scaling came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scaled {
    /// Accepted; the pool is being changed.
    Updating,
    /// The pool has the workers asked for, but some that it had before are down and being
    /// restarted.
    InProgress,
    /// The new limits are in force.
    Limited,
    /// The pool has the size asked for.
    Done {
        /// Workers at least.
        min_workers: usize,
    },
}

/// One page of the list of models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelPage {
    /// Name, and URL of the default version, sorted by name.
    pub models: Vec<(ModelName, String)>,
    /// Index that the next page starts at, if there may be one.
    pub next: Option<usize>,
}

/// Which versions to describe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Which {
    /// The default version.
    Default,
    /// This one.
    One(Version),
    /// All of them.
    All,
}

/// A model version as it is now.
#[derive(Debug, Clone)]
pub struct Description {
    /// Name.
    pub model: ModelName,
    /// Version.
    pub version: Version,
    /// URL as given at registration.
    pub url: String,
    /// Runtime.
    pub runtime: Runtime,
    /// Handler in force.
    pub handler: String,
    /// How its workers are isolated.
    pub isolation: Isolation,
    /// Requests join and leave a batch between its steps.
    pub continuous_batching: bool,
    /// Requests are sent to a worker without waiting for its replies.
    pub async_communication: bool,
    /// `parallelType` and `parallelLevel`.
    pub parallel: Option<(&'static str, u32)>,
    /// The numbers in force.
    pub limits: ModelLimits,
    /// How its requests are put in order and into batches.
    pub scheduling: Scheduling,
    /// What enforces those on its hosts, if there are any.
    pub host_limits_by: Option<&'static str>,
    /// Kind of device asked for.
    pub device_type: Option<DeviceType>,
    /// Devices asked for.
    pub device_ids: Option<Vec<u32>>,
    /// Registered from the command line or the configuration.
    pub loaded_at_startup: bool,
    /// It is the default version.
    pub is_default: bool,
    /// A request would be served: a worker can take it, or is started for it.
    pub ready: bool,
    /// Why no worker of it is started any more, if so.
    pub quarantined: Option<String>,
    /// Why the last worker that the load asked for did not come up.
    pub last_failure: Option<String>,
    /// Its workers, in order of their ids.
    pub workers: Vec<WorkerDescription>,
    /// Requests waiting.
    pub pending_requests: usize,
    /// Requests that may still be queued.
    pub remaining_capacity: usize,
}

/// A worker as it is now.
#[derive(Debug, Clone)]
pub struct WorkerDescription {
    /// Unique in this server; the first is 9000.
    pub id: u32,
    /// When its present incarnation was started.
    pub started: SystemTime,
    /// It can take a batch.
    pub ready: bool,
    /// Process of its host, while there is one; of a group, of rank 0.
    pub pid: Option<u32>,
    /// Resident bytes of its processes.
    pub memory_bytes: u64,
    /// Its processes, where it is a group of them.
    pub ranks: Vec<RankDescription>,
    /// How it is isolated.
    pub isolation: Isolation,
    /// Accelerators leased to it; most have none or one.
    pub devices: Vec<u32>,
    /// Its share of the cores: threads of one forward pass. `None` before it was first started.
    pub threads: Option<u32>,
    /// Counts its incarnations from 1.
    pub generation: u64,
    /// Why the last one ended, if one did.
    pub last_failure: Option<String>,
}

/// One process of a worker that is a group.
#[derive(Debug, Clone)]
pub struct RankDescription {
    /// Its number in the group.
    pub rank: u32,
    /// The process.
    pub pid: u32,
    /// Its resident bytes.
    pub memory_bytes: u64,
}

/// Registration, scaling, description and removal of models.
#[derive(Clone)]
pub struct ManagementService {
    pub(crate) core: Arc<Core>,
    /// The writer's lock: names and versions that a call is working on. Held for a moment only,
    /// never while something is awaited.
    reserved: Arc<Mutex<BTreeSet<(ModelName, Version)>>>,
    /// Where changes run, whoever asks for them.
    runtime: Handle,
}

impl ManagementService {
    /// To be called inside the runtime that changes are to run in.
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            reserved: Arc::default(),
            runtime: Handle::current(),
        }
    }

    /// Brings the gauges of queues and workers up to date, for whoever looks at them now.
    pub fn observe(&self) {
        for model in self.core.registry.snapshot().values() {
            for version in model.versions.values() {
                version.pool.observe();
            }
        }
    }

    /// Runs a change to its end even if the caller leaves in the middle.
    async fn run_to_the_end<T: Send + 'static>(
        &self,
        change: impl Future<Output = Result<T, ServingError>> + Send + 'static,
    ) -> Result<T, ServingError> {
        let change = self.runtime.spawn(change.in_current_span());
        change.await.unwrap_or(Err(ServingError::ShuttingDown))
    }

    /// Registers a model version. The first version of a model becomes its default.
    ///
    /// Everything is prepared aside; the version is published when it can be used, which for a
    /// synchronous registration means with all its workers up. The caller may go away: the
    /// registration is finished or taken back all the same.
    ///
    /// # Errors
    /// [`ServingError`]; after any of them nothing of the registration is left.
    pub async fn register(
        &self,
        registration: Registration,
    ) -> Result<Change<Registered>, ServingError> {
        let this = self.clone();
        let of_the_start = registration.is_of_the_start();
        self.run_to_the_end(async move {
            let outcome = this.register_all(registration).await?;
            let unsaved = if of_the_start {
                // All of them are saved together, see `started`.
                None
            } else {
                snapshot::keep(&this.core).await
            };
            Ok(Change { outcome, unsaved })
        })
        .await
    }

    /// Registers what an earlier server had, each model's default version first. One that cannot be
    /// registered is told in the log and does not hold up the others.
    ///
    /// `wait` waits for the workers of each before the next one.
    pub async fn restore(&self, models: SavedModels, wait: bool) {
        for (name, versions) in models.0 {
            let (default, others): (Vec<_>, Vec<_>) = versions
                .into_iter()
                .partition(|(_, saved)| saved.default_version);
            for (version, saved) in default.into_iter().chain(others) {
                let is_default = saved.default_version;
                let registration = Registration {
                    synchronous: wait,
                    ..saved.registration(&name, &version)
                };
                match self.register(registration).await {
                    Ok(_) => {
                        tracing::info!("Model {name} restored. version: {version}");
                        // A caller may have been first with another version.
                        if is_default {
                            let _is_there = self.set_default_of_start(&name, &version);
                        }
                    }
                    Err(error) => {
                        tracing::error!(
                            "Failed to restore model: {name} version: {version}: {}",
                            with_causes(&error)
                        );
                        self.start_failed(name.to_string(), Some(version));
                    }
                }
            }
        }
    }

    /// The models of the start are registered. From here on every change is saved before it is
    /// answered; those that came earlier wait for this. Returns why nothing can be saved.
    pub async fn started(&self) -> Option<String> {
        self.core.progress.has_started();
        snapshot::started(&self.core).await
    }

    async fn register_all(&self, registration: Registration) -> Result<Registered, ServingError> {
        if self.core.is_stopping() {
            return Err(ServingError::ShuttingDown);
        }
        if registration.url.len() > MAX_URL_BYTES {
            return Err(ServingError::BadRegistration(format!(
                "the url has {} bytes, over the limit of {MAX_URL_BYTES}",
                registration.url.len()
            )));
        }
        let core = &self.core;
        let located = match &registration.restored {
            Some((_, saved)) => find_again(&core.config, saved)?,
            None => store::locate(&core.config, &registration).await?,
        };
        let is_new = registration.restored.is_none();
        let mut rollback = Rollback {
            fetched: located.fetched,
            is_new,
        };
        let archive = file_name(&located.path);
        let (artifact, unreadable) = {
            let (core, path, expected) = (Arc::clone(core), located.path, located.expected);
            let (url, restored) = (registration.url.clone(), registration.restored.clone());
            let unpacking = tokio::task::spawn_blocking(move || {
                let config = &core.config;
                let url = store::without_digest(&url);
                match trust::unpack_trusted(config, url, &path, expected) {
                    Ok(artifact) => Ok((artifact, None)),
                    Err(error) => match restored {
                        Some((version, saved)) => {
                            let artifact = stand_in(&config.work_dir, &version, &saved)?;
                            Ok((artifact, Some(error)))
                        }
                        None => Err(error),
                    },
                }
            });
            unpacking.await.map_err(|_| ServingError::ShuttingDown)??
        };
        let resolved = spec::resolve(&core.config, &registration, &artifact)?;
        self.warn(&resolved, &artifact);
        let (name, version) = (resolved.name.clone(), resolved.version.clone());
        let reservation = self.reserve(&name, &version)?;
        let demands = &resolved.scheduling.resources;
        if let Err((demand, size)) = core.surroundings.resources.declare(demands) {
            return Err(ServingError::BadRegistration(format!(
                "the model needs {} of the resource `{}`, of which the server has {size}. Raise it in \
                 `rate_limit_resources`",
                demand.count, demand.name
            )));
        }
        let limits = resolved.limits.clone();
        let size = Size {
            min: limits.min_workers,
            max: limits.max_workers,
            autoscale: limits.autoscale,
        };
        can_be_had(size)?;
        let automatic_workers =
            spec::automatic_workers(&core.config, &resolved.placement, resolved.parallel);
        let expected = registration.is_of_the_start() || core.progress.misses(&name, &version);
        let standing = if expected {
            Standing::Expected
        } else {
            Standing::Aside
        };
        let published = Arc::new(ModelVersion {
            name: name.clone(),
            version: version.clone(),
            url: registration.url.clone(),
            archive,
            given_handler: registration.handler.clone(),
            given_isolation: registration.isolation,
            given_sha256: registration.sha256.clone(),
            runtime: resolved.runtime,
            device_type: resolved.device_type,
            device_ids: resolved.device_ids.clone(),
            automatic_workers,
            loaded_at_startup: registration.at_startup,
            pool: Pool::new(
                PoolSpec::new(resolved, Arc::clone(&core.surroundings)),
                standing,
            ),
            decided: Mutex::new(Decided { size, number: 0 }),
            folder: artifact.dir,
            fetched: rollback.fetched.take(),
        });
        let started = if let Some(error) = unreadable {
            let reason = with_causes(&error);
            tracing::error!("model {name} is listed, and has no worker: {reason}");
            published.pool.cannot_start(reason);
            Ok(())
        } else if registration.synchronous {
            published.pool.resize(size).started().await
        } else {
            published.pool.resize(size).failed()
        };
        if let Err(cause) = started {
            take_back(published, is_new).await;
            return Err(ServingError::WorkerStart {
                model: name,
                version,
                cause,
            });
        }
        if core.is_stopping() {
            take_back(published, is_new).await;
            return Err(ServingError::ShuttingDown);
        }
        self.publish(&published, reservation);
        let workers = limits.min_workers;
        tracing::info!(model = %name, version = %version, workers, "model registered");
        Ok(Registered {
            model: name,
            version,
            workers,
            ready: registration.synchronous || workers == 0,
        })
    }

    fn warn(&self, resolved: &spec::ResolvedModel, artifact: &ts_archive::Artifact) {
        let model = resolved.name.as_str();
        for warning in artifact.config.iter().flat_map(|config| &config.warnings) {
            tracing::warn!(model, "{warning}");
        }
        for key in spec::without_effect(artifact) {
            tracing::warn!(
                model,
                key,
                "`{key}` of the model's configuration has no effect yet"
            );
        }
        if artifact.manifest.model.requirements_file.is_some() {
            tracing::warn!(
                model,
                "the archive lists packages to install; they are not installed, so they must be \
                 in the server's environment already (`install_py_dep_per_model` has no effect yet)"
            );
        }
    }

    fn publish(&self, version: &Arc<ModelVersion>, mut reservation: Reservation) {
        let mut reserved = self.reserved.lock();
        self.core.registry.publish(|models| {
            let model = models.entry(version.name.clone()).or_insert_with(|| Model {
                default: version.version.clone(),
                versions: BTreeMap::new(),
            });
            model
                .versions
                .insert(version.version.clone(), Arc::clone(version));
        });
        // In one step with the publication: a removal may come right after it.
        if let Some(key) = reservation.key.take() {
            reserved.remove(&key);
        }
    }

    /// Claims a name and version that nobody has or is about to have.
    fn reserve(&self, name: &ModelName, version: &Version) -> Result<Reservation, ServingError> {
        let mut reserved = self.reserved.lock();
        let key = (name.clone(), version.clone());
        let exists = self.core.registry.resolve(name, Some(version)).is_ok();
        if exists || !reserved.insert(key.clone()) {
            return Err(ServingError::AlreadyRegistered {
                model: name.clone(),
                version: version.clone(),
            });
        }
        Ok(Reservation {
            reserved: Arc::clone(&self.reserved),
            key: Some(key),
        })
    }

    /// Changes the bounds of a pool, its limits, or both. A worker that is removed finishes its
    /// batch; new limits hold from the next batch and the next request on.
    ///
    /// # Errors
    /// Unknown model or version, bad range, a limit that cannot change: nothing has changed then.
    /// Workers that do not come up: what was before holds again. Workers that do not end in time.
    pub async fn scale(
        &self,
        model: &ModelName,
        version: Option<&Version>,
        scaling: Scaling,
    ) -> Result<Change<Scaled>, ServingError> {
        if self.core.is_stopping() {
            return Err(ServingError::ShuttingDown);
        }
        let found = self.core.registry.resolve(model, version)?;
        if found.pool.spec().queue.is_closed() {
            return Err(ServingError::BeingRemoved {
                model: found.name.clone(),
            });
        }
        let (under_way, step) = begin(&found, &scaling)?;
        let this = self.clone();
        self.run_to_the_end(async move {
            let Some(under_way) = under_way else {
                let outcome = Scaled::Limited;
                let unsaved = snapshot::keep(&this.core).await;
                return Ok(Change { outcome, unsaved });
            };
            let limit = this.core.config.defaults.unregister_timeout;
            let finishing = finish_scaling(Arc::clone(&found), under_way, limit);
            if !scaling.synchronous {
                let finishing = async move {
                    if let Err(error) = finishing.await {
                        tracing::warn!(%error, "scaling did not finish");
                    }
                };
                this.runtime.spawn(finishing.in_current_span());
                let outcome = Scaled::Updating;
                let unsaved = snapshot::keep(&this.core).await;
                return Ok(Change { outcome, unsaved });
            }
            let ready = match finishing.await {
                Ok(ready) => ready,
                Err(error) => {
                    let overtaken = step.was_overtaken(&found, &error);
                    step.take_back(&found, &error, limit).await;
                    // What holds now, and not what was to hold when somebody else saved.
                    snapshot::keep(&this.core).await;
                    let error = this.unless_removed(&found, error);
                    if !overtaken || !matches!(error, ServingError::WorkerStart { .. }) {
                        return Err(error);
                    }
                    // No worker failed: a later call needed fewer.
                    0
                }
            };
            let min_workers = step.size.min;
            let unsaved = snapshot::keep(&this.core).await;
            let outcome = if ready < min_workers {
                Scaled::InProgress
            } else {
                Scaled::Done { min_workers }
            };
            Ok(Change { outcome, unsaved })
        })
        .await
    }

    /// An error of a version that was taken away meanwhile is that it is not there.
    fn unless_removed(&self, version: &Arc<ModelVersion>, error: ServingError) -> ServingError {
        let registry = &self.core.registry;
        match registry.resolve(&version.name, Some(&version.version)) {
            Ok(found) if Arc::ptr_eq(&found, version) => error,
            Ok(_) => ServingError::VersionNotFound {
                model: version.name.clone(),
                version: version.version.clone(),
            },
            Err(gone) => gone,
        }
    }

    /// Lists models from `start` on, at most `limit`.
    pub fn list(&self, start: usize, limit: usize) -> ModelPage {
        let models = self.core.registry.snapshot();
        let page = models
            .iter()
            .skip(start)
            .take(limit)
            .filter_map(|(name, model)| Some((name.clone(), model.default_version()?.url.clone())));
        // As TorchServe: also when the page ends exactly at the last model.
        let end = start.saturating_add(limit);
        ModelPage {
            models: page.collect(),
            next: (end <= models.len()).then_some(end),
        }
    }

    /// Describes versions of a model; never empty.
    ///
    /// # Errors
    /// Unknown model or version.
    pub fn describe(
        &self,
        model: &ModelName,
        which: &Which,
    ) -> Result<Vec<Description>, ServingError> {
        let registry = &self.core.registry;
        let models = registry.snapshot();
        let found = models
            .get(model)
            .ok_or_else(|| ServingError::ModelNotFound {
                model: model.to_string(),
            })?;
        let versions = match which {
            Which::Default => vec![registry.resolve(model, None)?],
            Which::One(version) => vec![registry.resolve(model, Some(version))?],
            Which::All => found.versions.values().cloned().collect(),
        };
        Ok(versions
            .iter()
            .map(|version| describe(version, &found.default))
            .collect())
    }

    /// How the batches of a version, or of the default one, come about.
    ///
    /// # Errors
    /// Unknown model or version.
    pub fn batching(
        &self,
        model: &ModelName,
        version: Option<&Version>,
    ) -> Result<(Version, Batching), ServingError> {
        let found = self.core.registry.resolve(model, version)?;
        Ok((found.version.clone(), found.pool.spec().queue.explain()))
    }

    /// Makes a version the default.
    ///
    /// # Errors
    /// Unknown model or version.
    pub async fn set_default(
        &self,
        model: &ModelName,
        version: &Version,
    ) -> Result<Change<()>, ServingError> {
        if self.core.is_stopping() {
            return Err(ServingError::ShuttingDown);
        }
        self.set_default_of_start(model, version)?;
        let this = self.clone();
        self.run_to_the_end(async move {
            let unsaved = snapshot::keep(&this.core).await;
            Ok(Change {
                outcome: (),
                unsaved,
            })
        })
        .await
    }

    /// The same for the models of the start, which are saved together, see
    /// [`started`](Self::started).
    ///
    /// # Errors
    /// Unknown model or version.
    pub fn set_default_of_start(
        &self,
        model: &ModelName,
        version: &Version,
    ) -> Result<(), ServingError> {
        {
            let _writer = self.reserved.lock();
            match self.core.registry.resolve(model, Some(version)) {
                Ok(_) => {}
                Err(ServingError::VersionNotFound { model, version }) => {
                    return Err(ServingError::NoSuchDefault { model, version });
                }
                Err(error) => return Err(error),
            }
            self.core.registry.publish(|models| {
                if let Some(found) = models.get_mut(model) {
                    found.default = version.clone();
                }
            });
        }
        tracing::info!(%model, %version, "default version set");
        Ok(())
    }

    /// Removes a version, or the default version if it is the only one. Requests that were
    /// accepted are answered first, for at most `unregister_model_timeout`.
    ///
    /// # Errors
    /// Unknown model or version, default version in use, workers that do not end in time.
    pub async fn unregister(
        &self,
        model: &ModelName,
        version: Option<&Version>,
    ) -> Result<Change<()>, ServingError> {
        if self.core.is_stopping() {
            return Err(ServingError::ShuttingDown);
        }
        let (removed, reservation) = {
            let mut reserved = self.reserved.lock();
            let registry = &self.core.registry;
            let removed = registry.resolve(model, version)?;
            let models = registry.snapshot();
            if let Some(found) = models.get(model)
                && found.default == removed.version
                && found.versions.len() > 1
            {
                return Err(ServingError::DefaultInUse {
                    model: model.clone(),
                });
            }
            let key = (removed.name.clone(), removed.version.clone());
            reserved.insert(key.clone());
            registry.publish(|models| {
                if let Some(found) = models.get_mut(model) {
                    found.versions.remove(&removed.version);
                    if found.versions.is_empty() {
                        models.remove(model);
                    }
                }
            });
            (
                removed,
                Reservation {
                    reserved: Arc::clone(&self.reserved),
                    key: Some(key),
                },
            )
        };
        let this = self.clone();
        self.run_to_the_end(async move {
            let limit = this.core.config.defaults.unregister_timeout;
            if !removed.pool.finish(limit).await {
                // Still there, so still listed; it can be removed again.
                this.publish(&removed, reservation);
                snapshot::keep(&this.core).await;
                return Err(ServingError::CleanupTimeout {
                    model: removed.name.clone(),
                });
            }
            tracing::info!(model = %removed.name, version = %removed.version, "model unregistered");
            // Before its archive goes: a saved model whose archive is missing keeps the server from
            // starting.
            let unsaved = snapshot::keep(&this.core).await;
            if this.uses_archive_of(&removed) {
                drop_files(removed).await;
            } else {
                delete_files(removed).await;
            }
            drop(reservation);
            Ok(Change {
                outcome: (),
                unsaved,
            })
        })
        .await
    }

    /// Whether another version was registered from the archive that this one brought into the store.
    fn uses_archive_of(&self, removed: &ModelVersion) -> bool {
        let models = self.core.registry.snapshot();
        let mut versions = models.values().flat_map(|model| model.versions.values());
        versions.any(|version| version.archive == removed.archive)
    }

    /// Names registered at startup, sorted.
    pub fn startup_models(&self) -> Vec<ModelName> {
        let models = self.core.registry.snapshot();
        let at_startup = models.iter().filter(|(_, model)| {
            model
                .versions
                .values()
                .any(|version| version.loaded_at_startup)
        });
        at_startup.map(|(name, _)| name.clone()).collect()
    }

    /// Refuses new requests, finishes those accepted, ends all workers; at most until `limit`
    /// has passed, then ends them as they are. Returns whether everything ended in time.
    pub async fn shut_down(&self, limit: Duration) -> bool {
        self.core.stop_accepting();
        // With the models that are there now.
        snapshot::stop(&self.core).await;
        let models = self.core.registry.snapshot();
        let versions = models.values().flat_map(|model| model.versions.values());
        let ended = join_all(versions.map(|version| version.pool.finish(limit))).await;
        let _writer = self.reserved.lock();
        self.core.registry.publish(BTreeMap::clear);
        ended.into_iter().all(|gone| gone)
    }
}

/// A name and version that a call is working on; free again when dropped.
struct Reservation {
    reserved: Arc<Mutex<BTreeSet<(ModelName, Version)>>>,
    /// `None` once it has been given back.
    key: Option<(ModelName, Version)>,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Some(key) = self.key.take() {
            self.reserved.lock().remove(&key);
        }
    }
}

/// A fetched archive of a registration that has not got through yet.
struct Rollback {
    fetched: Option<store::Fetched>,
    /// This registration fetched it; one that restores a model found it.
    is_new: bool,
}

impl Drop for Rollback {
    fn drop(&mut self) {
        if let Some(fetched) = self.fetched.take()
            && self.is_new
        {
            let _best_effort = fetched.remove();
        }
    }
}

/// Ends and deletes what a registration that failed had made. An archive that it only found stays.
async fn take_back(version: Arc<ModelVersion>, is_new: bool) {
    version.pool.finish(Duration::ZERO).await;
    if is_new {
        delete_files(version).await;
    }
}

/// The archive of a model that an earlier server had.
fn find_again(config: &ServingConfig, saved: &SavedVersion) -> Result<Located, ServingError> {
    let store = config.model_store.as_ref().ok_or(ServingError::NoStore)?;
    let path = saved.archive(store);
    let path = path.ok_or_else(|| ServingError::NotInStore {
        url: saved.mar_name.clone(),
    })?;
    let fetched = saved.fetched.then(|| store::Fetched { path: path.clone() });
    let url = saved.url.as_deref().unwrap_or(&saved.mar_name);
    let (_, expected) = store::expected_digest(url, saved.sha256.as_deref())?;
    config.trust.check_given(url, expected)?;
    Ok(Located {
        path,
        fetched,
        expected,
    })
}

/// What is registered for an archive that was readable once, so that the model is not forgotten.
fn stand_in(
    work_dir: &Path,
    version: &Version,
    saved: &SavedVersion,
) -> Result<Artifact, ArchiveError> {
    let manifest = Manifest {
        runtime: saved.runtime_type,
        model: ManifestModel {
            model_version: Some(version.to_string()),
            handler: Some("unreadable".to_owned()),
            ..ManifestModel::default()
        },
        ..Manifest::default()
    };
    ts_archive::placeholder(work_dir, manifest)
}

fn file_name(path: &Path) -> String {
    let name = path.file_name().unwrap_or(path.as_os_str());
    name.to_string_lossy().into_owned()
}

/// Deletes the files of a version that is gone. They may be many: not on a thread of the runtime.
async fn delete_files(version: Arc<ModelVersion>) {
    let deleting = tokio::task::spawn_blocking(move || {
        remove_fetched(&version);
        drop(version);
    });
    let _panicked = deleting.await;
}

/// The same, but the archive stays in the store.
async fn drop_files(version: Arc<ModelVersion>) {
    let _panicked = tokio::task::spawn_blocking(move || drop(version)).await;
}

fn remove_fetched(version: &ModelVersion) {
    if let Some(fetched) = &version.fetched
        && let Err(error) = fetched.remove()
    {
        tracing::warn!(%error, "a fetched archive stays in the model store");
    }
}

/// A scaling that was decided.
struct Step {
    /// The size in force from now on, and the one before.
    size: Size,
    before: Size,
    /// The limits before.
    limits: LiveLimits,
    /// Its number, while no other came after it.
    number: u64,
}

/// What follows from it.
enum UnderWay {
    Resizing(Resizing),
    /// First its workers answer what waits, for so long.
    Draining(Duration, Size),
}

/// Decides, all or nothing, and lets the pool begin.
fn begin(
    version: &ModelVersion,
    scaling: &Scaling,
) -> Result<(Option<UnderWay>, Step), ServingError> {
    let mut decided = version.decided.lock();
    let before = decided.size;
    let mut size = if scaling.resizes {
        size(before, version.automatic_workers, scaling)
    } else {
        before
    };
    if size.max < size.min {
        return Err(ServingError::WorkerRange);
    }
    if let Some(room) = version.pool.spec().devices.room() {
        let wanted = size.max;
        size.min = size.min.min(room);
        size.max = size.max.min(room);
        if size.max < wanted {
            let model = &version.name;
            tracing::warn!(%model, wanted, room, "there are devices for fewer workers");
        }
    }
    if scaling.resizes {
        can_be_had(size)?;
    }
    let limits = version.pool.change_limits(&scaling.limits)?;
    decided.size = size;
    decided.number += 1;
    let number = decided.number;
    let under_way = scaling
        .resizes
        .then(|| match scaling.drain.filter(|_| size.max == 0) {
            Some(drain) => {
                version.pool.stop_taking();
                UnderWay::Draining(drain, size)
            }
            None => UnderWay::Resizing(version.pool.resize(size)),
        });
    let (model, of) = (&version.name, &version.version);
    if scaling.resizes {
        let (min, max, autoscale) = (size.min, size.max, size.autoscale);
        tracing::info!(%model, version = %of, min, max, autoscale, "workers scaled");
    }
    if scaling.limits != LiveLimits::default() {
        tracing::info!(%model, version = %of, limits = ?scaling.limits, "limits changed");
    }
    let step = Step {
        size,
        before,
        limits,
        number,
    };
    Ok((under_way, step))
}

impl Step {
    /// Whether another call stopped the workers that this one waited for.
    fn was_overtaken(&self, version: &ModelVersion, error: &ServingError) -> bool {
        let stopped = matches!(
            error,
            ServingError::WorkerStart { cause, .. } if *cause == StartFailure::stopped()
        );
        stopped && version.decided.lock().number != self.number
    }

    /// Where workers did not come up, puts back what was before. Not where another call came after
    /// this one, which has the last word.
    async fn take_back(&self, version: &ModelVersion, error: &ServingError, limit: Duration) {
        let mut resizing = {
            let mut decided = version.decided.lock();
            let failed = matches!(error, ServingError::WorkerStart { .. });
            if !failed || decided.number != self.number || version.pool.spec().queue.is_closed() {
                return;
            }
            // They held before, so they do again.
            let _valid = version.pool.change_limits(&self.limits);
            if self.before == self.size {
                return;
            }
            decided.number += 1;
            decided.size = self.before;
            version.pool.resize(self.before)
        };
        resizing.stopped(limit).await;
    }
}

/// Returns how many workers take batches after it.
async fn finish_scaling(
    version: Arc<ModelVersion>,
    under_way: UnderWay,
    limit: Duration,
) -> Result<usize, ServingError> {
    let mut resizing = match under_way {
        UnderWay::Resizing(resizing) => resizing,
        UnderWay::Draining(drain, size) if version.pool.drained(drain).await => {
            version.pool.resize(size)
        }
        // Another call came in between, and has the last word.
        UnderWay::Draining(..) => return Ok(version.pool.ready_workers()),
    };
    let started = resizing.started().await;
    let stopped = resizing.stopped(limit).await;
    // The last worker that could take what waits may have gone.
    version.pool.arrived();
    started.map_err(|cause: StartFailure| ServingError::WorkerStart {
        model: version.name.clone(),
        version: version.version.clone(),
        cause,
    })?;
    if !stopped {
        return Err(ServingError::CleanupTimeout {
            model: version.name.clone(),
        });
    }
    Ok(version.pool.ready_workers())
}

/// The bounds that a call asks for. Without autoscaling an absent one has TorchServe's default.
fn size(now: Size, automatic_workers: usize, scaling: &Scaling) -> Size {
    let autoscale = scaling.autoscale.unwrap_or(now.autoscale);
    let (min, max) = if scaling.autoscale == Some(true) {
        let min = scaling.min_workers.unwrap_or(now.min);
        let room = if now.max > now.min {
            now.max
        } else {
            automatic_workers
        };
        (min, scaling.max_workers.unwrap_or(room.max(min)))
    } else {
        let min = scaling.min_workers.unwrap_or(1);
        (min, scaling.max_workers.unwrap_or(min))
    };
    Size {
        min,
        max,
        autoscale,
    }
}

/// Refuses a size that may come to more workers than a version may have.
fn can_be_had(size: Size) -> Result<(), ServingError> {
    // Without autoscaling nothing ever grows above the least.
    let workers = if size.autoscale { size.max } else { size.min };
    if workers > MAX_WORKERS {
        return Err(ServingError::TooManyWorkers {
            workers,
            limit: MAX_WORKERS,
        });
    }
    Ok(())
}

fn describe(version: &ModelVersion, default: &Version) -> Description {
    let spec = version.pool.spec();
    // Not within the expression below, which would hold the lock while it takes the pool's.
    let limits = spec.limits.read().clone();
    let (pending_requests, remaining_capacity) = spec.queue.occupancy();
    Description {
        model: version.name.clone(),
        version: version.version.clone(),
        url: version.url.clone(),
        runtime: version.runtime,
        handler: spec.load.handler.clone(),
        isolation: spec.isolation,
        continuous_batching: spec.load.exchange == Exchange::Continuous,
        async_communication: spec.load.exchange == Exchange::Asynchronous,
        parallel: spec
            .parallel
            .map(|parallel| (parallel.kind(), parallel.level())),
        scheduling: spec.scheduling.clone(),
        host_limits_by: (!limits.hosts.is_unlimited()).then(|| spec.surroundings.means_of_limits()),
        limits,
        device_type: version.device_type,
        device_ids: version.device_ids.clone(),
        loaded_at_startup: version.loaded_at_startup,
        is_default: version.version == *default,
        ready: version.pool.can_serve(),
        quarantined: version.pool.quarantine(),
        last_failure: version.pool.growth_failure(),
        workers: version.pool.describe(),
        pending_requests,
        remaining_capacity,
    }
}
