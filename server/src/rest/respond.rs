//! From answers and failures to responses.

use std::future::ready;
use std::time::Duration;

use actix_web::HttpResponse;
use actix_web::body::{BodyStream, BoxBody};
use actix_web::http::StatusCode;
use actix_web::http::header::{
    ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue,
    InvalidHeaderValue, RETRY_AFTER, SET_COOKIE,
};
use futures_util::stream::LocalBoxStream;
use futures_util::{StreamExt as _, stream};
use parking_lot::RwLock;
use serde::Serialize;
use ts_serving::{Answer, ServingError, Timing};
use ts_types::{Classify as _, ErrorClass, Reply, RequestId, with_causes};

use super::events::Wanted;
use super::{RestError, coding, events};
use crate::{redact, status};

/// Why a request was not taken, in a word.
const REFUSAL_REASON: HeaderName = HeaderName::from_static("x-refusal-reason");

/// Headers that belong to the connection and not to the answer: no handler may set them.
const OF_THE_CONNECTION: &[&str] = &[
    "connection",
    "content-length",
    "date",
    "keep-alive",
    "proxy-authenticate",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Bytes that all headers of one answer may have: clients break off above this.
const MAX_HEADER_BYTES: usize = 64 << 10;

/// How the time of an answer was spent, for whoever looks at it in a browser.
const SERVER_TIMING: HeaderName = HeaderName::from_static("server-timing");

/// Proxies hand events on as they come when they see this.
const ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// A JSON body as TorchServe writes it: pretty, with a newline at the end.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> HttpResponse {
    // Our own types: their keys are text and their maps finite, so this does not fail.
    let mut body = serde_json::to_string_pretty(value).unwrap_or_default();
    body.push('\n');
    HttpResponse::build(status)
        .content_type("application/json")
        .body(without_line_separators(body))
}

/// The two characters that end a line in JavaScript and not in JSON are escaped, as in TorchServe.
fn without_line_separators(json: String) -> String {
    if json.contains(['\u{2028}', '\u{2029}']) {
        json.replace('\u{2028}', "\\u2028")
            .replace('\u{2029}', "\\u2029")
    } else {
        json
    }
}

/// `{"status": …}`.
pub(crate) fn status_line(status: StatusCode, text: &str) -> HttpResponse {
    #[derive(Serialize)]
    struct Line<'t> {
        status: &'t str,
    }
    json(status, &Line { status: text })
}

/// The body of a failure.
#[derive(Serialize)]
struct ErrorBody {
    code: u16,
    r#type: &'static str,
    message: String,
}

impl ErrorBody {
    fn of(error: &RestError) -> (StatusCode, Self) {
        let row = status::torchserve(error.class());
        let body = Self {
            code: row.status.as_u16(),
            r#type: row.kind,
            message: error.to_string(),
        };
        (row.status, body)
    }
}

/// The body of a failure in one line.
pub(crate) fn error_line(error: &RestError) -> String {
    let (_, body) = ErrorBody::of(error);
    without_line_separators(serde_json::to_string(&body).unwrap_or_default())
}

/// A failure, told to the client as its class demands and to the log if it is ours.
pub(crate) fn failure(error: &RestError, id: &RequestId) -> HttpResponse {
    log(error, error.class(), id);
    let (status, body) = ErrorBody::of(error);
    if matches!(error, RestError::TooLarge { .. }) {
        return HttpResponse::new(status);
    }
    let mut response = json(status, &body);
    if matches!(error, RestError::UnknownCoding { .. }) {
        let known = HeaderValue::from_static(coding::KNOWN);
        response.headers_mut().insert(ACCEPT_ENCODING, known);
    }
    if matches!(error, RestError::MemoryFull(_)) {
        let headers = response.headers_mut();
        headers.insert(RETRY_AFTER, HeaderValue::from(1));
        headers.insert(REFUSAL_REASON, HeaderValue::from_static("body-memory"));
    }
    if let RestError::Serving(ServingError::Refused {
        reason,
        retry_after,
        ..
    }) = error
    {
        let headers = response.headers_mut();
        if !retry_after.is_zero() {
            let seconds = retry_after.as_millis().div_ceil(1000);
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds as u64));
        }
        headers.insert(REFUSAL_REASON, HeaderValue::from_static(reason.as_str()));
    }
    response
}

