//! HTTP. [`serve`] takes every request of every listener through the same steps: route, gate,
//! endpoint, response.

pub(crate) mod body;
mod coding;
mod cors;
mod docs_page;
mod error;
mod events;
mod health;
mod openapi;
mod operations;
mod peer;
pub(crate) mod query;
mod respond;
pub(crate) mod routes;
mod spans;
pub(crate) mod torchserve;
pub(crate) mod trace;

use std::sync::Arc;

use actix_web::http::header::AUTHORIZATION;
use actix_web::{HttpMessage as _, HttpRequest, HttpResponse, web};
use percent_encoding::percent_decode_str;
use tracing::Instrument as _;
use ts_metrics::Metrics;
use ts_serving::{InferenceService, ManagementService};
use ts_types::RequestId;

pub(crate) use error::RestError;
pub(crate) use peer::Proxies;
use routes::Route;
pub(crate) use routes::Surface;
pub(crate) use trace::{Owed, Traffic};

use crate::auth::{Action, Guard};
use crate::telemetry::{Gpus, LogFilter, Traces};
use crate::transport::Origin;

/// What endpoints work with; one for all threads.
pub(crate) struct Edge {
    /// Runs requests.
    pub(crate) inference: Arc<InferenceService>,
    /// Registers and removes models.
    pub(crate) management: Arc<ManagementService>,
    /// Decides what may be done.
    pub(crate) guard: Guard,
    /// How bodies are taken in.
    pub(crate) intake: body::Intake,
    /// Bytes from which a response is compressed for a client that accepts it; 0 for never.
    pub(crate) min_compressed_bytes: usize,
    /// Counts and marks responses.
    pub(crate) traffic: Traffic,
    /// `/ping` tells whether the server is ready.
    pub(crate) ping_requires_ready: bool,
    /// Metrics, as text and by name.
    pub(crate) metrics: Arc<Metrics>,
    /// What the accelerators do.
    pub(crate) gpus: Arc<Gpus>,
    /// Spans, where the environment asks for them.
    pub(crate) traces: Option<Traces>,
    /// Whose word on the address of a caller is believed.
    pub(crate) proxies: Proxies,
    /// What is logged.
    pub(crate) log_filter: LogFilter,
}

/// Where a request came in. Connections are marked by the library over HTTP/1, requests over
/// HTTP/2.
fn origin(request: &HttpRequest) -> Origin {
    let marked = request.conn_data::<Origin>().cloned();
    let marked = marked.or_else(|| request.extensions().get::<Origin>().cloned());
    marked.unwrap_or_else(Origin::none)
}

/// Answers one request.
pub(crate) async fn serve(
    request: HttpRequest,
    payload: web::Payload,
    edge: web::Data<Edge>,
) -> HttpResponse {
    let origin = origin(&request);
    let mut passage = edge.traffic.enter(origin.begin());
    let id = trace::request_id(&request);
    let context = passage.begin(&request, &origin, &id, &edge);
    let work = async {
        let response = match answer(&edge, &request, payload, &id, origin.surface).await {
            Ok(response) => response,
            Err(error) => respond::failure(&error, &id),
        };
        let response = coding::compressed(&request, response, edge.min_compressed_bytes).await;
        passage.leave(&request, &id, &edge, response)
    };
    context.scope(work).await
}

/// What the client shows to prove who it is.
fn authorization(request: &HttpRequest) -> Option<&str> {
    let value = request.headers().get(AUTHORIZATION)?;
    value.to_str().ok()
}

/// Whether the client could list the models here.
fn may_list(edge: &Edge, request: &HttpRequest) -> bool {
    let permitted = || {
        let checked = edge.guard.check(Action::Manage, || authorization(request));
        checked.is_ok()
    };
    origin(request).surface.management && permitted()
}

async fn answer(
    edge: &Edge,
    request: &HttpRequest,
    payload: web::Payload,
    id: &RequestId,
    surface: Surface,
) -> Result<HttpResponse, RestError> {
    let encoded = request.uri().path();
    let path = percent_decode_str(encoded)
        .decode_utf8()
        .map_err(|_| RestError::PathNotText {
            path: encoded.to_owned(),
        })?;
    let route = routes::find(surface, request.method(), &path)?;
    edge.guard
        .check(route.action(), || authorization(request))?;
    let work = torchserve::answer(edge, request, payload, id, route);
    if matches!(route, Route::Predict(_)) {
        return work.await;
    }
    // Changes are made by tasks of their own, which have the span and not the context.
    let span = tracing::error_span!("call", request_id = id.as_str());
    work.instrument(span).await
}
