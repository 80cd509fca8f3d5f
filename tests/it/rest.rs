//! The HTTP edge: descriptions, codings, events, ids, timing, and what connections do.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use serde_json::Value;
use ts_test::Running;

use crate::{server, serving};

/// Headers of every response, and the settings that they come from.
const CORS: [(&str, &str, &str); 3] = [
    (
        "access-control-allow-origin",
        "cors_allowed_origin",
        "https://there.example",
    ),
    (
        "access-control-allow-methods",
        "cors_allowed_methods",
        "GET, POST, OPTIONS",
    ),
    (
        "access-control-allow-headers",
        "cors_allowed_headers",
        "X-Custom",
    ),
];

fn gzip(body: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(body).unwrap();
    encoder.finish().unwrap()
}

fn deflate(body: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(body).unwrap();
    encoder.finish().unwrap()
}

fn brotli(body: &[u8]) -> Vec<u8> {
    let mut encoder = brotli::CompressorWriter::new(Vec::new(), 4096, 5, 22);
    encoder.write_all(body).unwrap();
    encoder.into_inner()
}

fn zstd(body: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(body, 3).unwrap()
}

/// A way to compress.
type Encode = fn(&[u8]) -> Vec<u8>;

const CODINGS: [(&str, Encode); 4] = [
    ("gzip", gzip),
    ("deflate", deflate),
    ("br", brotli),
    ("zstd", zstd),
];

/// A connection that is spoken to byte by byte.
struct Raw {
    reader: BufReader<TcpStream>,
}

/// The head of an answer.
struct Head {
    status: String,
    headers: Vec<(String, String)>,
}

impl Head {
    fn all(&self, name: &str) -> Vec<&str> {
        let named = self.headers.iter();
        let named = named.filter(|(key, _)| key.eq_ignore_ascii_case(name));
        named.map(|(_, value)| value.as_str()).collect()
    }

    fn one(&self, name: &str) -> Option<&str> {
        match self.all(name)[..] {
            [] => None,
            [value] => Some(value),
            ref more => panic!("{name} came {} times", more.len()),
        }
    }
}

impl Raw {
    fn to(url: &str) -> Self {
        let socket = TcpStream::connect(url.trim_start_matches("http://")).unwrap();
        let limit = Some(Duration::from_secs(30));
        socket.set_read_timeout(limit).unwrap();
        Self {
            reader: BufReader::new(socket),
        }
    }

    fn say(&mut self, bytes: &[u8]) {
        self.reader.get_mut().write_all(bytes).unwrap();
    }

    fn head(&mut self) -> Head {
        let mut lines = (&mut self.reader).lines().map(Result::unwrap);
        let status = lines.next().unwrap();
        let headers = lines.take_while(|line| !line.is_empty()).map(|line| {
            let (name, value) = line.split_once(':').unwrap();
            (name.to_owned(), value.trim().to_owned())
        });
        let headers = headers.collect();
        Head { status, headers }
    }

    fn body(&mut self, head: &Head) -> Vec<u8> {
        let bytes = head.one("content-length").unwrap().parse().unwrap();
        let mut body = vec![0; bytes];
        self.reader.read_exact(&mut body).unwrap();
        body
    }

    fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        self.reader.read_to_end(&mut rest).unwrap();
        rest
    }
}

