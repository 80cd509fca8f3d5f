//! Pools that scale by themselves, the devices and cores of their workers, and models in
//! quarantine.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use ts_test::{Running, at_once};

use crate::server;

const ISOLATIONS: [&str; 2] = ["process", "thread"];

fn workers(server: &Running, model: &str) -> Vec<Value> {
    server.describe(model)["workers"]
        .as_array()
        .cloned()
        .unwrap_or_default()
}

fn devices(server: &Running, model: &str) -> Vec<String> {
    workers(server, model)
        .iter()
        .map(|worker| worker["device"].as_str().unwrap().to_owned())
        .collect()
}

fn register(server: &Running, model: &str, workers: usize) {
    let path = format!("/models?url={model}&initial_workers={workers}");
    server.manage("POST", &path).send().expect(200);
}

fn scale(server: &Running, model: &str, query: &str) {
    let path = format!("/models/{model}?synchronous=true&{query}");
    server.manage("PUT", &path).send().expect(200);
}

fn kill(pid: &Value) {
    let pid = i32::try_from(pid.as_i64().unwrap()).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

fn predict(server: &Running, model: &str) -> ts_test::Answer {
    let path = format!("/predictions/{model}");
    server.infer("POST", &path).body("x").send()
}

/// Sends this many requests at once and expects an answer to each.
fn burst(server: &Running, model: &str, requests: usize) {
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..requests)
            .map(|_| scope.spawn(|| predict(server, model)))
            .collect();
        for call in calls {
            call.join().unwrap().expect(200);
        }
    });
}

#[test]
fn a_burst_raises_the_workers_to_the_most_and_idle_ones_go_down_to_the_least() {
    at_once(ISOLATIONS, |isolation| {
        let server = server().start();
        let yaml = format!(
            "autoscale: true\nminWorkers: 1\nmaxWorkers: 3\nscaleDownIdleSeconds: 1\n\
             workerIsolation: {isolation}\necho:\n  batchMicros: 100000\n"
        );
        server.echo_model("m", "1.0", &yaml);
        server.manage("POST", "/models?url=m").send().expect(200);
        assert_eq!(server.describe("m")["autoscale"], true);
        assert_eq!(workers(&server, "m").len(), 1);
        let most = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let load = scope.spawn(|| burst(&server, "m", 30));
            server.wait_until("the burst has raised the pool", || {
                let now = workers(&server, "m").len();
                most.fetch_max(now, std::sync::atomic::Ordering::SeqCst);
                now == 3
            });
            load.join().unwrap();
        });
        assert_eq!(most.into_inner(), 3, "{isolation}");
        server.wait_until("the idle workers are gone", || {
            workers(&server, "m").len() == 1
        });
        server.infer("GET", "/ping").send().expect(200);
        predict(&server, "m").expect(200);
    });
}

#[test]
fn without_workers_the_first_call_loads_one_and_idleness_unloads_it() {
    at_once(ISOLATIONS, |isolation| {
        let server = server().start();
        let yaml = format!(
            "autoscale: true\nminWorkers: 0\nmaxWorkers: 2\nscaleDownIdleSeconds: 1\n\
             workerIsolation: {isolation}\n"
        );
        server.echo_model("m", "1.0", &yaml);
        server.manage("POST", "/models?url=m").send().expect(200);
        for _ in 0..2 {
            assert!(workers(&server, "m").is_empty(), "{isolation}");
            server.infer("GET", "/ping").send().expect(200);
            let ready = server.manage("GET", "/v1/models/m").send().json();
            assert_eq!(ready["ready"], true);
            predict(&server, "m").expect(200);
            assert_eq!(workers(&server, "m").len(), 1, "{isolation}");
            server.wait_without_hosts();
            server.wait_until("it is gone", || workers(&server, "m").is_empty());
        }
    });
}

