//! TorchServe's REST dialect: each endpoint decodes, calls the core, encodes.

mod batching;
mod description;
pub(crate) mod management;
mod metrics;
mod ping;
mod predict;

use actix_web::http::header::ALLOW;
use actix_web::{HttpRequest, HttpResponse, web};
use ts_types::RequestId;

use super::routes::Route;
use super::{Edge, RestError};

/// Answers a request whose route is known and permitted.
pub(super) async fn answer(
    edge: &Edge,
    request: &HttpRequest,
    payload: web::Payload,
    id: &RequestId,
    route: Route<'_>,
) -> Result<HttpResponse, RestError> {
    match route {
        Route::Predict(route) => predict::predict(edge, request, payload, id, route).await,
        Route::Ping => Ok(ping::ping(edge)),
        Route::List => Ok(management::list(edge, request)),
        Route::Register => management::register(edge, request, payload).await,
        Route::Describe { model, version } => {
            management::describe(edge, request, id, model, version).await
        }
        Route::Batching { model, version } => batching::batching(edge, model, version),
        Route::Scale { model, version } => management::scale(edge, request, model, version).await,
        Route::SetDefault { model, version } => {
            management::set_default(edge, request, model, version).await
        }
        Route::Unregister { model, version } => {
            management::unregister(edge, request, model, version).await
        }
        Route::Ready { model } => management::ready(edge, model),
        Route::RenewToken => management::renew_token(edge, request),
        Route::Metrics => Ok(metrics::metrics(edge, request)),
        Route::Description(what) => description::describe(edge, request, what),
        Route::Options => Ok(HttpResponse::Ok()
            .insert_header((ALLOW, "GET, POST, PUT, PATCH, DELETE, OPTIONS"))
            .finish()),
    }
}