#[test]
fn every_port_describes_itself_with_and_without_cors_in_17() {
    for cors in [false, true] {
        let server = server()
            .echo_model("m", "minWorkers: 1\nmaxWorkers: 1")
            .args(&["--models", "m"]);
        let settings = CORS.iter().filter(|_| cors);
        let server = settings.fold(server, |server, (_, key, value)| {
            server.config(&format!("{key}={value}"))
        });
        let server = server.start();
        let ask = |api: &str, method: &'static str, path: &str| {
            let request = match api {
                "inference" => server.infer(method, path),
                "management" => server.manage(method, path),
                _ => server.metrics(path),
            };
            let request = request
                .header("origin", "https://there.example")
                .header("access-control-request-method", "POST")
                .header("access-control-request-headers", "X-Custom");
            let answer = request.send();
            for (name, _, value) in CORS {
                assert_eq!(answer.header(name), cors.then_some(value), "{api} {path}");
            }
            answer
        };
        for api in ["inference", "management"] {
            let described = ask(api, "OPTIONS", "/").expect(200).json();
            assert_eq!(described["openapi"], "3.0.1");
            assert_eq!(described["info"]["title"], "TorchServe APIs");
            assert!(described["paths"]["/metrics"]["get"].is_object());
            assert_eq!(
                ask(api, "GET", "/api-description").expect(200).json(),
                described
            );
            assert_eq!(
                ask(api, "POST", "/api-description").expect(200).json(),
                described
            );
            let error = ask(api, "GET", "/").expect(405).json();
            assert_eq!(error["type"], "MethodNotAllowedException");
            ask(api, "OPTIONS", "/no/such/path").expect(404);
        }
        let mut raw = Raw::to(&server.metrics);
        raw.say(b"OPTIONS / HTTP/1.1\r\nhost: h\r\norigin: https://there.example\r\n\r\n");
        let head = raw.head();
        assert!(head.status.contains(" 200"), "{}", head.status);
        for (name, _, value) in CORS {
            assert_eq!(head.one(name), cors.then_some(value));
        }
        let described: Value = serde_json::from_slice(&raw.body(&head)).unwrap();
        assert_eq!(described["info"]["title"], "TorchServe APIs");
        let described = ask("metrics", "GET", "/api-description").expect(200).json();
        assert_eq!(described["info"]["title"], "TorchServe APIs");

        for path in ["/predictions/m", "/predictions/m/1.0"] {
            let described = ask("inference", "OPTIONS", path).expect(200).json();
            assert_eq!(described["info"]["title"], "RESTful API for: m");
        }
        for path in ["/models/m", "/models/m/1.0", "/models/m/all"] {
            let described = ask("management", "OPTIONS", path).expect(200).json();
            assert_eq!(described["info"]["title"], "RESTful Management API for: m");
        }
        for (api, path, kind) in [
            ("inference", "/predictions/none", "ModelNotFoundException"),
            (
                "inference",
                "/predictions/m/9",
                "ModelVersionNotFoundException",
            ),
            ("management", "/models/none", "ModelNotFoundException"),
            ("management", "/models/m/9", "ModelVersionNotFoundException"),
            ("inference", "/models/m", "ResourceNotFoundException"),
            ("management", "/predictions/m", "ResourceNotFoundException"),
        ] {
            let error = ask(api, "OPTIONS", path).expect(404).json();
            assert_eq!(error["type"], kind, "{api} {path}");
        }
        for (api, path) in [
            ("inference", "/ping"),
            ("inference", "/explanations/m"),
            ("inference", "/invocations"),
            ("management", "/models"),
        ] {
            let answer = ask(api, "OPTIONS", path).expect(200);
            assert!(
                answer.body.is_empty() && answer.header("allow").is_some(),
                "{path}"
            );
        }
    }
}

#[test]
fn descriptions_need_no_token() {
    let server = server()
        .echo_model("m", "minWorkers: 1\nmaxWorkers: 1")
        .with_default_safety()
        .args(&["--models", "m"])
        .start();
    server.wait_until("the model is there", || {
        server.infer("OPTIONS", "/predictions/m").send().status == 200
    });
    server
        .infer("POST", "/predictions/m")
        .body("x")
        .send()
        .expect(400);
    server.infer("OPTIONS", "/").send().expect(200);
    server.infer("OPTIONS", "/predictions/m").send().expect(200);
    server.manage("OPTIONS", "/models/m").send().expect(200);
    server.manage("GET", "/api-description").send().expect(200);
    server.infer("GET", "/docs").send().expect(200);
    let document = server
        .infer("GET", "/openapi.json")
        .send()
        .expect(200)
        .json();
    let operation = &document["paths"]["/predictions/{model_name}"];
    assert!(operation["post"]["security"].is_array());
    assert!(operation["options"].get("security").is_none());
}

