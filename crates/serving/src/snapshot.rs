//! The registry as plain data, and how it outlives the server.
//!
//! A change is saved before its caller hears of it. There is one writer: it saves the models as they
//! are when it begins, so one save serves every change that was published before, and what was saved
//! last is never older than a change that was answered.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{Mutex, OwnedMutexGuard, watch};
use ts_types::{Isolation, ModelName, Runtime, Version};

use crate::Core;
use crate::management::Registration;
use crate::registry::{ModelVersion, Registry};
use crate::store;

/// How long a change waits to be saved: a disk that stands still must not hold callers, or the
/// server's end.
const SAVE_LIMIT: Duration = Duration::from_secs(20);

/// Every registered model, by name and version. The members of a version are TorchServe's
/// (*torchserve-contract* 2.7), with more that it would ignore.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SavedModels(pub BTreeMap<ModelName, BTreeMap<Version, SavedVersion>>);

/// What it takes to register a version again as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SavedVersion {
    /// It answers requests that name no version.
    pub default_version: bool,
    /// Name of its archive, in the model store unless `url` says otherwise.
    pub mar_name: String,
    /// Workers at least.
    pub min_workers: usize,
    /// Workers at most.
    pub max_workers: usize,
    /// Requests in one batch at most.
    pub batch_size: usize,
    /// Milliseconds; TorchServe writes some below zero.
    pub max_batch_delay: i64,
    /// Seconds.
    #[serde(default = "two_minutes")]
    pub response_timeout: u64,
    /// Seconds.
    #[serde(default = "two_minutes")]
    pub startup_timeout: u64,
    /// What runs it.
    #[serde(default = "python")]
    pub runtime_type: Runtime,
    /// The delay where it is no whole number of milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_batch_delay_micros: Option<u64>,
    /// As given at registration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The registration brought the archive into the store, so it goes with the model.
    #[serde(default, skip_serializing_if = "is_false")]
    pub fetched: bool,
    /// Handler given at registration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub handler: Option<String>,
    /// Isolation given at registration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worker_isolation: Option<Isolation>,
    /// SHA-256 given at registration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The load decides how many workers there are.
    #[serde(default, skip_serializing_if = "is_false")]
    pub autoscale: bool,
    /// Requests that may wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_queue_size: Option<usize>,
}

fn two_minutes() -> u64 {
    120
}

fn python() -> Runtime {
    Runtime::Python
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_false(flag: &bool) -> bool {
    !flag
}

/// An archive that a saved model needs and that is not there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingArchive {
    /// The model.
    pub model: ModelName,
    /// Its version.
    pub version: Version,
    /// Name of the archive.
    pub archive: String,
}

impl SavedModels {
    /// How many models there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The archives that are no longer where they were.
    pub fn missing(&self, store: &Path) -> Vec<MissingArchive> {
        let versions = self.0.iter().flat_map(|(model, versions)| {
            let of_model = move |(version, saved)| (model, version, saved);
            versions.iter().map(of_model)
        });
        versions
            .filter(|(_, _, saved)| saved.archive(store).is_none())
            .map(|(model, version, saved)| MissingArchive {
                model: model.clone(),
                version: version.clone(),
                archive: saved.mar_name.clone(),
            })
            .collect()
    }

    pub(crate) fn of(registry: &Registry) -> Self {
        let models = registry.snapshot();
        let of_model = |(name, model): (&ModelName, &crate::registry::Model)| {
            let versions = model.versions.values().map(|version| {
                let is_default = version.version == model.default;
                (
                    version.version.clone(),
                    SavedVersion::of(version, is_default),
                )
            });
            (name.clone(), versions.collect())
        };
        Self(models.iter().map(of_model).collect())
    }
}

impl SavedVersion {
    fn of(version: &ModelVersion, default_version: bool) -> Self {
        let spec = version.pool.spec();
        let limits = spec.limits.read().clone();
        // Not the pool's own, which it may not have reached yet.
        let size = version.decided.lock().size;
        let delay = limits.max_batch_delay;
        let whole = delay.subsec_nanos().is_multiple_of(1_000_000);
        Self {
            default_version,
            mar_name: version.archive.clone(),
            min_workers: size.min,
            max_workers: size.max,
            batch_size: limits.batch_size,
            max_batch_delay: i64::try_from(delay.as_millis()).unwrap_or(i64::MAX),
            response_timeout: limits.response_timeout.as_secs(),
            startup_timeout: limits.startup_timeout.as_secs(),
            runtime_type: version.runtime,
            max_batch_delay_micros: (!whole)
                .then(|| u64::try_from(delay.as_micros()).unwrap_or(u64::MAX)),
            url: Some(version.url.clone()),
            fetched: version.fetched.is_some(),
            handler: version.given_handler.clone(),
            worker_isolation: version.given_isolation,
            sha256: version.given_sha256.clone(),
            autoscale: size.autoscale,
            job_queue_size: Some(limits.job_queue_size),
        }
    }

