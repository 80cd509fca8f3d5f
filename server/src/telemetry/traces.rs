//! Traces for OpenTelemetry: whether the environment asks for them, and the way of spans to the
//! collector. It is bounded and never waited for: what the collector does not take in time is
//! dropped and counted. What spans a request has is decided in `rest/spans.rs`.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{Context, KeyValue};
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::WithHttpConfig as _;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchSpanProcessor, SdkTracer, SdkTracerProvider, Span, SpanData, SpanExporter, SpanProcessor,
};
use tokio::runtime::Handle;

use ts_metrics::{Metric, Metrics, names};

use crate::settings::Environment;

/// How long the last spans may take to reach the collector when the server ends.
const LAST_SPANS: Duration = Duration::from_secs(2);

/// Bytes of a collector's answer that are looked at.
const MAX_ANSWER_BYTES: usize = 64 * 1024;

/// What the variables say.
#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    /// Nobody asks for traces.
    Off,
    /// Somebody does, but in a way that cannot be obeyed; why.
    Impossible(String),
    /// To a collector, with warnings about what is not understood.
    On(Vec<String>),
}

const SAMPLERS: [&str; 6] = [
    "always_on",
    "always_off",
    "traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "parentbased_traceidratio",
];

impl Wanted {
    /// An empty variable is one that is not set, as the specification has it.
    fn by(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| {
            let text = variable(name)?;
            Some(text.trim().to_owned()).filter(|text| !text.is_empty())
        };
        let of_traces = |name: &str| {
            set(&format!("OTEL_EXPORTER_OTLP_TRACES_{name}"))
                .or_else(|| set(&format!("OTEL_EXPORTER_OTLP_{name}")))
        };
        if set("OTEL_SDK_DISABLED").is_some_and(|text| text.eq_ignore_ascii_case("true")) {
            return Self::Off;
        }
        match set("OTEL_TRACES_EXPORTER").as_deref() {
            None if of_traces("ENDPOINT").is_none() => return Self::Off,
            Some("none") => return Self::Off,
            None | Some("otlp") => {}
            Some(other) => {
                return Self::Impossible(format!(
                    "`OTEL_TRACES_EXPORTER` is `{other}`; this server has `otlp` and `none`"
                ));
            }
        }
        match of_traces("PROTOCOL").as_deref() {
            None | Some("http/protobuf") => {}
            Some(other) => {
                return Self::Impossible(format!(
                    "`OTEL_EXPORTER_OTLP_PROTOCOL` is `{other}`; this server sends `http/protobuf` \
                     only, to port 4318 of most collectors"
                ));
            }
        }
        if let Some(coding) = of_traces("COMPRESSION").filter(|coding| coding != "none") {
            return Self::Impossible(format!(
                "`OTEL_EXPORTER_OTLP_COMPRESSION` is `{coding}`; this server sends spans as they are"
            ));
        }
        let mut warnings = Vec::new();
        if let Some(sampler) = set("OTEL_TRACES_SAMPLER") {
            let argument = set("OTEL_TRACES_SAMPLER_ARG");
            let ratio = argument
                .as_deref()
                .and_then(|text| text.parse::<f64>().ok());
            if !SAMPLERS.contains(&sampler.as_str()) {
                warnings.push(format!(
                    "`OTEL_TRACES_SAMPLER` is `{sampler}`, none of `{}`; `parentbased_always_on` is \
                     in force",
                    SAMPLERS.join("`, `")
                ));
            } else if sampler.ends_with("traceidratio")
                && !ratio.is_some_and(|ratio| (0.0..=1.0).contains(&ratio))
            {
                warnings.push(format!(
                    "`OTEL_TRACES_SAMPLER` is `{sampler}`, and `OTEL_TRACES_SAMPLER_ARG` is no ratio \
                     from 0 to 1; every trace is sampled"
                ));
            }
        }
        Self::On(warnings)
    }
}

/// The time that the collector has for one request: milliseconds, 10 s unless given.
fn timeout(variable: impl Fn(&str) -> Option<String>) -> Duration {
    let set = [
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
        "OTEL_EXPORTER_OTLP_TIMEOUT",
    ];
    let mut given = set
        .iter()
        .filter_map(|name| variable(name)?.trim().parse().ok());
    Duration::from_millis(given.next().unwrap_or(10_000))
}

/// Where spans are made, and go.
pub(crate) struct Traces {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
    counts: Arc<Counts>,
}

impl Traces {
    /// As the environment says: most servers have none. To be called inside the runtime that the
    /// collector is to be reached from.
    pub(crate) fn start(environment: &Environment, metrics: &Metrics) -> Option<Self> {
        let variable = |name: &str| environment.get(name).map(str::to_owned);
        let warnings = match Wanted::by(variable) {
            Wanted::Off => return None,
            Wanted::Impossible(reason) => {
                tracing::error!("no traces are sent: {reason}");
                return None;
            }
            Wanted::On(warnings) => warnings,
        };
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        let counts = Counts::new(queue_size(variable), metrics);
        match Self::to_collector(timeout(variable), resource(variable), counts) {
            Ok(traces) => {
                tracing::info!("traces are sent to the OpenTelemetry collector");
                Some(traces)
            }
            // A server without traces is better than none.
            Err(error) => {
                tracing::error!("no traces are sent: {error:#}");
                None
            }
        }
    }