#[test]
fn our_description_is_true_of_each_listener() {
    let server = serving("");
    for api in ["inference", "management", "metrics"] {
        let ask = |method: &'static str, path: &str| match (api, method) {
            ("inference", _) => server.infer(method, path),
            ("management", _) => server.manage(method, path),
            (_, "GET") => server.metrics(path),
            _ => panic!("the metrics API is only read"),
        };
        let answer = ask("GET", "/openapi.json").send().expect(200);
        assert_eq!(answer.header("content-type"), Some("application/json"));
        let document = answer.json();
        assert_eq!(document["openapi"], "3.1.0");
        let mut asked = 0;
        for (path, methods) in document["paths"].as_object().unwrap() {
            for (method, operation) in methods.as_object().unwrap() {
                let method = match method.as_str() {
                    "get" => "GET",
                    _ if api == "metrics" => continue,
                    "post" => "POST",
                    "put" => "PUT",
                    "delete" => "DELETE",
                    "options" => "OPTIONS",
                    other => panic!("{other} {path}"),
                };
                // The model is asked for to the end.
                let names: &[&str] = match method {
                    "DELETE" => &["none", "-x"],
                    _ => &["m", "none", "-x"],
                };
                for name in names {
                    let path = path
                        .replace("{model_name}", name)
                        .replace("{model_version}", "1.0")
                        .replace("{url_path}", "a/b");
                    let answer = ask(method, &path).send();
                    let documented = &operation["responses"][answer.status.to_string()];
                    let shown = format!("{method} {path}: {} {}", answer.status, answer.text());
                    assert!(documented.is_object(), "{shown}");
                    for header in ["x-warning", "server-timing", "retry-after"] {
                        if answer.header(header).is_some() {
                            assert!(documented["headers"][header].is_object(), "{shown}");
                        }
                    }
                    asked += 1;
                    for parameter in operation["parameters"].as_array().into_iter().flatten() {
                        if parameter["in"] == "query" {
                            let name = parameter["name"].as_str().unwrap();
                            let answer = ask(method, &format!("{path}?{name}=1")).send();
                            let shown = format!("{name}: {} {}", answer.status, answer.text());
                            let documented = &operation["responses"][answer.status.to_string()];
                            assert!(documented.is_object(), "{method} {path}?{shown}");
                            let warning = answer.header("x-warning").unwrap_or_default();
                            assert!(!warning.contains("unknown"), "{path}: {warning}");
                        }
                    }
                }
            }
        }
        assert!(asked >= 4, "{api}: {document}");

        let page = ask("GET", "/docs").send().expect(200);
        assert_eq!(
            page.header("content-type"),
            Some("text/html; charset=utf-8")
        );
        let policy = page.header("content-security-policy").unwrap();
        assert!(policy.starts_with("default-src 'none'"), "{policy}");
        let page = page.text();
        for path in document["paths"].as_object().unwrap().keys() {
            assert!(
                page.contains(&format!(">{path}<")),
                "{path} is not on the page"
            );
        }
        assert!(
            !page.contains("<script") && !page.contains("http://"),
            "{page}"
        );
    }
}

#[test]
fn a_listener_of_all_apis_has_versioned_management() {
    // Two that are the same port have to name one.
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let server = server()
        .config(&format!("inference_address={address}"))
        .config(&format!("management_address={address}"))
        .echo_model("m", "minWorkers: 1\nmaxWorkers: 1")
        .args(&["--models", "m"])
        .start();
    server.wait_ready("m");
    let described = server
        .manage("GET", "/models/m/1.0")
        .send()
        .expect(200)
        .json();
    assert_eq!(described[0]["modelVersion"], "1.0");
    server
        .infer("POST", "/models/m/invoke")
        .body("x")
        .send()
        .expect(200);
    let document = server
        .infer("GET", "/openapi.json")
        .send()
        .expect(200)
        .json();
    for path in [
        "/predictions/{model_name}",
        "/models/{model_name}/{model_version}",
        "/metrics",
    ] {
        assert!(document["paths"][path].is_object(), "{path}");
    }
}

