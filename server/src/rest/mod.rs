//! HTTP. [`serve`] takes every request of every listener through the same steps: route, gate,
//! endpoint, response.

pub(crate) mod body;
mod coding;
mod docs_page;
mod error;
mod events;
mod openapi;
mod operations;
pub(crate) mod query;
mod respond;
pub(crate) mod routes;
pub(crate) mod torchserve;
pub(crate) mod trace;

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
use crate::listen::Surfaces;
use crate::telemetry::{Exporter, RequestContext};

/// What endpoints work with; one for all threads.
pub(crate) struct Edge {
    /// Runs requests.
    pub(crate) inference: Arc<InferenceService>,
    /// Registers and removes models.
    pub(crate) management: Arc<ManagementService>,
    /// Decides what may be done.
    pub(crate) guard: Guard,
    /// Which APIs each listener serves.
    pub(crate) surfaces: Surfaces,
    /// Limits on bodies.
    pub(crate) limits: body::Limits,
    /// Bytes from which a response is compressed for a client that accepts it; 0 for never.
    pub(crate) min_compressed_bytes: usize,
    /// Counts and marks responses.
    pub(crate) traffic: Traffic,
    /// Metrics as text.
    pub(crate) exporter: Exporter,
}

impl Edge {
    fn surface(&self, request: &HttpRequest) -> Surface {
        let marked = request.conn_data::<Surface>().copied();
        marked.unwrap_or_else(|| self.surfaces.of_tcp(request.app_config().local_addr()))
    }
}

/// Answers one request.
pub(crate) async fn serve(
    request: HttpRequest,
    payload: web::Payload,
    edge: web::Data<Edge>,
) -> HttpResponse {
    let passage = edge.traffic.enter();
    let id = trace::request_id(&request);
    let context = RequestContext { id: id.clone() };
    let work = async {
        let response = match answer(&edge, &request, payload, &id).await {
            Ok(response) => response,
            Err(error) => respond::failure(&error, &id),
        };
        let response = coding::compressed(&request, response, edge.min_compressed_bytes).await;
        passage.leave(&request, &id, &edge, response)
    };
    context.scope(work).await
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
    let surface = edge.surface(request);
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
