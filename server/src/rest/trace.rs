//! What happens to every response, whatever its outcome: headers, counts, one access log line.

use std::borrow::Cow;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::http::header::{CACHE_CONTROL, EXPIRES, HeaderName, HeaderValue, PRAGMA};
use actix_web::http::{ConnectionType, Method, Uri, Version};
use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;
use percent_encoding::percent_decode_str;
use tokio::sync::watch;
use ts_types::RequestId;

use super::Edge;
use super::cors::Cors;
use super::operations::REGISTRATION;
use super::spans::RequestSpan;
use crate::redact;
use crate::telemetry::{RequestContext, ResponseCounts, Traces};
use crate::transport::{Busy, Origin};

const NO_CACHE: HeaderValue = HeaderValue::from_static("no-cache");
const NEVER_STORED: HeaderValue =
    HeaderValue::from_static("no-cache; no-store, must-revalidate, private");
const LONG_AGO: HeaderValue = HeaderValue::from_static("Thu, 01 Jan 1970 00:00:00 UTC");
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Where a request stands in a trace that spans services (W3C Trace Context).
pub(crate) const TRACE_PARENT: HeaderName = HeaderName::from_static("traceparent");

/// How often the end of the last request is looked for while the server stops.
const DRAIN_POLL: Duration = Duration::from_millis(20);

/// How long no request may have come in then: on a connection that was accepted one may still be on
/// its way.
const QUIET: Duration = Duration::from_millis(200);

/// What the client calls its request, if that can be used, else a fresh id.
pub(crate) fn request_id(request: &HttpRequest) -> RequestId {
    let sent = request.headers().get(REQUEST_ID);
    let sent = sent.and_then(|value| RequestId::of_client(value.to_str().ok()?));
    sent.unwrap_or_else(RequestId::random)
}

/// The request's place in a trace, if it has a valid one. Of versions to come only the beginning is
/// known.
pub(crate) fn trace_parent(request: &HttpRequest) -> Option<&HeaderValue> {
    let mut all = request.headers().get_all(TRACE_PARENT);
    let (value, None) = (all.next()?, all.next()) else {
        return None;
    };
    let text = value.to_str().ok()?;
    let mut fields = text.split('-');
    let [version, trace, parent, flags] = std::array::from_fn(|_| fields.next());
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let hex = |field: &str, digits| field.len() == digits && field.bytes().all(is_hex);
    let some = |field: &str| field.bytes().any(|byte| byte != b'0');
    let (version, trace, parent) = (version?, trace?, parent?);
    let valid = hex(version, 2)
        && version != "ff"
        && hex(trace, 32)
        && some(trace)
        && hex(parent, 16)
        && some(parent)
        && hex(flags?, 2)
        && (version != "00" || fields.next().is_none());
    valid.then_some(value)
}

/// The target of a request for the log: of a registration without the query of its `url`, which may
/// be a signature. Where that was not percent-encoded, parameters that nobody knows are the rest of
/// it.
fn told(uri: &Uri) -> Cow<'_, str> {
    let whole = || uri.path_and_query().map_or("*", |target| target.as_str());
    let path = || percent_decode_str(uri.path()).decode_utf8_lossy();
    // Most requests have no query, and need no look at their path.
    let Some(query) = uri.query().filter(|_| path().starts_with("/models")) else {
        return whole().into();
    };
    let pairs = || form_urlencoded::parse(query.as_bytes());
    let is_secret = |name: &str, value: &str| name == "url" && redact::url(value) != value;
    if !pairs().any(|(name, value)| is_secret(&name, &value)) {
        return whole().into();
    }
    let mut shown = form_urlencoded::Serializer::new(String::new());
    for (name, value) in pairs() {
        if name == "url" {
            shown.append_pair(&name, &redact::url(&value));
        } else if REGISTRATION.iter().any(|known| known.name == name) {
            shown.append_pair(&name, &value);
        } else {
            shown.append_pair(&name, redact::HIDDEN);
        }
    }
    format!("{}?{}", uri.path(), shown.finish()).into()
}

