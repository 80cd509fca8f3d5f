//! `model-config.yaml`: the keys that the server itself understands (*torchserve-contract* 3.5).
//!
//! The file comes with the model, so it is read as plain data: no tags that build things, no
//! expansion without bounds, no key twice. A key of the wrong type costs that key and a warning,
//! as it does in TorchServe; a file that is not YAML costs the registration.

use std::io::Read;
use std::path::Path;

use fs_err as fs;
use serde_json::{Map, Value};
use ts_types::{DeviceType, Isolation, LoadPolicy};

use crate::error::{ArchiveError, Doing};

/// The largest configuration file that is read.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The known keys of a model's configuration. `None` means that the file does not say, or said
/// something unusable, in which case there is a warning.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ModelConfig {
    /// `minWorkers`, at least 1, or 0 where `autoscale` is on.
    pub min_workers: Option<u32>,
    /// `maxWorkers`.
    pub max_workers: Option<u32>,
    /// `batchSize`, at least 1.
    pub batch_size: Option<u32>,
    /// `maxBatchDelay`, in milliseconds.
    pub max_batch_delay: Option<u32>,
    /// `responseTimeout`, in seconds, above 0.
    pub response_timeout: Option<u32>,
    /// `startupTimeout`, in seconds, above 0.
    pub startup_timeout: Option<u32>,
    /// `deviceType`.
    pub device_type: Option<DeviceType>,
    /// `deviceIds`.
    pub device_ids: Option<Vec<u32>>,
    /// `parallelType`.
    pub parallel_type: Option<ParallelType>,
    /// `parallelLevel`, or `torchrun.nproc-per-node`: devices per worker. Only ever above 0
    /// together with a parallel type.
    pub parallel_level: Option<u32>,
    /// `torchrun`, as written.
    pub torchrun: Option<Map<String, Value>>,
    /// `maxRetryTimeoutInSec`.
    pub max_retry_timeout_in_sec: Option<u32>,
    /// `clientTimeoutInMills`; 0 means none.
    pub client_timeout_in_mills: Option<u32>,
    /// `jobQueueSize`; 0 means the server's.
    pub job_queue_size: Option<u32>,
    /// `useJobTicket`.
    pub use_job_ticket: Option<bool>,
    /// `continuousBatching`.
    pub continuous_batching: Option<bool>,
    /// `sequenceBatching`.
    pub sequence_batching: Option<bool>,
    /// `sequenceMaxIdleMSec`.
    pub sequence_max_idle_msec: Option<u32>,
    /// `sequenceTimeoutMSec`; 0 means none.
    pub sequence_timeout_msec: Option<u32>,
    /// `maxNumSequence`, at least 1.
    pub max_num_sequence: Option<u32>,
    /// `maxSequenceJobQueueSize`, at least 1.
    pub max_sequence_job_queue_size: Option<u32>,
    /// `asyncCommunication`.
    pub async_communication: Option<bool>,
    /// `useVenv`.
    pub use_venv: Option<bool>,
    /// `workerIsolation`: `process` or `thread`. Ours, not TorchServe's.
    pub worker_isolation: Option<Isolation>,
    /// `autoscale`: whether the load moves the number of workers between the two bounds. Ours, not
    /// TorchServe's.
    pub autoscale: Option<bool>,
    /// `scaleDownIdleSeconds`, at least 1: how long a worker that the load brought may be idle.
    /// Ours, not TorchServe's.
    pub scale_down_idle_seconds: Option<u32>,
    /// `quarantineAfter`, at least 1: workers that may be lost in a row, with no batch answered in
    /// between. Ours, not TorchServe's.
    pub quarantine_after: Option<u32>,
    /// `memoryLimitMb`: memory of each host process, at least 1. Ours, not TorchServe's.
    pub memory_limit_mb: Option<u32>,
    /// `cpuLimit`: cores' worth of processor time of each host process. Ours, not TorchServe's.
    pub cpu_limit: Option<f64>,
    /// `nativeHandlers`: whether default handlers may run without Python. Ours, not TorchServe's.
    pub native_handlers: Option<bool>,
    /// `isolateBadRequests`: whether a batch that its handler raised on is run again in halves. Ours,
    /// not TorchServe's.
    pub isolate_bad_requests: Option<bool>,
    /// `loadPolicy`: what the model's files may make the server deserialise, where that is less than
    /// the server allows. Ours, not TorchServe's.
    pub load_policy: Option<LoadPolicy>,
    /// Every other key, for the handler.
    pub other: Map<String, Value>,
    /// What was ignored or moved into its range, one sentence each.
    pub warnings: Vec<String>,
}

