//! Continuous batching (*torchserve-contract* 9.3): requests join and leave between steps.

use std::io::{BufRead, Read};
use std::time::{Duration, Instant};

use ts_test::{Opened, Running, at_once};

use crate::serving;

const ISOLATIONS: [&str; 2] = ["process", "thread"];

fn continuous(isolation: &str, batch_size: usize, step_millis: u64) -> Running {
    serving(&format!(
        "workerIsolation: {isolation}\ncontinuousBatching: true\nbatchSize: {batch_size}\n\
         maxBatchDelay: 0\necho:\n  batchMicros: {}\n",
        step_millis * 1000
    ))
}

fn open(server: &Running, value: &str, parts: usize) -> Opened {
    let request = server.infer("POST", "/predictions/m").body(value);
    let request = request.header("x-echo-stream", &parts.to_string());
    request.open().unwrap()
}

#[track_caller]
fn read(opened: &mut Opened, value: &str, parts: usize) {
    let mut text = String::new();
    opened.body.read_to_string(&mut text).unwrap();
    let expected: String = (0..parts).map(|part| format!("{part} {value}\n")).collect();
    assert_eq!(text, expected);
}

#[test]
fn requests_that_come_while_others_run_join_and_short_ones_end_first() {
    at_once(ISOLATIONS, |isolation| {
        let server = continuous(isolation, 4, 50);
        assert_eq!(server.describe("m")["continuousBatching"], true);
        std::thread::scope(|scope| {
            let mut long = open(&server, "long", 100);
            let mut line = String::new();
            long.body.read_line(&mut line).unwrap();
            assert_eq!(line, "0 long\n");
            let started = Instant::now();
            let mut short = open(&server, "short", 3);
            let header = short.headers.iter().find(|(key, _)| key == "x-batch-size");
            assert_eq!(header.unwrap().1, "2", "it joined the one that runs");
            read(&mut short, "short", 3);
            // One without parts is answered in the midst, too.
            let answer = server.infer("POST", "/predictions/m").body("one").send();
            assert_eq!(answer.expect(200).text(), "one");
            assert!(
                started.elapsed() < Duration::from_secs(4),
                "{isolation}: it waited for the long one: {:?}",
                started.elapsed()
            );
            scope.spawn(move || {
                let mut rest = String::new();
                long.body.read_to_string(&mut rest).unwrap();
                assert!(rest.ends_with("99 long\n") && rest.lines().count() == 99);
            });
        });
    });
}

#[test]
fn never_more_than_the_batch_size_run_and_all_are_answered() {
    for isolation in ISOLATIONS {
        let server = continuous(isolation, 4, 2);
        std::thread::scope(|scope| {
            for number in 0..24 {
                let server = &server;
                scope.spawn(move || {
                    let value = format!("caller {number}");
                    let mut opened = open(server, &value, 2 + number % 9);
                    let header = opened.headers.iter().find(|(key, _)| key == "x-batch-size");
                    let size: usize = header.unwrap().1.parse().unwrap();
                    assert!((1..=4).contains(&size), "{size}");
                    read(&mut opened, &value, 2 + number % 9);
                });
            }
        });
        assert_eq!(server.describe("m")["workers"][0]["generation"], 1);
    }
}

#[test]
fn a_caller_that_leaves_is_taken_out_of_the_batch() {
    for isolation in ISOLATIONS {
        let server = continuous(isolation, 2, 20);
        let mut leaver = open(&server, "leaver", 500);
        let mut stayer = open(&server, "stayer", 40);
        leaver.body.read_line(&mut String::new()).unwrap();
        drop(leaver);
        server.wait_until("the leaver is told of", || {
            server
                .output()
                .contains("Connection to client got closed; Removing job: ")
        });
        read(&mut stayer, "stayer", 40);
        let answer = server.infer("POST", "/predictions/m").body("alone").send();
        assert_eq!(answer.expect(200).header("x-batch-size"), Some("1"));
    }
}

#[test]
fn a_worker_that_dies_breaks_all_live_streams_off_and_comes_back() {
    for isolation in ISOLATIONS {
        let server = continuous(isolation, 2, 20);
        let mut victim = open(&server, "victim", 100);
        let request = server.infer("POST", "/predictions/m").body("x");
        let request = request
            .header("x-echo-stream", "5")
            .header("x-echo-fault", "abort")
            .header("x-echo-fault-at", "2");
        let mut killer = request.open().unwrap();
        for opened in [&mut victim, &mut killer] {
            assert!(opened.body.read_to_string(&mut String::new()).is_err());
        }
        read(&mut open(&server, "next", 3), "next", 3);
    }
}

#[test]
fn one_failed_request_does_not_end_the_others() {
    let server = continuous("thread", 2, 20);
    let mut stayer = open(&server, "stayer", 20);
    let request = server.infer("POST", "/predictions/m").body("x");
    let request = request.header("x-echo-fault", "raise");
    request.send().expect(503);
    read(&mut stayer, "stayer", 20);
}
