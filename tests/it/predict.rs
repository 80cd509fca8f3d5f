//! Bodies, replies and errors of a prediction (*torchserve-contract* 4).

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::{server, serving};

#[test]
fn bodies_of_every_size_come_back_as_sent() {
    let server = serving("");
    // Around the border between socket and shared memory, and far beyond it.
    for bytes in [
        0_usize, 1, 100, 65_535, 65_536, 65_537, 3_000_000, 6_000_000, 70_000,
    ] {
        let body: Vec<u8> = (0..bytes).map(|at| (at % 253) as u8).collect();
        let answer = server
            .infer("POST", "/predictions/m")
            .body(body.clone())
            .send()
            .expect(200);
        assert!(
            answer.body == body,
            "a body of {bytes} bytes came back changed"
        );
    }
}

#[test]
fn every_method_predicts_and_a_missing_body_is_an_empty_one() {
    let server = serving("");
    for method in ["GET", "POST", "PUT", "PATCH", "DELETE"] {
        server.infer(method, "/predictions/m").send().expect(200);
        server
            .infer(method, "/predictions/m/1.0")
            .send()
            .expect(200);
        server
            .infer(method, "/predictions/m/1.0/a/tail")
            .send()
            .expect(200);
    }
}

#[test]
fn replies_carry_the_headers_that_clients_know() {
    let server = serving("");
    let request = server
        .infer("POST", "/predictions/m")
        .header("content-type", "text/x-thing");
    let answer = request.body("x").send().expect(200);
    assert_eq!(answer.header("content-type"), Some("text/x-thing"));
    assert_eq!(answer.header("pragma"), Some("no-cache"));
    assert_eq!(
        answer.header("cache-control"),
        Some("no-cache; no-store, must-revalidate, private")
    );
    assert_eq!(
        answer.header("expires"),
        Some("Thu, 01 Jan 1970 00:00:00 UTC")
    );
    assert_eq!(answer.header("x-request-id").map(str::len), Some(36));
    for (name, _) in &answer.headers {
        let count = answer
            .headers
            .iter()
            .filter(|(other, _)| other == name)
            .count();
        assert_eq!(count, 1, "header {name} is there {count} times");
    }
}

#[test]
fn a_multipart_body_becomes_named_parts() {
    let server = serving("");
    let form = "--x\r\ncontent-disposition: form-data; name=\"data\"; filename=\"../../evil\"\r\n\
                content-type: image/png\r\n\r\nPIXELS\r\n--x--\r\n";
    let request = server.infer("POST", "/predictions/m");
    let request = request
        .header("content-type", "multipart/form-data; boundary=x")
        .body(form);
    let answer = request.send().expect(200);
    assert_eq!(
        (answer.text().as_str(), answer.header("content-type")),
        ("PIXELS", Some("image/png"))
    );
}

#[test]
fn a_form_body_becomes_named_parts() {
    let server = serving("");
    let request = server.infer("POST", "/predictions/m");
    let request = request.header("content-type", "application/x-www-form-urlencoded");
    assert_eq!(
        request
            .body("data=a%20b+c&other=1")
            .send()
            .expect(200)
            .text(),
        "a b c"
    );
}

#[test]
fn unknown_models_versions_and_paths_are_told_as_torchserve_tells_them() {
    let server = serving("");
    let cases = [
        (
            "/predictions/other",
            "ModelNotFoundException",
            "Model not found: other",
        ),
        (
            "/predictions/m/9",
            "ModelVersionNotFoundException",
            "Model version: 9 does not exist for model: m",
        ),
        (
            "/nothing",
            "ResourceNotFoundException",
            "Requested resource is not found, please refer to API document.",
        ),
    ];
    for (path, kind, message) in cases {
        let error = server
            .infer("POST", path)
            .body("x")
            .send()
            .expect(404)
            .json();
        assert_eq!(error["code"], 404);
        assert_eq!(
            (error["type"].as_str(), error["message"].as_str()),
            (Some(kind), Some(message))
        );
    }
}

#[test]
fn failures_of_a_handler_have_torchserves_codes() {
    let server = serving("");
    let cases = [
        ("raise", 503, "Prediction failed"),
        ("out-of-memory", 507, "Out of resources"),
        (
            "nonsense",
            400,
            "unknown fault `nonsense` in `x-echo-fault`",
        ),
    ];
    for (fault, status, message) in cases {
        let request = server
            .infer("POST", "/predictions/m")
            .header("x-echo-fault", fault);
        let error = request.body("x").send().expect(status).json();
        assert_eq!(error["code"], status);
        assert_eq!(error["type"], "InternalServerException");
        assert_eq!(error["message"], message);
    }
    // A status of the handler's own keeps its body.
    let request = server
        .infer("POST", "/predictions/m")
        .header("x-echo-fault", "status=599");
    assert_eq!(request.body("mine").send().expect(599).text(), "mine");
}