/// The requests in work, and what all responses have in common.
pub(crate) struct Traffic {
    counts: ResponseCounts,
    cors: Cors,
    in_work: AtomicUsize,
    stopping: AtomicBool,
    made: Instant,
    /// When the last request or connection came in, in milliseconds since `made`.
    last_millis: AtomicU64,
    /// Connections whose clients have yet to get what is theirs.
    owing: Arc<AtomicUsize>,
    draining: watch::Sender<bool>,
}

impl Traffic {
    /// `cors` are the `Access-Control-*` headers, checked by the settings.
    pub(crate) fn new(counts: ResponseCounts, cors: &[(&'static str, String)]) -> Self {
        Self {
            counts,
            cors: Cors::new(cors),
            in_work: AtomicUsize::new(0),
            stopping: AtomicBool::new(false),
            made: Instant::now(),
            last_millis: AtomicU64::new(0),
            owing: Arc::default(),
            draining: watch::Sender::new(false),
        }
    }

    /// Takes a request in.
    pub(crate) fn enter(&self, busy: Busy) -> Passage<'_> {
        self.in_work.fetch_add(1, Ordering::AcqRel);
        let started = Instant::now();
        self.note(started);
        Passage {
            traffic: self,
            busy: Some(busy),
            started,
            span: None,
            answered: false,
        }
    }

    /// Brings the gauge of requests in work up to date.
    pub(crate) fn observe(&self) {
        self.counts.in_flight(self.in_work.load(Ordering::Acquire));
    }

    /// From here on the server is not ready, and every response ends its connection.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
    }

    /// From here on the server only waits for the requests that it has.
    pub(crate) fn drain(&self) {
        self.draining.send_replace(true);
    }

    /// Tells when that is.
    pub(crate) fn draining(&self) -> watch::Receiver<bool> {
        self.draining.subscribe()
    }

    /// Whether the server has been told to stop.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Requests that are in work.
    pub(crate) fn in_work(&self) -> usize {
        self.in_work.load(Ordering::Acquire)
    }

    /// A client has yet to get what is its own.
    pub(crate) fn owes(&self) -> Owed {
        self.owing.fetch_add(1, Ordering::AcqRel);
        Owed(Arc::clone(&self.owing))
    }

    /// A client connected, or came further with it: its request may be on its way.
    pub(crate) fn somebody_came(&self) {
        self.note(Instant::now());
    }

    fn note(&self, at: Instant) {
        let millis = at.duration_since(self.made).as_millis();
        let millis = u64::try_from(millis).unwrap_or(u64::MAX);
        self.last_millis.store(millis, Ordering::Relaxed);
    }

    /// Waits until no request is in work, all responses are with their clients and no more come, at most until the deadline. Returns how many are still in work.
    pub(crate) async fn drained(&self, deadline: Instant) -> usize {
        loop {
            let last = Duration::from_millis(self.last_millis.load(Ordering::Relaxed));
            let is_quiet = self.made.elapsed().saturating_sub(last) >= QUIET;
            let left = self.in_work() + self.owing.load(Ordering::Acquire);
            if left == 0 && is_quiet {
                return 0;
            }
            if Instant::now() >= deadline {
                return left;
            }
            tokio::time::sleep(DRAIN_POLL).await;
        }
    }
}

/// What a client has yet to get: the rest of a response, or a word of farewell. The end waits for it.
#[derive(Debug)]
pub(crate) struct Owed(Arc<AtomicUsize>);

impl Drop for Owed {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A request on its way; leaves the count even if its client gives up.
pub(crate) struct Passage<'t> {
    traffic: &'t Traffic,
    /// Of its connection.
    busy: Option<Busy>,
    started: Instant,
    span: Option<RequestSpan>,
    answered: bool,
}

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.traffic.counts.client_left();
        }
        self.traffic.in_work.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A response in parts that is on its way.
struct InWork {
    edge: web::Data<Edge>,
    span: Option<RequestSpan>,
    /// Of its connection.
    _busy: Option<Busy>,
}

