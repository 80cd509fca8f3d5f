//! HTTP. [`serve`] takes every request of every listener through the same steps: route, gate,
//! endpoint, response.

pub(crate) mod body;
mod error;
pub(crate) mod query;
mod respond;
pub(crate) mod routes;
pub(crate) mod torchserve;
mod trace;

use std::net::SocketAddr;
use std::sync::Arc;

use actix_web::http::header::AUTHORIZATION;
use actix_web::{HttpRequest, HttpResponse, web};
use percent_encoding::percent_decode_str;
use ts_serving::{InferenceService, ManagementService};
use ts_types::RequestId;

pub(crate) use error::RestError;
pub(crate) use routes::Surface;
pub(crate) use trace::Traffic;

use crate::auth::Guard;
use crate::telemetry::Exporter;

/// What endpoints work with; one for all threads.
pub(crate) struct Edge {
    /// Runs requests.
    pub(crate) inference: Arc<InferenceService>,
    /// Registers and removes models.
    pub(crate) management: Arc<ManagementService>,
    /// Decides what may be done.
    pub(crate) guard: Guard,
    /// Which APIs each listener serves.
    pub(crate) surfaces: Vec<(SocketAddr, Surface)>,
    /// Limits on bodies.
    pub(crate) limits: body::Limits,
    /// Counts and marks responses.
    pub(crate) traffic: Traffic,
    /// Metrics as text.
    pub(crate) exporter: Exporter,
}

impl Edge {
    fn surface(&self, address: SocketAddr) -> Surface {
        let found = self.surfaces.iter().find(|(bound, _)| *bound == address);
        found.map_or(Surface::NONE, |(_, surface)| *surface)
    }
}

/// Answers one request.
pub(crate) async fn serve(
    request: HttpRequest,
    payload: web::Payload,
    edge: web::Data<Edge>,
) -> HttpResponse {
    let passage = edge.traffic.enter();
    let id = RequestId::random();
    let response = match answer(&edge, &request, payload, &id).await {
        Ok(response) => response,
        Err(error) => respond::failure(&error, &id),
    };
    passage.leave(&request, &id, &edge, response)
}

async fn answer(
    edge: &Edge,
    request: &HttpRequest,
    payload: web::Payload,
    id: &RequestId,
) -> Result<HttpResponse, RestError> {
    let encoded = request.uri().path();
    let path = percent_decode_str(encoded)
        .decode_utf8()
        .map_err(|_| RestError::PathNotText {
            path: encoded.to_owned(),
        })?;
    let surface = edge.surface(request.app_config().local_addr());
    let route = routes::find(surface, request.method(), &path)?;
    let authorization = || {
        request
            .headers()
            .get(AUTHORIZATION)
            .and_then(|v| v.to_str().ok())
    };
    edge.guard.check(route.action(), authorization)?;
    torchserve::answer(edge, request, payload, id, route).await
}