#[test]
fn a_worker_that_was_busy_is_idle_from_the_end_of_its_batch_on() {
    let exchanges = [
        "",
        "continuousBatching: true\n",
        "asyncCommunication: true\n",
    ];
    at_once(exchanges, |exchange| {
        let server = server().start();
        let yaml = format!(
            "{exchange}autoscale: true\nminWorkers: 0\nmaxWorkers: 1\nscaleDownIdleSeconds: 1\n\
             echo:\n  batchMicros: 500000\n"
        );
        server.echo_model("m", "1.0", &yaml);
        server.manage("POST", "/models?url=m").send().expect(200);
        let request = server.infer("POST", "/predictions/m").body("x");
        let answer = request.header("x-echo-stream", "5").send().expect(200);
        let ended = Instant::now();
        // It took more than twice as long as a worker may be idle.
        assert_eq!(answer.text().lines().count(), 5, "{exchange}");
        server.wait_until("it is gone", || workers(&server, "m").is_empty());
        let stayed = ended.elapsed();
        assert!(
            (Duration::from_millis(900)..Duration::from_secs(3)).contains(&stayed),
            "{exchange}: {stayed:?}"
        );
    });
}

/// A light load reaches every worker now and then, and needs one.
#[test]
fn workers_that_a_light_load_does_not_need_go_down_too() {
    let server = server().start();
    let yaml = "autoscale: true\nminWorkers: 1\nmaxWorkers: 3\nscaleDownIdleSeconds: 1\n";
    server.echo_model("m", "1.0", yaml);
    server.manage("POST", "/models?url=m").send().expect(200);
    scale(&server, "m", "autoscale=true&min_worker=3&max_worker=3");
    scale(&server, "m", "autoscale=true&min_worker=1&max_worker=3");
    assert_eq!(workers(&server, "m").len(), 3);
    server.wait_until("one worker is left", || {
        predict(&server, "m").expect(200);
        workers(&server, "m").len() == 1
    });
}

/// WK-05: what waits when the workers are to go is answered as the call says.
#[test]
fn scaling_to_zero_waits_for_the_queue_as_long_as_it_is_told_to() {
    at_once(ISOLATIONS, |isolation| {
        let server = server().start();
        let yaml = format!("workerIsolation: {isolation}\necho:\n  batchMicros: 400000\n");
        server.echo_model("m", "1.0", &yaml);
        register(&server, "m", 2);
        let pending = || server.describe("m")["jobQueueStatus"]["pendingRequests"].clone();
        for (timeout, answered) in [("-1", 7..=7), ("1", 4..=6)] {
            scale(&server, "m", "min_worker=2");
            std::thread::scope(|scope| {
                let calls: Vec<_> = (0..7)
                    .map(|_| scope.spawn(|| predict(&server, "m")))
                    .collect();
                server.wait_until("five wait", || pending() == 5);
                let path = format!("/models/m?min_worker=0&timeout={timeout}");
                server.manage("PUT", &path).send().expect(202);
                server.wait_until("no more are taken", || {
                    let refused = predict(&server, "m");
                    refused.header("x-refusal-reason") == Some("draining")
                });
                let statuses: Vec<u16> = calls
                    .into_iter()
                    .map(|call| call.join().unwrap().status)
                    .collect();
                let served = statuses.iter().filter(|status| **status == 200).count();
                let refused = statuses.iter().filter(|status| **status == 503).count();
                assert_eq!(served + refused, 7, "{isolation} {timeout}: {statuses:?}");
                assert!(
                    answered.contains(&served),
                    "{isolation} {timeout}: {statuses:?}"
                );
            });
            server.wait_without_hosts();
            let refused = predict(&server, "m").expect(503);
            assert_eq!(refused.header("x-refusal-reason"), Some("no-worker"));
        }
    });
}