/// How a model is spread over devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParallelType {
    /// `""`: not at all.
    None,
    /// `pp`: pipeline.
    Pipeline,
    /// `tp`: tensor.
    Tensor,
    /// `pptp`: both.
    PipelineTensor,
    /// `custom`: the handler knows.
    Custom,
}

impl ModelConfig {
    /// Reads a configuration file. An empty one is the default.
    ///
    /// # Errors
    /// When the file cannot be read, is larger than 1 MiB, or is not plain YAML with a mapping at
    /// the top; the error names the file and the line.
    pub fn read(path: &Path) -> Result<Self, ArchiveError> {
        let mut bytes = Vec::new();
        fs::File::open(path)
            .and_then(|file| file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut bytes))
            .doing("read", path)?;
        if bytes.len() as u64 > MAX_CONFIG_BYTES {
            return Err(invalid(path, None, "it is larger than 1 MiB"));
        }
        let text =
            String::from_utf8(bytes).map_err(|_| invalid(path, None, "it is not UTF-8 text"))?;
        Self::parse(&text, path)
    }

    /// Reads configuration text; `path` is the name that errors show.
    ///
    /// # Errors
    /// As [`ModelConfig::read`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, ArchiveError> {
        let options = serde_saphyr::options! {
            budget: serde_saphyr::budget! {
                max_documents: 1,
                max_nodes: 100_000,
                max_anchors: 1_000,
                max_aliases: 10_000,
            },
            alias_limits: serde_saphyr::alias_limits! {
                max_total_replayed_events: 20_000,
                max_replay_stack_depth: 32,
            },
            duplicate_keys: serde_saphyr::options::DuplicateKeyPolicy::Error,
            reject_unsupported_tags: true,
            // The handler reads the file itself; for us an infinite number need not be one.
            non_finite_float_policy: serde_saphyr::options::NonFiniteFloatPolicy::AsString,
            with_snippet: false,
        };
        let value: Option<Value> =
            serde_saphyr::from_str_with_options(text, options).map_err(|error| {
                let error = error.without_snippet();
                invalid(
                    path,
                    error.location().map(|at| at.line()),
                    &error.to_string(),
                )
            })?;
        match value {
            None | Some(Value::Null) => Ok(Self::default()),
            Some(Value::Object(keys)) => Ok(Self::from_keys(keys)),
            Some(_) => Err(invalid(
                path,
                Some(1),
                "the top of the file is not a mapping",
            )),
        }
    }

    /// Keys are taken in the order of the file: of `torchrun` and `parallelLevel` the later wins.
    fn from_keys(keys: Map<String, Value>) -> Self {
        let mut config = Self::default();
        for (key, value) in keys {
            if let Err(warning) = config.take(&key, value) {
                config.warnings.push(format!("`{key}` {warning}"));
            }
        }
        if config.min_workers == Some(0) && config.autoscale != Some(true) {
            config.min_workers = Some(1);
            config.warnings.push(
                "`minWorkers` is 0; 1 is used, the least it can be without `autoscale`".to_owned(),
            );
        }
        if config.parallel_level.is_some_and(|level| level > 0)
            && matches!(config.parallel_type, None | Some(ParallelType::None))
        {
            config.parallel_level = Some(0);
            config
                .warnings
                .push("`parallelLevel` is 0 without a `parallelType`".to_owned());
        }
        config
    }

    fn take(&mut self, key: &str, value: Value) -> Result<(), String> {
        match key {
            "minWorkers" if value.as_i64() == Some(0) => self.min_workers = Some(0),
            "minWorkers" => return self.at_least_one(&value, |config| &mut config.min_workers),
            "maxWorkers" => self.max_workers = Some(integer(&value, 0)?),
            "batchSize" => return self.at_least_one(&value, |config| &mut config.batch_size),
            "maxBatchDelay" => self.max_batch_delay = Some(integer(&value, 0)?),
            "responseTimeout" => self.response_timeout = Some(integer(&value, 1)?),
            "startupTimeout" => self.startup_timeout = Some(integer(&value, 1)?),
            "deviceType" => self.device_type = Some(named(&value)?),
            "deviceIds" => self.device_ids = Some(integers(&value)?),
            "parallelType" => self.parallel_type = Some(parallel_type(&value)?),
            "parallelLevel" => self.parallel_level = Some(integer(&value, 0)?),
            "torchrun" => return self.take_torchrun(value),
            "maxRetryTimeoutInSec" => self.max_retry_timeout_in_sec = Some(integer(&value, 0)?),
            "clientTimeoutInMills" => self.client_timeout_in_mills = Some(integer(&value, 0)?),
            "jobQueueSize" => self.job_queue_size = Some(integer(&value, 0)?),
            "useJobTicket" => self.use_job_ticket = Some(boolean(&value)?),
            "continuousBatching" => self.continuous_batching = Some(boolean(&value)?),
            "sequenceBatching" => self.sequence_batching = Some(boolean(&value)?),
            "sequenceMaxIdleMSec" => self.sequence_max_idle_msec = Some(integer(&value, 0)?),
            "sequenceTimeoutMSec" => self.sequence_timeout_msec = Some(integer(&value, 0)?),
            "maxNumSequence" => {
                return self.at_least_one(&value, |config| &mut config.max_num_sequence);
            }
            "maxSequenceJobQueueSize" => {
                return self.at_least_one(&value, |config| &mut config.max_sequence_job_queue_size);
            }
            "asyncCommunication" => self.async_communication = Some(boolean(&value)?),
            "useVenv" => self.use_venv = Some(boolean(&value)?),
            "workerIsolation" => self.worker_isolation = Some(named(&value)?),
            "autoscale" => self.autoscale = Some(boolean(&value)?),
            "scaleDownIdleSeconds" => self.scale_down_idle_seconds = Some(integer(&value, 1)?),
            "quarantineAfter" => self.quarantine_after = Some(integer(&value, 1)?),
            "memoryLimitMb" => self.memory_limit_mb = Some(integer(&value, 1)?),
            "cpuLimit" => self.cpu_limit = Some(cores(&value)?),
            "nativeHandlers" => self.native_handlers = Some(boolean(&value)?),
            "loadPolicy" => return self.take_load_policy(&value),
            "isolateBadRequests" => self.isolate_bad_requests = Some(boolean(&value)?),
            _ => drop(self.other.insert(key.to_owned(), value)),
        }
        Ok(())
    }

    fn at_least_one(
        &mut self,
        value: &Value,
        field: fn(&mut Self) -> &mut Option<u32>,
    ) -> Result<(), String> {
        match value.as_i64() {
            Some(number @ ..=0) => {
                *field(self) = Some(1);
                Err(format!("is {number}; 1 is used, the least it can be"))
            }
            _ => {
                *field(self) = Some(integer(value, 1)?);
                Ok(())
            }
        }
    }

    /// A wish for less that cannot be read is taken for the wish for least.
    fn take_load_policy(&mut self, value: &Value) -> Result<(), String> {
        let policy = value.as_str().map(str::parse);
        self.load_policy = Some(match policy {
            Some(Ok(policy)) => policy,
            _ => LoadPolicy::Strict,
        });
        match policy {
            Some(Ok(_)) => Ok(()),
            _ => Err(format!(
                "is {value}; known are `any`, `weights-only`, `strict`; `strict` is used"
            )),
        }
    }

    fn take_torchrun(&mut self, value: Value) -> Result<(), String> {
        const KNOWN: [&str; 8] = [
            "nnodes",
            "nproc-per-node",
            "rdzv-backend",
            "rdzv-endpoint",
            "rdzv-conf",
            "monitor-interval",
            "node-rank",
            "OMP_NUMBER_THREADS",
        ];
        let Value::Object(map) = value else {
            return Err(wrong_type("a mapping", &value));
        };
        for key in map.keys().filter(|key| !KNOWN.contains(&key.as_str())) {
            self.warnings
                .push(format!("`torchrun.{key}` is not known and is ignored"));
        }
        if let Some(processes) = map.get("nproc-per-node") {
            match integer(processes, 1) {
                Ok(level) => self.parallel_level = Some(level),
                Err(why) => self
                    .warnings
                    .push(format!("`torchrun.nproc-per-node` {why}")),
            }
        }
        self.torchrun = Some(map);
        Ok(())
    }
}

