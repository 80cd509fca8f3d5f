//! Predictions and explanations (*torchserve-contract* 4.3–4.6).

use std::str::FromStr;
use std::time::Duration;

use actix_web::http::header::{CONTENT_ENCODING, CONTENT_LENGTH, HeaderName};
use actix_web::{HttpRequest, HttpResponse, web};
use ts_types::{Headers, InferRequest, ModelName, Part, RequestId, RequestKind, Urgency, Version};

use crate::rest::body::{Fields, Limits};
use crate::rest::events::Wanted;
use crate::rest::query::Parameters;
use crate::rest::routes::{Predict, Told};
use crate::rest::{Edge, RestError, body, respond, spans, trace};
use crate::telemetry::RequestContext;

/// Names that tell the handler what the server decided. A client's own are dropped.
const RESERVED: &[&str] = &[
    "describe",
    "explain",
    "ts_request_sequence_row",
    "ts_stream_next",
    "url_path",
];

/// How urgent a request is: a level of the model's queue, 1 being the most urgent.
const PRIORITY: HeaderName = HeaderName::from_static("x-priority");

/// How long a client waits for its answer, in milliseconds.
const TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout-ms");

/// Runs a model.
pub(super) async fn predict(
    edge: &Edge,
    http: &HttpRequest,
    payload: web::Payload,
    id: &RequestId,
    route: Predict<'_>,
) -> Result<HttpResponse, RestError> {
    // Names are checked before the body is read: a wrong one costs nothing.
    let named = route.model.map(ModelName::new).transpose()?;
    let version = route.version.map(Version::new).transpose()?;
    let urgency = urgency(http)?;
    let limits = edge.intake.limits;
    let body = body::collect(http, payload, &edge.intake).await?;
    let mut headers = client_headers(http, body.bytes.len());
    let mut parts = body::parts(body::content_type(http), body, limits).await?;
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
            let query = Parameters::of_query(http.query_string());
            let model = match named {
                Some(model) => Some(model),
                None => model_of(edge, &query, &parts)?,
            };
            parts = with_query(parts, query, limits)?;
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
        urgency,
    };
    let course = RequestContext::with(|context| context.course.clone()).flatten();
    let answer = edge.inference.infer(request, course).await?;
    respond::answer(answer, Wanted::by(http))
}

fn urgency(request: &HttpRequest) -> Result<Urgency, RestError> {
    let timeout: Option<u64> = number(request, &TIMEOUT)?;
    Ok(Urgency {
        priority: number(request, &PRIORITY)?.unwrap_or(0),
        timeout: timeout
            .filter(|millis| *millis > 0)
            .map(Duration::from_millis),
    })
}

/// A header's value as a whole number.
fn number<T: FromStr>(request: &HttpRequest, name: &HeaderName) -> Result<Option<T>, RestError> {
    let Some(value) = request.headers().get(name) else {
        return Ok(None);
    };
    let number = value
        .to_str()
        .ok()
        .and_then(|text| text.trim().parse().ok());
    number.map(Some).ok_or_else(|| RestError::BadHeader {
        name: name.clone(),
        value: String::from_utf8_lossy(value.as_bytes()).into_owned(),
    })
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

/// Query parameters come as fields after those of the body, and count as such.
fn with_query(parts: Vec<Part>, query: Parameters, limits: Limits) -> Result<Vec<Part>, RestError> {
    let mut fields = Fields::new(limits);
    for part in parts {
        fields.add(part)?;
    }
    for (name, value) in query.into_pairs() {
        fields.add(body::text_part(name, value))?;
    }
    Ok(fields.finish())
}

/// The client's headers, for a body of so many bytes; of several with one name the last counts. Bytes
/// beyond ASCII are Latin-1, as HTTP has it.
fn client_headers(request: &HttpRequest, body_bytes: usize) -> Headers {
    let decoded = request.headers().contains_key(CONTENT_ENCODING);
    let mut headers = Headers::with_capacity(request.headers().len() + 2);
    let parent = RequestContext::with(|context| context.trace_parent.clone()).flatten();
    for (name, value) in request.headers() {
        if RESERVED.contains(&name.as_str())
            || name == CONTENT_ENCODING
            || name == trace::TRACE_PARENT
            || name == spans::TRACE_STATE && trace::trace_parent(request).is_none()
        {
            continue;
        }
        let value = match value.to_str() {
            // Of the body that the handler gets.
            Ok(_) if decoded && name == CONTENT_LENGTH => body_bytes.to_string(),
            Ok(text) => text.to_owned(),
            Err(_) => value.as_bytes().iter().copied().map(char::from).collect(),
        };
        let name = name.as_str();
        match headers.iter_mut().find(|(earlier, _)| earlier == name) {
            Some((_, earlier)) => *earlier = value,
            None => headers.push((name.to_owned(), value)),
        }
    }
    if let Some(parent) = parent {
        headers.push((trace::TRACE_PARENT.as_str().to_owned(), parent.to_string()));
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
            .append_header(("x-name", &b"caf\xe9"[..]))
            .to_http_request();
        let mut headers = client_headers(&request, 0);
        headers.sort();
        let expected = [("x-name", "caf\u{e9}"), ("x-own", "2")];
        assert_eq!(headers, expected.map(|(k, v)| (k.to_owned(), v.to_owned())));
    }

    #[test]
    fn query_parameters_replace_fields_of_the_same_name_and_count_as_fields() {
        let limits = Limits {
            bytes: 100,
            parts: 3,
        };
        let parts = || vec![body::text_part("data".to_owned(), "1".to_owned())];
        let query = Parameters::of_query("data=2&other=3");
        let both = with_query(parts(), query, limits).unwrap();
        let values: Vec<_> = both.iter().map(|part| &part.value[..]).collect();
        assert_eq!(values, [b"2", b"3"]);
        let many = with_query(parts(), Parameters::of_query("a&a&a"), limits);
        assert!(matches!(many, Err(RestError::TooManyParts { limit: 3 })));
    }
}
