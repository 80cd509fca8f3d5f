//! `/ping` (*torchserve-contract* 4.5).

use actix_web::HttpResponse;
use actix_web::http::StatusCode;

use crate::rest::{Edge, respond};
use crate::status;

/// Whether every model has its healthy workers, and the server is to go on.
pub(super) fn ping(edge: &Edge) -> HttpResponse {
    if edge.management.healthy() && !edge.traffic.is_stopping() {
        respond::status_line(StatusCode::OK, "Healthy")
    } else {
        respond::status_line(status::UNHEALTHY, "Unhealthy")
    }
}