#[test]
fn bodies_come_compressed() {
    let server = serving("");
    let body = b"some text, again and again. ".repeat(3000);
    for (name, encode) in CODINGS {
        let request = server.infer("POST", "/predictions/m").body(encode(&body));
        let answer = request.header("content-encoding", name).send().expect(200);
        assert!(answer.body == body, "{name}");
        let form = encode(b"data=from+a+form");
        let request = server.infer("POST", "/predictions/m").body(form);
        let request = request.header("content-type", "application/x-www-form-urlencoded");
        let answer = request.header("content-encoding", name).send().expect(200);
        assert_eq!(answer.text(), "from a form");

        let request = server.infer("POST", "/predictions/m").body("no such thing");
        let error = request
            .header("content-encoding", name)
            .send()
            .expect(400)
            .json();
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(name), "{message}");
    }
    let request = server.infer("POST", "/predictions/m").body("x");
    let answer = request
        .header("content-encoding", "lzma")
        .send()
        .expect(415);
    assert_eq!(
        answer.header("accept-encoding"),
        Some("gzip, deflate, br, zstd")
    );
    let message = answer.json()["message"].to_string();
    assert!(
        message.contains("`lzma`") && message.contains("zstd"),
        "{message}"
    );
}

/// The most memory that the server has ever had, in bytes.
fn peak(server: &Running) -> u64 {
    let status = fs_err::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmHWM:"))
        .unwrap();
    let kilobytes: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kilobytes << 10
}

#[test]
fn a_bomb_is_too_large_and_takes_no_memory() {
    let server = serving("");
    let zeros = vec![0_u8; 64 << 20];
    let bombs = CODINGS.map(|(name, encode)| (name, encode(&zeros)));
    drop(zeros);
    let before = peak(&server);
    for (name, bomb) in bombs {
        assert!(bomb.len() < 200_000, "{name}: {}", bomb.len());
        for _ in 0..3 {
            let request = server.infer("POST", "/predictions/m").body(bomb.clone());
            let answer = request.header("content-encoding", name).send().expect(413);
            assert!(answer.body.is_empty());
        }
    }
    let more = peak(&server).saturating_sub(before);
    assert!(more < 40 << 20, "the bombs took {} MiB", more >> 20);
    server
        .infer("POST", "/predictions/m")
        .body("x")
        .send()
        .expect(200);
}

#[test]
fn answers_go_compressed_to_who_accepts_it() {
    let server = serving("");
    let body = "some text, again and again. ".repeat(1000);
    let ask = |body: &str, kind: &str, accept: Option<&str>| {
        let request = server.infer("POST", "/predictions/m").body(body.to_owned());
        let request = request.header("content-type", kind);
        let request = match accept {
            Some(accept) => request.header("accept-encoding", accept),
            None => request.header("accept-encoding", "identity"),
        };
        request.send().expect(200)
    };
    for (name, _) in CODINGS {
        let answer = ask(&body, "text/plain", Some(name));
        assert_eq!(answer.header("content-encoding"), Some(name));
        assert_eq!(answer.header("vary"), Some("accept-encoding"));
        let length: usize = answer.header("content-length").unwrap().parse().unwrap();
        assert!(
            length == answer.body.len() && length < 1000,
            "{name}: {length}"
        );
        // It is what the same coding gives back as a request.
        let request = server.infer("POST", "/predictions/m").body(answer.body);
        let request = request.header("content-encoding", name);
        let back = request
            .header("accept-encoding", "identity")
            .send()
            .expect(200);
        assert!(back.text() == body, "{name}");
    }
    let plain = ask(&body, "text/plain", None);
    assert_eq!(plain.header("content-encoding"), None);
    assert_eq!(plain.header("vary"), Some("accept-encoding"));
    for (body, kind) in [(&body[..], "image/png"), ("short", "text/plain")] {
        let answer = ask(body, kind, Some("gzip"));
        assert_eq!(
            (answer.header("content-encoding"), answer.header("vary")),
            (None, None)
        );
        assert_eq!(answer.text(), body);
    }
    let answer = server.manage("GET", "/openapi.json");
    let answer = answer.header("accept-encoding", "gzip").send().expect(200);
    assert_eq!(answer.header("content-encoding"), Some("gzip"));

    let server = crate::server()
        .config("min_compressed_size=0")
        .echo_model("m", "minWorkers: 1\nmaxWorkers: 1")
        .args(&["--models", "m"])
        .start();
    server.wait_ready("m");
    let request = server.infer("POST", "/predictions/m").body(body);
    let answer = request.header("accept-encoding", "gzip").send().expect(200);
    assert_eq!(answer.header("content-encoding"), None);
}

