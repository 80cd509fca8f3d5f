//! Order, deadlines, groups, sequences and what the server tells of its batches
//! (*batching-and-scheduling* 15 and 16), on the echo backend.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ts_test::{Answer, Running};

use crate::{server, serving};

const MS: Duration = Duration::from_millis(1);

/// Runs requests at the same time, each after the one before has been sent, and returns their
/// answers in order.
fn at_once(requests: Vec<ts_test::Request>, apart: Duration) -> Vec<(Answer, Instant)> {
    std::thread::scope(|scope| {
        let calls: Vec<_> = requests
            .into_iter()
            .map(|request| {
                let call = scope.spawn(move || (request.send(), Instant::now()));
                std::thread::sleep(apart);
                call
            })
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    })
}

fn predict(server: &Running, body: &str) -> ts_test::Request {
    server.infer("POST", "/predictions/m").body(body)
}

fn batching(server: &Running) -> serde_json::Value {
    server
        .manage("GET", "/models/m/batching")
        .send()
        .expect(200)
        .json()
}

/// Occupies the one worker for as long as a batch takes, and returns when it is occupied.
fn occupied<'s>(scope: &'s std::thread::Scope<'s, '_>, server: &'s Running) {
    let request = predict(server, "first");
    scope.spawn(move || request.send().expect(200));
    server.wait_until("the worker is busy", || batching(server)["batches"] == 1);
}

#[test]
fn sixteen_callers_fill_batches_without_a_fixed_delay_and_a_lone_one_does_not_wait() {
    let server = serving(
        "batchSize: 16\nmaxBatchDelay: 10000\njobQueueSize: 1000\n\
         warmup:\n  - file: model-config.yaml\n\
         echo:\n  batchMicros: 20000\n  itemMicros: 300\n",
    );
    let told = batching(&server);
    let per_batch = told["cost"]["perBatchMicros"].as_f64().unwrap();
    assert!((15_000.0..40_000.0).contains(&per_batch), "{told}");
    let left = AtomicUsize::new(16 * 40);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                while left
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1))
                    .is_ok()
                {
                    predict(&server, "x").send().expect(200);
                }
            });
        }
    });
    let told = batching(&server);
    let mean = told["meanBatch"].as_f64().unwrap();
    // How many come in time depends on how busy the machine is; without any wait it would be half
    // of the callers at best.
    assert!(mean > 4.0 && told["target"].as_u64().unwrap() > 8, "{told}");
    assert!(told["holds"].as_u64().unwrap() > 0, "{told}");
    // The cap of ten seconds is nothing to a caller who is alone.
    for _ in 0..20 {
        predict(&server, "x").send().expect(200);
    }
    let started = Instant::now();
    let answer = predict(&server, "x").send().expect(200);
    assert_eq!(answer.header("x-batch-size"), Some("1"));
    assert!(
        started.elapsed() < Duration::from_secs(2),
        "{:?}",
        started.elapsed()
    );
}

#[test]
fn what_was_cut_and_why_is_told() {
    let server = serving("batchSize: 4\nbatchGather: strict\nmaxBatchDelay: 5000\n");
    let requests = (0..4).map(|_| predict(&server, "x")).collect();
    for (answer, _) in at_once(requests, Duration::ZERO) {
        assert_eq!(answer.expect(200).header("x-batch-size"), Some("4"));
    }
    let told = batching(&server);
    assert_eq!(told["gather"], "strict");
    assert_eq!(told["batchesBySize"], serde_json::json!({"4": 1}));
    assert_eq!(told["cutBecause"]["full"], 1);
    assert_eq!(told["modelVersion"], "1.0");
    let versioned = server
        .manage("GET", "/models/m/1.0/batching")
        .send()
        .expect(200)
        .json();
    assert_eq!(versioned["batches"], 1);
    server
        .manage("GET", "/models/none/batching")
        .send()
        .expect(404);
    server
        .manage("GET", "/models/m/9/batching")
        .send()
        .expect(404);
}

#[test]
fn groups_of_a_header_never_share_a_batch_and_each_fills_its_own() {
    let server = serving("batchSize: 4\nbatchGroupHeader: X-Shape\necho:\n  batchMicros: 300000\n");
    let answers = std::thread::scope(|scope| {
        occupied(scope, &server);
        let requests = (0..16).map(|number| {
            let shape = if number % 2 == 0 { "a" } else { "b" };
            predict(&server, shape).header("x-shape", shape)
        });
        at_once(requests.collect(), Duration::ZERO)
    });
    for (answer, _) in answers {
        assert_eq!(answer.expect(200).header("x-batch-size"), Some("4"));
    }
}

