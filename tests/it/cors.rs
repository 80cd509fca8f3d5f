//! What browsers ask before and see after a call from a page of another origin
//! (*torchserve-contract* 12).

use std::collections::BTreeSet;

use ts_test::Answer;

use crate::server;

const ALLOWED: [&str; 2] = [
    "cors_allowed_methods=GET, POST, PUT, OPTIONS",
    "cors_allowed_headers=X-Custom, content-type",
];

fn serving(origins: &str) -> ts_test::Running {
    let server = server().echo_model("m", "minWorkers: 1\nmaxWorkers: 1");
    let server = server.args(&["--models", "m"]);
    let lines = ALLOWED
        .iter()
        .fold(server, |server, line| server.config(line));
    let server = lines
        .config(&format!("cors_allowed_origin={origins}"))
        .start();
    server.wait_ready("m");
    server
}

fn allowed(answer: &Answer) -> Option<&str> {
    answer.header("access-control-allow-origin")
}

#[test]
fn a_browser_may_ask_before_it_calls_and_needs_no_token() {
    // Tokens are on.
    let server = server().with_default_safety();
    let server = ALLOWED
        .iter()
        .fold(server, |server, line| server.config(line));
    let server = server
        .config("cors_allowed_origin=https://app.example")
        .start();
    let asks = |request: ts_test::Request, method| {
        request
            .header("origin", "https://app.example")
            .header("access-control-request-method", method)
            .header("access-control-request-headers", "content-type")
            .send()
    };
    for (request, method) in [
        (server.infer("OPTIONS", "/"), "GET"),
        (server.infer("OPTIONS", "/predictions/absent"), "POST"),
        (server.manage("OPTIONS", "/models"), "POST"),
        (server.manage("OPTIONS", "/models/absent"), "PUT"),
    ] {
        let answer = asks(request, method);
        assert!(
            [200, 404].contains(&answer.status),
            "{} {}",
            answer.status,
            answer.text()
        );
        assert_eq!(allowed(&answer), Some("https://app.example"));
        assert_eq!(
            answer.header("access-control-allow-methods"),
            Some("GET, POST, PUT, OPTIONS")
        );
        assert_eq!(
            answer.header("access-control-allow-headers"),
            Some("X-Custom, content-type")
        );
    }
}

#[test]
fn asking_runs_no_model_and_errors_can_be_read_too() {
    let server = serving("*");
    let before = server.metrics("/metrics").send().expect(200).text();
    let asked = server
        .infer("OPTIONS", "/predictions/m")
        .header("origin", "https://a")
        .send();
    assert_eq!(allowed(&asked.expect(200)), Some("*"));
    let after = server.metrics("/metrics").send().expect(200).text();
    let runs = |text: &str| {
        let lines = text
            .lines()
            .filter(|line| line.starts_with("ts_inference_requests_total"));
        lines.map(str::to_owned).collect::<BTreeSet<_>>()
    };
    assert_eq!(runs(&before), runs(&after));
    for (path, status) in [
        ("/predictions/m", 200),
        ("/predictions/absent", 404),
        ("/none", 404),
    ] {
        let answer = server.infer("POST", path).body("x").send().expect(status);
        assert_eq!(allowed(&answer), Some("*"), "{path}");
    }
    let large = server
        .infer("POST", "/predictions/m")
        .body(vec![0; 7_000_000]);
    assert_eq!(allowed(&large.send().expect(413)), Some("*"));
}

#[test]
fn of_several_origins_the_one_that_asks_is_answered() {
    let server = serving("https://a.example, https://b.example");
    for (origin, answered) in [
        (Some("https://a.example"), Some("https://a.example")),
        (Some("https://b.example"), Some("https://b.example")),
        (Some("https://a.example.evil"), None),
        (Some("null"), None),
        (None, None),
    ] {
        let request = server.infer("GET", "/ping");
        let request = match origin {
            Some(origin) => request.header("origin", origin),
            None => request,
        };
        let answer = request.send().expect(200);
        assert_eq!(allowed(&answer), answered, "{origin:?}");
        let vary = answer.header("vary");
        assert!(
            vary.is_some_and(|vary| vary.to_ascii_lowercase().contains("origin")),
            "{vary:?}"
        );
    }
}
