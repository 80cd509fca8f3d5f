//! Replies in parts (*torchserve-contract* 9.2) and callers that leave in the midst of one.

use std::io::{BufRead, ErrorKind, Read};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use ts_test::{Opened, Running, at_once};

use crate::{server, serving};

const ISOLATIONS: [&str; 2] = ["process", "thread"];

/// Asks for a reply in `parts` parts.
fn open(server: &Running, value: &str, parts: usize) -> Opened {
    let request = server.infer("POST", "/predictions/m").body(value);
    let request = request.header("x-echo-stream", &parts.to_string());
    request.open().unwrap()
}

fn line(opened: &mut Opened) -> String {
    let mut line = String::new();
    opened.body.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// Reads what is left; fails unless it is whole and starts with the part `first`.
#[track_caller]
fn read_from(opened: &mut Opened, value: &str, first: usize, parts: usize) {
    let mut text = String::new();
    opened.body.read_to_string(&mut text).unwrap();
    let expected: String = (first..parts)
        .map(|part| format!("{part} {value}\n"))
        .collect();
    assert_eq!(text, expected);
}

/// One worker has never been replaced, and every place in a queue of `size` can be taken.
fn assert_capacity(server: &Running, size: usize) {
    let described = server.describe("m");
    assert_eq!(described["workers"][0]["generation"], 1);
    server.wait_until("nothing waits any more", || {
        server.describe("m")["jobQueueStatus"]["remainingCapacity"] == size
    });
}

#[test]
fn parts_arrive_as_they_are_made_under_the_head_of_the_first() {
    for isolation in ISOLATIONS {
        let server = serving(&format!(
            "workerIsolation: {isolation}\necho:\n  batchMicros: 300000\n"
        ));
        let mut opened = open(&server, "x", 3);
        let started = Instant::now();
        assert_eq!(opened.status, 200);
        let header = |name| {
            let found = opened.headers.iter().find(|(key, _)| key == name);
            found.map(|(_, value)| value.as_str())
        };
        assert_eq!(header("transfer-encoding"), Some("chunked"));
        assert_eq!(header("x-batch-size"), Some("1"));
        assert_eq!(line(&mut opened), "0 x");
        let first = started.elapsed();
        read_from(&mut opened, "x", 1, 3);
        let whole = started.elapsed();
        assert!(
            whole - first > Duration::from_millis(400),
            "the first part waited for the last: {first:?} of {whole:?}"
        );
    }
}

#[test]
fn parts_of_every_size_come_whole() {
    let server = serving("");
    for bytes in [0, 1, 65_535, 65_536, 300_000] {
        let value = "v".repeat(bytes);
        read_from(&mut open(&server, &value, 4), &value, 0, 4);
    }
}

#[test]
fn cancelling_after_every_number_of_parts_leaves_everything_as_it_was_wk_13() {
    for isolation in ISOLATIONS {
        let server = serving(&format!(
            "workerIsolation: {isolation}\nbatchSize: 4\nmaxBatchDelay: 2\njobQueueSize: 50\n\
             echo:\n  batchMicros: 500\n"
        ));
        std::thread::scope(|scope| {
            for lane in 0..2 {
                let server = &server;
                scope.spawn(move || {
                    for parts in 0..=20 {
                        let mut opened = open(server, "leaver", 20);
                        for number in 0..parts.min(20) {
                            assert_eq!(line(&mut opened), format!("{number} leaver"));
                        }
                        drop(opened);
                        let value = format!("stays {lane} {parts}");
                        read_from(&mut open(server, &value, 20), &value, 0, 20);
                    }
                });
            }
        });
        assert_capacity(&server, 50);
    }
}

#[test]
fn parallel_streams_never_mix_gr_05() {
    let server = serving("batchSize: 8\nmaxBatchDelay: 1\n");
    server
        .manage("PUT", "/models/m?min_worker=2&synchronous=true")
        .send()
        .expect(200);
    std::thread::scope(|scope| {
        for number in 0..64 {
            let server = &server;
            scope.spawn(move || {
                let value = format!("caller {number}");
                read_from(&mut open(server, &value, 200), &value, 0, 200);
            });
        }
    });
}

#[test]
fn streams_of_one_batch_have_lengths_of_their_own_gr_06() {
    let server = serving(
        "batchSize: 4\nbatchGather: strict\nmaxBatchDelay: 20000\necho:\n  batchMicros: 20000\n",
    );
    std::thread::scope(|scope| {
        for (number, parts) in [1, 5, 5, 20].into_iter().enumerate() {
            let server = &server;
            scope.spawn(move || {
                let value = format!("caller {number}");
                if parts == 1 {
                    let request = server.infer("POST", "/predictions/m").body(value.clone());
                    let answer = request.send().expect(200);
                    assert_eq!(answer.header("x-batch-size"), Some("4"));
                    assert_eq!(answer.text(), value);
                    return;
                }
                let mut opened = open(server, &value, parts);
                if number == 2 {
                    assert_eq!(line(&mut opened), format!("0 {value}"));
                    return;
                }
                read_from(&mut opened, &value, 0, parts);
            });
        }
    });
}

#[test]
fn a_stream_that_breaks_is_seen_to_break_and_counted_gr_10() {
    at_once(ISOLATIONS, |isolation| {
        for fault in ["raise", "raise-batch", "abort", "panic"] {
            let server = serving(&format!("workerIsolation: {isolation}\n"));
            let request = server.infer("POST", "/predictions/m").body("x");
            let request = request
                .header("x-echo-stream", "5")
                .header("x-echo-fault", fault)
                .header("x-echo-fault-at", "3");
            let mut opened = request.open().unwrap();
            assert_eq!(opened.status, 200);
            let mut text = String::new();
            let ended = opened.body.read_to_string(&mut text);
            assert!(
                ended.is_err(),
                "{isolation} {fault}: half a reply looks whole"
            );
            assert_eq!(text, "0 x\n1 x\n2 x\n", "{isolation} {fault}");
            let metrics = server.metrics("/metrics").send().expect(200).text();
            let counted = metrics
                .lines()
                .any(|line| line.starts_with("ts_streams_broken_total{") && line.ends_with(" 1.0"));
            assert!(counted, "{isolation} {fault}: {metrics}");
            server.wait_until("the log tells of it", || {
                server.output().contains("a reply in parts was broken off")
            });
            // The next one is served.
            read_from(&mut open(&server, "y", 3), "y", 0, 3);
        }
    });
}

#[test]
fn a_failure_before_the_first_part_is_an_ordinary_error() {
    let server = serving("");
    let request = server.infer("POST", "/predictions/m").body("x");
    let request = request
        .header("x-echo-stream", "5")
        .header("x-echo-fault", "raise");
    let error = request.send().expect(503).json();
    assert_eq!(error["message"], "Prediction failed");
}

#[test]
fn the_response_timeout_starts_anew_with_each_part() {
    at_once(ISOLATIONS, |isolation| {
        let server = serving(&format!(
            "workerIsolation: {isolation}\nresponseTimeout: 1\necho:\n  batchMicros: 400000\n"
        ));
        let mut opened = open(&server, "x", 5);
        read_from(&mut opened, "x", 0, 5);
        let request = server.infer("POST", "/predictions/m").body("x");
        let request = request
            .header("x-echo-stream", "5")
            .header("x-echo-fault", "hang")
            .header("x-echo-fault-at", "2");
        let mut opened = request.open().unwrap();
        let started = Instant::now();
        assert!(opened.body.read_to_string(&mut String::new()).is_err());
        assert!(started.elapsed() < Duration::from_secs(3));
    });
}

#[test]
fn a_worker_stops_within_a_part_when_its_last_caller_has_left_gr_10() {
    for isolation in ISOLATIONS {
        let server = serving(&format!(
            "workerIsolation: {isolation}\necho:\n  batchMicros: 100000\n"
        ));
        let mut opened = open(&server, "x", 100);
        for _ in 0..3 {
            line(&mut opened);
        }
        drop(opened);
        let started = Instant::now();
        let request = server.infer("POST", "/predictions/m").body("y");
        request.send().expect(200);
        assert!(
            started.elapsed() < Duration::from_secs(2),
            "{isolation}: the other 97 parts were made: {:?}",
            started.elapsed()
        );
        assert_capacity(&server, 100);
    }
}

#[test]
fn a_caller_that_does_not_read_loses_its_stream_and_no_other() {
    let model = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 2\nbatchGather: strict\nmaxBatchDelay: 20000\n\
                 echo:\n  batchMicros: 20000\n";
    let server = server().echo_model("m", model);
    let server = server.config("max_response_size=400000");
    let server = server.args(&["--models", "m"]).start();
    server.wait_ready("m");
    let value = "v".repeat(100_000);
    std::thread::scope(|scope| {
        let (server, value) = (&server, &value);
        let idle = scope.spawn(move || open(server, value, 150));
        let mut reading = open(server, value, 150);
        let reads = scope.spawn(move || read_from(&mut reading, value, 0, 150));
        let mut idle = idle.join().unwrap();
        reads.join().unwrap();
        let mut text = Vec::new();
        let error = idle.body.read_to_end(&mut text).unwrap_err();
        assert_ne!(error.kind(), ErrorKind::TimedOut);
        assert!(text.len() < 150 * value.len());
    });
    server.wait_until("the log tells why", || {
        server.output().contains("were not read")
    });
}

#[test]
fn a_stream_is_finished_before_the_server_ends() {
    let mut server = serving("echo:\n  batchMicros: 100000\n");
    let mut opened = open(&server, "x", 10);
    assert_eq!(line(&mut opened), "0 x");
    server.signal(Signal::TERM);
    read_from(&mut opened, "x", 1, 10);
    drop(opened);
    assert!(server.wait_for_exit(Duration::from_secs(20)).success());
    assert!(
        server
            .output()
            .contains("every accepted request was answered")
    );
}

#[test]
fn latency_is_counted_at_the_last_part() {
    let server = serving("echo:\n  batchMicros: 100000\n");
    read_from(&mut open(&server, "x", 5), "x", 0, 5);
    let latency = || {
        let metrics = server.metrics("/metrics").send().expect(200).text();
        let line = metrics
            .lines()
            .find(|line| {
                line.starts_with("ts_inference_latency_microseconds{")
                    && line.contains("model_version=\"default\"")
            })
            .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
        line.unwrap_or(0.0)
    };
    server.wait_until("the latency of the whole reply is counted", || {
        latency() >= 450_000.0
    });
}

#[test]
fn a_part_over_the_limit_fails_its_request_and_no_other_rs_02() {
    let model = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 2\nmaxBatchDelay: 20000\n";
    let server = server().echo_model("m", model);
    let server = server.config("max_response_size=1000");
    let server = server.args(&["--models", "m"]).start();
    server.wait_ready("m");
    std::thread::scope(|scope| {
        let server = &server;
        scope.spawn(move || read_from(&mut open(server, "small", 5), "small", 0, 5));
        let request = server.infer("POST", "/predictions/m");
        let request = request.header("x-echo-stream", "5");
        let error = request.body("v".repeat(2000)).send().expect(507).json();
        let told = error["message"].as_str().unwrap();
        assert!(told.contains("`max_response_size`"), "{told}");
    });
    assert_capacity(&server, 100);
}
