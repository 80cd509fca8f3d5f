//! Traces, as a collector gets them.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use prost::Message as _;
use ts_test::{Running, Server};

use crate::server;

/// What is sent to a collector, as it is read.
#[derive(Default)]
struct Taken {
    heads: Vec<String>,
    requests: Vec<ExportTraceServiceRequest>,
}

/// A collector that takes its time for each answer.
struct Collector {
    address: SocketAddr,
    taken: Arc<Mutex<Taken>>,
}

/// A span, with its attributes as text.
#[derive(Debug, Clone)]
struct Span {
    name: String,
    trace: String,
    id: String,
    parent: String,
    kind: SpanKind,
    times: (u64, u64),
    failed: bool,
    /// Traces and spans.
    links: Vec<(String, String)>,
    attributes: HashMap<String, String>,
}

impl Span {
    fn attribute(&self, name: &str) -> &str {
        self.attributes.get(name).map_or("", String::as_str)
    }

    fn is_within(&self, other: &Self) -> bool {
        other.times.0 <= self.times.0
            && self.times.0 <= self.times.1
            && self.times.1 <= other.times.1
    }

    fn millis(&self) -> u64 {
        (self.times.1 - self.times.0) / 1_000_000
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn as_text(attributes: &[KeyValue]) -> HashMap<String, String> {
    let text = |value: &Option<AnyValue>| match value.as_ref().and_then(|v| v.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        other => panic!("an attribute is {other:?}"),
    };
    let pairs = attributes
        .iter()
        .map(|one| (one.key.clone(), text(&one.value)));
    pairs.collect()
}

impl Collector {
    fn start(pause: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let collector = Self {
            address: listener.local_addr().unwrap(),
            taken: Arc::default(),
        };
        let taken = Arc::clone(&collector.taken);
        let serve = move || {
            for stream in listener.incoming().map_while(Result::ok) {
                // A server that ends may have left.
                let _may_be_gone = Self::take(stream, &taken, pause);
            }
        };
        let thread = std::thread::Builder::new().name("collector".to_owned());
        thread.spawn(serve).unwrap();
        collector
    }

    fn take(stream: TcpStream, taken: &Mutex<Taken>, pause: Duration) -> std::io::Result<()> {
        let mut stream = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if stream.read_line(&mut head)? == 0 {
                return Ok(());
            }
        }
        let head = head.to_ascii_lowercase();
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.unwrap().parse().unwrap()];
        stream.read_exact(&mut body)?;
        std::thread::sleep(pause);
        {
            let mut taken = taken.lock().unwrap();
            taken.heads.push(head);
            let request = ExportTraceServiceRequest::decode(&body[..]).unwrap();
            taken.requests.push(request);
        }
        stream.get_mut().write_all(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\nconnection: close\r\n\
              content-length: 0\r\n\r\n",
        )
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn spans(&self) -> Vec<Span> {
        let taken = self.taken.lock().unwrap();
        let resources = taken.requests.iter().flat_map(|one| &one.resource_spans);
        let scopes = resources.flat_map(|one| &one.scope_spans);
        let spans = scopes.flat_map(|one| &one.spans).map(|span| Span {
            name: span.name.clone(),
            trace: hex(&span.trace_id),
            id: hex(&span.span_id),
            parent: hex(&span.parent_span_id),
            kind: span.kind(),
            times: (span.start_time_unix_nano, span.end_time_unix_nano),
            failed: span
                .status
                .as_ref()
                .is_some_and(|s| s.code() == StatusCode::Error),
            links: span
                .links
                .iter()
                .map(|link| (hex(&link.trace_id), hex(&link.span_id)))
                .collect(),
            attributes: as_text(&span.attributes),
        });
        spans.collect()
    }

    /// The spans of the trace that a response belongs to, by their names, once its root has come.
    fn trace(&self, server: &Running, parent: &str) -> HashMap<String, Span> {
        let mut fields = parent.split('-').skip(1);
        let (trace, root) = (fields.next().unwrap(), fields.next().unwrap());
        server.wait_until("the trace has come", || {
            self.spans().iter().any(|span| span.id == root)
        });
        let spans = self.spans().into_iter().filter(|span| span.trace == trace);
        spans
            .map(|span| {
                let name = if span.id == root { "root" } else { &span.name };
                (name.to_owned(), span)
            })
            .collect()
    }
}

const MODEL: &str = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 0\n";

fn traced(endpoint: &str) -> Server {
    server()
        .echo_model("m", &format!("{MODEL}echo:\n  batchMicros: 20000\n"))
        .args(&["--models", "m"])
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        .env("OTEL_BSP_SCHEDULE_DELAY", "50")
}

fn started(server: Server) -> Running {
    let server = server.start();
    server.wait_ready("m");
    server
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CLIENT: &str = "b7ad6b7169203331";

#[test]
fn a_request_is_a_span_of_the_clients_trace_with_children_for_its_stages() {
    let collector = Collector::start(Duration::ZERO);
    let server = traced(&collector.url())
        .env("OTEL_EXPORTER_OTLP_HEADERS", "x-key=hush%21")
        .env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test");
    let mut server = started(server);
    let answer = server
        .infer("POST", "/predictions/m?secret=1")
        .header("traceparent", &format!("00-{TRACE}-{CLIENT}-01"))
        .header("tracestate", "vendor=1")
        .header("x-request-id", "mine")
        .body("x")
        .send()
        .expect(200);
    let parent = answer.header("traceparent").unwrap();
    assert!(parent.starts_with(&format!("00-{TRACE}-")), "{parent}");
    assert!(
        parent.ends_with("-01") && !parent.contains(CLIENT),
        "{parent}"
    );

    let spans = collector.trace(&server, parent);
    let root = &spans["root"];
    assert_eq!(root.name, "POST /predictions/{model_name}");
    assert_eq!(
        (root.kind, root.parent.as_str()),
        (SpanKind::Server, CLIENT)
    );
    assert!(!root.failed);
    for (name, value) in [
        ("http.request.method", "POST"),
        ("http.route", "/predictions/{model_name}"),
        ("http.response.status_code", "200"),
        ("url.path", "/predictions/m"),
        ("url.scheme", "http"),
        ("network.protocol.version", "1.1"),
        ("client.address", "127.0.0.1"),
        ("torchserve.request.id", "mine"),
        ("torchserve.model.version", "1.0"),
    ] {
        assert_eq!(root.attribute(name), value, "{name}");
    }
    assert_eq!(root.attribute("error.type"), "");
    for (name, parent) in [
        ("read", "root"),
        ("queue", "root"),
        ("batch", "root"),
        ("handler", "batch"),
    ] {
        let (span, parent) = (&spans[name], &spans[parent]);
        assert_eq!(span.parent, parent.id, "{name}");
        assert!(span.is_within(parent), "{span:?} in {parent:?}");
        assert_eq!(span.kind, SpanKind::Internal);
    }
    assert_eq!(spans.len(), 5);
    assert!(spans["read"].times.1 <= spans["queue"].times.0);
    assert!(spans["queue"].times.1 <= spans["batch"].times.0);
    let handler = spans["handler"].millis();
    assert!((20..2000).contains(&handler), "{handler} ms");
    assert_eq!(spans["batch"].attribute("torchserve.batch.requests"), "1");
    assert_eq!(spans["batch"].attribute("torchserve.worker.id"), "9000");

    {
        let taken = collector.taken.lock().unwrap();
        assert!(taken.heads.iter().all(|head| head.contains("x-key: hush!")));
        assert!(taken.heads[0].starts_with("post /v1/traces http/1.1"));
        let resource = taken.requests[0].resource_spans[0].resource.as_ref();
        let resource = as_text(&resource.unwrap().attributes);
        assert_eq!(resource["service.name"], "torchserve");
        assert_eq!(resource["deployment.environment"], "test");
        // Of the state that came, what a later service may want to see.
        let span = &taken.requests.iter().flat_map(|one| &one.resource_spans);
        let mut spans = span.clone().flat_map(|one| &one.scope_spans[0].spans);
        assert!(spans.any(|span| span.trace_state == "vendor=1"));
    }
    assert!(server.stop().success());
    let output = server.output();
    assert!(!output.contains("hush"), "{output}");
    assert!(
        output.contains("spans were sent to the collector"),
        "{output}"
    );
}

#[test]
fn an_encrypted_request_is_told_as_one() {
    let collector = Collector::start(Duration::ZERO);
    let authority = crate::tls::Authority::new();
    let server = crate::tls::certified(&authority, &[])
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())
        .env("OTEL_BSP_SCHEDULE_DELAY", "50");
    let server = started(server);
    let answer = server.infer("GET", "/ping").send().expect(200);
    let spans = collector.trace(&server, answer.header("traceparent").unwrap());
    assert_eq!(spans["root"].attribute("url.scheme"), "https");
}

#[test]
fn a_batch_is_linked_to_the_other_requests_in_it() {
    let collector = Collector::start(Duration::ZERO);
    let server = server()
        .echo_model(
            "m",
            "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 3\nmaxBatchDelay: 20000\nbatchGather: strict\n",
        )
        .args(&["--models", "m"])
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", &collector.url())
        .env("OTEL_TRACES_SAMPLER", "parentbased_always_on")
        .env("OTEL_BSP_SCHEDULE_DELAY", "50");
    let server = started(server);
    let parents = Mutex::new(Vec::new());
    // The last one is not sampled: it has no span, and no link leads to it.
    ts_test::at_once(["01", "01", "00"], |flags| {
        let answer = server
            .infer("POST", "/predictions/m")
            .header("traceparent", &format!("00-{TRACE}-{CLIENT}-{flags}"))
            .body("x")
            .send()
            .expect(200);
        if flags == "01" {
            let parent = answer.header("traceparent").unwrap().to_owned();
            parents.lock().unwrap().push(parent);
        }
    });
    let roots: Vec<String> = parents
        .into_inner()
        .unwrap()
        .iter()
        .map(|parent| parent.split('-').nth(2).unwrap().to_owned())
        .collect();
    server.wait_until("both have come", || {
        let spans = collector.spans();
        roots
            .iter()
            .all(|root| spans.iter().any(|span| span.id == *root))
    });
    let spans = collector.spans();
    for (own, other) in [(0, 1), (1, 0)] {
        let is_it = |span: &&Span| span.name == "batch" && span.parent == roots[own];
        let batch = spans.iter().find(is_it).unwrap();
        assert_eq!(batch.attribute("torchserve.batch.requests"), "3");
        assert_eq!(batch.links, [(TRACE.to_owned(), roots[other].clone())]);
    }
}

#[test]
fn every_request_is_a_span_and_begins_a_trace_if_its_client_has_none() {
    let collector = Collector::start(Duration::ZERO);
    let server = started(traced(&collector.url()).env("OTEL_SERVICE_NAME", "pictures"));
    for (method, path, name, status) in [
        ("GET", "/models", "GET /models", 200),
        (
            "GET",
            "/models/m/1.0",
            "GET /models/{model_name}/{model_version}",
            200,
        ),
        ("GET", "/models/other", "GET /models/{model_name}", 404),
        ("GET", "/v2/health/ready", "GET /v2/health/ready", 200),
        ("GET", "/nowhere/at/all", "GET", 404),
    ] {
        let answer = server
            .manage(method, path)
            .header("traceparent", "not one")
            .header("tracestate", "vendor=1")
            .send()
            .expect(status);
        let spans = collector.trace(&server, answer.header("traceparent").unwrap());
        let root = &spans["root"];
        assert_eq!((root.name.as_str(), root.parent.as_str()), (name, ""));
        let told = root.attribute("http.response.status_code");
        assert_eq!(told, status.to_string(), "{path}");
        assert!(
            !root.failed,
            "{path}: the client's fault is not the server's"
        );
        assert_eq!(spans.len(), 1, "{path}");
    }
    let taken = collector.taken.lock().unwrap();
    let resource = taken.requests[0].resource_spans[0].resource.as_ref();
    assert_eq!(
        as_text(&resource.unwrap().attributes)["service.name"],
        "pictures"
    );
}

#[test]
fn what_fails_has_the_stages_that_it_came_to() {
    let collector = Collector::start(Duration::ZERO);
    let server = started(traced(&collector.url()).config("max_request_size=1000"));
    let call = || server.infer("POST", "/predictions/m");
    // The handler raises, the worker dies, nobody answers in time, the body is too large.
    let raised = call()
        .header("x-echo-fault", "raise-batch")
        .body("x")
        .send()
        .expect(503);
    let died = call()
        .header("x-echo-fault", "abort")
        .body("x")
        .send()
        .expect(500);
    server.wait_ready("m");
    let late = call()
        .header("x-request-timeout-ms", "5")
        .body("x")
        .send()
        .expect(504);
    let large = call().body(vec![b'x'; 2000]).send().expect(413);
    for (answer, stages, failed) in [
        (
            raised,
            &["batch", "handler", "queue", "read", "root"][..],
            true,
        ),
        (died, &["batch", "queue", "read", "root"], true),
        (late, &["batch", "queue", "read", "root"], true),
        (large, &["root"], false),
    ] {
        let spans = collector.trace(&server, answer.header("traceparent").unwrap());
        let mut names: Vec<_> = spans.keys().map(String::as_str).collect();
        names.sort_unstable();
        let status = answer.status.to_string();
        assert_eq!(names, stages, "{status}");
        let root = &spans["root"];
        assert_eq!(root.failed, failed, "{root:?}");
        assert_eq!(root.attribute("error.type") == status, failed, "{root:?}");
        assert_eq!(root.attribute("http.response.status_code"), status);
        for (name, span) in &spans {
            let parent = if name == "handler" {
                &spans["batch"]
            } else {
                root
            };
            assert!(span.is_within(parent), "{name} of {status}");
        }
    }
}

#[test]
fn a_stream_is_a_span_to_its_last_part_and_a_client_that_leaves_is_told() {
    let collector = Collector::start(Duration::ZERO);
    let server = started(traced(&collector.url()));
    let call = || {
        server
            .infer("POST", "/predictions/m")
            .header("x-echo-stream", "3")
    };
    let answer = call().body("x").send().expect(200);
    let spans = collector.trace(&server, answer.header("traceparent").unwrap());
    assert!(!spans["root"].failed);
    assert!(spans["batch"].is_within(&spans["root"]));
    assert!(spans["root"].millis() >= 20);

    let parent = format!("00-{}-{CLIENT}-01", TRACE.replace('0', "1"));
    let left = call()
        .header("traceparent", &parent)
        .header("x-echo-fault", "delay=60000")
        .body("x")
        .limit(Duration::from_millis(300))
        .try_send();
    assert!(left.is_err());
    let is_root = |span: &Span| span.trace == TRACE.replace('0', "1") && span.parent == CLIENT;
    server.wait_until("the end is told", || collector.spans().iter().any(is_root));
    let root = collector.spans().into_iter().find(is_root).unwrap();
    assert!(root.failed);
    assert_eq!(root.attribute("error.type"), "cancelled");
    assert_eq!(root.attribute("http.response.status_code"), "");
}

#[test]
fn what_is_not_sampled_is_passed_on_and_not_sent() {
    let collector = Collector::start(Duration::ZERO);
    let server = started(traced(&collector.url()));
    let call = |trace: &str, flags: &str| {
        let answer = server
            .infer("POST", "/predictions/m")
            .header("traceparent", &format!("00-{trace}-{CLIENT}-{flags}"))
            .body("x")
            .send()
            .expect(200);
        answer.header("traceparent").unwrap().to_owned()
    };
    let unsampled = TRACE.replace('0', "2");
    let parent = call(&unsampled, "00");
    assert!(parent.starts_with(&format!("00-{unsampled}-")) && parent.ends_with("-00"));
    assert!(!parent.contains(CLIENT));
    // A later one has come, so the earlier one would have.
    collector.trace(&server, &call(TRACE, "01"));
    assert!(collector.spans().iter().all(|span| span.trace != unsampled));

    let silent = Collector::start(Duration::ZERO);
    let server = traced(&silent.url()).env("OTEL_TRACES_SAMPLER", "always_off");
    let mut server = started(server);
    let answer = server
        .infer("POST", "/predictions/m")
        .body("x")
        .send()
        .expect(200);
    assert!(answer.header("traceparent").unwrap().ends_with("-00"));
    assert!(server.stop().success());
    assert!(silent.spans().is_empty());
}

#[test]
fn a_collector_that_is_not_there_holds_up_nobody_and_is_told_once() {
    let nobody = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let server = traced(&format!("http://{nobody}")).env("OTEL_EXPORTER_OTLP_TIMEOUT", "200");
    let mut server = started(server);
    let told = "the collector does not take spans";
    for _ in 0..5 {
        for _ in 0..5 {
            server
                .infer("POST", "/predictions/m")
                .body("x")
                .send()
                .expect(200);
        }
        server.wait_until("it is told", || server.output().contains(told));
    }
    server.wait_until("what was dropped is counted", || {
        let page = server.metrics("/metrics").send().page();
        page.value("ts_spans_dropped_total", &[]) >= Some(25.0)
    });
    let began = Instant::now();
    assert!(server.stop().success());
    assert!(began.elapsed() < Duration::from_secs(8));
    let output = server.output();
    assert_eq!(output.matches(told).count(), 1, "{output}");
    assert!(
        output.contains("0 spans were sent to the collector, "),
        "{output}"
    );
}

#[test]
fn a_slow_collector_holds_up_neither_requests_nor_the_end() {
    let collector = Collector::start(Duration::from_secs(3));
    let server = traced(&collector.url())
        .env("OTEL_BSP_MAX_QUEUE_SIZE", "16")
        .env("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8");
    let mut server = started(server);
    let began = Instant::now();
    for _ in 0..40 {
        server
            .infer("POST", "/predictions/m")
            .body("x")
            .send()
            .expect(200);
    }
    // Forty batches of 20 ms, and no answer of the collector's within that.
    let took = began.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    // Two hundred spans; sixteen wait, and a few have been taken at most.
    let page = server.metrics("/metrics").send().page();
    let dropped = page.value("ts_spans_dropped_total", &[]).unwrap();
    assert!((100.0..200.0).contains(&dropped), "{dropped}");
    let began = Instant::now();
    assert!(server.stop().success());
    let took = began.elapsed();
    assert!(took < Duration::from_secs(8), "{took:?}");
    let output = server.output();
    assert!(output.contains(" were lost"), "{output}");
}

#[test]
fn there_are_no_traces_unless_they_can_be_had() {
    let collector = Collector::start(Duration::ZERO);
    for (name, value, told) in [
        ("OTEL_SDK_DISABLED", "true", None),
        ("OTEL_TRACES_EXPORTER", "none", None),
        (
            "OTEL_EXPORTER_OTLP_PROTOCOL",
            "grpc",
            Some("sends `http/protobuf` only"),
        ),
        (
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "not a url",
            Some("no traces are sent"),
        ),
    ] {
        let mut server = started(traced(&collector.url()).env(name, value));
        let parent = format!("00-{TRACE}-{CLIENT}-01");
        let answer = server
            .infer("POST", "/predictions/m")
            .header("traceparent", &parent)
            .body("x")
            .send()
            .expect(200);
        // As it came, since nothing stands in between.
        assert_eq!(answer.header("traceparent"), Some(parent.as_str()));
        assert!(server.stop().success());
        let output = server.output();
        match told {
            Some(told) => assert!(output.contains(told), "{output}"),
            None => assert!(!output.contains("traces"), "{output}"),
        }
    }
    assert!(collector.spans().is_empty());
}