/// The client gave the addresses in what it is told; a log has other readers.
fn log(error: &RestError, class: ErrorClass, id: &RequestId) {
    let causes = || redact::sentence(&with_causes(error));
    match class {
        _ if matches!(error, RestError::NegativeWorkers { .. }) => {
            tracing::debug!(request_id = %id, "{error}");
        }
        // The client sees no word of it (see below).
        ErrorClass::TooLarge => tracing::info!(request_id = %id, "{error}"),
        ErrorClass::Internal => tracing::error!(request_id = %id, "{}", causes()),
        ErrorClass::WorkerLost
        | ErrorClass::WorkerStart
        | ErrorClass::OutOfMemory
        | ErrorClass::CleanupTimeout => tracing::warn!(request_id = %id, "{}", causes()),
        _ => tracing::debug!(request_id = %id, "{}", causes()),
    }
}

/// What a handler answered, in as many parts as it came, or as events.
///
/// # Errors
/// As [`reply`].
pub(crate) fn answer(answer: Answer, wanted: Wanted) -> Result<HttpResponse, RestError> {
    let Answer {
        reply: first,
        timing,
        more,
    } = answer;
    let body = first.body.clone();
    let mut response = reply(first)?;
    tell_timing(response.headers_mut(), timing);
    if status::is_bodiless(response.status()) {
        return Ok(response);
    }
    let as_events = match (wanted, &more) {
        (Wanted::No, _) | (Wanted::ForParts, None) => false,
        (Wanted::ForParts, Some(_)) | (Wanted::Always, _) => {
            response.status().is_success() && !is_event_stream(response.headers())
        }
    };
    if as_events {
        let headers = response.headers_mut();
        // They speak of the parts' bytes, not of the events'.
        for name in &coding::OF_THE_BYTES {
            headers.remove(name);
        }
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(events::MEDIA_TYPE));
        headers.insert(ACCEL_BUFFERING, HeaderValue::from_static("no"));
        let first = stream::once(ready(Ok(body)));
        let events: LocalBoxStream<'static, _> = match more {
            Some(more) => Box::pin(events::events(first.chain(more))),
            None => Box::pin(events::events(first)),
        };
        let events = events.filter(|event| ready(event.as_ref().is_ok_and(|e| !e.is_empty())));
        return Ok(response.set_body(BoxBody::new(BodyStream::new(events))));
    }
    let Some(more) = more else {
        return Ok(response);
    };
    // An error ends the connection without the last chunk, so that the client sees it is not whole;
    // what came before it is sent first.
    let more = more.then(async |part| {
        if part.is_err() {
            tokio::task::yield_now().await;
        }
        part
    });
    // A chunk without bytes would be the last one.
    let parts = stream::once(async { Ok(body) })
        .chain(more)
        .filter(|part| ready(part.as_ref().map_or(true, |part| !part.is_empty())));
    Ok(response.set_body(BoxBody::new(BodyStream::new(Box::pin(parts)))))
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).is_some_and(|value| {
        let start = value.as_bytes().get(..events::MEDIA_TYPE.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(events::MEDIA_TYPE.as_bytes()))
    })
}

/// Says where the time of an answer went, after what its handler says of that.
fn tell_timing(headers: &mut HeaderMap, timing: Timing) {
    // Whole numbers are written many times faster than those with a point.
    let of = |time: Duration| {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        (micros / 1000, micros % 1000)
    };
    let (queue, batch, handler) = (of(timing.queue), of(timing.batch), of(timing.handler));
    let ours = format!(
        "queue;dur={}.{:03}, batch;dur={}.{:03}, handler;dur={}.{:03}",
        queue.0, queue.1, batch.0, batch.1, handler.0, handler.1
    );
    let all = match headers.get(SERVER_TIMING).map(HeaderValue::to_str) {
        Some(Ok(theirs)) if !theirs.is_empty() => format!("{theirs}, {ours}"),
        _ => ours,
    };
    if let Ok(value) = HeaderValue::from_str(&all) {
        headers.insert(SERVER_TIMING, value);
    }
}

