//! Limits that change while a model is served, and the layers that they come from at first.

use std::time::{Duration, Instant};

use serde_json::Value;
use ts_test::{Answer, Running};

use crate::{server, serving};

fn put(server: &Running, query: &str) -> Answer {
    server.manage("PUT", &format!("/models/m?{query}")).send()
}

/// Sends so many requests at once, and returns the sizes of the batches that they were in.
fn batch_sizes(server: &Running, callers: usize) -> Vec<usize> {
    std::thread::scope(|scope| {
        let call = || {
            let answer = server.infer("POST", "/predictions/m").body("x").send();
            let size = answer.expect(200).header("x-batch-size").unwrap().parse();
            size.unwrap()
        };
        let calls: Vec<_> = (0..callers).map(|_| scope.spawn(call)).collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

fn waiting(server: &Running) -> Value {
    server.describe("m")["jobQueueStatus"]["pendingRequests"].clone()
}

#[test]
fn limits_change_without_touching_the_workers() {
    let server = serving("batchSize: 2\nbatchGather: strict\nmaxBatchDelay: 30000");
    let before = server.describe("m");
    let pids = server.worker_pids("m");
    assert_eq!(batch_sizes(&server, 4), [2; 4]);
    let query = "batch_size=4&max_batch_delay=20000&response_timeout=77&job_queue_size=9";
    let answer = put(&server, query).expect(200);
    assert_eq!(answer.json()["status"], "Limits changed for model: m");
    assert_eq!(answer.header("x-warning"), None);
    assert_eq!(batch_sizes(&server, 4), [4; 4]);
    let described = server.describe("m");
    for (member, value) in [
        ("batchSize", 4),
        ("maxBatchDelay", 20_000),
        ("responseTimeout", 77),
        ("minWorkers", 1),
        ("maxWorkers", 1),
    ] {
        assert_eq!(described[member], value, "{member}");
    }
    assert_eq!(described["jobQueueStatus"]["remainingCapacity"], 9);
    let batching = server
        .manage("GET", "/models/m/batching")
        .send()
        .expect(200);
    assert_eq!(batching.json()["batchSize"], 4);
    assert_eq!(described["workers"][0]["id"], before["workers"][0]["id"]);
    assert_eq!(server.worker_pids("m"), pids);
    // By version, and together with workers.
    let versioned = server.manage("PUT", "/models/m/1.0?batch_size=1").send();
    let text = versioned.expect(200).json()["status"].clone();
    assert_eq!(text, "Limits changed for model: m, version: 1.0");
    assert_eq!(batch_sizes(&server, 3), [1; 3]);
    put(&server, "batch_size=3&min_worker=2&synchronous=true").expect(200);
    let described = server.describe("m");
    assert_eq!(
        (&described["batchSize"], &described["minWorkers"]),
        (&3.into(), &2.into())
    );
    // Without parameters it is what it is in TorchServe.
    put(&server, "").expect(202);
    assert_eq!(server.describe("m")["minWorkers"], 1);
    assert_eq!(server.describe("m")["batchSize"], 3);
}

#[test]
fn a_worker_that_waits_for_company_sees_new_limits_at_once() {
    let server = serving("batchSize: 9\nbatchGather: strict\nmaxBatchDelay: 60000");
    for query in ["batch_size=3", "max_batch_delay=0"] {
        put(&server, "batch_size=9&max_batch_delay=60000").expect(200);
        let began = Instant::now();
        std::thread::scope(|scope| {
            let calls = scope.spawn(|| batch_sizes(&server, 3));
            server.wait_until("all wait", || waiting(&server) == 3);
            put(&server, query).expect(200);
            assert_eq!(calls.join().unwrap(), [3; 3], "{query}");
        });
        assert!(began.elapsed() < Duration::from_secs(30), "{query}");
    }
}

#[test]
fn a_response_time_out_holds_for_the_next_batch() {
    let server = serving("echo:\n  batchMicros: 1500000\n");
    put(&server, "response_timeout=1").expect(200);
    let request = || server.infer("POST", "/predictions/m").body("x");
    request().send().expect(500);
    put(&server, "response_timeout=60").expect(200);
    server.wait_ready("m");
    request().send().expect(200);
}

#[test]
fn a_smaller_queue_keeps_what_waits_and_refuses_what_comes() {
    let server = serving("echo:\n  batchMicros: 700000\n");
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    server
                        .infer("POST", "/predictions/m")
                        .body("x")
                        .send()
                        .status
                })
            })
            .collect();
        server.wait_until("three wait", || waiting(&server) == 3);
        put(&server, "job_queue_size=1").expect(200);
        let refused = server
            .infer("POST", "/predictions/m")
            .body("x")
            .send()
            .expect(503);
        assert_eq!(refused.header("x-refusal-reason"), Some("queue-full"));
        for call in calls {
            assert_eq!(call.join().unwrap(), 200);
        }
    });
    put(&server, "job_queue_size=10").expect(200);
    assert_eq!(
        server.describe("m")["jobQueueStatus"]["remainingCapacity"],
        10
    );
}

