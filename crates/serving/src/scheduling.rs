//! The scheduling of a model, as `model-config.yaml` spells it (*batching-and-scheduling* 15.2).
//!
//! TorchServe's keys stand at the top of the file. Those that only Triton has stand in blocks with
//! Triton's names, so that a `config.pbtxt` is carried over as it is:
//!
//! ```yaml
//! batchGather: auto              # or fixed, strict
//! batchGroupHeader: x-language   # requests that differ in it never share a batch
//! latencyGoalMs: 200             # refuse what would be answered later than this
//! dynamic_batching:
//!   preferred_batch_size: [4, 8]
//!   max_queue_delay_microseconds: 5000
//!   preserve_ordering: false
//!   priority_levels: 2
//!   default_priority_level: 2
//!   default_queue_policy: {timeout_action: DELAY, default_timeout_microseconds: 100000}
//!   priority_queue_policy: {1: {max_queue_size: 10}}
//! rate_limiter:
//!   resources: [{name: big_model, count: 1}]
//! sequenceBatching: true
//! sequenceStrategy: direct       # or oldest
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use ts_archive::ModelConfig;
use ts_types::{
    Gather, LevelPolicy, ResourceDemand, Scheduling, SequencePolicy, SequenceStrategy,
    TimeoutAction,
};

use crate::error::ServingError;

/// Levels that a queue may have.
const MAX_LEVELS: usize = 16;

/// The longest name of a resource.
const MAX_RESOURCE_NAME_BYTES: usize = 200;