/// What a handler answered. Its headers are taken as far as they can be sent.
///
/// # Errors
/// A status that no response can have.
pub(crate) fn reply(reply: Reply) -> Result<HttpResponse, RestError> {
    let bad_status = || RestError::BadStatus {
        status: reply.status,
    };
    let status = StatusCode::from_u16(reply.status).map_err(|_| bad_status())?;
    if status.is_informational() {
        return Err(bad_status());
    }
    let header_bytes = reply
        .headers
        .iter()
        .map(|(name, value)| name.len() + value.len())
        .sum();
    if header_bytes > MAX_HEADER_BYTES {
        return Err(RestError::HeadersTooLarge {
            bytes: header_bytes,
            limit: MAX_HEADER_BYTES,
        });
    }
    let mut response = HttpResponse::new(status);
    // Empty unless the handler says something, whatever the status, as TorchServe sends it.
    response.head_mut().reason = Some(phrase(&reply.reason));
    let headers = response.headers_mut();
    for (name, value) in &reply.headers {
        let parsed = (HeaderName::from_bytes(name.as_bytes()), header_value(value));
        let (Ok(name), Ok(value)) = parsed else {
            tracing::warn!(header = ?name, "a handler set a header that cannot be sent");
            continue;
        };
        if OF_THE_CONNECTION.contains(&name.as_str()) {
            continue;
        }
        if name == SET_COOKIE {
            headers.append(name, value);
        } else {
            headers.insert(name, value);
        }
    }
    if status::is_bodiless(status) {
        response.headers_mut().remove(CONTENT_TYPE);
        response.headers_mut().remove(CONTENT_LENGTH);
        return Ok(response);
    }
    Ok(response.set_body(BoxBody::new(reply.body)))
}

/// The value as HTTP carries it: visible ASCII and Latin-1.
fn header_value(text: &str) -> Result<HeaderValue, InvalidHeaderValue> {
    if text.is_ascii() {
        return HeaderValue::from_str(text);
    }
    let latin_1 = text
        .chars()
        .map(u8::try_from)
        .collect::<Result<Vec<u8>, _>>();
    // What is beyond Latin-1 is refused in its own encoding, as a line feed is.
    HeaderValue::from_bytes(latin_1.as_deref().unwrap_or(b"\n"))
}

/// The phrase in the form that actix wants it: one that lives as long as the server. Handlers use
/// a few fixed ones; past a number of them, or a length, the phrase is left out.
fn phrase(text: &str) -> &'static str {
    static KNOWN: RwLock<Vec<&'static str>> = RwLock::new(Vec::new());
    const KEPT: usize = 64;
    const LONGEST: usize = 80;
    let sendable = text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    if text.is_empty() || text.len() > LONGEST || !sendable {
        return "";
    }
    let known = KNOWN.read().iter().copied().find(|known| *known == text);
    known.unwrap_or_else(|| {
        let mut all = KNOWN.write();
        if let Some(known) = all.iter().copied().find(|known| *known == text) {
            known
        } else if all.len() < KEPT {
            let kept: &'static str = Box::leak(Box::from(text));
            all.push(kept);
            kept
        } else {
            ""
        }
    })
}

#[cfg(test)]
mod tests {
    use actix_web::body::MessageBody as _;
    use bytes::Bytes;
    use ts_serving::{Refusal, RunFailure};
    use ts_types::ModelName;

    use super::*;

    fn replied(
        status: u16,
        reason: &str,
        headers: &[(&str, &str)],
    ) -> Result<HttpResponse, RestError> {
        let headers = headers
            .iter()
            .map(|(n, v)| ((*n).to_owned(), (*v).to_owned()))
            .collect();
        reply(Reply {
            status,
            reason: reason.to_owned(),
            headers,
            body: Bytes::from_static(b"x"),
        })
    }