    /// Where its archive lies now.
    pub(crate) fn archive(&self, store: &Path) -> Option<PathBuf> {
        // The file's name alone: what stands before it was a place of another day.
        let name = Path::new(&self.mar_name).file_name()?;
        let in_store = store.join(name);
        if in_store.exists() {
            return Some(in_store);
        }
        // Deeper in the store, or a folder elsewhere that was registered in place.
        let url = self.url.as_ref().filter(|_| !self.fetched)?;
        store::find(store, url).ok()
    }

    /// The call that registers it again.
    pub(crate) fn registration(self, name: &ModelName, version: &Version) -> Registration {
        let delay = match self.max_batch_delay_micros {
            Some(micros) => Duration::from_micros(micros),
            None => Duration::from_millis(u64::try_from(self.max_batch_delay).unwrap_or(0)),
        };
        Registration {
            url: self.url.clone().unwrap_or_else(|| self.mar_name.clone()),
            model_name: Some(name.to_string()),
            handler: self.handler.clone(),
            runtime: Some(self.runtime_type),
            batch_size: Some(self.batch_size),
            max_batch_delay: Some(delay),
            response_timeout: Some(Duration::from_secs(self.response_timeout)),
            startup_timeout: Some(Duration::from_secs(self.startup_timeout)),
            autoscale: Some(self.autoscale),
            isolation: self.worker_isolation,
            sha256: self.sha256.clone(),
            restored: Some((version.clone(), self)),
            ..Registration::default()
        }
    }
}

/// When a snapshot is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occasion {
    /// The models of the start are registered.
    Startup,
    /// Something was changed.
    Change,
    /// The server stops.
    Shutdown,
}

/// Puts snapshots where they outlive the server.
pub trait SnapshotWriter: Send + Sync {
    /// Returns when the snapshot is safe. May block. Called by one thread at a time.
    ///
    /// # Errors
    /// It could not be written; the one before it still holds.
    fn write(&self, models: &SavedModels, occasion: Occasion) -> io::Result<()>;
}

/// Who saves.
pub(crate) struct Keeper {
    writer: Option<Arc<dyn SnapshotWriter>>,
    /// Counts the changes that were published.
    changes: AtomicU64,
    /// Held while a snapshot is written.
    saved: Arc<Mutex<Saved>>,
    /// Whether the models of the start are all there: a snapshot before that would lose some.
    start: watch::Sender<Start>,
}

/// How far the registration of the models of the start has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Start {
    UnderWay,
    Complete,
    /// The server was told to end before.
    BrokenOff,
}

#[derive(Debug, Default)]
struct Saved {
    /// Changes that the last snapshot has.
    changes: u64,
    /// It was the last one.
    closed: bool,
}

impl Keeper {
    pub(crate) fn new(writer: Option<Arc<dyn SnapshotWriter>>) -> Self {
        Self {
            writer,
            changes: AtomicU64::new(0),
            saved: Arc::default(),
            start: watch::Sender::new(Start::UnderWay),
        }
    }
}

/// Saves what was published until now, unless somebody did meanwhile. Returns why it could not.
pub(crate) async fn keep(core: &Arc<Core>) -> Option<String> {
    let keeper = &core.keeper;
    keeper.writer.as_ref()?;
    let wanted = keeper.changes.fetch_add(1, Ordering::SeqCst) + 1;
    let mut start = keeper.start.subscribe();
    // Its sender lives as long as the core.
    drop(start.wait_for(|start| *start != Start::UnderWay).await);
    let saving = async {
        if *keeper.start.borrow() == Start::BrokenOff {
            return Some("the server stops, and has not restored all of its models".to_owned());
        }
        let saved = Arc::clone(&keeper.saved).lock_owned().await;
        if saved.changes >= wanted {
            return None;
        }
        write(core, saved, Occasion::Change).await
    };
    let failed = within_limit(saving).await;
    if let Some(reason) = &failed {
        tracing::error!("the change will not outlive the server: {reason}");
    }
    failed
}

/// The models of the start are registered.
pub(crate) async fn started(core: &Arc<Core>) -> Option<String> {
    let saving = async {
        let saved = Arc::clone(&core.keeper.saved).lock_owned().await;
        write(core, saved, Occasion::Startup).await
    };
    let failed = within_limit(saving).await;
    core.keeper.start.send_replace(Start::Complete);
    failed
}

/// No more models of the start come. Changes that wait for them are answered, unsaved.
pub(crate) fn break_off(core: &Core) {
    core.keeper.start.send_if_modified(|start| {
        let waits = *start == Start::UnderWay;
        if waits {
            *start = Start::BrokenOff;
        }
        waits
    });
}

