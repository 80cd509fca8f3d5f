//! `/metrics` (*torchserve-contract* 6.1).

use std::collections::HashSet;

use actix_web::{HttpRequest, HttpResponse};

use crate::rest::Edge;
use crate::rest::query::Parameters;

/// The metrics as text; `name[]` picks samples.
pub(super) fn metrics(edge: &Edge, request: &HttpRequest) -> HttpResponse {
    let query = Parameters::of_query(request.query_string());
    let names: HashSet<&str> = query.all("name[]").collect();
    let body = edge.exporter.text(&names);
    HttpResponse::Ok()
        .content_type("text/plain; version=0.0.4; charset=utf-8")
        .body(body)
}
