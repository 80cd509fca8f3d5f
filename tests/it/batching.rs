//! Batches, the queue's bound, and callers that leave (*torchserve-contract* 9.1).

use std::time::{Duration, Instant};

use crate::serving;

fn batch_sizes(server: &ts_test::Running, callers: usize) -> Vec<usize> {
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..callers)
            .map(|number| {
                let request = server
                    .infer("POST", "/predictions/m")
                    .body(number.to_string());
                scope.spawn(move || {
                    let answer = request.send().expect(200);
                    assert_eq!(answer.text(), number.to_string(), "somebody else's answer");
                    answer.header("x-batch-size").unwrap().parse().unwrap()
                })
            })
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

#[test]
fn requests_that_come_together_run_together() {
    let server = serving("batchSize: 4\nbatchGather: strict\nmaxBatchDelay: 5000");
    assert_eq!(batch_sizes(&server, 4), [4; 4]);
}

#[test]
fn a_partial_batch_goes_when_its_delay_is_over() {
    let server = serving("batchSize: 8\nbatchGather: fixed\nmaxBatchDelay: 300");
    let started = Instant::now();
    assert_eq!(batch_sizes(&server, 1), [1]);
    assert!(started.elapsed() >= Duration::from_millis(300));
}

#[test]
fn a_backlog_is_taken_without_waiting_and_never_over_the_size() {
    let server = serving("batchSize: 8\nmaxBatchDelay: 0\necho:\n  batchMicros: 50000\n");
    let sizes = batch_sizes(&server, 40);
    assert!(sizes.iter().all(|size| (1..=8).contains(size)), "{sizes:?}");
    assert!(sizes.iter().any(|size| *size > 4), "{sizes:?}");
}

#[test]
fn a_full_queue_refuses_at_once_and_the_others_are_answered() {
    let server = serving("jobQueueSize: 2\necho:\n  batchMicros: 1500000\n");
    let statuses = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..10)
            .map(|_| {
                let request = server.infer("POST", "/predictions/m").body("x");
                scope.spawn(move || {
                    let started = Instant::now();
                    (request.send(), started.elapsed())
                })
            })
            .collect();
        calls
            .into_iter()
            .map(|call| call.join().unwrap())
            .collect::<Vec<_>>()
    });
    let (refused, answered): (Vec<_>, Vec<_>) = statuses
        .into_iter()
        .partition(|(answer, _)| answer.status == 503);
    assert!(answered.iter().all(|(answer, _)| answer.status == 200));
    // One runs, two wait; which of the ten came first is theirs.
    assert!(
        (2..=4).contains(&answered.len()),
        "{} answered",
        answered.len()
    );
    for (answer, took) in refused {
        assert_eq!(answer.header("x-refusal-reason"), Some("queue-full"));
        assert!(
            took < Duration::from_millis(1200),
            "refused only after {took:?}"
        );
    }
}

#[test]
fn a_caller_that_leaves_is_never_run() {
    let server = serving("echo:\n  batchMicros: 1000000\n");
    std::thread::scope(|scope| {
        let first = server.infer("POST", "/predictions/m").body("x");
        scope.spawn(move || first.send().expect(200));
        std::thread::sleep(Duration::from_millis(100));
        // Leaves while the first one runs; had it been run, the last would wait for it too.
        let leaver = server.infer("POST", "/predictions/m").body("y");
        assert!(leaver.limit(Duration::from_millis(100)).try_send().is_err());
        let started = Instant::now();
        server
            .infer("POST", "/predictions/m")
            .body("z")
            .send()
            .expect(200);
        assert!(
            started.elapsed() < Duration::from_millis(2500),
            "{:?}",
            started.elapsed()
        );
    });
}

#[test]
fn an_answer_that_would_come_too_late_is_an_error_in_time() {
    let server = serving("clientTimeoutInMills: 200\necho:\n  batchMicros: 1000000\n");
    let started = Instant::now();
    let error = server
        .infer("POST", "/predictions/m")
        .body("x")
        .send()
        .expect(504)
        .json();
    assert!(
        started.elapsed() < Duration::from_millis(900),
        "{:?}",
        started.elapsed()
    );
    assert!(
        error["message"].as_str().unwrap().contains("200 ms"),
        "{error}"
    );
}

#[test]
fn several_workers_pull_from_one_queue() {
    let server = serving("echo:\n  batchMicros: 600000\n");
    server
        .manage("PUT", "/models/m?min_worker=4&synchronous=true")
        .send()
        .expect(200);
    let started = Instant::now();
    batch_sizes(&server, 4);
    assert!(
        started.elapsed() < Duration::from_millis(1800),
        "{:?}",
        started.elapsed()
    );
}

/// Eight requests at once, of which the ones named raise for their whole batch.
fn with_bad_ones(server: &ts_test::Running, bad: &[usize], fault: &str) -> Vec<u16> {
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..8)
            .map(|number| {
                let request = server
                    .infer("POST", "/predictions/m")
                    .body(number.to_string());
                let request = if bad.contains(&number) {
                    request.header("x-echo-fault", fault)
                } else {
                    request
                };
                scope.spawn(move || {
                    let answer = request.send();
                    assert!(answer.status != 200 || answer.text() == number.to_string());
                    answer.status
                })
            })
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

#[test]
fn only_the_request_that_a_handler_raises_on_fails() {
    const FULL: &str = "batchSize: 8\nbatchGather: strict\nmaxBatchDelay: 20000\n";
    for isolation in ["process", "thread"] {
        let server = serving(&format!("workerIsolation: {isolation}\n{FULL}"));
        for bad in [
            &[0][..],
            &[7],
            &[3],
            &[1, 2],
            &[0, 1, 2, 3, 4, 5, 6, 7],
            &[],
        ] {
            let statuses = with_bad_ones(&server, bad, "raise-batch");
            for (number, status) in statuses.into_iter().enumerate() {
                let expected = if bad.contains(&number) { 503 } else { 200 };
                assert_eq!(
                    status, expected,
                    "{isolation}: request {number}, bad {bad:?}"
                );
            }
        }
        assert_eq!(server.describe("m")["workers"][0]["generation"], 1);
    }
    // The archive has the last word.
    let server = serving(&format!("isolateBadRequests: false\n{FULL}"));
    assert_eq!(with_bad_ones(&server, &[3], "raise-batch"), [503; 8]);
    // A lost worker is not the handler's word on a request.
    let server = serving(FULL);
    assert_eq!(with_bad_ones(&server, &[3], "abort"), [500; 8]);
}

#[test]
fn a_failed_item_is_no_reason_to_run_the_others_again() {
    let server = serving("batchSize: 8\nbatchGather: strict\nmaxBatchDelay: 20000\n");
    let mut expected = [200; 8];
    expected[5] = 503;
    assert_eq!(with_bad_ones(&server, &[5], "raise"), expected);
}
