//! The metrics page.

use crate::serving;

fn value(page: &str, name: &str, label: &str) -> Option<f64> {
    let line = page
        .lines()
        .find(|line| line.starts_with(name) && line.contains(label))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn requests_are_counted_once_in_their_class() {
    let server = serving("");
    let count = |class: &str| {
        let page = server.metrics("/metrics").send().expect(200).text();
        value(&page, &format!("Requests{class}{{"), "Level=\"Host\"").unwrap_or(0.0)
    };
    let before = (count("2XX"), count("4XX"), count("5XX"));
    for _ in 0..5 {
        server
            .infer("POST", "/predictions/m")
            .body("x")
            .send()
            .expect(200);
    }
    for _ in 0..3 {
        server
            .infer("POST", "/predictions/none")
            .body("x")
            .send()
            .expect(404);
    }
    for _ in 0..2 {
        let request = server
            .infer("POST", "/predictions/m")
            .header("x-echo-fault", "raise");
        request.body("x").send().expect(503);
    }
    let after = (count("2XX"), count("4XX"), count("5XX"));
    // Scrapes count too: three before, and two of the three after that came before the last.
    assert!(after.0 - before.0 >= 5.0, "{before:?} {after:?}");
    assert_eq!((after.1 - before.1, after.2 - before.2), (3.0, 2.0));
}

#[test]
fn a_models_requests_and_times_are_on_the_page() {
    let server = serving("");
    for _ in 0..4 {
        server
            .infer("POST", "/predictions/m")
            .body("x")
            .send()
            .expect(200);
    }
    server
        .infer("POST", "/predictions/m/1.0")
        .body("x")
        .send()
        .expect(200);
    let answer = server.metrics("/metrics").send().expect(200);
    let kind = answer.header("content-type").unwrap();
    assert!(
        kind.starts_with("text/plain") && kind.contains("charset=utf-8"),
        "{kind}"
    );
    let page = answer.text();
    let requests = "ts_inference_requests_total";
    assert_eq!(
        value(&page, requests, "model_version=\"default\""),
        Some(4.0),
        "{page}"
    );
    assert_eq!(
        value(&page, requests, "model_version=\"1.0\""),
        Some(1.0),
        "{page}"
    );
    let names = [
        "ts_inference_latency_microseconds",
        "ts_queue_latency_microseconds",
        "QueueTime",
        "WorkerThreadTime",
        "WorkerLoadTime",
        "MemoryUsed",
        "DiskUsage",
    ];
    // The first figures of the system come from a thread that the start does not wait for.
    server.wait_until("every metric is on the page", || {
        let page = server.metrics("/metrics").send().expect(200).text();
        names.iter().all(|name| value(&page, name, "").is_some())
    });
}

#[test]
fn the_page_is_well_formed_and_can_be_filtered() {
    let server = serving("");
    server
        .infer("POST", "/predictions/m")
        .body("x")
        .send()
        .expect(200);
    let page = server.metrics("/metrics").send().expect(200).text();
    let mut families = std::collections::HashSet::new();
    let mut series = std::collections::HashSet::new();
    for line in page.lines().filter(|line| !line.is_empty()) {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            assert!(families.insert(rest.to_owned()), "twice: {line}");
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(series.insert(name.to_owned()), "twice: {line}");
            value.parse::<f64>().unwrap();
        }
    }
    let some = server
        .metrics("/metrics?name[]=QueueTime")
        .send()
        .expect(200)
        .text();
    let names: Vec<&str> = some.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(
        names
            .iter()
            .all(|line| line.is_empty() || line.starts_with("QueueTime")),
        "{some}"
    );
    assert!(
        names.iter().any(|line| line.starts_with("QueueTime")),
        "{some}"
    );
    let none = server
        .metrics("/metrics?name[]=nothing")
        .send()
        .expect(200)
        .text();
    assert!(
        none.lines()
            .all(|line| line.is_empty() || line.starts_with('#')),
        "{none}"
    );
}