/// Replies of a larger batch than the worker was started with are no breach of what it may send.
#[test]
fn a_larger_batch_may_answer_more() {
    let server = serving("batchSize: 1\nbatchGather: strict\nmaxBatchDelay: 30000");
    put(&server, "batch_size=4").expect(200);
    let body = vec![b'x'; 6_000_000];
    std::thread::scope(|scope| {
        let call = || {
            let request = server.infer("POST", "/predictions/m").body(body.clone());
            request.send().expect(200).body.len()
        };
        let calls: Vec<_> = (0..4).map(|_| scope.spawn(call)).collect();
        for call in calls {
            assert_eq!(call.join().unwrap(), body.len());
        }
    });
    assert_eq!(server.describe("m")["workers"][0]["generation"], 1);
}

#[test]
fn limits_that_cannot_change_are_refused_with_the_reason() {
    let cases = [
        (
            "asyncCommunication: true",
            "batch_size=2",
            "asyncCommunication",
        ),
        (
            "asyncCommunication: true",
            "max_batch_delay=2",
            "asyncCommunication",
        ),
        (
            "continuousBatching: true\nbatchSize: 2",
            "batch_size=3",
            "continuousBatching",
        ),
        (
            "batchSize: 8\ndynamic_batching: {preferred_batch_size: [4]}",
            "batch_size=3",
            "preferred_batch_size",
        ),
        // CF-08.
        (
            "batchGather: strict\nbatchSize: 4\nmaxBatchDelay: 10\nclientTimeoutInMills: 200",
            "max_batch_delay=200",
            "clientTimeoutInMills",
        ),
    ];
    for (yaml, query, reason) in cases {
        let server = server().echo_model("m", yaml).start();
        server.manage("POST", "/models?url=m").send().expect(200);
        let before = server.describe("m");
        let query = format!("job_queue_size=7&{query}&min_worker=1&synchronous=true");
        let error = put(&server, &query).expect(400).json();
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(reason), "{message}");
        assert_eq!(server.describe("m"), before, "nothing of it was done");
    }
    let server = server()
        .echo_model("m", "continuousBatching: true\nbatchSize: 4")
        .start();
    server.manage("POST", "/models?url=m").send().expect(200);
    put(&server, "batch_size=2").expect(200);
    put(&server, "batch_size=4").expect(200);
}

#[test]
fn a_call_does_all_of_it_or_nothing() {
    let server = server().start();
    server.echo_model("m", "1.0", "echo:\n  loadError: no weights today\n");
    server.manage("POST", "/models?url=m").send().expect(200);
    let before = server.describe("m");
    for (query, status, text) in [
        ("batch_size=0", 400, "`batch_size`"),
        ("batch_size=two&min_worker=0", 400, "`batch_size`"),
        ("response_timeout=-1", 400, "`response_timeout`"),
        ("job_queue_size=99999999999", 400, "from 1 to 10000000"),
        ("max_batch_delay=", 400, "`max_batch_delay`"),
        ("batch_size=4&min_worker=2&max_worker=1", 400, "max_worker"),
        ("batch_size=4&min_worker=-1", 500, "min_worker"),
        // The worker does not come up, so the limits go back too.
        (
            "batch_size=4&min_worker=1&synchronous=true",
            500,
            "no weights today",
        ),
    ] {
        let answer = put(&server, query).expect(status);
        assert!(answer.text().contains(text), "{query}: {}", answer.text());
        assert_eq!(server.describe("m"), before, "{query}");
    }
    server.manage("DELETE", "/models/m").send().expect(200);
}

/// CF-06: of the call, the archive, the `models` property and the built-in default the first that
/// says something counts, also where it says what would hold anyhow.
#[test]
fn the_first_layer_that_says_something_counts() {
    for call in [None, Some(2), Some(1)] {
        for archive in [None, Some(3), Some(1)] {
            for file in [None, Some(4), Some(1)] {
                let yaml = archive.map_or(String::new(), |size| format!("batchSize: {size}\n"));
                let property = file.map_or("{}".to_owned(), |size| {
                    format!(r#"{{"m": {{"1.0": {{"batchSize": {size}}}}}}}"#)
                });
                let server = server().echo_model("m", &yaml);
                let server = server.config(&format!("models={property}")).start();
                let more = call.map_or(String::new(), |size| format!("&batch_size={size}"));
                let path = format!("/models?url=m{more}");
                server.manage("POST", &path).send().expect(200);
                let expected = call.or(archive).or(file).unwrap_or(1);
                let shown = &server.describe("m")["batchSize"];
                assert_eq!(*shown, expected, "{call:?} {archive:?} {file:?}");
            }
        }
    }
}

/// CF-07: what the `models` property says is in force, and so is what a call changes it to.
#[test]
fn the_models_property_is_in_force_and_can_be_changed() {
    let property = r#"models={"m": {"1.0": {"minWorkers": 1, "maxWorkers": 1, "batchSize": 5, "maxBatchDelay": 20000}}}"#;
    let server = server().echo_model("m", "").config(property);
    let server = server
        .config("batch_gather=strict")
        .args(&["--models", "m"])
        .start();
    server.wait_ready("m");
    let described = server.describe("m");
    let shown = (&described["batchSize"], &described["maxBatchDelay"]);
    assert_eq!(shown, (&5.into(), &20_000.into()));
    assert_eq!(batch_sizes(&server, 5), [5; 5]);
    put(&server, "batch_size=2").expect(200);
    assert_eq!(batch_sizes(&server, 4), [2; 4]);
    assert_eq!(server.describe("m")["batchSize"], 2);
}
