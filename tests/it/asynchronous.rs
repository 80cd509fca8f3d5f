//! Asynchronous communication with workers (*torchserve-contract* 9.7).

use std::io::Read;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use ts_test::{Request, Running, at_once};

use crate::serving;

const ISOLATIONS: [&str; 2] = ["process", "thread"];

fn asynchronous(isolation: &str, yaml: &str) -> Running {
    serving(&format!(
        "workerIsolation: {isolation}\nasyncCommunication: true\n{yaml}"
    ))
}

fn predict(server: &Running, value: &str) -> Request {
    server.infer("POST", "/predictions/m").body(value)
}

#[test]
fn one_worker_serves_many_at_once_and_everyone_gets_their_own() {
    for isolation in ISOLATIONS {
        let server = asynchronous(isolation, "batchSize: 8\necho:\n  itemMicros: 300000\n");
        let described = server.describe("m");
        assert_eq!(described["asyncCommunication"], true);
        assert_eq!(described["batchSize"], 1);
        let started = Instant::now();
        std::thread::scope(|scope| {
            for number in 0..30 {
                let request = predict(&server, &format!("caller {number}"));
                scope.spawn(move || {
                    let answer = request.send().expect(200);
                    assert_eq!(answer.text(), format!("caller {number}"));
                });
            }
        });
        assert!(
            started.elapsed() < Duration::from_secs(3),
            "{isolation}: one after another: {:?}",
            started.elapsed()
        );
    }
}

#[test]
fn large_bodies_cross_each_other() {
    let server = asynchronous("process", "");
    std::thread::scope(|scope| {
        for number in 0..16_u8 {
            let body = vec![number; 1_000_000];
            let request = server.infer("POST", "/predictions/m").body(body.clone());
            scope.spawn(move || assert!(request.send().expect(200).body == body));
        }
    });
}

#[test]
fn streams_run_side_by_side() {
    for isolation in ISOLATIONS {
        let server = asynchronous(isolation, "echo:\n  batchMicros: 20000\n");
        std::thread::scope(|scope| {
            for number in 0..16 {
                let value = format!("caller {number}");
                let request = predict(&server, &value).header("x-echo-stream", "20");
                scope.spawn(move || {
                    let expected: String =
                        (0..20).map(|part| format!("{part} {value}\n")).collect();
                    assert_eq!(request.send().expect(200).text(), expected);
                });
            }
        });
    }
}

#[test]
fn one_failure_is_of_one_request() {
    for isolation in ISOLATIONS {
        let server = asynchronous(isolation, "echo:\n  batchMicros: 300000\n");
        std::thread::scope(|scope| {
            for number in 0..8 {
                let request = predict(&server, "x");
                scope.spawn(move || match number % 2 {
                    0 => drop(request.send().expect(200)),
                    _ => drop(request.header("x-echo-fault", "raise").send().expect(503)),
                });
            }
        });
        assert_eq!(server.describe("m")["workers"][0]["generation"], 1);
    }
}

#[test]
fn the_response_timeout_holds_for_each_request() {
    at_once(ISOLATIONS, |isolation| {
        let server = asynchronous(isolation, "responseTimeout: 1\n");
        let started = Instant::now();
        let hangs = predict(&server, "x").header("x-echo-fault", "hang");
        let error = hangs.send().expect(500).json();
        assert!(
            error["message"]
                .as_str()
                .unwrap()
                .contains("`responseTimeout` of 1 s"),
            "{error}"
        );
        let took = started.elapsed();
        assert!(
            (Duration::from_millis(900)..Duration::from_secs(2)).contains(&took),
            "{took:?}"
        );
        predict(&server, "y").send().expect(200);
        assert_eq!(server.describe("m")["workers"][0]["generation"], 1);
    });
}

#[test]
fn a_worker_that_stops_reading_is_replaced_and_all_that_it_had_is_answered() {
    let server = asynchronous("process", "responseTimeout: 1\n");
    let pid = server.worker_pids("m")[0];
    let process = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    kill_process(process, Signal::STOP).unwrap();
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            // Together more than the socket has room for.
            let request = server.infer("POST", "/predictions/m");
            let request = request.body(vec![b'x'; 1_000_000]);
            scope.spawn(move || assert!(matches!(request.send().status, 200 | 500)));
        }
        server.wait_until("it is replaced", || !server.worker_pids("m").contains(&pid));
    });
    let took = began.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    predict(&server, "y").send().expect(200);
    assert_eq!(server.describe("m")["workers"][0]["generation"], 2);
}

#[test]
fn the_death_of_a_worker_answers_all_that_it_had() {
    at_once(ISOLATIONS, |isolation| {
        for panics in [false, true] {
            let server = asynchronous(isolation, "echo:\n  batchMicros: 200000\n");
            let all_run = Barrier::new(9);
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    let request = predict(&server, "x").header("x-echo-stream", "50");
                    let all_run = &all_run;
                    scope.spawn(move || {
                        let opened = request.open();
                        all_run.wait();
                        let broken = opened.unwrap().body.read_to_string(&mut String::new());
                        assert!(broken.is_err());
                    });
                }
                all_run.wait();
                if panics {
                    let request = predict(&server, "x").header("x-echo-fault", "panic");
                    assert_eq!(request.send().expect(500).json()["message"], "Worker died.");
                } else {
                    let pid = i32::try_from(server.worker_pids("m")[0]).unwrap();
                    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
                }
            });
            predict(&server, "y").send().expect(200);
            assert_eq!(server.describe("m")["workers"][0]["generation"], 2);
        }
    });
}

#[test]
fn no_more_than_the_queue_holds_are_with_the_worker_and_the_queue_keeps_its_limit() {
    let server = asynchronous("thread", "jobQueueSize: 4\necho:\n  batchMicros: 1000000\n");
    let (mut answered, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..20)
            .map(|_| {
                let request = predict(&server, "x");
                scope.spawn(move || request.send().status)
            })
            .collect();
        for call in calls {
            match call.join().unwrap() {
                200 => answered += 1,
                503 => refused += 1,
                other => panic!("{other}"),
            }
        }
    });
    // Four run, four wait, and one may be on its way between.
    assert!((8..=9).contains(&answered), "{answered} answered");
    assert_eq!(answered + refused, 20);
}

#[test]
fn a_stop_finishes_what_runs() {
    let mut server = asynchronous("process", "echo:\n  batchMicros: 700000\n");
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..5)
            .map(|_| {
                let request = predict(&server, "x");
                scope.spawn(move || request.send())
            })
            .collect();
        std::thread::sleep(Duration::from_millis(200));
        server.signal(Signal::TERM);
        for call in calls {
            call.join().unwrap().expect(200);
        }
    });
    assert!(server.wait_for_exit(Duration::from_secs(20)).success());
}

#[test]
fn the_two_ways_exclude_each_other() {
    let server = crate::server().start();
    server.echo_model(
        "m",
        "1.0",
        "asyncCommunication: true\ncontinuousBatching: true\n",
    );
    let error = server
        .manage("POST", "/models?url=m&initial_workers=1")
        .send()
        .expect(400);
    assert!(
        error.text().contains("exclude each other"),
        "{}",
        error.text()
    );
}