#[test]
fn parts_come_as_events_to_who_asks_for_them() {
    let server = serving("");
    let ask = |accept: &str, parts: &str, body: &[u8]| {
        let request = server.infer("POST", "/predictions/m").body(body);
        let request = request
            .header("accept-encoding", "gzip")
            .header("accept", accept);
        request.header("x-echo-stream", parts)
    };
    let answer = ask("text/event-stream", "3", b"x").send().expect(200);
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    assert_eq!(answer.header("transfer-encoding"), Some("chunked"));
    assert_eq!(answer.header("content-encoding"), None);
    let expected = "data: 0 x\ndata: \n\ndata: 1 x\ndata: \n\ndata: 2 x\ndata: \n\n\
                    event: end\ndata: [DONE]\n\n";
    assert_eq!(answer.text(), expected);
    let binary = ask("text/event-stream", "1", b"\xff").send().expect(200);
    assert_eq!(
        binary.text(),
        "event: base64\ndata: /w==\n\nevent: end\ndata: [DONE]\n\n"
    );

    for (accept, content_type) in [("*/*", None), ("application/json", None)] {
        let answer = ask(accept, "2", b"x").send().expect(200);
        assert_eq!(answer.header("content-type"), content_type, "{accept}");
        assert_eq!(answer.text(), "0 x\n1 x\n");
    }

    let request = ask("text/event-stream", "5", b"x");
    let request = request
        .header("x-echo-fault", "raise")
        .header("x-echo-fault-at", "2");
    let broken = request.send().expect(200).text();
    let (parts, error) = broken.split_once("event: error\ndata: ").unwrap();
    assert_eq!(parts.matches("data: ").count(), 4);
    let error: Value = serde_json::from_str(error.trim_end()).unwrap();
    assert_eq!(error["code"], 503);
    assert_eq!(error["message"], "Prediction failed");
    let early = ask("text/event-stream", "5", b"x").header("x-echo-fault", "raise");
    assert_eq!(early.send().expect(503).json()["code"], 503);

    // A reply that comes at once is an event only for clients that take nothing else.
    for (accept, expected) in [
        (
            "text/event-stream",
            "data: whole\n\nevent: end\ndata: [DONE]\n\n",
        ),
        ("application/json, text/event-stream", "whole"),
    ] {
        let request = server.infer("POST", "/predictions/m").body("whole");
        let answer = request.header("accept", accept).send().expect(200);
        assert_eq!(answer.text(), expected);
    }
    let request = server.infer("POST", "/predictions/m").body("mine");
    let request = request
        .header("accept", "text/event-stream")
        .header("content-type", "Text/Event-Stream");
    assert_eq!(request.send().expect(200).text(), "mine");
    let request = server.infer("POST", "/predictions/none");
    let request = request.header("accept", "text/event-stream");
    assert_eq!(
        request.send().expect(404).json()["type"],
        "ModelNotFoundException"
    );
}

#[test]
fn events_arrive_as_they_are_made() {
    let server = serving("echo:\n  batchMicros: 300000\n");
    let request = server.infer("POST", "/predictions/m").body("x");
    let request = request
        .header("accept", "text/event-stream")
        .header("x-echo-stream", "3");
    let started = Instant::now();
    let mut opened = request.open().unwrap();
    let mut line = String::new();
    opened.body.read_line(&mut line).unwrap();
    assert_eq!(line, "data: 0 x\n");
    let first = started.elapsed();
    opened.body.read_to_string(&mut line).unwrap();
    assert!(
        started.elapsed() - first > Duration::from_millis(400),
        "{first:?}"
    );
}