fn invalid(path: &Path, at_line: Option<u64>, reason: &str) -> ArchiveError {
    ArchiveError::ConfigInvalid {
        path: path.to_owned(),
        at_line,
        reason: reason.to_owned(),
    }
}

fn wrong_type(expected: &str, found: &Value) -> String {
    let kind = match found {
        Value::Null => "nothing",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a mapping",
    };
    format!("must be {expected}, not {kind}; it is ignored")
}

fn integer(value: &Value, least: u32) -> Result<u32, String> {
    // The limit is that of TorchServe's `int`.
    const MOST: u32 = i32::MAX as u32;
    if !value.is_i64() && !value.is_u64() {
        return Err(wrong_type("an integer", value));
    }
    value
        .as_u64()
        .and_then(|number| u32::try_from(number).ok())
        .filter(|number| (least..=MOST).contains(number))
        .ok_or_else(|| format!("is {value}, outside of {least} to {MOST}; it is ignored"))
}

/// A number of cores, down to a hundredth: less is no share that a system gives.
fn cores(value: &Value) -> Result<f64, String> {
    let number = value
        .as_f64()
        .ok_or_else(|| wrong_type("a number", value))?;
    if (0.01..=100_000.0).contains(&number) {
        Ok(number)
    } else {
        Err(format!(
            "is {value}, outside of 0.01 to 100000; it is ignored"
        ))
    }
}