#[test]
fn a_body_over_the_limit_is_refused_without_reading_it_all() {
    let server = server()
        .config("max_request_size=1000")
        .echo_model("m", "minWorkers: 1\nmaxWorkers: 1")
        .args(&["--models", "m"])
        .start();
    server.wait_ready("m");
    server
        .infer("POST", "/predictions/m")
        .body(vec![0; 1000])
        .send()
        .expect(200);
    let refused = server
        .infer("POST", "/predictions/m")
        .body(vec![0; 1001])
        .send()
        .expect(413);
    assert!(refused.body.is_empty(), "{}", refused.text());
    // Announced but never sent: answered at once, no memory taken.
    let address = server.inference.trim_start_matches("http://").to_owned();
    for length in [
        "2147483648",
        "4294967297",
        "9223372036854775808",
        "99999999999999999999",
    ] {
        let mut socket = TcpStream::connect(&address).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        write!(
            socket,
            "POST /predictions/m HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n"
        )
        .unwrap();
        let mut head = [0; 12];
        socket.read_exact(&mut head).unwrap();
        let status = String::from_utf8_lossy(&head[9..]).into_owned();
        assert!(
            matches!(status.as_str(), "413" | "400"),
            "content-length {length}: {status}"
        );
    }
    // Chunked, so nothing is announced.
    let mut socket = TcpStream::connect(&address).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    write!(
        socket,
        "POST /predictions/m HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    .unwrap();
    for _ in 0..20 {
        // The server may already have answered and closed.
        let _ = write!(socket, "64\r\n{}\r\n", "y".repeat(100));
    }
    let mut head = [0; 12];
    socket.read_exact(&mut head).unwrap();
    assert_eq!(&head[9..], b"413");
}

#[test]
fn a_reply_over_the_limit_fails_alone_and_keeps_its_worker() {
    let server = server()
        .config("max_response_size=1000")
        .echo_model(
            "m",
            "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nbatchGather: strict\nmaxBatchDelay: 2000",
        )
        .args(&["--models", "m"])
        .start();
    server.wait_ready("m");
    let pids = server.worker_pids("m");
    let sizes = [10, 1000, 1001, 20];
    let answers: Vec<_> = std::thread::scope(|scope| {
        let callers = sizes.map(|bytes| {
            let request = server
                .infer("POST", "/predictions/m")
                .body(vec![b'z'; bytes]);
            scope.spawn(move || request.send())
        });
        callers
            .into_iter()
            .map(|caller| caller.join().unwrap())
            .collect()
    });
    for (bytes, answer) in sizes.into_iter().zip(answers) {
        if bytes == 1001 {
            let message = answer.expect(507).json()["message"].to_string();
            assert!(message.contains("max_response_size"), "{message}");
        } else {
            assert_eq!(answer.expect(200).body.len(), bytes);
        }
    }
    assert_eq!(server.worker_pids("m"), pids);
}

#[test]
fn hostile_names_are_refused_before_the_disk_is_touched() {
    let server = serving("");
    let long = format!("/predictions/{}", "x".repeat(300));
    for path in [
        "/predictions/..%2f..%2fetc",
        "/predictions/%00",
        "/predictions/-x",
        &long,
    ] {
        let answer = server.infer("POST", path).body("x").send();
        assert!(
            matches!(answer.status, 400 | 404),
            "{path}: {}",
            answer.status
        );
    }
    server
        .infer("POST", "/predictions/m")
        .body("x")
        .send()
        .expect(200);
}

#[test]
fn damaged_requests_never_end_the_server() {
    let server = serving("");
    let address = server.inference.trim_start_matches("http://").to_owned();
    let requests: [&[u8]; 8] = [
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST /predictions/m HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"POST /predictions/m HTTP/1.1\r\nhost: x\r\ncontent-length: +5\r\n\r\nhello",
        b"POST /predictions/m HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        b"POST /predictions/%ff%fe HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx",
        b"POST /predictions/m HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data\r\ncontent-length: 1\r\n\r\nx",
        b"POST /predictions/m HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ];
    for request in requests {
        let mut socket = TcpStream::connect(&address).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        socket.write_all(request).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        let _reset_is_fine = socket.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        let shown = String::from_utf8_lossy(request);
        assert!(!answer.starts_with("HTTP/1.1 5"), "{shown:?} gave {answer}");
    }
    server
        .infer("POST", "/predictions/m")
        .body("still here")
        .send()
        .expect(200);
}

#[test]
fn a_bad_multipart_body_is_a_located_error() {
    let server = serving("");
    let bodies = [
        "",
        "--x\r\n",
        "--x\r\ncontent-disposition: form-data\r\n\r\nno name\r\n--x--\r\n",
        "junk",
    ];
    for body in bodies {
        let request = server.infer("POST", "/predictions/m");
        let request = request
            .header("content-type", "multipart/form-data; boundary=x")
            .body(body);
        let error = request.send().expect(400).json();
        assert_eq!(error["type"], "BadRequestException", "{body:?}");
    }
}

#[test]
fn asking_for_the_options_of_a_path_runs_nothing() {
    let server = serving("");
    for path in ["/explanations/m", "/ping", "/invocations"] {
        let answer = server.infer("OPTIONS", path).send().expect(200);
        assert!(
            answer.body.is_empty() && answer.header("allow").is_some(),
            "{path}"
        );
    }
    server.infer("OPTIONS", "/predictions/m").send().expect(200);
    server.infer("OPTIONS", "/nothing").send().expect(404);
    server.manage("OPTIONS", "/models/m").send().expect(200);
    let page = server.metrics("/metrics").send().expect(200).text();
    let requests = page
        .lines()
        .find(|line| line.starts_with("ts_inference_requests_total"));
    assert!(
        requests.is_none_or(|line| line.ends_with(" 0.0")),
        "{requests:?}"
    );
}

#[test]
fn a_form_with_any_number_of_fields_of_one_name_is_refused() {
    let server = serving("");
    let request = server.infer("POST", "/predictions/m");
    let request = request.header("content-type", "application/x-www-form-urlencoded");
    request.body("a&".repeat(100_000)).send().expect(400);
    let long = format!("{}=1", "n".repeat(100_000));
    let request = server.infer("POST", "/predictions/m");
    let request = request.header("content-type", "application/x-www-form-urlencoded");
    request.body(long).send().expect(400);
    assert!(
        server.output().len() < 100_000,
        "the log grows with the request"
    );
}