/// A call that comes while another one drains the pool has the last word.
#[test]
fn a_pool_that_drains_is_kept_by_a_later_call() {
    let server = server().start();
    server.echo_model("m", "1.0", "echo:\n  batchMicros: 300000\n");
    register(&server, "m", 1);
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| predict(&server, "m")))
            .collect();
        server.wait_until("three wait", || {
            server.describe("m")["jobQueueStatus"]["pendingRequests"] == 3
        });
        let path = "/models/m?min_worker=0&timeout=-1";
        server.manage("PUT", path).send().expect(202);
        scale(&server, "m", "min_worker=1");
        for call in calls {
            call.join().unwrap().expect(200);
        }
    });
    predict(&server, "m").expect(200);
    assert_eq!(server.describe("m")["minWorkers"], 1);
}

/// HL-11: the cores that this process may use, not those of the machine.
#[test]
fn cores_are_those_of_the_affinity() {
    let mut one = rustix::thread::CpuSet::new();
    let all = rustix::thread::sched_getaffinity(None).unwrap();
    let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|core| all.is_set(*core));
    one.set(first.unwrap());
    // This thread's alone; the server inherits it.
    rustix::thread::sched_setaffinity(None, &one).unwrap();
    let server = server().start();
    server.echo_model("m", "1.0", "");
    register(&server, "m", 1);
    assert_eq!(workers(&server, "m")[0]["threads"], 1);
    server.wait_until("the log tells it", || {
        server.output().contains("Number of CPUs: 1,")
    });
}

/// A job that arrives while the last worker leaves is neither lost nor refused.
#[test]
fn calls_at_the_moment_of_unloading_are_answered() {
    let server = server().start();
    let yaml = "autoscale: true\nminWorkers: 0\nmaxWorkers: 1\nscaleDownIdleSeconds: 1\n";
    server.echo_model("m", "1.0", yaml);
    server.manage("POST", "/models?url=m").send().expect(200);
    std::thread::scope(|scope| {
        for caller in 0..8_u64 {
            let server = &server;
            scope.spawn(move || {
                // Each reaches the idle limit from another side.
                for _ in 0..4 {
                    predict(server, "m").expect(200);
                    std::thread::sleep(Duration::from_millis(980 + 5 * caller));
                }
            });
        }
    });
}

#[test]
fn scaling_by_itself_is_off_unless_it_is_asked_for() {
    let server = server().start();
    let yaml = "minWorkers: 1\nmaxWorkers: 3\necho:\n  batchMicros: 20000\n";
    server.echo_model("m", "1.0", yaml);
    server.manage("POST", "/models?url=m").send().expect(200);
    burst(&server, "m", 20);
    assert_eq!(workers(&server, "m").len(), 1);
    assert_eq!(server.describe("m")["autoscale"], false);
    server
        .manage("PUT", "/models/m?autoscale=maybe")
        .send()
        .expect(400);
    // The bounds stay where only the switch is given.
    scale(&server, "m", "autoscale=true");
    let described = server.describe("m");
    let bounds = (&described["minWorkers"], &described["maxWorkers"]);
    assert_eq!(bounds, (&1.into(), &3.into()));
    burst(&server, "m", 20);
    assert!(workers(&server, "m").len() > 1);
    scale(&server, "m", "autoscale=false&min_worker=1");
    assert_eq!(workers(&server, "m").len(), 1);
    burst(&server, "m", 20);
    assert_eq!(workers(&server, "m").len(), 1);
    // To zero by hand means zero.
    scale(&server, "m", "min_worker=0");
    predict(&server, "m").expect(503);
    scale(&server, "m", "autoscale=true&min_worker=0");
    predict(&server, "m").expect(200);
}

#[test]
fn a_registration_asks_for_scaling_and_has_room_for_it() {
    let server = server().start();
    server.echo_model("m", "1.0", "");
    let path = "/models?url=m&autoscale=true";
    server.manage("POST", path).send().expect(200);
    let described = server.describe("m");
    assert_eq!(described["minWorkers"], 0);
    assert!(described["maxWorkers"].as_u64().unwrap() >= 1);
    predict(&server, "m").expect(200);
}