impl InWork {
    fn enter(edge: web::Data<Edge>, span: Option<RequestSpan>, busy: Option<Busy>) -> Self {
        edge.traffic.in_work.fetch_add(1, Ordering::AcqRel);
        Self {
            edge,
            span,
            _busy: busy,
        }
    }
}

impl Drop for InWork {
    fn drop(&mut self) {
        self.edge.traffic.in_work.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The body of such a response.
struct Held {
    body: BoxBody,
    in_work: InWork,
    ended: bool,
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.ended
            && let Some(span) = &mut self.in_work.span
        {
            span.broke_off();
        }
    }
}

impl MessageBody for Held {
    type Error = Box<dyn std::error::Error>;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, Self::Error>>> {
        let polled = Pin::new(&mut self.body).poll_next(context);
        self.ended |= matches!(polled, Poll::Ready(None));
        polled
    }
}

impl Passage<'_> {
    /// Begins the request's span, if there are spans. Returns what is done on its behalf.
    pub(crate) fn begin(
        &mut self,
        request: &HttpRequest,
        origin: &Origin,
        id: &RequestId,
        edge: &Edge,
    ) -> RequestContext {
        let client = trace_parent(request).and_then(|value| value.to_str().ok());
        let (tracer, started) = (edge.traces.as_ref().map(Traces::tracer), self.started);
        self.span =
            tracer.map(|tracer| RequestSpan::begin(tracer, request, origin, client, id, started));
        let trace_parent = match &self.span {
            Some(span) => Some(span.trace_parent().into()),
            None => client.map(Arc::from),
        };
        RequestContext {
            id: id.clone(),
            trace_parent,
            course: self.span.as_ref().and_then(RequestSpan::course),
        }
    }

    /// Marks, counts and logs the response. One in parts stays in work until its last one.
    pub(crate) fn leave(
        mut self,
        request: &HttpRequest,
        id: &RequestId,
        edge: &web::Data<Edge>,
        mut response: HttpResponse,
    ) -> HttpResponse {
        let status = response.status();
        let headers = response.headers_mut();
        if let Ok(id) = HeaderValue::from_str(id.as_str()) {
            headers.insert(REQUEST_ID, id);
        }
        let parent = RequestContext::with(|context| context.trace_parent.clone()).flatten();
        if let Some(parent) = parent
            && let Ok(parent) = HeaderValue::from_str(&parent)
        {
            headers.insert(TRACE_PARENT, parent);
        }
        if let Some(span) = &mut self.span {
            span.answered(status);
        }
        headers.insert(PRAGMA, NO_CACHE);
        headers.insert(CACHE_CONTROL, NEVER_STORED);
        headers.insert(EXPIRES, LONG_AGO);
        self.traffic.cors.add(request.headers(), headers);
        // One that asks for another protocol is answered in this one; its connection is not kept.
        let asks_for_another = request.head().upgrade();
        let is_stopping = self.traffic.is_stopping();
        if is_stopping && let Some(busy) = &self.busy {
            busy.connection_ends(|| self.traffic.owes());
        }
        if status.as_u16() >= 400 || is_stopping || asks_for_another {
            response
                .head_mut()
                .set_connection_type(ConnectionType::Close);
        }
        self.traffic.counts.count(status);
        self.answered = true;
        self.log(request, edge, &response);
        if matches!(response.body().size(), BodySize::Stream) {
            if request.version() < Version::HTTP_11 {
                // Knows no chunks: the end of the connection is the end of the body.
                let head = response.head_mut();
                head.no_chunking(true);
                head.set_connection_type(ConnectionType::Close);
            }
            let in_work = InWork::enter(web::Data::clone(edge), self.span.take(), self.busy.take());
            return response.map_body(|_, body| {
                BoxBody::new(Held {
                    body,
                    in_work,
                    // Nobody asks for the body.
                    ended: request.method() == Method::HEAD,
                })
            });
        }
        response
    }