/// Cap of a wait for company where the model speaks Triton's language and names none.
const DEFAULT_DELAY: Duration = Duration::from_millis(5);

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct DynamicBatching {
    preferred_batch_size: Vec<usize>,
    max_queue_delay_microseconds: Option<u64>,
    preserve_ordering: bool,
    priority_levels: usize,
    default_priority_level: usize,
    default_queue_policy: Option<QueuePolicy>,
    priority_queue_policy: BTreeMap<String, QueuePolicy>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct QueuePolicy {
    timeout_action: TimeoutAction,
    default_timeout_microseconds: u64,
    allow_timeout_override: bool,
    max_queue_size: usize,
}

impl Default for QueuePolicy {
    fn default() -> Self {
        Self {
            timeout_action: TimeoutAction::Reject,
            default_timeout_microseconds: 0,
            allow_timeout_override: true,
            max_queue_size: 0,
        }
    }
}

impl QueuePolicy {
    fn level(&self) -> LevelPolicy {
        let micros = self.default_timeout_microseconds;
        LevelPolicy {
            timeout: (micros > 0).then(|| Duration::from_micros(micros)),
            timeout_action: self.timeout_action,
            allow_timeout_override: self.allow_timeout_override,
            capacity: (self.max_queue_size > 0).then_some(self.max_queue_size),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RateLimiter {
    resources: Vec<Resource>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Resource {
    name: String,
    #[serde(default = "one")]
    count: usize,
}

fn one() -> usize {
    1
}

/// The scheduling of a model whose batches have at most `batch_size` requests, and the cap of a
/// wait for company if a block of Triton's names one or leaves it to us.
///
/// # Errors
/// A key with a value that it cannot have.
pub(crate) fn read(
    yaml: &ModelConfig,
    batch_size: usize,
    gather: Gather,
) -> Result<(Scheduling, Option<Duration>), ServingError> {
    let batching: Option<DynamicBatching> = read_key(yaml, "dynamic_batching")?;
    let limiter: RateLimiter = read_key(yaml, "rate_limiter")?.unwrap_or_default();
    let goal: Option<u64> = read_key(yaml, "latencyGoalMs")?;
    let group_header: Option<String> = read_key(yaml, "batchGroupHeader")?;
    let delay = batching.as_ref().map(|batching| {
        let micros = batching.max_queue_delay_microseconds;
        micros.map_or(DEFAULT_DELAY, Duration::from_micros)
    });
    let batching = batching.unwrap_or_default();
    let levels = levels(&batching)?;
    let default_level = match (batching.default_priority_level, levels.len()) {
        (0, 1) => 0,
        (level, count) if (1..=count).contains(&level) => level - 1,
        (level, count) => {
            return Err(bad(
                "dynamic_batching",
                format!("`default_priority_level` is {level}, outside of 1 to {count}"),
            ));
        }
    };
    if batching.preserve_ordering
        && (levels.len() > 1
            || levels
                .iter()
                .any(|level| level.timeout_action == TimeoutAction::Delay))
    {
        return Err(bad(
            "dynamic_batching",
            "`preserve_ordering` cannot be had together with more than one priority level or with \
             `timeout_action: DELAY`, which change the order"
                .to_owned(),
        ));
    }
    let scheduling = Scheduling {
        gather: read_key(yaml, "batchGather")?.unwrap_or(gather),
        preferred_batch_sizes: preferred(batching.preferred_batch_size, batch_size)?,
        preserve_ordering: batching.preserve_ordering,
        levels,
        default_level,
        group_header: group_header.map(|name| name.to_ascii_lowercase()),
        latency_goal: goal.filter(|goal| *goal > 0).map(Duration::from_millis),
        resources: resources(limiter)?,
        job_ticket: yaml.use_job_ticket == Some(true),
        sequences: sequences(yaml)?,
    };
    Ok((scheduling, delay))
}

fn levels(batching: &DynamicBatching) -> Result<Vec<LevelPolicy>, ServingError> {
    let count = batching.priority_levels.max(1);
    if count > MAX_LEVELS {
        return Err(bad(
            "dynamic_batching",
            format!("`priority_levels` is {count}, over the limit of {MAX_LEVELS}"),
        ));
    }
    let default = batching.default_queue_policy.clone().unwrap_or_default();
    let mut levels = vec![default.level(); count];
    for (level, policy) in &batching.priority_queue_policy {
        let place = level.parse::<usize>().ok();
        let place = place.and_then(|level| levels.get_mut(level.checked_sub(1)?));
        let place = place.ok_or_else(|| {
            bad(
                "dynamic_batching",
                format!("`priority_queue_policy` names level `{level}`, outside of 1 to {count}"),
            )
        })?;
        *place = policy.level();
    }
    Ok(levels)
}

fn preferred(mut sizes: Vec<usize>, batch_size: usize) -> Result<Vec<usize>, ServingError> {
    sizes.sort_unstable();
    sizes.dedup();
    match sizes.iter().find(|size| !(1..=batch_size).contains(*size)) {
        None => Ok(sizes),
        Some(size) => Err(bad(
            "dynamic_batching",
            format!(
                "`preferred_batch_size` has {size}, outside of 1 to the batch size {batch_size}"
            ),
        )),
    }
}

fn resources(limiter: RateLimiter) -> Result<Vec<ResourceDemand>, ServingError> {
    let mut demands: Vec<ResourceDemand> = Vec::new();
    for Resource { name, count } in limiter.resources {
        if name.is_empty() || name.len() > MAX_RESOURCE_NAME_BYTES || count == 0 {
            return Err(bad(
                "rate_limiter",
                format!("a resource needs a name and a count above 0, not `{name}` and {count}"),
            ));
        }
        match demands.iter_mut().find(|demand| demand.name == name) {
            Some(demand) => demand.count = demand.count.saturating_add(count),
            None => demands.push(ResourceDemand { name, count }),
        }
    }
    // In one order everywhere.
    demands.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(demands)
}

fn sequences(yaml: &ModelConfig) -> Result<Option<SequencePolicy>, ServingError> {
    if yaml.sequence_batching != Some(true) {
        return Ok(None);
    }
    let millis = |value: Option<u32>| {
        let millis = value.filter(|value| *value > 0);
        millis.map(|millis| Duration::from_millis(u64::from(millis)))
    };
    let max_idle = millis(yaml.sequence_max_idle_msec).ok_or_else(|| {
        bad(
            "sequenceBatching",
            "it needs `sequenceMaxIdleMSec` above 0, the time after which an idle sequence is over"
                .to_owned(),
        )
    })?;
    let waiting: Option<usize> = read_key(yaml, "maxWaitingSequence")?;
    Ok(Some(SequencePolicy {
        strategy: read_key(yaml, "sequenceStrategy")?.unwrap_or(SequenceStrategy::Direct),
        max_idle,
        timeout: millis(yaml.sequence_timeout_msec),
        max_sequences: yaml.max_num_sequence.unwrap_or(1) as usize,
        max_waiting_sequences: waiting.unwrap_or(0),
        max_queued: yaml.max_sequence_job_queue_size.unwrap_or(1) as usize,
        continuous: yaml.continuous_batching == Some(true),
    }))
}

fn read_key<T: DeserializeOwned>(yaml: &ModelConfig, key: &str) -> Result<Option<T>, ServingError> {
    match yaml.other.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => serde_json::from_value(value.clone())
            .map(Some)
            .map_err(|error| bad(key, error.to_string())),
    }
}

fn bad(key: &str, reason: impl std::fmt::Display) -> ServingError {
    ServingError::BadRegistration(format!("`{key}` in the model's configuration: {reason}"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn parse(text: &str) -> Result<(Scheduling, Option<Duration>), ServingError> {
        let yaml = ModelConfig::parse(text, Path::new("model-config.yaml")).unwrap();
        read(&yaml, 8, Gather::Auto)
    }

    #[test]
    fn a_file_that_says_nothing_leaves_the_defaults() {
        assert_eq!(parse("").unwrap(), (Scheduling::default(), None));
    }

    #[test]
    fn tritons_block_is_read_under_its_own_names() {
        let text = "
dynamic_batching:
  preferred_batch_size: [8, 4]
  max_queue_delay_microseconds: 700
  priority_levels: 3
  default_priority_level: 2
  default_queue_policy: {timeout_action: DELAY, default_timeout_microseconds: 9000}
  priority_queue_policy:
    1: {max_queue_size: 5, allow_timeout_override: false}
rate_limiter:
  resources: [{name: r2, count: 2}, {name: r1}]
";
        let (scheduling, delay) = parse(text).unwrap();
        assert_eq!(delay, Some(Duration::from_micros(700)));
        assert_eq!(scheduling.preferred_batch_sizes, [4, 8]);
        assert_eq!(scheduling.default_level, 1);
        let delayed = LevelPolicy {
            timeout: Some(Duration::from_micros(9000)),
            timeout_action: TimeoutAction::Delay,
            ..LevelPolicy::default()
        };
        let urgent = LevelPolicy {
            allow_timeout_override: false,
            capacity: Some(5),
            ..LevelPolicy::default()
        };
        assert_eq!(scheduling.levels, [urgent, delayed, delayed]);
        let demand = |name: &str, count| ResourceDemand {
            name: name.to_owned(),
            count,
        };
        assert_eq!(scheduling.resources, [demand("r1", 1), demand("r2", 2)]);
        let (_, delay) = parse("dynamic_batching: {}").unwrap();
        assert_eq!(delay, Some(DEFAULT_DELAY));
    }

    #[test]
    fn sequences_need_an_idle_time() {
        let (scheduling, _) = parse(
            "sequenceBatching: true\nsequenceMaxIdleMSec: 500\nmaxNumSequence: 4\n\
             sequenceStrategy: oldest\n",
        )
        .unwrap();
        let policy = scheduling.sequences.unwrap();
        assert_eq!(policy.strategy, SequenceStrategy::Oldest);
        assert_eq!((policy.max_sequences, policy.max_queued), (4, 1));
        let error = parse("sequenceBatching: true\n").unwrap_err().to_string();
        assert!(error.contains("sequenceMaxIdleMSec"), "{error}");
    }

    #[test]
    fn values_that_cannot_be_are_told_with_their_key() {
        for (text, told) in [
            ("batchGather: greedy", "batchGather"),
            (
                "dynamic_batching: {preferred_batch_size: [9]}",
                "outside of 1 to the batch size 8",
            ),
            (
                "dynamic_batching: {prefered_batch_size: [4]}",
                "prefered_batch_size",
            ),
            (
                "dynamic_batching: {priority_levels: 17}",
                "over the limit of 16",
            ),
            (
                "dynamic_batching: {priority_levels: 2}",
                "`default_priority_level` is 0",
            ),
            (
                "dynamic_batching: {priority_queue_policy: {2: {max_queue_size: 1}}}",
                "level `2`, outside of 1 to 1",
            ),
            (
                "dynamic_batching: {preserve_ordering: true, priority_levels: 2, \
                 default_priority_level: 1}",
                "preserve_ordering",
            ),
            (
                "dynamic_batching: {default_queue_policy: {timeout_action: WAIT}}",
                "WAIT",
            ),
            (
                "rate_limiter: {resources: [{name: r, count: 0}]}",
                "count above 0",
            ),
            ("latencyGoalMs: soon", "latencyGoalMs"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(told), "{text}: {error}");
        }
    }
}