#[test]
fn a_start_on_demand_that_fails_answers_what_waits_and_does_not_loop() {
    let server = server().start();
    let yaml = "autoscale: true\nminWorkers: 0\nmaxWorkers: 2\nmaxRetryTimeoutInSec: 2\n\
                echo:\n  loadError: no weights today\n  loadMicros: 200000\n";
    server.echo_model("m", "1.0", yaml);
    server.manage("POST", "/models?url=m").send().expect(200);
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| predict(&server, "m")))
            .collect();
        for call in calls {
            let error = call.join().unwrap().expect(500).json()["message"].to_string();
            assert!(error.contains("no weights today"), "{error}");
        }
    });
    assert_eq!(server.describe("m")["lastFailure"], "no weights today");
    assert!(workers(&server, "m").is_empty());
    let ready = server.manage("GET", "/v1/models/m").send().json();
    assert_eq!(ready["ready"], false);
    let refused = predict(&server, "m").expect(503);
    assert_eq!(refused.header("x-refusal-reason"), Some("no-worker"));
    server.wait_until("it has been tried for long enough", || {
        let answer = predict(&server, "m");
        answer.header("x-refusal-reason") == Some("quarantined")
    });
    let starts = server.output().matches("Worker disconnected").count();
    assert!((2..=4).contains(&starts), "{starts} starts");
    let reason = server.describe("m")["quarantined"].to_string();
    assert!(reason.contains("no weights today"), "{reason}");
    server.infer("GET", "/ping").send().expect(500);
}

#[test]
fn a_model_that_only_loses_workers_is_put_into_quarantine_and_others_go_on() {
    at_once(ISOLATIONS, |isolation| {
        let server = server().config("quarantine_after=9").start();
        let yaml = format!("quarantineAfter: 3\nworkerIsolation: {isolation}\n");
        server.echo_model("bad", "1.0", &yaml);
        server.echo_model("good", "1.0", "");
        register(&server, "bad", 2);
        register(&server, "good", 1);
        let crash = |fault: &str| {
            let request = server.infer("POST", "/predictions/bad");
            let request = request.header("x-echo-fault", fault);
            request.body("x").send().expect(500);
        };
        // A batch in between starts the count anew.
        crash("abort");
        crash("abort");
        server.wait_ready("bad");
        predict(&server, "bad").expect(200);
        crash("abort");
        crash("abort");
        predict(&server, "bad").expect(200);
        assert!(server.describe("bad")["quarantined"].is_null());
        for _ in 0..3 {
            crash("abort");
        }
        server.wait_until("it is in quarantine", || {
            server.describe("bad")["quarantined"].is_string()
        });
        let reason = server.describe("bad")["quarantined"].to_string();
        assert!(reason.contains("3 workers were lost in a row"), "{reason}");
        let refused = predict(&server, "bad").expect(503);
        assert_eq!(refused.header("x-refusal-reason"), Some("quarantined"));
        server.wait_until("its processes are gone", || {
            server.children().len() == 1 && server.worker_pids("bad").iter().all(|pid| *pid == 0)
        });
        let told = || {
            server
                .output()
                .matches("the model is in quarantine")
                .count()
        };
        server.wait_until("the log tells it", || told() > 0);
        server.infer("GET", "/ping").send().expect(500);
        let ready = server.manage("GET", "/v1/models/bad").send().json();
        assert_eq!(ready["ready"], false);
        predict(&server, "good").expect(200);
        assert_eq!(told(), 1);
        // Scaling it, if only to what it had, gives it another chance.
        scale(&server, "bad", "min_worker=2");
        predict(&server, "bad").expect(200);
        assert!(server.describe("bad")["quarantined"].is_null());
        server.infer("GET", "/ping").send().expect(200);
    });
}

