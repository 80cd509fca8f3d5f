//! What is logged, asked and changed while the server runs. TorchServe has no such call.

use actix_web::http::StatusCode;
use actix_web::{HttpRequest, HttpResponse};
use serde::Serialize;

use crate::rest::query::Parameters;
use crate::rest::{Edge, RestError, operations, respond};

/// GET `/logging`.
pub(super) fn show(edge: &Edge) -> HttpResponse {
    #[derive(Serialize)]
    struct Logging {
        filter: String,
    }
    let filter = edge.log_filter.text();
    respond::json(StatusCode::OK, &Logging { filter })
}

/// PUT `/logging`.
pub(super) fn change(
    edge: &Edge,
    request: &HttpRequest,
    parameters: &Parameters,
) -> Result<HttpResponse, RestError> {
    parameters.warn_unknown(operations::LOGGING);
    let refused = |reason| RestError::LogFilter { reason };
    let filter = parameters
        .get("filter")
        .filter(|filter| !filter.trim().is_empty())
        .ok_or_else(|| refused("the parameter `filter` is missing".to_owned()))?;
    let who = edge.proxies.caller(request).to_string();
    edge.log_filter.change(filter, &who).map_err(refused)?;
    Ok(show(edge))
}