#[test]
fn a_client_names_its_request_and_gets_its_own_answer() {
    let exchanges = [
        "",
        "batchSize: 8\nmaxBatchDelay: 20\nbatchGather: strict\n",
        "continuousBatching: true\nbatchSize: 8\n",
        "asyncCommunication: true\n",
    ];
    for exchange in exchanges {
        let server = serving(&format!("{exchange}echo:\n  batchMicros: 2000\n"));
        std::thread::scope(|scope| {
            for caller in 0..16 {
                let server = &server;
                scope.spawn(move || {
                    for round in 0..10 {
                        let value = format!("caller {caller} round {round}");
                        let request = server.infer("POST", "/predictions/m").body(value.clone());
                        let request = request.header("x-request-id", "the-same");
                        let parts = if caller % 2 == 0 { 4 } else { 0 };
                        let (request, expected) = if parts > 0 {
                            let all = (0..parts).map(|part| format!("{part} {value}\n")).collect();
                            (request.header("x-echo-stream", &parts.to_string()), all)
                        } else {
                            (request, value)
                        };
                        let answer = request.send().expect(200);
                        assert_eq!(answer.header("x-request-id"), Some("the-same"));
                        assert_eq!(answer.text(), expected, "{exchange}");
                    }
                });
            }
        });
    }
}

#[test]
fn ids_and_traces_that_are_none_are_not_passed_on() {
    let server = serving("");
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let ask = |id: &str, parent: &str, path: &str| {
        let request = server.infer("POST", path).body("x");
        let request = request.header("x-request-id", id);
        request.header("traceparent", parent).send()
    };
    for path in ["/predictions/m", "/predictions/none", "/ping", "/nothing"] {
        let answer = ask("mine", trace, path);
        assert_eq!(answer.header("x-request-id"), Some("mine"), "{path}");
        assert_eq!(answer.header("traceparent"), Some(trace), "{path}");
        let long = "x".repeat(129);
        for id in ["two words", "../../x", "a,1|#Level:Host", "a\"b", &long] {
            let answer = ask(id, "00-junk", path);
            assert_eq!(
                answer.header("x-request-id").map(str::len),
                Some(36),
                "{path}"
            );
            assert_eq!(answer.header("traceparent"), None, "{path}");
        }
    }
}

fn timing(header: &str) -> BTreeMap<&str, f64> {
    let entries = header.split(", ");
    let entries = entries.map(|entry| entry.split_once(";dur=").unwrap());
    entries
        .map(|(name, value)| (name, value.parse().unwrap()))
        .collect()
}

#[test]
fn answers_tell_where_their_time_went() {
    for exchange in ["", "asyncCommunication: true\n"] {
        let server = serving(&format!("{exchange}echo:\n  batchMicros: 50000\n"));
        for parts in ["0", "3"] {
            let request = server.infer("POST", "/predictions/m").body("x");
            let request = match parts {
                "0" => request,
                parts => request.header("x-echo-stream", parts),
            };
            let started = Instant::now();
            let answer = request.send().expect(200);
            let total = started.elapsed().as_secs_f64() * 1e3;
            let timing = timing(answer.header("server-timing").unwrap());
            assert_eq!(timing.len(), 3, "{timing:?}");
            assert!(timing["handler"] >= 50.0, "{timing:?}");
            let sum: f64 = timing.values().sum();
            assert!(sum <= total, "{timing:?} of {total}");
            // Of a reply in parts, what came after the first is not in it.
            assert!(parts == "0" || sum < total - 50.0, "{timing:?} of {total}");
        }
    }
    let server = serving("echo:\n  batchMicros: 100000\n");
    let queued = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| server.infer("POST", "/predictions/m").body("x").send()))
            .collect();
        let answers = callers.into_iter().map(|caller| caller.join().unwrap());
        answers
            .map(|answer| timing(answer.expect(200).header("server-timing").unwrap())["queue"])
            .fold(0.0, f64::max)
    });
    assert!(queued >= 150.0, "the last of three waited {queued} ms");
    let answer = server.infer("POST", "/predictions/none").send().expect(404);
    assert_eq!(answer.header("server-timing"), None);
}