#[test]
fn requests_that_wait_when_a_model_goes_into_quarantine_are_answered() {
    let server = server().start();
    let yaml = "quarantineAfter: 1\necho:\n  batchMicros: 500000\n";
    server.echo_model("m", "1.0", yaml);
    register(&server, "m", 1);
    std::thread::scope(|scope| {
        let pending = || server.describe("m")["jobQueueStatus"]["pendingRequests"].clone();
        let before = scope.spawn(|| predict(&server, "m"));
        let crash = server
            .infer("POST", "/predictions/m")
            .header("x-echo-fault", "abort");
        let crash = scope.spawn(|| crash.body("x").send());
        server.wait_until("one waits for the other", || pending() == 1);
        server.wait_until("the second runs", || pending() == 0);
        let waiting: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| predict(&server, "m")))
            .collect();
        let mut statuses: Vec<u16> = [before, crash]
            .into_iter()
            .chain(waiting)
            .map(|call| call.join().unwrap().status)
            .collect();
        statuses.sort_unstable();
        // Had the first been the one that crashes, the other would have been refused with them.
        assert!(
            [&[200, 500, 503, 503, 503][..], &[500, 503, 503, 503, 503]].contains(&&statuses[..]),
            "{statuses:?}"
        );
    });
    let refused = predict(&server, "m").expect(503);
    assert_eq!(refused.header("x-refusal-reason"), Some("quarantined"));
}

/// A worker that is lost while the model is in quarantine already may put jobs back.
#[test]
fn requests_that_are_put_back_in_quarantine_are_answered() {
    let server = server().start();
    let yaml = "workerIsolation: process\nquarantineAfter: 1\nbatchSize: 3\nmaxBatchDelay: 1000\nbatchGather: fixed\n";
    server.echo_model("m", "1.0", yaml);
    register(&server, "m", 2);
    let pids = server.worker_pids("m");
    std::thread::scope(|scope| {
        let call = |fault: &'static str| {
            let request = server.infer("POST", "/predictions/m").body("x");
            scope.spawn(move || request.header("x-echo-fault", fault).send())
        };
        let pending = |count: i32| {
            server.wait_until("so many wait", || {
                server.describe("m")["jobQueueStatus"]["pendingRequests"] == count
            });
        };
        // One batch, which is run in halves since its first request fails.
        let failing = call("raise-batch");
        pending(1);
        let slow = call("delay=8000");
        pending(2);
        let left = call("delay=0");
        failing.join().unwrap().expect(503);
        // While the second one runs, the other worker is lost.
        let crashing = call("abort");
        server.wait_until("it is in quarantine", || {
            server.describe("m")["quarantined"].is_string()
        });
        crashing.join().unwrap().expect(500);
        for pid in pids {
            let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
            let _the_one_that_crashed = kill_process(pid, Signal::KILL);
        }
        slow.join().unwrap().expect(507);
        let refused = left.join().unwrap().expect(503);
        assert_eq!(refused.header("x-refusal-reason"), Some("quarantined"));
    });
}

