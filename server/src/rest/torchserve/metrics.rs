//! `/metrics` (*torchserve-contract* 6.1).

use actix_web::{HttpRequest, HttpResponse};

use crate::rest::Edge;
use crate::rest::query::Parameters;

/// The metrics as text; `name[]` picks samples.
pub(super) fn metrics(edge: &Edge, request: &HttpRequest) -> HttpResponse {
    let query = Parameters::of_query(request.query_string());
    let names: Vec<&str> = query.all("name[]").collect();
    edge.management.observe();
    edge.traffic.observe();
    HttpResponse::Ok()
        .content_type("text/plain; version=0.0.4; charset=utf-8")
        .body(edge.metrics.page(&names))
}