/// Takes the last snapshot, once.
pub(crate) async fn stop(core: &Arc<Core>) {
    // A start that was broken off has read a better state than the one it has reached.
    if *core.keeper.start.borrow() != Start::Complete {
        return;
    }
    let saving = async {
        let saved = Arc::clone(&core.keeper.saved).lock_owned().await;
        write(core, saved, Occasion::Shutdown).await
    };
    if let Some(reason) = within_limit(saving).await {
        tracing::error!("the models could not be saved: {reason}");
    }
}

/// Waits for a save, but not for ever. One that takes longer goes on, and may still succeed.
async fn within_limit(saving: impl Future<Output = Option<String>>) -> Option<String> {
    let in_time = tokio::time::timeout(SAVE_LIMIT, saving).await;
    in_time.unwrap_or_else(|_| {
        let seconds = SAVE_LIMIT.as_secs();
        Some(format!("it was not written within {seconds} s"))
    })
}

/// Goes on to its end, with the lock, if its caller leaves.
async fn write(
    core: &Arc<Core>,
    mut saved: OwnedMutexGuard<Saved>,
    occasion: Occasion,
) -> Option<String> {
    let writer = Arc::clone(core.keeper.writer.as_ref()?);
    let core = Arc::clone(core);
    let writing = tokio::task::spawn_blocking(move || {
        if saved.closed {
            return Err(io::Error::other("the server stops"));
        }
        // Before the models are looked at, so that they have all that was counted.
        let changes = core.keeper.changes.load(Ordering::SeqCst);
        saved.closed = occasion == Occasion::Shutdown;
        writer.write(&SavedModels::of(&core.registry), occasion)?;
        saved.changes = changes;
        Ok(())
    });
    match writing.await {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(error) => Some(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> SavedVersion {
        serde_json::from_str(text).unwrap()
    }

    const OLD: &str = r#"{"defaultVersion": true, "marName": "noop.mar", "minWorkers": 1,
        "maxWorkers": 2, "batchSize": 4, "maxBatchDelay": -10000}"#;

    #[test]
    fn an_entry_of_torchserve_is_read_with_its_gaps() {
        let saved = version(OLD);
        assert_eq!(saved.runtime_type, Runtime::Python);
        assert_eq!((saved.response_timeout, saved.startup_timeout), (120, 120));
        let (name, one) = (ModelName::new("m").unwrap(), Version::new("1.0").unwrap());
        let call = saved.registration(&name, &one);
        assert_eq!(call.url, "noop.mar");
        assert_eq!(call.max_batch_delay, Some(Duration::ZERO));
        let with_more = OLD.replace('{', r#"{"parallelLevel": 2, "of_tomorrow": [], "#);
        assert_eq!(version(&with_more), version(OLD));
    }

    #[test]
    fn an_entry_without_a_mandatory_member_is_none() {
        for member in [
            "defaultVersion",
            "marName",
            "minWorkers",
            "maxWorkers",
            "batchSize",
            "maxBatchDelay",
        ] {
            let text = OLD.replace(member, "other");
            assert!(
                serde_json::from_str::<SavedVersion>(&text).is_err(),
                "{member}"
            );
        }
    }

    #[test]
    fn an_archive_is_looked_for_by_its_name_and_a_folder_where_it_was() {
        let store = tempfile::tempdir().unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let mut saved = version(OLD);
        assert_eq!(saved.archive(store.path()), None);
        fs_err::write(store.path().join("noop.mar"), "").unwrap();
        saved.mar_name = "/another/day/noop.mar".to_owned();
        assert_eq!(
            saved.archive(store.path()),
            Some(store.path().join("noop.mar"))
        );
        saved.mar_name = "folder".to_owned();
        saved.url = Some(elsewhere.path().to_str().unwrap().to_owned());
        assert_eq!(
            saved.archive(store.path()).as_deref(),
            Some(elsewhere.path())
        );
        let below = store.path().join("sub");
        fs_err::create_dir(&below).unwrap();
        fs_err::write(below.join("deep.mar"), "").unwrap();
        saved.mar_name = "deep.mar".to_owned();
        let digest = "0".repeat(64);
        for url in [
            "sub/deep.mar".to_owned(),
            format!("sub/deep.mar#sha256={digest}"),
        ] {
            saved.url = Some(url);
            assert_eq!(saved.archive(store.path()), Some(below.join("deep.mar")));
        }
        for nothing in ["", "/", "..", "."] {
            let mut saved = version(OLD);
            saved.mar_name = nothing.to_owned();
            assert_eq!(saved.archive(store.path()), None, "{nothing}");
        }
    }
}