#[test]
fn an_urgent_request_overtakes_those_that_wait() {
    let server = serving(
        "jobQueueSize: 100\necho:\n  batchMicros: 100000\n\
         dynamic_batching:\n  priority_levels: 2\n  default_priority_level: 2\n",
    );
    let answers = std::thread::scope(|scope| {
        occupied(scope, &server);
        let mut requests: Vec<_> = (0..10).map(|_| predict(&server, "later")).collect();
        requests.push(predict(&server, "urgent").header("x-priority", "1"));
        at_once(requests, 5 * MS)
    });
    let (urgent, others) = answers.split_last().unwrap();
    let before = others.iter().filter(|(_, at)| *at < urgent.1).count();
    // One may have been taken while the urgent one was on its way.
    assert!(before <= 2, "{before} were answered before the urgent one");
    predict(&server, "x")
        .header("x-priority", "soon")
        .send()
        .expect(400);
}

#[test]
fn a_deadline_is_kept_while_the_worker_is_busy_and_the_request_never_runs() {
    let server = serving("echo:\n  batchMicros: 1500000\n");
    std::thread::scope(|scope| {
        occupied(scope, &server);
        let started = Instant::now();
        let late = predict(&server, "late").header("x-request-timeout-ms", "50");
        let error = late.send().expect(504).json();
        assert!(
            started.elapsed() < Duration::from_secs(1),
            "{:?}",
            started.elapsed()
        );
        assert!(
            error["message"].as_str().unwrap().contains("50 ms"),
            "{error}"
        );
        assert_eq!(server.describe("m")["jobQueueStatus"]["pendingRequests"], 0);
    });
    assert_eq!(batching(&server)["batches"], 1, "the late request was run");
    predict(&server, "x")
        .header("x-request-timeout-ms", "-1")
        .send()
        .expect(400);
}

#[test]
fn who_waits_too_long_is_refused_or_goes_last_as_the_level_says() {
    for (action, expected) in [("REJECT", 504), ("DELAY", 200)] {
        let server = serving(&format!(
            "echo:\n  batchMicros: 400000\n\
             dynamic_batching:\n  default_queue_policy:\n    timeout_action: {action}\n    \
             default_timeout_microseconds: 100000\n",
        ));
        std::thread::scope(|scope| {
            occupied(scope, &server);
            predict(&server, "waits").send().expect(expected);
        });
    }
}

#[test]
fn what_would_come_too_late_is_refused_at_once_with_a_time_to_come_again() {
    let server = serving(
        "jobQueueSize: 100\nlatencyGoalMs: 1500\nbatchSize: 2\n\
         warmup:\n  - file: model-config.yaml\necho:\n  batchMicros: 500000\n",
    );
    let answers = std::thread::scope(|scope| {
        occupied(scope, &server);
        at_once((0..12).map(|_| predict(&server, "x")).collect(), 5 * MS)
    });
    let (taken, refused): (Vec<_>, Vec<_>) = answers
        .into_iter()
        .partition(|(answer, _)| answer.status == 200);
    assert!((1..=5).contains(&taken.len()), "{} were taken", taken.len());
    for (answer, _) in refused {
        let answer = answer.expect(503);
        assert_eq!(answer.header("x-refusal-reason"), Some("too-late"));
        let after: u64 = answer.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=3).contains(&after), "{after}");
    }
}

#[test]
fn answers_leave_in_order_of_arrival_where_the_model_says_so() {
    let server = server().echo_model(
        "m",
        "minWorkers: 2\nmaxWorkers: 2\ndynamic_batching:\n  preserve_ordering: true\n",
    );
    let server = server.args(&["--models", "m"]).start();
    server.wait_ready("m");
    let count = |told: &serde_json::Value, key: &str| told[key].as_u64().unwrap();
    let times: Vec<Instant> = std::thread::scope(|scope| {
        let calls: Vec<_> = (0..6_u64)
            .map(|number| {
                let delay = if number.is_multiple_of(2) { 400 } else { 1 };
                let request = predict(&server, "x");
                let request = request.header("x-echo-fault", &format!("delay={delay}"));
                let call = scope.spawn(move || {
                    request.send().expect(200);
                    Instant::now()
                });
                server.wait_until("the request has arrived", || {
                    let told = batching(&server);
                    count(&told, "batches") + count(&told, "waiting") > number
                });
                call
            })
            .collect();
        calls.into_iter().map(|call| call.join().unwrap()).collect()
    });
    // What is answered at the same time may be read in any order by threads of a busy machine.
    let in_order = times.windows(2).all(|pair| pair[0] <= pair[1] + 100 * MS);
    assert!(in_order, "{times:?}");
}

