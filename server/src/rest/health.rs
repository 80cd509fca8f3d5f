//! Probes: is the server alive, is it ready, is a model? The paths are those of the second version
//! of `KServe`'s protocol; what they tell is computed in the core, which every dialect asks.

use actix_web::HttpResponse;
use actix_web::http::StatusCode;
use serde::Serialize;
use ts_serving::Readiness;
use ts_types::{ModelName, Version};

use super::{Edge, RestError, respond};
use crate::status;

/// Models that one answer names at most.
const NAMED: usize = 100;

/// `/v2/health/live`: whoever can answer lives.
pub(super) fn live() -> HttpResponse {
    #[derive(Serialize)]
    struct Liveness {
        live: bool,
    }
    respond::json(StatusCode::OK, &Liveness { live: true })
}

/// `/v2/health/ready`. `tells_why` is for those who may list the models anyway.
pub(super) fn ready(edge: &Edge, tells_why: bool) -> HttpResponse {
    #[derive(Serialize)]
    struct Answer<'r> {
        ready: bool,
        #[serde(flatten, skip_serializing_if = "Option::is_none")]
        why: Option<Why<'r>>,
    }
    let readiness = edge.management.readiness();
    let ready = readiness.is_ready();
    let why = (tells_why && !ready).then(|| Why::of(&readiness));
    respond::json(told(ready), &Answer { ready, why })
}

/// `/v2/models/{model}[/versions/{version}]/ready`.
pub(super) fn model_ready(
    edge: &Edge,
    model: &str,
    version: Option<&str>,
) -> Result<HttpResponse, RestError> {
    let (ready, answer) = of_model(edge, model, version)?;
    Ok(respond::json(told(ready), &answer))
}

/// `/v1/models/{model}`: a model that is not ready is told with 200, as its clients expect.
pub(super) fn v1_ready(edge: &Edge, model: &str) -> Result<HttpResponse, RestError> {
    let (_, answer) = of_model(edge, model, None)?;
    Ok(respond::json(StatusCode::OK, &answer))
}

/// `/ping` where `ping_requires_ready` is set is as ready as everything else; else it has
/// TorchServe's meaning.
pub(super) fn ping(edge: &Edge) -> HttpResponse {
    let healthy = if edge.ping_requires_ready {
        edge.management.readiness().is_ready()
    } else {
        edge.management.healthy()
    };
    if healthy {
        respond::status_line(StatusCode::OK, "Healthy")
    } else {
        respond::status_line(status::UNHEALTHY, "Unhealthy")
    }
}

/// The status of a probe's answer.
fn told(ready: bool) -> StatusCode {
    if ready {
        StatusCode::OK
    } else {
        status::NOT_READY
    }
}

#[derive(Serialize)]
struct OfModel {
    name: ModelName,
    ready: bool,
}

fn of_model(edge: &Edge, model: &str, version: Option<&str>) -> Result<(bool, OfModel), RestError> {
    let name = ModelName::new(model)?;
    let version = version.map(Version::new).transpose()?;
    let ready = edge.management.model_is_ready(&name, version.as_ref())?;
    Ok((ready, OfModel { name, ready }))
}

/// What stands against being ready.
#[derive(Serialize)]
struct Why<'r> {
    starting: bool,
    stopping: bool,
    models: Vec<Obstacle<'r>>,
    /// How many more there are.
    #[serde(skip_serializing_if = "is_zero")]
    more: usize,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks so")]
fn is_zero(number: &usize) -> bool {
    *number == 0
}

#[derive(Serialize)]
struct Obstacle<'r> {
    name: &'r str,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<&'r Version>,
    reason: &'static str,
}

impl<'r> Why<'r> {
    fn of(readiness: &'r Readiness) -> Self {
        let all = &readiness.obstacles;
        let named = all.iter().take(NAMED).map(|obstacle| Obstacle {
            name: &obstacle.model,
            version: obstacle.version.as_ref(),
            reason: obstacle.reason,
        });
        Self {
            starting: readiness.starting,
            stopping: readiness.stopping,
            models: named.collect(),
            more: all.len().saturating_sub(NAMED),
        }
    }
}