/// Crashes, kills and changes of size at once: every request is answered, and afterwards the pool is
/// what it was.
#[test]
fn a_pool_under_fire_answers_everything_and_recovers() {
    for isolation in ISOLATIONS {
        let server = server().start();
        let yaml = format!(
            "autoscale: true\nminWorkers: 1\nmaxWorkers: 3\nscaleDownIdleSeconds: 1\n\
             quarantineAfter: 1000000\nworkerIsolation: {isolation}\necho:\n  itemMicros: 2000\n"
        );
        server.echo_model("m", "1.0", &yaml);
        server.manage("POST", "/models?url=m").send().expect(200);
        std::thread::scope(|scope| {
            for caller in 0..6 {
                let server = &server;
                scope.spawn(move || {
                    for turn in 0..40 {
                        let request = server.infer("POST", "/predictions/m").body("x");
                        let answer = match (caller * 40 + turn) % 41 {
                            0 => request.header("x-echo-fault", "abort").send(),
                            20 => request.header("x-echo-fault", "panic").send(),
                            _ => request.send(),
                        };
                        let expected = matches!(answer.status, 200 | 500 | 503 | 507);
                        assert!(expected, "{}: {}", answer.status, answer.text());
                    }
                });
            }
            for turn in 0..10 {
                let size = ["0", "2", "1"][turn % 3];
                let path = format!("/models/m?autoscale=true&min_worker={size}&max_worker=3");
                server.manage("PUT", &path).send().expect(202);
                if let Some(pid) = server.worker_pids("m").first().filter(|pid| **pid > 0) {
                    let pid = Pid::from_raw(i32::try_from(*pid).unwrap()).unwrap();
                    let _may_be_gone = kill_process(pid, Signal::KILL);
                }
                predict(&server, "m");
            }
        });
        scale(&server, "m", "autoscale=true&min_worker=1&max_worker=3");
        predict(&server, "m").expect(200);
        server.wait_until("one idle worker is left", || {
            let workers = workers(&server, "m");
            workers.len() == 1 && workers[0]["status"] == "READY"
        });
        server.wait_until("and only its host", || {
            server.children() == server.worker_pids("m")
        });
    }
}

#[test]
fn a_worker_that_served_is_started_again_at_once() {
    for isolation in ISOLATIONS {
        let server = server().start();
        server.echo_model("m", "1.0", &format!("workerIsolation: {isolation}\n"));
        register(&server, "m", 1);
        predict(&server, "m").expect(200);
        let started = Instant::now();
        kill(&workers(&server, "m")[0]["pid"]);
        predict(&server, "m").expect(200);
        server.wait_until("it is the second generation", || {
            let worker = &workers(&server, "m")[0];
            worker["generation"] == 2 && worker["status"] == "READY"
        });
        let took = started.elapsed();
        assert!(took < Duration::from_millis(900), "{isolation}: {took:?}");
    }
}

/// PF-03 with devices that only this server believes in.
#[test]
fn workers_are_spread_over_the_devices_and_keep_theirs_when_restarted() {
    for isolation in ISOLATIONS {
        let server = server().config("devices=0,1,2,3").start();
        let isolated = format!("workerIsolation: {isolation}\n");
        server.echo_model("a", "1.0", &isolated);
        server.echo_model("b", "1.0", &format!("deviceIds: [3, 2]\n{isolated}"));
        server.echo_model("c", "1.0", &format!("deviceType: cpu\n{isolated}"));
        register(&server, "b", 3);
        assert_eq!(devices(&server, "b"), ["gpu:3", "gpu:2", "gpu:3"]);
        register(&server, "a", 2);
        assert_eq!(devices(&server, "a"), ["gpu:1", "gpu:0"]);
        register(&server, "c", 1);
        let on_cpu = &workers(&server, "c")[0];
        assert_eq!(
            (&on_cpu["device"], &on_cpu["gpu"]),
            (&"cpu".into(), &false.into())
        );
        let worker = &workers(&server, "a")[0];
        assert_eq!(
            (&worker["gpu"], &worker["gpuUsage"]),
            (&true.into(), &"gpuId::1".into())
        );
        predict(&server, "a").expect(200);
        kill(&worker["pid"]);
        server.wait_until("it has been restarted", || {
            let worker = &workers(&server, "a")[0];
            worker["generation"] == 2 && worker["status"] == "READY"
        });
        server.wait_ready("a");
        assert_eq!(devices(&server, "a"), ["gpu:1", "gpu:0"]);
        // Of the list both have as few then, and the third of four was the last turn.
        scale(&server, "b", "min_worker=0");
        scale(&server, "b", "min_worker=2");
        assert_eq!(devices(&server, "b"), ["gpu:2", "gpu:3"]);
        // Only what was given back is free for others.
        scale(&server, "a", "min_worker=4");
        let mut all = devices(&server, "a");
        all.sort_unstable();
        assert_eq!(all[..2], ["gpu:0", "gpu:0"][..], "{all:?}");
    }
}