#[test]
fn no_header_comes_twice_on_any_route_in_10() {
    let server = serving("");
    let post = |path: &str, more: &str| {
        format!("POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\n{more}\r\nx")
    };
    let rows = [
        ("inference", post("/predictions/m", ""), "200"),
        (
            "inference",
            post("/predictions/m", "Content-Type: Text/Plain\r\n"),
            "200",
        ),
        (
            "inference",
            post("/predictions/m", "x-echo-stream: 2\r\n"),
            "200",
        ),
        (
            "inference",
            post("/predictions/m", "accept: text/event-stream\r\n"),
            "200",
        ),
        (
            "inference",
            post("/predictions/m", "X-Request-ID: a\r\n"),
            "200",
        ),
        (
            "inference",
            post("/predictions/m", "x-echo-fault: raise\r\n"),
            "503",
        ),
        (
            "inference",
            post("/predictions/m", "content-encoding: x\r\n"),
            "415",
        ),
        ("inference", post("/explanations/m/1.0", ""), "200"),
        ("inference", post("/invocations", ""), "200"),
        ("inference", post("/models/m/invoke", ""), "200"),
        ("inference", post("/m/predict", ""), "200"),
        ("inference", post("/v1/models/m:predict", ""), "200"),
        ("inference", post("/v2/models/m/infer", ""), "200"),
        ("inference", post("/ping", ""), "200"),
        ("inference", post("/nothing", ""), "404"),
        (
            "inference",
            "OPTIONS / HTTP/1.1\r\nhost: h\r\n\r\n".to_owned(),
            "200",
        ),
        (
            "inference",
            "GET /docs HTTP/1.1\r\nhost: h\r\n\r\n".to_owned(),
            "200",
        ),
        (
            "management",
            "GET /models HTTP/1.1\r\nhost: h\r\n\r\n".to_owned(),
            "200",
        ),
        (
            "management",
            "GET /models/m HTTP/1.1\r\nhost: h\r\n\r\n".to_owned(),
            "200",
        ),
        ("management", post("/models", ""), "400"),
        (
            "metrics",
            "GET /metrics HTTP/1.1\r\nhost: h\r\n\r\n".to_owned(),
            "200",
        ),
    ];
    for (api, request, status) in rows {
        let mut raw = Raw::to(match api {
            "inference" => &server.inference,
            "management" => &server.management,
            _ => &server.metrics,
        });
        raw.say(request.as_bytes());
        let head = raw.head();
        assert!(head.status.contains(status), "{request:?}: {}", head.status);
        for (name, _) in &head.headers {
            assert_eq!(head.all(name).len(), 1, "{name} of {request:?}");
        }
        assert!(head.one("x-request-id").is_some(), "{request:?}");
        let framed = [head.one("content-length"), head.one("transfer-encoding")];
        assert_eq!(framed.iter().flatten().count(), 1, "{request:?}");
    }
}

#[test]
fn every_large_body_is_whole_or_seen_to_be_cut_in_15() {
    const BYTES: usize = 4 << 20;
    let server = serving("batchSize: 4\nmaxBatchDelay: 1\n");
    let body = |seed: u64| -> Vec<u8> {
        // Noise without a period: a lost or doubled piece cannot go unseen.
        let mut state = seed.wrapping_mul(2).wrapping_add(1);
        let words = (0..BYTES / 8).flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        });
        words.collect()
    };
    let send = |raw: &mut Raw, body: &[u8]| {
        let head = format!(
            "POST /predictions/m HTTP/1.1\r\nhost: h\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        raw.say(head.as_bytes());
        raw.say(body);
    };
    std::thread::scope(|scope| {
        for caller in 1..=4_u64 {
            let server = &server;
            scope.spawn(move || {
                let mut raw = Raw::to(&server.inference);
                for round in 0..25 {
                    let sent = body(caller * 1000 + round);
                    send(&mut raw, &sent);
                    let head = raw.head();
                    assert!(head.status.contains(" 200"), "{}", head.status);
                    assert!(raw.body(&head) == sent, "caller {caller} round {round}");
                }
            });
        }
        // Reads little by little while the others are served.
        let server = &server;
        scope.spawn(move || {
            let sent = body(7);
            let mut raw = Raw::to(&server.inference);
            send(&mut raw, &sent);
            let head = raw.head();
            let mut got = Vec::with_capacity(BYTES);
            let mut piece = vec![0; 64 << 10];
            while got.len() < BYTES {
                raw.reader.read_exact(&mut piece).unwrap();
                got.extend_from_slice(&piece);
                std::thread::sleep(Duration::from_millis(40));
            }
            assert_eq!(head.one("content-length"), Some("4194304"));
            assert!(got == sent, "the slow reader got something else");
        });
    });
}

