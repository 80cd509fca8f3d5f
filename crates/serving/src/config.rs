//! What the operator settled, in the form the core wants it: resolved, typed, without origins.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use regex::RegexSet;
use ts_archive::{Digest, TrustedKeys, UnpackLimits};
use ts_metrics::Metrics;
use ts_types::{DeviceType, Gather, Isolation, LoadPolicy, ModelName, ResourceDemand, Version};
pub use ts_wire::frame::SequenceHeaders;

use crate::handler_metrics::HandlerMetricsConfig;

/// Everything the core needs to know.
#[derive(Debug, Clone)]
pub struct ServingConfig {
    /// Folder that model names in registrations are looked up in.
    pub model_store: Option<PathBuf>,
    /// Folder for unpacked archives; this server's own, emptied of leftovers at start.
    pub work_dir: PathBuf,
    /// Which URLs a registration may fetch from.
    pub allowed_urls: RegexSet,
    /// Limits while unpacking an archive.
    pub unpack_limits: UnpackLimits,
    /// Bytes that a downloaded archive may have.
    pub max_download_bytes: u64,
    /// How long a download may take in all.
    pub download_limit: Duration,
    /// Defaults for every model.
    pub defaults: ModelDefaults,
    /// The `models` property (*torchserve-contract* 2.6).
    pub per_model: HashMap<ModelName, HashMap<Version, ModelOverrides>>,
    /// How hosts are made.
    pub hosts: HostConfig,
    /// What archives may make the server deserialise (`load_policy`).
    pub load_policy: LoadPolicy,
    /// Which archives are taken.
    pub trust: Trust,
    /// Resources that models share, and how much there is of each (`rate_limit_resources`).
    pub resources: Vec<ResourceDemand>,
    /// `ts_header_key_sequence_*`.
    pub sequence_headers: SequenceHeaders,
    /// Where everything is counted.
    pub metrics: Arc<Metrics>,
    /// What the operator declared of the metrics of handlers.
    pub handler_metrics: HandlerMetricsConfig,
}

/// Which archives are taken, whoever names them.
#[derive(Debug, Clone, Default)]
pub struct Trust {
    /// A registration has to say the SHA-256 (`require_sha256`).
    pub require_sha256: bool,
    /// If given, the only archives there are (`allowed_sha256`).
    pub allowed: Option<BTreeSet<Digest>>,
    /// Whose signatures count (`trusted_keys`).
    pub keys: TrustedKeys,
    /// An archive has to have one (`require_signature`).
    pub require_signature: bool,
}

/// Defaults that hold for every model unless its archive or its registration says otherwise.
#[derive(Debug, Clone)]
pub struct ModelDefaults {
    /// `default_workers_per_model`; `None` when the operator did not set it.
    pub workers: Option<usize>,
    /// `default_response_timeout`.
    pub response_timeout: Duration,
    /// `default_startup_timeout`.
    pub startup_timeout: Duration,
    /// `unregister_model_timeout`.
    pub unregister_timeout: Duration,
    /// `job_queue_size`.
    pub job_queue_size: usize,
    /// `default_service_handler`.
    pub handler: Option<String>,
    /// `worker_isolation`; `None` lets the kind of model decide.
    pub isolation: Option<Isolation>,
    /// `batch_gather`.
    pub gather: Gather,
    /// `quarantine_after`.
    pub quarantine_after: u32,
}

/// Settings of one model version from the `models` property.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModelOverrides {
    /// `minWorkers`.
    pub min_workers: Option<usize>,
    /// `maxWorkers`.
    pub max_workers: Option<usize>,
    /// `batchSize`.
    pub batch_size: Option<usize>,
    /// `maxBatchDelay`.
    pub max_batch_delay: Option<Duration>,
    /// `responseTimeout`.
    pub response_timeout: Option<Duration>,
    /// `startupTimeout`.
    pub startup_timeout: Option<Duration>,
    /// `deviceType`.
    pub device_type: Option<DeviceType>,
    /// `deviceIds`.
    pub device_ids: Option<Vec<u32>>,
    /// `defaultVersion`: of the versions loaded at start, this one answers requests that name none.
    pub default_version: bool,
}

/// How hosts are made, and what their workers are told.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// The executable whose `worker` command is a host: normally the server itself.
    pub executable: PathBuf,
    /// The Python interpreter for handlers; `None` looks for one, see `pool::python`.
    pub python: Option<PathBuf>,
    /// Folder that holds the `ts` package (`model_server_home`); `None` looks for it.
    pub home: Option<PathBuf>,
    /// Fork Python hosts from a zygote.
    pub zygote: bool,
    /// Modules that the zygote imports for models that name them (`preload_modules`).
    pub preload_modules: Vec<String>,
    /// Cores that all workers together may use.
    pub cores: usize,
    /// Ids of the accelerators that workers may use.
    pub devices: Vec<u32>,
    /// What limits the devices that this process sees (`CUDA_VISIBLE_DEVICES`).
    pub visible_devices: Option<String>,
    /// `service_envelope`.
    pub service_envelope: Option<String>,
    /// `decode_input_request`.
    pub decode_input_request: bool,
    /// `limit_max_image_pixels`.
    pub limit_max_image_pixels: bool,
    /// `max_response_size`.
    pub max_response_bytes: u64,
    /// Environment names that hosts do not inherit (`blacklist_env_vars`).
    pub hidden_environment: Option<regex::Regex>,
    /// Names of variables that hold secrets of the server; hosts do not inherit them either.
    pub secret_variables: Vec<String>,
    /// The server's version as handlers see it.
    pub server_version: String,
}
