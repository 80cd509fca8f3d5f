//! The spans of a request, after the conventions of OpenTelemetry for HTTP:
//!
//! ```text
//! POST /predictions/{model_name}     from its head to the last part of its response
//!   read                             its body
//!   queue                            waiting for a worker
//!   batch                            with a worker, there and back; linked to the others in it
//!     handler                        in its backend
//! ```
//!
//! The children are made when all is over, of the instants that the core has noted: a request that
//! failed, expired or was given up has those that it came to.

use std::time::{Instant, SystemTime};

use actix_web::HttpRequest;
use actix_web::http::header::{HOST, HeaderMap, HeaderName, USER_AGENT};
use actix_web::http::{Method, StatusCode, Version};
use opentelemetry::trace::{
    Link, SpanBuilder, SpanContext, SpanId, SpanKind, Status, TraceContextExt as _, TraceFlags,
    TraceId, TraceState, Tracer as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::SdkTracer;
use percent_encoding::percent_decode_str;
use ts_serving::{Course, Milestones};
use ts_types::RequestId;

use super::operations;
use crate::transport::Origin;

/// What services add to a trace on its way (W3C Trace Context).
pub(crate) const TRACE_STATE: HeaderName = HeaderName::from_static("tracestate");

/// A request as a span. It ends with this value.
pub(crate) struct RequestSpan {
    tracer: SdkTracer,
    context: Context,
    started: Instant,
    began: SystemTime,
    /// Where the core notes what becomes of it; `None` where nobody will look.
    course: Option<Course>,
    end: End,
}

/// How a request ended.
enum End {
    /// Its client left before there was an answer.
    Cancelled,
    /// It was answered.
    Answered(StatusCode),
    /// It was answered in part.
    BrokenOff(StatusCode),
}

impl RequestSpan {
    /// Begins it, as a child of the client's span if there is one. `parent` is a valid `traceparent`.
    pub(crate) fn begin(
        tracer: &SdkTracer,
        request: &HttpRequest,
        origin: &Origin,
        parent: Option<&str>,
        id: &RequestId,
        started: Instant,
    ) -> Self {
        let began = SystemTime::now();
        let remote = parent.and_then(|parent| span_context(parent, state(request.headers())));
        let parent = match remote {
            Some(remote) => Context::new().with_remote_span_context(remote),
            None => Context::new(),
        };
        let span = SpanBuilder::from_name("HTTP")
            .with_kind(SpanKind::Server)
            .with_start_time(began);
        let context = parent.with_span(tracer.build_with_context(span, &parent));
        let span = context.span();
        let course = span
            .is_recording()
            .then(|| Course::new(trace_parent(span.span_context())));
        if span.is_recording() {
            let method = method(request.method());
            let path = percent_decode_str(request.uri().path()).decode_utf8_lossy();
            let route = operations::template(origin.surface, request.method(), &path);
            span.update_name(match route {
                Some(route) => format!("{method} {route}"),
                None => method.to_owned(),
            });
            span.set_attributes(attributes(request, origin, method, route, id));
        }
        Self {
            tracer: tracer.clone(),
            context,
            started,
            began,
            course,
            end: End::Cancelled,
        }
    }

    /// The `traceparent` of whoever works for this request.
    pub(crate) fn trace_parent(&self) -> String {
        trace_parent(self.context.span().span_context())
    }

    /// Where the core is to note what becomes of the request.
    pub(crate) fn course(&self) -> Option<Course> {
        self.course.clone()
    }

    /// The answer is made.
    pub(crate) fn answered(&mut self, status: StatusCode) {
        self.end = End::Answered(status);
    }

    /// Not all of the answer was made.
    pub(crate) fn broke_off(&mut self) {
        if let End::Answered(status) = self.end {
            self.end = End::BrokenOff(status);
        }
    }

    fn at(&self, instant: Instant) -> SystemTime {
        self.began + instant.saturating_duration_since(self.started)
    }

    fn child(&self, parent: &Context, name: &'static str, times: (Instant, Instant)) -> Context {
        self.linked(parent, name, times, Vec::new())
    }

    fn linked(
        &self,
        parent: &Context,
        name: &'static str,
        times: (Instant, Instant),
        links: Vec<Link>,
    ) -> Context {
        let span = SpanBuilder::from_name(name)
            .with_kind(SpanKind::Internal)
            .with_links(links)
            .with_start_time(self.at(times.0));
        parent.with_span(self.tracer.build_with_context(span, parent))
    }

    /// The other requests of its batch, of those whose traces are kept.
    fn company(&self, seen: &Milestones) -> Vec<Link> {
        let own = self.course.as_ref().map_or("", Course::name);
        let others = seen.batch_names.iter().filter(|name| &***name != own);
        let contexts = others.filter_map(|name| span_context(name, TraceState::default()));
        contexts.map(Link::with_context).collect()
    }

    /// The children, `end` being the last instant of all.
    fn tell(&self, seen: &Milestones, end: Instant, failed: bool) {
        let Some(arrived) = seen.arrived else {
            return;
        };
        let close = |span: &Context, at| span.span().end_with_timestamp(self.at(at));
        let read = (self.started, arrived);
        close(&self.child(&self.context, "read", read), read.1);
        let queue = (arrived, seen.handed_over.unwrap_or(end));
        close(&self.child(&self.context, "queue", queue), queue.1);
        let Some(handed_over) = seen.handed_over else {
            return;
        };
        let batch = (handed_over, seen.answered.unwrap_or(end).max(handed_over));
        let span = self.linked(&self.context, "batch", batch, self.company(seen));
        let requests = i64::try_from(seen.batch_requests).unwrap_or(i64::MAX);
        span.span()
            .set_attribute(KeyValue::new("torchserve.batch.requests", requests));
        if let Some(worker) = seen.worker {
            span.span()
                .set_attribute(KeyValue::new("torchserve.worker.id", i64::from(worker)));
        }
        match seen.handler {
            Some(handler) => {
                // Its clock is the worker's: the way there and back are taken to be alike.
                let way = (batch.1 - batch.0).saturating_sub(handler) / 2;
                let handler = (batch.0 + way, (batch.0 + way + handler).min(batch.1));
                close(&self.child(&span, "handler", handler), handler.1);
            }
            None if failed => span.span().set_status(Status::error("the worker was lost")),
            None => {}
        }
        close(&span, batch.1);
    }
}

impl Drop for RequestSpan {
    fn drop(&mut self) {
        let Some(course) = &self.course else {
            return;
        };
        let end = Instant::now();
        let seen = course.milestones();
        let span = self.context.span();
        if let Some(version) = &seen.version {
            span.set_attribute(KeyValue::new(
                "torchserve.model.version",
                version.to_string(),
            ));
        }
        let error = match self.end {
            End::Cancelled => Some(("cancelled".to_owned(), "the client left before the answer")),
            End::BrokenOff(_) => Some(("broken_off".to_owned(), "the answer broke off")),
            End::Answered(status) if status.is_server_error() => {
                Some((status.as_str().to_owned(), ""))
            }
            End::Answered(_) => None,
        };
        if let End::Answered(status) | End::BrokenOff(status) = self.end {
            let status = i64::from(status.as_u16());
            span.set_attribute(KeyValue::new("http.response.status_code", status));
        }
        let failed = error.is_some();
        if let Some((kind, text)) = error {
            span.set_attribute(KeyValue::new("error.type", kind));
            span.set_status(Status::error(text));
        }
        self.tell(&seen, end, failed);
        span.end_with_timestamp(self.at(end));
    }
}

/// A span by its `traceparent`.
fn trace_parent(of: &SpanContext) -> String {
    let flags = of.trace_flags().to_u8();
    format!("00-{}-{}-{flags:02x}", of.trace_id(), of.span_id())
}

/// What services have added to the client's trace.
fn state(headers: &HeaderMap) -> TraceState {
    let states = headers.get_all(TRACE_STATE);
    let states: Vec<_> = states.filter_map(|value| value.to_str().ok()).collect();
    states.join(",").parse().unwrap_or_default()
}

/// The span that a `traceparent` names.
fn span_context(parent: &str, state: TraceState) -> Option<SpanContext> {
    let mut fields = parent.split('-').skip(1);
    let [trace, span, flags] = std::array::from_fn(|_| fields.next());
    let flags = u8::from_str_radix(flags?, 16).ok()?;
    Some(SpanContext::new(
        TraceId::from_hex(trace?).ok()?,
        SpanId::from_hex(span?).ok()?,
        TraceFlags::new(flags) & TraceFlags::SAMPLED,
        true,
        state,
    ))
}

/// The method, of those that are known: clients can make up any number of others.
fn method(method: &Method) -> &'static str {
    const KNOWN: [&str; 8] = [
        "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE",
    ];
    let mut known = KNOWN.into_iter();
    known
        .find(|known| *known == method.as_str())
        .unwrap_or("HTTP")
}

