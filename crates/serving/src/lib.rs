//! The core: registry, queues, batching, worker pools and hosts.
//!
//! Dialects see two services: [`InferenceService`] runs requests, [`ManagementService`] registers
//! and removes models. What stands behind them is private, so no adapter can reach past them.
//!
//! A request's way: `inference.rs` resolves it in `registry.rs`, wraps it in a job (`job.rs`) and
//! puts it into the version's queue (`queue.rs`). The dispatcher thread of an idle worker
//! (`pool/dispatcher.rs`) cuts a batch as `batch.rs` says, sends it to the worker in its host
//! (`pool/hosts.rs`), and answers the jobs (`pool/exchange.rs`); parts of a reply wait in a stream
//! (`stream.rs`).

mod admission;
mod batch;
#[cfg(feature = "bench")]
#[doc(hidden)]
pub mod bench;
mod config;
mod course;
mod error;
mod explain;
mod fit;
mod handler_metrics;
mod health;
mod inference;
mod job;
mod management;
mod metrics;
mod names;
mod order;
mod pool;
mod queue;
mod registry;
mod resources;
mod scheduling;
mod sequence;
mod snapshot;
mod spec;
mod store;
mod stream;
mod trust;
mod warmup;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use config::{
    HostConfig, ModelDefaults, ModelOverrides, SequenceHeaders, ServingConfig, Trust,
};
pub use course::{Course, Milestones};
pub use error::{Refusal, ServingError, StartFailure};
pub use explain::Batching;
pub use fit::BatchCost;
pub use handler_metrics::{DeclaredMetric, HandlerMetricsConfig};
pub use health::{Obstacle, Readiness};
pub use inference::{Answer, InferenceService, Parts};
pub use job::Timing;
pub use management::{
    Change, Description, LiveLimits, ManagementService, ModelPage, RankDescription, Registered,
    Registration, Scaled, Scaling, Which, WorkerDescription,
};
pub use snapshot::{MissingArchive, Occasion, SavedModels, SavedVersion, SnapshotWriter};
pub use ts_wire::frame::RunFailure;

/// What both services work on.
pub(crate) struct Core {
    config: ServingConfig,
    registry: registry::Registry,
    keeper: snapshot::Keeper,
    surroundings: Arc<pool::Surroundings>,
    names: names::Names,
    progress: health::Progress,
    stopping: AtomicBool,
}

impl Core {
    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    fn stop_accepting(&self) {
        self.stopping.store(true, Ordering::SeqCst);
    }
}

/// Starts the core: prepares the work folder, starts no model. Changes of the registry go to the
/// writer of snapshots, if there is one.
///
/// # Errors
/// [`ServingError::Disk`] when the work folder cannot be used.
pub fn start(
    config: ServingConfig,
    snapshots: Option<Arc<dyn SnapshotWriter>>,
) -> Result<(Arc<InferenceService>, Arc<ManagementService>), ServingError> {
    fs_err::create_dir_all(&config.work_dir).map_err(|source| ServingError::Disk {
        path: config.work_dir.clone(),
        source,
    })?;
    if let Some(store) = &config.model_store {
        store::sweep(store);
    }
    let core = Arc::new(Core {
        surroundings: Arc::new(pool::Surroundings::new(&config)),
        config,
        registry: registry::Registry::default(),
        names: names::Names::default(),
        progress: health::Progress::default(),
        keeper: snapshot::Keeper::new(snapshots),
        stopping: AtomicBool::new(false),
    });
    Ok((
        Arc::new(InferenceService::new(Arc::clone(&core))),
        Arc::new(ManagementService::new(core)),
    ))
}
