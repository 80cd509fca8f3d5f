//! `/ping` (*torchserve-contract* 4.5).

use actix_web::HttpResponse;
use actix_web::http::StatusCode;

use crate::rest::{Edge, respond};
use crate::status;

/// Whether every model has its healthy workers.
pub(super) fn ping(edge: &Edge) -> HttpResponse {
    if edge.management.healthy() {
        respond::status_line(StatusCode::OK, "Healthy")
    } else {
        respond::status_line(status::UNHEALTHY, "Unhealthy")
    }
}