    fn to_collector(timeout: Duration, resource: Resource, counts: Counts) -> anyhow::Result<Self> {
        // Fails where it was settled before, which is as good.
        let _settled = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder()
            .timeout(timeout)
            // Its headers may be secrets of this collector's.
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .context("no HTTP client can be made")?;
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_http_client(Client {
                client,
                runtime: Handle::current(),
            })
            .build()
            .context("the OTEL_EXPORTER_OTLP_ variables are not valid")?;
        let counts = Arc::new(counts);
        let exporter = Counted {
            inner: exporter,
            counts: Arc::clone(&counts),
        };
        let processor = Counted {
            inner: BatchSpanProcessor::builder(exporter).build(),
            counts: Arc::clone(&counts),
        };
        let provider = SdkTracerProvider::builder()
            .with_span_processor(processor)
            .with_resource(resource)
            .build();
        Ok(Self {
            tracer: provider.tracer("torchserve"),
            provider,
            counts,
        })
    }

    /// Makes spans.
    pub(crate) fn tracer(&self) -> &SdkTracer {
        &self.tracer
    }

    /// Sends the last spans, for a short time.
    pub(crate) async fn end(&self) {
        let provider = self.provider.clone();
        let sending =
            tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(LAST_SPANS));
        // What it says is in the counts.
        let _in_time = tokio::time::timeout(LAST_SPANS, sending).await;
        let (sent, ended) = (self.counts.sent(), self.counts.ended());
        let lost = ended.saturating_sub(sent);
        if lost == 0 {
            tracing::info!("{sent} spans were sent to the collector");
        } else {
            tracing::warn!("{sent} spans were sent to the collector, {lost} were lost");
        }
    }
}

/// What spans are of. The library reads the same variables for the rest of it.
fn resource(variable: impl Fn(&str) -> Option<String>) -> Resource {
    let names_service = |all: String| {
        let mut all = all.split(',').map(str::trim_start);
        all.any(|one| one.starts_with("service.name="))
    };
    let named = variable("OTEL_SERVICE_NAME").is_some_and(|name| !name.is_empty())
        || variable("OTEL_RESOURCE_ATTRIBUTES").is_some_and(names_service);
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let pid = KeyValue::new("process.pid", i64::from(std::process::id()));
    let resource = Resource::builder().with_attributes([version, pid]);
    if named {
        resource.build()
    } else {
        resource.with_service_name("torchserve").build()
    }
}

/// Spans that may wait for the collector. The library reads the same variable, and drops without
/// telling whom.
fn queue_size(variable: impl Fn(&str) -> Option<String>) -> u64 {
    let set = variable("OTEL_BSP_MAX_QUEUE_SIZE").and_then(|text| text.trim().parse().ok());
    set.unwrap_or(2048)
}

/// What became of spans.
#[derive(Debug)]
struct Counts {
    ended: AtomicU64,
    sent: AtomicU64,
    lost: AtomicU64,
    may_wait: u64,
    dropped: Metric,
    /// The collector did not take the last ones.
    failing: AtomicBool,
}

impl Counts {
    fn new(may_wait: u64, metrics: &Metrics) -> Self {
        Self {
            ended: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            lost: AtomicU64::new(0),
            may_wait,
            dropped: metrics.builtin(&names::SPANS_DROPPED, &[]),
            failing: AtomicBool::new(false),
        }
    }

    /// Takes in a span that has ended, if it may wait.
    fn admit(&self) -> bool {
        let ended = self.ended.fetch_add(1, Ordering::Relaxed);
        let gone = self.sent() + self.lost.load(Ordering::Relaxed);
        let has_room = ended.saturating_sub(gone) < self.may_wait;
        if !has_room {
            self.drop(1);
        }
        has_room
    }

    fn drop(&self, spans: usize) {
        self.lost.fetch_add(spans as u64, Ordering::Relaxed);
        for _ in 0..spans {
            self.dropped.count();
        }
    }

    fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }

    fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Says once that the collector cannot be reached, and once that it can again.
    fn note(&self, spans: usize, outcome: &OTelSdkResult) {
        match outcome {
            Ok(()) => {
                self.sent.fetch_add(spans as u64, Ordering::Relaxed);
                if self.failing.swap(false, Ordering::Relaxed) {
                    tracing::info!("the collector takes spans again");
                }
            }
            Err(error) => {
                self.drop(spans);
                if !self.failing.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        "the collector does not take spans: {error}. Until it does they are dropped, \
                         and this is not said again"
                    );
                }
            }
        }
    }
}