fn integers(value: &Value) -> Result<Vec<u32>, String> {
    let items = value
        .as_array()
        .ok_or_else(|| wrong_type("a list of integers", value))?;
    items
        .iter()
        .map(|item| integer(item, 0))
        .collect::<Result<_, _>>()
        .map_err(|why| {
            format!(
                "has an item that {}; the whole list is ignored",
                why.replace("; it is ignored", "")
            )
        })
}

fn boolean(value: &Value) -> Result<bool, String> {
    value
        .as_bool()
        .ok_or_else(|| wrong_type("`true` or `false`", value))
}

fn named<T: std::str::FromStr<Err = ts_types::UnknownName>>(value: &Value) -> Result<T, String> {
    let text = value.as_str().ok_or_else(|| wrong_type("a text", value))?;
    text.parse().map_err(|unknown: ts_types::UnknownName| {
        format!("is `{text}`; known are {}; it is ignored", unknown.known)
    })
}

fn parallel_type(value: &Value) -> Result<ParallelType, String> {
    let text = value.as_str().ok_or_else(|| wrong_type("a text", value))?;
    match text.to_ascii_lowercase().as_str() {
        "" => Ok(ParallelType::None),
        "pp" => Ok(ParallelType::Pipeline),
        "tp" => Ok(ParallelType::Tensor),
        "pptp" => Ok(ParallelType::PipelineTensor),
        "custom" => Ok(ParallelType::Custom),
        _ => Err(format!(
            "is `{text}`; known are ``, `pp`, `tp`, `pptp`, `custom`; it is ignored"
        )),
    }
}

#[cfg(test)]
mod tests;