    fn body(response: HttpResponse) -> String {
        let bytes = response.into_body().try_into_bytes().unwrap();
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    #[test]
    fn a_handler_cannot_split_the_response_or_repeat_a_header() {
        let response = replied(
            200,
            "a\r\nx: y",
            &[
                ("content-type", "text/plain"),
                ("Content-Type", "text/html"),
                ("x-a", "1\r\nx-b: 2"),
                ("x c", "1"),
                ("Transfer-Encoding", "chunked"),
                ("content-length", "7"),
                ("set-cookie", "a=1"),
                ("set-cookie", "b=2"),
            ],
        )
        .unwrap();
        let mut sent: Vec<_> = response
            .headers()
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        sent.sort();
        assert_eq!(
            sent,
            [
                "content-type: text/html",
                "set-cookie: a=1",
                "set-cookie: b=2"
            ]
        );
        assert_eq!(response.head().reason(), "");
    }

    #[test]
    fn events_are_not_in_the_coding_of_their_parts() {
        let headers = ["content-encoding", "etag", "x-own"].map(|n| (n.to_owned(), "v".to_owned()));
        let whole = |wanted| {
            let reply = Reply {
                status: 200,
                reason: String::new(),
                headers: headers.to_vec(),
                body: Bytes::from_static(b"\x1f\x8b"),
            };
            let timing = Timing::default();
            let more = None;
            let given = Answer {
                reply,
                timing,
                more,
            };
            answer(given, wanted).unwrap()
        };
        let has = |response: &HttpResponse| {
            let headers = response.headers();
            ["content-encoding", "etag", "x-own"].map(|name| headers.contains_key(name))
        };
        assert_eq!(has(&whole(Wanted::Always)), [false, false, true]);
        assert_eq!(has(&whole(Wanted::ForParts)), [true, true, true]);
    }

    #[test]
    fn headers_are_latin_1_and_not_endless() {
        let response = replied(200, "", &[("x-a", "caf\u{e9}"), ("x-b", "\u{5317}")]).unwrap();
        assert_eq!(
            response.headers().get("x-a").unwrap().as_bytes(),
            b"caf\xe9"
        );
        assert!(response.headers().get("x-b").is_none());
        let long = "y".repeat(MAX_HEADER_BYTES);
        let error = replied(200, "", &[("x-a", &long)]).unwrap_err();
        assert!(matches!(error, RestError::HeadersTooLarge { .. }));
    }

    #[test]
    fn a_handler_chooses_status_and_phrase() {
        let response = replied(599, "Custom", &[]).unwrap();
        assert_eq!(
            (response.status().as_u16(), response.head().reason()),
            (599, "Custom")
        );
        assert_eq!(replied(200, "", &[]).unwrap().head().reason(), "");
        for impossible in [0, 99, 100, 101, 1000] {
            let error = replied(impossible, "", &[]).unwrap_err();
            assert!(matches!(error, RestError::BadStatus { .. }), "{impossible}");
        }
        for bodiless in [204, 205, 304] {
            assert_eq!(body(replied(bodiless, "", &[]).unwrap()), "", "{bodiless}");
            let message = "mine".to_owned();
            let failed = RunFailure::HandlerStatus {
                code: bodiless,
                message,
            };
            let response = failure(&ServingError::Run(failed).into(), &RequestId::random());
            assert_eq!(response.status().as_u16(), 500, "{bodiless}");
        }
    }

    #[test]
    fn failures_have_the_known_body() {
        let response = failure(&RestError::NoSuchRoute, &RequestId::random());
        assert_eq!(
            response.headers().get(CONTENT_TYPE).unwrap(),
            "application/json"
        );
        let expected = "{\n  \"code\": 404,\n  \"type\": \"ResourceNotFoundException\",\n  \
             \"message\": \"Requested resource is not found, please refer to API document.\"\n}\n";
        assert_eq!(body(response), expected);
        let response = failure(&RestError::TooLarge { limit: 1 }, &RequestId::random());
        assert_eq!(
            (response.status().as_u16(), body(response)),
            (413, String::new())
        );
    }

    #[test]
    fn a_refusal_says_when_to_come_back_and_why() {
        for (reason, millis, name, seconds) in [
            (Refusal::QueueFull, 2100, "queue-full", Some("3")),
            (Refusal::SequenceOver, 0, "sequence-over", None),
        ] {
            let error = ServingError::Refused {
                model: ModelName::new("m").unwrap(),
                version: None,
                reason,
                retry_after: std::time::Duration::from_millis(millis),
            };
            let response = failure(&error.into(), &RequestId::random());
            assert_eq!(response.status().as_u16(), 503);
            let header = |name: &str| Some(response.headers().get(name)?.to_str().unwrap());
            assert_eq!(header("retry-after"), seconds);
            assert_eq!(header("x-refusal-reason"), Some(name));
        }
    }
}