#[test]
fn a_ticket_is_needed_where_the_model_says_so() {
    let server = serving("useJobTicket: true\njobQueueSize: 100\necho:\n  batchMicros: 500000\n");
    std::thread::scope(|scope| {
        occupied(scope, &server);
        let refused = predict(&server, "x").send().expect(503);
        assert_eq!(refused.header("x-refusal-reason"), Some("no-idle-worker"));
    });
    server.wait_until("the worker is idle", || {
        batching(&server)["idleWorkers"] == 1
    });
    predict(&server, "x").send().expect(200);
    assert_eq!(server.describe("m")["useJobTicket"], true);
}

#[test]
fn models_that_share_a_resource_take_turns() {
    let yaml = "minWorkers: 2\nmaxWorkers: 2\necho:\n  batchMicros: 300000\n\
                rate_limiter:\n  resources: [{name: heavy, count: 1}]\n";
    let server = server()
        .echo_model("m", yaml)
        .echo_model("n", yaml)
        .config("rate_limit_resources=heavy:1")
        .args(&["--models", "m,n"])
        .start();
    server.wait_ready("m");
    server.wait_ready("n");
    let started = Instant::now();
    let requests = ["m", "n", "m", "n"].map(|model| {
        server
            .infer("POST", &format!("/predictions/{model}"))
            .body("x")
    });
    for (answer, _) in at_once(requests.into(), Duration::ZERO) {
        answer.expect(200);
    }
    assert!(started.elapsed() >= 1200 * MS, "{:?}", started.elapsed());
    server.echo_model(
        "big",
        "1.0",
        "rate_limiter:\n  resources: [{name: heavy, count: 2}]\n",
    );
    let refused = server
        .manage("POST", "/models?url=big&initial_workers=1")
        .send()
        .expect(400)
        .json();
    let told = refused["message"].as_str().unwrap();
    assert!(
        told.contains("`heavy`") && told.contains("rate_limit_resources"),
        "{told}"
    );
}

fn in_sequence(server: &Running, id: &str, more: &[(&str, &str)]) -> ts_test::Request {
    let request = predict(server, id).header("ts_request_sequence_id", id);
    more.iter().fold(request, |request, (name, value)| {
        request.header(name, value)
    })
}

#[test]
fn of_a_sequence_one_request_runs_at_a_time_in_order() {
    for strategy in ["direct", "oldest"] {
        let server = server().echo_model(
            "m",
            &format!(
                "minWorkers: 2\nmaxWorkers: 2\nbatchSize: 4\njobQueueSize: 100\n\
                 sequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 2\n\
                 maxSequenceJobQueueSize: 10\nsequenceStrategy: {strategy}\n\
                 echo:\n  batchMicros: 60000\n",
            ),
        );
        let server = server.args(&["--models", "m"]).start();
        server.wait_ready("m");
        assert_eq!(server.describe("m")["stateful"], true);
        let started = Instant::now();
        let requests = (0..10).map(|number| {
            let id = if number % 2 == 0 { "a" } else { "b" };
            in_sequence(&server, id, &[])
        });
        let answers = at_once(requests.collect(), 20 * MS);
        assert!(
            started.elapsed() >= 300 * MS,
            "five of each, one after another"
        );
        for of in 0..2 {
            let times: Vec<Instant> = answers
                .iter()
                .skip(of)
                .step_by(2)
                .map(|(_, at)| *at)
                .collect();
            assert!(times.is_sorted(), "{strategy}");
        }
        for (answer, _) in answers {
            let id = answer.text();
            assert_eq!(
                answer.expect(200).header("ts_request_sequence_id"),
                Some(id.as_str())
            );
        }
        let third = in_sequence(&server, "c", &[]).send().expect(503);
        assert_eq!(third.header("x-refusal-reason"), Some("too-many-sequences"));
        in_sequence(&server, "a", &[("ts_request_sequence_end", "true")])
            .send()
            .expect(200);
        in_sequence(&server, "c", &[]).send().expect(200);
    }
}