fn attributes(
    request: &HttpRequest,
    origin: &Origin,
    method: &'static str,
    route: Option<&'static str>,
    id: &RequestId,
) -> Vec<KeyValue> {
    let text = |name| {
        request
            .headers()
            .get(name)?
            .to_str()
            .ok()
            .map(str::to_owned)
    };
    let protocol = match request.version() {
        Version::HTTP_10 => "1.0",
        Version::HTTP_2 => "2",
        _ => "1.1",
    };
    let scheme = if origin.encrypted { "https" } else { "http" };
    let named = if method == "HTTP" { "_OTHER" } else { method };
    let mut all = vec![
        KeyValue::new("http.request.method", named),
        // Without the query, in which secrets may be.
        KeyValue::new("url.path", request.uri().path().to_owned()),
        KeyValue::new("url.scheme", scheme),
        KeyValue::new("network.protocol.version", protocol),
        KeyValue::new("torchserve.request.id", id.as_str().to_owned()),
    ];
    all.extend(route.map(|route| KeyValue::new("http.route", route)));
    if let Some(peer) = request.peer_addr() {
        all.push(KeyValue::new("client.address", peer.ip().to_string()));
        all.push(KeyValue::new("client.port", i64::from(peer.port())));
    }
    // HTTP/2 has it beside the path.
    let host = text(HOST).or_else(|| request.uri().host().map(str::to_owned));
    all.extend(host.map(|host| KeyValue::new("server.address", host)));
    all.extend(text(USER_AGENT).map(|agent| KeyValue::new("user_agent.original", agent)));
    all
}