/// A processor that counts the spans that come, an exporter that counts those that have gone.
#[derive(Debug)]
struct Counted<T> {
    inner: T,
    counts: Arc<Counts>,
}

impl SpanProcessor for Counted<BatchSpanProcessor> {
    fn on_start(&self, span: &mut Span, context: &Context) {
        self.inner.on_start(span, context);
    }

    fn on_end(&self, span: SpanData) {
        if self.counts.admit() {
            self.inner.on_end(span);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

impl SpanExporter for Counted<opentelemetry_otlp::SpanExporter> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let outcome = self.inner.export(batch).await;
        self.counts.note(spans, &outcome);
        outcome
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.inner.set_resource(resource);
    }
}

/// Sends on the server's runtime what the exporter's own thread waits for.
#[derive(Debug)]
struct Client {
    client: reqwest::Client,
    runtime: Handle,
}

impl HttpClient for Client {
    fn send_bytes<'c, 'f>(
        &'c self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'f>>
    where
        'c: 'f,
        Self: 'f,
    {
        let client = self.client.clone();
        let sending = self.runtime.spawn(async move {
            let request = reqwest::Request::try_from(request)?;
            let mut answer = client.execute(request).await?;
            let mut response = Response::builder().status(answer.status());
            if let Some(headers) = response.headers_mut() {
                *headers = std::mem::take(answer.headers_mut());
            }
            let mut body = Vec::new();
            while let Some(part) = answer.chunk().await? {
                if body.len() + part.len() > MAX_ANSWER_BYTES {
                    let limit = MAX_ANSWER_BYTES;
                    return Err(format!("an answer of more than {limit} bytes").into());
                }
                body.extend_from_slice(&part);
            }
            Ok(response.body(Bytes::from(body))?)
        });
        Box::pin(async move { sending.await? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(set: &[(&str, &str)]) -> Wanted {
        Wanted::by(|name| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, text)| (*text).to_owned())
        })
    }

    const HERE: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318");

    #[test]
    fn traces_are_off_unless_somebody_asks_for_them() {
        for set in [
            &[][..],
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", "")],
            &[("OTEL_SERVICE_NAME", "m")],
            &[HERE, ("OTEL_SDK_DISABLED", "True")],
            &[HERE, ("OTEL_TRACES_EXPORTER", "none")],
        ] {
            assert_eq!(wanted(set), Wanted::Off, "{set:?}");
        }
        for set in [
            &[HERE][..],
            &[("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://h/v1/traces")],
            &[("OTEL_TRACES_EXPORTER", "otlp")],
            &[HERE, ("OTEL_SDK_DISABLED", "false")],
            &[HERE, ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")],
            &[
                HERE,
                ("OTEL_TRACES_SAMPLER", "traceidratio"),
                ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
            ],
        ] {
            assert_eq!(wanted(set), Wanted::On(vec![]), "{set:?}");
        }
    }

    #[test]
    fn what_cannot_be_obeyed_is_told() {
        for other in [
            ("OTEL_TRACES_EXPORTER", "zipkin"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
            ("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip"),
        ] {
            let told = wanted(&[HERE, other]);
            assert!(
                matches!(&told, Wanted::Impossible(reason) if reason.contains(other.1)),
                "{told:?}"
            );
        }
        for other in [
            ("OTEL_TRACES_SAMPLER", "xray"),
            ("OTEL_TRACES_SAMPLER", "traceidratio"),
        ] {
            let told = wanted(&[HERE, other]);
            assert!(
                matches!(&told, Wanted::On(warnings) if warnings[0].contains(other.1)),
                "{told:?}"
            );
        }
    }

    #[test]
    fn spans_that_find_no_room_are_dropped_and_counted() {
        let metrics = Metrics::new(ts_metrics::Mode::Prometheus, None, false);
        let counts = Counts::new(3, &metrics);
        let admitted: Vec<_> = (0..5).map(|_| counts.admit()).collect();
        assert_eq!(admitted, [true, true, true, false, false]);
        counts.note(2, &Ok(()));
        assert!(counts.admit());
        counts.note(
            2,
            &Err(opentelemetry_sdk::error::OTelSdkError::AlreadyShutdown),
        );
        assert!(counts.admit() && counts.admit());
        assert_eq!((counts.sent(), counts.lost.load(Ordering::Relaxed)), (2, 4));
    }

    #[test]
    fn the_collector_has_its_time() {
        let of = |given: Option<&str>| {
            timeout(|name| {
                let text = given.filter(|_| name == "OTEL_EXPORTER_OTLP_TIMEOUT");
                text.map(str::to_owned)
            })
        };
        assert_eq!(of(Some("250")), Duration::from_millis(250));
        assert_eq!(of(Some("soon")), Duration::from_secs(10));
        assert_eq!(of(None), Duration::from_secs(10));
    }
}