    fn log(&self, request: &HttpRequest, edge: &Edge, response: &HttpResponse) {
        // `enabled` first: what the line is made of is looked up only if somebody reads it.
        if !tracing::enabled!(target: "ACCESS_LOG", tracing::Level::INFO) {
            return;
        }
        let ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let mut path = told(request.uri());
        // The only character that a target may have and that would end its field.
        if path.contains('"') {
            path = path.replace('"', "%22").into();
        }
        let bytes = match response.body().size() {
            BodySize::Sized(bytes) => Some(bytes),
            BodySize::None => Some(0),
            BodySize::Stream => None,
        };
        // A plain line has them in this order, but for the bytes (`telemetry/logging/layout.rs`).
        tracing::info!(
            target: "ACCESS_LOG",
            peer = %edge.proxies.caller(request),
            method = %request.method(),
            path = &*path,
            protocol = ?request.version(),
            status = response.status().as_u16(),
            ms,
            bytes,
        );
    }
}

#[cfg(test)]
mod tests {
    use actix_web::test::TestRequest;

    use super::*;

    #[test]
    fn a_trace_is_passed_on_if_it_is_one() {
        const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
        let parent = |value: String| {
            let request = TestRequest::get().insert_header((TRACE_PARENT, value));
            trace_parent(&request.to_http_request()).is_some()
        };
        assert!(parent(format!("00-{TRACE}-b7ad6b7169203331-01")));
        assert!(parent(format!("cc-{TRACE}-b7ad6b7169203331-01-more")));
        for other in [
            format!("00-{TRACE}-b7ad6b7169203331-01-more"),
            format!("ff-{TRACE}-b7ad6b7169203331-01"),
            format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)),
            format!("00-{TRACE}-0000000000000000-01"),
            format!("00-{}-b7ad6b7169203331-01", TRACE.to_uppercase()),
            format!("00-{TRACE}-b7ad6b7169203331"),
            format!("00-{TRACE}-b7ad6b716920333-01"),
            String::new(),
        ] {
            assert!(!parent(other.clone()), "{other}");
        }
        let twice = TestRequest::get()
            .append_header((TRACE_PARENT, format!("00-{TRACE}-b7ad6b7169203331-01")))
            .append_header((TRACE_PARENT, format!("00-{TRACE}-b7ad6b7169203332-01")));
        assert!(trace_parent(&twice.to_http_request()).is_none());
    }

    #[test]
    fn the_log_has_no_signature_of_a_registration() {
        let digest = "sha256=0a&model_name=m";
        for (target, shown) in [
            (
                format!("/models?url=https%3A%2F%2Fh%2Fm.mar%3Fa%3D1%26sig%3Ds&{digest}"),
                format!("/models?url=https%3A%2F%2Fh%2Fm.mar%3F***&{digest}"),
            ),
            (
                format!("/models?{digest}&%75rl=https://h/m.mar?a=1&sig=s"),
                format!("/models?{digest}&url=https%3A%2F%2Fh%2Fm.mar%3F***&sig=***"),
            ),
            (
                "/%6dodels?url=https://u:s@h/m.mar".to_owned(),
                "/%6dodels?url=https%3A%2F%2F***%40h%2Fm.mar".to_owned(),
            ),
        ] {
            assert_eq!(told(&target.parse().unwrap()), shown);
        }
        for same in [
            "/models?url=https://h/m.mar&other=1",
            "/models?url=m.mar",
            "/models",
            "/predictions/m?url=https://h/?q=1",
            "*",
        ] {
            assert_eq!(told(&same.parse().unwrap()), same);
        }
    }

    #[test]
    fn a_client_may_name_its_request() {
        let named = |value: &'static [u8]| {
            let value = HeaderValue::from_bytes(value).unwrap();
            let request = TestRequest::get().insert_header((REQUEST_ID, value));
            request_id(&request.to_http_request()).as_str().to_owned()
        };
        assert_eq!(named(b"mine-1"), "mine-1");
        for other in [&b"two words"[..], b"caf\xe9", b"", &[b'x'; 129]] {
            assert_eq!(named(other).len(), 36, "{other:?}");
        }
    }
}
