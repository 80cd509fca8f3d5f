//! Descriptions of the APIs (*torchserve-contract* 4.8), and of ours.

use actix_web::http::header::{CONTENT_SECURITY_POLICY, HeaderValue};
use actix_web::http::{Method, StatusCode};
use actix_web::{HttpRequest, HttpResponse};
use serde_json::Value;
use ts_serving::Which;
use ts_types::{ModelName, Version};

use crate::rest::operations::Operation;
use crate::rest::routes::Description;
use crate::rest::{Edge, RestError, Surface, docs_page, openapi, origin, respond, routes};

/// The page runs nothing and fetches nothing, whatever should get into it.
const NOTHING_ACTIVE: HeaderValue =
    HeaderValue::from_static("default-src 'none'; style-src 'unsafe-inline'");

/// Answers with a description.
pub(super) fn describe(
    edge: &Edge,
    request: &HttpRequest,
    what: Description<'_>,
) -> Result<HttpResponse, RestError> {
    let surface = origin(request).surface;
    let document = match what {
        Description::Listener => openapi::of_listener(surface),
        Description::Predictions { model, version } => {
            openapi::of_predictions(known(edge, model, version)?.as_str())
        }
        Description::Management { model, version } => {
            openapi::of_management(known(edge, model, version)?.as_str())
        }
        Description::Ours => ours(edge, surface),
        Description::Page => {
            let page = docs_page::page(&ours(edge, surface));
            return Ok(HttpResponse::Ok()
                .content_type("text/html; charset=utf-8")
                .insert_header((CONTENT_SECURITY_POLICY, NOTHING_ACTIVE))
                .body(page));
        }
    };
    Ok(respond::json(StatusCode::OK, &document))
}

/// The name of a model that is there.
fn known(edge: &Edge, model: &str, version: Option<&str>) -> Result<ModelName, RestError> {
    let name = ModelName::new(model)?;
    let which = match version {
        None => Which::Default,
        Some("all") => Which::All,
        Some(version) => Which::One(Version::new(version)?),
    };
    edge.management.describe(&name, &which)?;
    Ok(name)
}

fn ours(edge: &Edge, surface: Surface) -> Value {
    openapi::of_what_is_served(surface, |operation| needs_token(edge, surface, operation))
}

fn needs_token(edge: &Edge, surface: Surface, operation: &Operation) -> bool {
    // Named in capitals on the wire.
    let method = operation.methods.described().to_ascii_uppercase();
    let method = Method::from_bytes(method.as_bytes()).unwrap_or_default();
    routes::find(surface, &method, operation.path)
        .is_ok_and(|route| edge.guard.needs_token(route.action()))
}