/// PF-04: the same effect in both places, and no device is dropped without a word.
#[test]
fn a_list_of_devices_holds_wherever_it_stands_and_an_unknown_id_is_an_error() {
    let models =
        r#"models={"m": {"1.0": {"deviceIds": [1]}}, "cpu": {"1.0": {"deviceType": "cpu"}}}"#;
    let server = server()
        .config("devices=0,1")
        .config("number_of_gpu=2")
        .config(models)
        .start();
    for (model, device) in [("m", "gpu:1"), ("cpu", "cpu")] {
        server.echo_model(model, "1.0", "");
        register(&server, model, 1);
        assert_eq!(devices(&server, model), [device]);
    }
    assert_eq!(server.describe("m")["deviceIds"], serde_json::json!([1]));
    server.echo_model("bad", "1.0", "deviceIds: [0, 2]\n");
    let error = server.manage("POST", "/models?url=bad").send().expect(400);
    let text = error.text();
    assert!(text.contains("has 2") && text.contains("[0, 1]"), "{text}");
    server.manage("GET", "/models/bad").send().expect(404);
}

#[test]
fn a_gpu_model_on_a_server_without_one_fails_and_never_runs_on_the_processor() {
    let server = server().config("number_of_gpu=0").start();
    server.echo_model("m", "1.0", "deviceType: gpu\n");
    let path = "/models?url=m&initial_workers=1";
    let error = server.manage("POST", path).send().expect(500).text();
    assert!(error.contains("deviceType: gpu"), "{error}");
    server.echo_model("list", "1.0", "deviceIds: [0]\n");
    let error = server.manage("POST", "/models?url=list").send().expect(400);
    assert!(error.text().contains("no device"), "{}", error.text());
}

#[test]
fn a_worker_tells_its_isolation_its_threads_and_its_generation() {
    let cores = std::thread::available_parallelism().unwrap().get();
    for isolation in ISOLATIONS {
        let server = server().start();
        server.echo_model("m", "1.0", &format!("workerIsolation: {isolation}\n"));
        register(&server, "m", 1);
        let worker = &workers(&server, "m")[0];
        assert_eq!(worker["isolation"], isolation);
        assert_eq!(worker["threads"], cores);
        assert_eq!(
            (&worker["device"], &worker["generation"]),
            (&"cpu".into(), &1.into())
        );
        // PF-01: together they stay within the cores.
        scale(&server, "m", "min_worker=0");
        scale(&server, "m", &format!("min_worker={cores}"));
        for worker in workers(&server, "m") {
            assert_eq!(worker["threads"], 1);
        }
    }
}

/// HL-05: during start, loss and restart no worker is told ready that has not loaded its model.
#[test]
fn a_worker_is_ready_only_while_its_model_is_loaded() {
    let server = server().start();
    server.echo_model("m", "1.0", "echo:\n  loadMicros: 300000\n");
    let path = "/models?url=m&initial_workers=1&synchronous=false";
    server.manage("POST", path).send().expect(202);
    let is_ready = || workers(&server, "m")[0]["status"] == "READY";
    assert!(!is_ready());
    server.wait_ready("m");
    predict(&server, "m").expect(200);
    kill(&workers(&server, "m")[0]["pid"]);
    let killed = Instant::now();
    server.wait_until("the loss shows", || !is_ready());
    assert!(killed.elapsed() < Duration::from_secs(1));
    let ready = server.manage("GET", "/v1/models/m").send().json();
    assert_eq!(ready["ready"], false);
    server.wait_ready("m");
    assert!(killed.elapsed() >= Duration::from_millis(300));
}
