//! Why the batches of a model are as they are. Not a path of TorchServe.

use std::collections::BTreeMap;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::http::StatusCode;
use serde::Serialize;
use ts_serving::Batching;
use ts_types::{Gather, ModelName, Version};

use crate::rest::{Edge, RestError, respond};

/// GET `/models/{m}[/{v}]/batching`. Durations are in microseconds.
pub(super) fn batching(
    edge: &Edge,
    model: &str,
    version: Option<&str>,
) -> Result<HttpResponse, RestError> {
    let model = ModelName::new(model)?;
    let version = version.map(Version::new).transpose()?;
    let (version, told) = edge.management.batching(&model, version.as_ref())?;
    Ok(respond::json(
        StatusCode::OK,
        &Told::of(model, version, &told),
    ))
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Told {
    model_name: ModelName,
    model_version: Version,
    gather: Gather,
    batch_size: usize,
    max_delay_micros: u128,
    preferred_sizes: Vec<usize>,
    cost: Option<Cost>,
    samples: usize,
    target: usize,
    batches: u64,
    mean_batch: Option<f64>,
    batches_by_size: BTreeMap<usize, u64>,
    cut_because: BTreeMap<&'static str, u64>,
    holds: u64,
    held_micros: u128,
    dropped_as_late: u64,
    waiting: usize,
    running_batches: usize,
    running_requests: usize,
    idle_workers: usize,
    predicted_wait_micros: Option<u128>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequences: Option<Sequences>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Cost {
    per_batch_micros: f64,
    per_item_micros: f64,
}

#[derive(Debug, Serialize)]
struct Sequences {
    active: usize,
    waiting: usize,
}

impl Told {
    fn of(model_name: ModelName, model_version: Version, told: &Batching) -> Self {
        let batches: u64 = told.sizes.values().sum();
        let requests: u64 = told
            .sizes
            .iter()
            .map(|(size, count)| *size as u64 * count)
            .sum();
        Self {
            model_name,
            model_version,
            gather: told.gather,
            batch_size: told.batch_size,
            max_delay_micros: told.max_delay.as_micros(),
            preferred_sizes: told.preferred_sizes.clone(),
            cost: told.cost.map(|cost| Cost {
                per_batch_micros: cost.per_batch_micros.round(),
                per_item_micros: (cost.per_item_micros * 10.0).round() / 10.0,
            }),
            samples: told.samples,
            target: told.target,
            batches,
            mean_batch: (batches > 0).then(|| requests as f64 / batches as f64),
            batches_by_size: told.sizes.clone(),
            cut_because: told.cuts.iter().copied().collect(),
            holds: told.holds,
            held_micros: told.held.as_micros(),
            dropped_as_late: told.late,
            waiting: told.waiting,
            running_batches: told.running_batches,
            running_requests: told.running_jobs,
            idle_workers: told.idle_workers,
            predicted_wait_micros: told.predicted_wait.as_ref().map(Duration::as_micros),
            sequences: told
                .sequences
                .map(|(active, waiting)| Sequences { active, waiting }),
        }
    }
}