#[test]
fn an_idle_sequence_ends_and_one_that_waits_follows() {
    let server = serving(
        "sequenceBatching: true\nsequenceMaxIdleMSec: 300\nmaxNumSequence: 1\n\
         maxWaitingSequence: 1\njobQueueSize: 10\n",
    );
    in_sequence(&server, "a", &[]).send().expect(200);
    let started = Instant::now();
    // Nobody ends `a`: it is over when it was idle for its time.
    in_sequence(&server, "b", &[]).send().expect(200);
    assert!(started.elapsed() >= 100 * MS && started.elapsed() < Duration::from_secs(5));
    let unnamed = predict(&server, "x").send();
    assert_eq!(unnamed.status, 200, "{}", unnamed.text());
    assert!(
        unnamed
            .header("ts_request_sequence_id")
            .unwrap()
            .starts_with("ts-seq-")
    );
}

#[test]
fn a_worker_that_dies_takes_its_sequences_along_and_answers_them() {
    let server = serving(
        "sequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 1\n\
         maxSequenceJobQueueSize: 10\nworkerIsolation: process\njobQueueSize: 10\n",
    );
    in_sequence(&server, "a", &[]).send().expect(200);
    in_sequence(&server, "a", &[("x-echo-fault", "abort")])
        .send()
        .expect(500);
    server.wait_ready("m");
    in_sequence(&server, "b", &[]).send().expect(200);
}

#[test]
fn settings_of_the_scheduler_that_cannot_be_are_refused_with_their_key() {
    let server = server().start();
    for (yaml, told) in [
        ("sequenceBatching: true\n", "sequenceMaxIdleMSec"),
        (
            "dynamic_batching: {priority_levels: 99}\n",
            "priority_levels",
        ),
        ("batchGather: greedy\n", "batchGather"),
        ("useJobTicket: true\nautoscale: true\n", "`minWorkers` to 1"),
    ] {
        server.echo_model("m", "1.0", yaml);
        let refused = server
            .manage("POST", "/models?url=m")
            .send()
            .expect(400)
            .json();
        assert!(
            refused["message"].as_str().unwrap().contains(told),
            "{refused}"
        );
    }
}

fn autoscaling(yaml: &str) -> Running {
    let server = server().echo_model("m", &format!("autoscale: true\n{yaml}"));
    let server = server.args(&["--models", "m"]).start();
    server.wait_until("the model is there", || {
        server.manage("GET", "/models/m").send().status == 200
    });
    server
}

#[test]
fn a_pool_of_one_worker_that_could_have_four_keeps_all_sequences() {
    let server = autoscaling(
        "minWorkers: 1\nmaxWorkers: 4\nsequenceBatching: true\nsequenceMaxIdleMSec: 60000\n\
         maxNumSequence: 4\n",
    );
    for id in ["a", "b", "c", "d"] {
        let request = in_sequence(&server, id, &[]);
        request.limit(Duration::from_secs(20)).send().expect(200);
    }
}

#[test]
fn a_worker_that_keeps_a_sequence_stays_while_it_lasts() {
    let server = autoscaling(
        "minWorkers: 0\nmaxWorkers: 1\nscaleDownIdleSeconds: 1\nsequenceBatching: true\n\
         sequenceMaxIdleMSec: 3000\nmaxNumSequence: 4\n",
    );
    in_sequence(&server, "a", &[]).send().expect(200);
    let before = server.worker_pids("m");
    std::thread::sleep(Duration::from_millis(2200));
    in_sequence(&server, "a", &[]).send().expect(200);
    assert_eq!(
        server.worker_pids("m"),
        before,
        "another worker goes on without the state"
    );
    server.wait_until("it goes when the sequence is over", || {
        server.worker_pids("m").is_empty()
    });
}

#[test]
fn a_latency_goal_holds_for_a_model_without_batches() {
    let server = serving("latencyGoalMs: 150\njobQueueSize: 100\necho:\n  batchMicros: 100000\n");
    predict(&server, "x").send();
    let answers = at_once(
        (0..10).map(|_| predict(&server, "x")).collect(),
        Duration::ZERO,
    );
    let refused = answers.iter().filter(|(answer, _)| answer.status == 503);
    assert!(refused.count() >= 5, "{}", batching(&server));
}

#[test]
fn a_model_that_was_slow_once_is_not_refused_for_ever() {
    let server = serving(
        "batchSize: 2\nbatchGather: fixed\nmaxBatchDelay: 200\nclientTimeoutInMills: 1000\n",
    );
    let slow = || predict(&server, "x").header("x-echo-fault", "delay=1500");
    slow().send().expect(504);
    for (answer, _) in at_once(vec![slow(), slow()], Duration::ZERO) {
        answer.expect(504);
    }
    server.wait_until("the model is idle", || {
        batching(&server)["runningRequests"] == 0
    });
    for _ in 0..3 {
        predict(&server, "x").send().expect(200);
    }
}
