//! TorchServe's REST dialect: each endpoint decodes, calls the core, encodes.

mod batching;
mod description;
mod logging;
pub(crate) mod management;
mod metrics;
mod predict;

use actix_web::http::header::ALLOW;
use actix_web::{HttpRequest, HttpResponse, web};
use ts_types::RequestId;

use self::management::told;
use super::query::Parameters;
use super::routes::Route;
use super::{Edge, RestError, health, may_list};

/// Answers a request whose route is known and permitted.
pub(super) async fn answer(
    edge: &Edge,
    request: &HttpRequest,
    payload: web::Payload,
    id: &RequestId,
    route: Route<'_>,
) -> Result<HttpResponse, RestError> {
    let query = || Parameters::of_query(request.query_string());
    match route {
        Route::Predict(route) => predict::predict(edge, request, payload, id, route).await,
        Route::Ping => Ok(health::ping(edge)),
        Route::Live => Ok(health::live()),
        Route::ServerReady => Ok(health::ready(edge, may_list(edge, request))),
        Route::ModelReady { model, version } => health::model_ready(edge, model, version),
        Route::Register => {
            let parameters = management::parameters(edge, request, payload).await?;
            let done = async |of: &_| management::register(edge, of).await;
            Ok(told(parameters, id, done).await)
        }
        Route::List => {
            let done = async |query: &_| Ok(management::list(edge, query));
            Ok(told(query(), id, done).await)
        }
        Route::Describe { model, version } => {
            let done =
                async |query: &_| management::describe(edge, query, id, model, version).await;
            Ok(told(query(), id, done).await)
        }
        Route::Scale { model, version } => {
            let done = async |query: &_| management::scale(edge, query, model, version).await;
            Ok(told(query(), id, done).await)
        }
        Route::SetDefault { model, version } => {
            let done = async |query: &_| management::set_default(edge, query, model, version).await;
            Ok(told(query(), id, done).await)
        }
        Route::Unregister { model, version } => {
            let done = async |query: &_| management::unregister(edge, query, model, version).await;
            Ok(told(query(), id, done).await)
        }
        Route::RenewToken => {
            let done = async |query: &_| management::renew_token(edge, query);
            Ok(told(query(), id, done).await)
        }
        Route::Logging => Ok(logging::show(edge)),
        Route::ChangeLogging => {
            let parameters = management::parameters(edge, request, payload).await?;
            let done = async |of: &_| logging::change(edge, request, of);
            Ok(told(parameters, id, done).await)
        }
        Route::Batching { model, version } => batching::batching(edge, model, version),
        Route::Ready { model } => health::v1_ready(edge, model),
        Route::Metrics => Ok(metrics::metrics(edge, request)),
        Route::Description(what) => description::describe(edge, request, what),
        Route::Options => Ok(HttpResponse::Ok()
            .insert_header((ALLOW, "GET, POST, PUT, PATCH, DELETE, OPTIONS"))
            .finish()),
    }
}
