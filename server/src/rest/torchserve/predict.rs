//! Predictions and explanations (*torchserve-contract* 4.3–4.6).

use actix_web::{HttpRequest, HttpResponse, web};
use ts_types::{Headers, InferRequest, ModelName, Part, RequestId, RequestKind, Version};

use crate::rest::query::Parameters;
use crate::rest::routes::{Predict, Told};
use crate::rest::{Edge, RestError, body, respond};

/// Names that tell the handler what the server decided. A client's own are dropped.
const RESERVED: &[&str] = &["describe", "explain", "ts_stream_next", "url_path"];

/// Runs a model.
pub(super) async fn predict(
    edge: &Edge,
    request: &HttpRequest,
    payload: web::Payload,
    id: &RequestId,
    route: Predict<'_>,
) -> Result<HttpResponse, RestError> {
    // Names are checked before the body is read: a wrong one costs nothing.
    let named = route.model.map(ModelName::new).transpose()?;
    let version = route.version.map(Version::new).transpose()?;
    let bytes = body::collect(request, payload, edge.limits).await?;
    let mut parts = body::parts(body::content_type(request), bytes, edge.limits).await?;
    let mut headers = client_headers(request);
    let mut explains = |explain: bool| {
        let text = if explain { "True" } else { "False" };
        headers.push(("explain".to_owned(), text.to_owned()));
        if explain {
            RequestKind::Explain
        } else {
            RequestKind::Predict
        }
    };
    let mut kind = RequestKind::Predict;
    let model = match route.told {
        Told::Route { url_path, explain } => {
            kind = explains(explain);
            headers.push(("url_path".to_owned(), url_path.to_owned()));
            named
        }
        Told::Explain(explain) => {
            kind = explains(explain);
            named
        }
        Told::QueryFields => {
            let query = Parameters::of_query(request.query_string());
            let model = match named {
                Some(model) => Some(model),
                None => model_of(edge, &query, &parts)?,
            };
            add_fields(&mut parts, query);
            model
        }
    };
    let model = model.ok_or(RestError::MissingParameter { name: "model_name" })?;
    let id = id.clone();
    let request = InferRequest {
        id,
        model,
        version,
        kind,
        parts,
        headers,
    };
    respond::reply(edge.inference.infer(request).await?)
}

/// The model that a request names outside its path, else the only one loaded at start.
fn model_of(
    edge: &Edge,
    query: &Parameters,
    parts: &[Part],
) -> Result<Option<ModelName>, RestError> {
    if let Some(name) = query.get("model_name") {
        return Ok(Some(ModelName::new(name)?));
    }
    let mut loaded = edge.management.startup_models();
    if loaded.len() == 1 {
        return Ok(loaded.pop());
    }
    let field = parts.iter().find(|part| part.name == "model_name");
    let name = field.map(|part| String::from_utf8_lossy(&part.value).into_owned());
    Ok(name.map(|name| ModelName::new(&name)).transpose()?)
}

fn add_fields(parts: &mut Vec<Part>, query: Parameters) {
    for (name, value) in query.into_pairs() {
        let part = body::text_part(name, value);
        match parts.iter_mut().find(|earlier| earlier.name == part.name) {
            Some(earlier) => *earlier = part,
            None => parts.push(part),
        }
    }
}

/// The client's headers, as far as they are text; of several with one name the last counts.
fn client_headers(request: &HttpRequest) -> Headers {
    let mut headers = Headers::with_capacity(request.headers().len() + 2);
    for (name, value) in request.headers() {
        let name = name.as_str();
        let Ok(value) = value.to_str() else { continue };
        if RESERVED.contains(&name) {
            continue;
        }
        match headers.iter_mut().find(|(earlier, _)| earlier == name) {
            Some((_, earlier)) => value.clone_into(earlier),
            None => headers.push((name.to_owned(), value.to_owned())),
        }
    }
    headers
}

#[cfg(test)]
mod tests {
    use actix_web::test::TestRequest;

    use super::*;

    #[test]
    fn clients_cannot_speak_for_the_server() {
        let request = TestRequest::get()
            .insert_header(("Explain", "True"))
            .insert_header(("DESCRIBE", "True"))
            .append_header(("url_path", "a"))
            .append_header(("url_path", "b"))
            .append_header(("X-Own", "1"))
            .append_header(("x-own", "2"))
            .to_http_request();
        assert_eq!(
            client_headers(&request),
            [("x-own".to_owned(), "2".to_owned())]
        );
    }

    #[test]
    fn query_parameters_replace_fields_of_the_same_name() {
        let mut parts = vec![body::text_part("data".to_owned(), "1".to_owned())];
        add_fields(&mut parts, Parameters::of_query("data=2&other=3"));
        let values: Vec<_> = parts.iter().map(|part| &part.value[..]).collect();
        assert_eq!(values, [b"2", b"3"]);
    }
}