#[test]
fn connections_are_kept_and_closed_as_http_has_it() {
    let server = serving("");
    let mut raw = Raw::to(&server.inference);
    for _ in 0..3 {
        raw.say(b"POST /predictions/m HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\n\r\nx");
        let head = raw.head();
        assert_eq!(raw.body(&head), b"x");
    }
    raw.say(b"GET /predictions/none HTTP/1.1\r\nhost: h\r\n\r\n");
    let head = raw.head();
    assert!(head.status.contains(" 404"));
    assert_eq!(head.one("connection"), Some("close"));
    raw.rest();

    let mut raw = Raw::to(&server.inference);
    raw.say(b"GET /ping HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n");
    let head = raw.head();
    assert_eq!(head.one("connection"), Some("close"));
    raw.rest();

    let mut raw = Raw::to(&server.inference);
    raw.say(b"GET /a\"%20200%200 HTTP/1.1\r\nhost: h\r\n\r\n");
    assert!(raw.head().status.contains(" 404"));
    server.wait_until("the line has one target", || {
        server
            .output()
            .contains("\"GET /a%22%20200%200 HTTP/1.1\" 404")
    });

    let mut raw = Raw::to(&server.inference);
    for _ in 0..2 {
        raw.say(b"GET /ping HTTP/1.0\r\nconnection: keep-alive\r\n\r\n");
        let head = raw.head();
        assert_eq!(head.one("connection"), Some("keep-alive"));
        raw.body(&head);
    }

    // As some clients try HTTP/2: they get their answer, and nothing that reads as an agreement.
    let mut raw = Raw::to(&server.inference);
    raw.say(
        b"POST /predictions/m HTTP/1.1\r\nhost: h\r\nconnection: Upgrade, HTTP2-Settings\r\n\
          upgrade: h2c\r\nhttp2-settings: AAMAAABk\r\ncontent-length: 1\r\n\r\nx",
    );
    let head = raw.head();
    assert!(head.status.contains(" 200"), "{}", head.status);
    assert_eq!(head.one("connection"), Some("close"));
    assert_eq!(raw.body(&head), b"x");
    raw.rest();

    // HTTP/1.0 knows neither chunks nor, unless it says so, a second request.
    for (more, parts) in [
        ("", "0 x\n1 x\n"),
        ("accept: text/event-stream\r\n", "data: 0 x\n"),
    ] {
        let mut raw = Raw::to(&server.inference);
        let request = format!(
            "POST /predictions/m HTTP/1.0\r\ncontent-length: 1\r\nx-echo-stream: 2\r\n{more}\r\nx"
        );
        raw.say(request.as_bytes());
        let head = raw.head();
        assert_eq!(head.one("transfer-encoding"), None);
        assert!(String::from_utf8(raw.rest()).unwrap().starts_with(parts));
    }

    // A response to HEAD ends with its head, whatever its length says.
    let text = "x".repeat(5000);
    let mut raw = Raw::to(&server.inference);
    for more in ["", "accept-encoding: gzip\r\n", "x-echo-stream: 2\r\n"] {
        let request = format!(
            "HEAD /predictions/m HTTP/1.1\r\nhost: h\r\ncontent-type: text/plain\r\n\
             content-length: 5000\r\n{more}\r\n{text}"
        );
        raw.say(request.as_bytes());
        let head = raw.head();
        assert!(head.status.contains(" 200"), "{more:?}: {}", head.status);
    }
    raw.say(b"GET /ping HTTP/1.1\r\nhost: h\r\n\r\n");
    assert!(raw.head().status.contains(" 200"));
}
