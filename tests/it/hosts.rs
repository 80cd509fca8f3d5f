//! What happens to requests and processes when a host dies, hangs or is taken away.

use std::io::Read;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use ts_test::at_once;

use crate::{server, serving};

const ISOLATIONS: [&str; 2] = ["process", "thread"];

fn isolated(isolation: &str, yaml: &str) -> ts_test::Running {
    serving(&format!("workerIsolation: {isolation}\n{yaml}"))
}

fn kill(pid: u32) {
    kill_process(
        Pid::from_raw(i32::try_from(pid).unwrap()).unwrap(),
        Signal::KILL,
    )
    .unwrap();
}

#[test]
fn isolation_decides_how_many_workers_share_a_process() {
    for (isolation, processes) in [("process", 3), ("thread", 1)] {
        let server = isolated(isolation, "");
        server
            .manage("PUT", "/models/m?min_worker=3&synchronous=true")
            .send()
            .expect(200);
        let mut pids = server.worker_pids("m");
        assert_eq!(pids.len(), 3, "{isolation}");
        pids.sort_unstable();
        pids.dedup();
        assert_eq!(pids.len(), processes, "{isolation}");
        for pid in pids {
            assert_ne!(pid, server.pid());
        }
    }
}

#[test]
fn a_registration_chooses_the_isolation_over_the_archive() {
    let server = server().start();
    server.echo_model("m", "1.0", "workerIsolation: process\n");
    let path = "/models?url=m&initial_workers=2&worker_isolation=none";
    server.manage("POST", path).send().expect(400);
    let path = "/models?url=m&initial_workers=2&worker_isolation=thread";
    server.manage("POST", path).send().expect(200);
    assert_eq!(server.describe("m")["workerIsolation"], "thread");
    let pids = server.worker_pids("m");
    assert_eq!((pids.len(), pids[0]), (2, pids[1]));
}

#[test]
fn a_crash_answers_its_request_and_the_worker_comes_back() {
    at_once(ISOLATIONS, |isolation| {
        for fault in ["abort", "panic"] {
            let server = isolated(isolation, "");
            let request = server
                .infer("POST", "/predictions/m")
                .header("x-echo-fault", fault);
            let error = request.body("x").send().expect(500).json();
            assert_eq!(error["message"], "Worker died.", "{isolation} {fault}");
            assert_eq!(error["type"], "InternalServerException");
            // The next one waits for the replacement.
            server
                .infer("POST", "/predictions/m")
                .body("x")
                .send()
                .expect(200);
            let worker = &server.describe("m")["workers"][0];
            assert_eq!(worker["generation"], 2, "{isolation} {fault}");
            assert!(
                worker["lastFailure"].as_str().is_some(),
                "{isolation} {fault}"
            );
        }
    });
}

#[test]
fn a_worker_killed_while_it_is_idle_is_noticed_and_replaced() {
    at_once(ISOLATIONS, |isolation| {
        let server = isolated(isolation, "");
        let before = server.worker_pids("m");
        kill(before[0]);
        server.wait_until("another process serves", || {
            let now = server.worker_pids("m");
            !now.is_empty() && now != before
        });
        server
            .infer("POST", "/predictions/m")
            .body("x")
            .send()
            .expect(200);
    });
}

#[test]
fn a_worker_killed_from_outside_while_it_runs_answers_with_out_of_memory() {
    let server = isolated("process", "echo:\n  batchMicros: 3000000\n");
    let pid = server.worker_pids("m")[0];
    std::thread::scope(|scope| {
        let request = server.infer("POST", "/predictions/m").body("x");
        let call = scope.spawn(move || {
            let started = Instant::now();
            (request.send(), started.elapsed())
        });
        std::thread::sleep(Duration::from_millis(200));
        kill(pid);
        let (answer, took) = call.join().unwrap();
        assert_eq!(answer.expect(507).json()["message"], "Worker died.");
        assert!(took < Duration::from_secs(2), "answered after {took:?}");
    });
    let failure = server.describe("m")["workers"][0]["lastFailure"].to_string();
    assert!(
        failure.contains("signal 9") && failure.contains("memory"),
        "{failure}"
    );
}

#[test]
fn a_worker_that_does_not_answer_is_killed_at_its_limit() {
    at_once(ISOLATIONS, |isolation| {
        let server = isolated(isolation, "responseTimeout: 1\n");
        let before = server.worker_pids("m");
        let started = Instant::now();
        let request = server
            .infer("POST", "/predictions/m")
            .header("x-echo-fault", "hang");
        assert_eq!(
            request.body("x").send().expect(500).json()["message"],
            "Worker died."
        );
        let took = started.elapsed();
        let expected = Duration::from_millis(900)..Duration::from_secs(4);
        assert!(expected.contains(&took), "{isolation}: {took:?}");
        server
            .infer("POST", "/predictions/m")
            .body("x")
            .send()
            .expect(200);
        assert_ne!(server.worker_pids("m"), before);
        let phrases = [
            "Number or consecutive unsuccessful inference 1",
            "Worker disconnected",
            "Auto recovery start timestamp",
            "Retry worker",
            "Auto recovery succeeded, reset recoveryStartTS",
        ];
        server.wait_until("the recovery is logged as TorchServe logs it", || {
            let output = server.output();
            phrases.iter().all(|phrase| output.contains(phrase))
        });
        let output = server.output();
        assert!(!output.contains("Auto recovery failed again"), "{output}");
    });
}

#[test]
fn a_model_that_loads_too_slowly_fails_at_the_start_up_limit() {
    let server = server().start();
    server.echo_model(
        "slow",
        "1.0",
        "startupTimeout: 1\necho:\n  loadMicros: 20000000\n",
    );
    let started = Instant::now();
    let error = server
        .manage("POST", "/models?url=slow&initial_workers=1")
        .send()
        .expect(500)
        .json();
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "{:?}",
        started.elapsed()
    );
    assert!(
        error["message"].as_str().unwrap().contains("within 1 s"),
        "{error}"
    );
    // Loading is not held to the limit of a prediction.
    server.echo_model(
        "ok",
        "1.0",
        "responseTimeout: 1\necho:\n  loadMicros: 2000000\n",
    );
    server
        .manage("POST", "/models?url=ok&initial_workers=1")
        .send()
        .expect(200);
    server
        .infer("POST", "/predictions/ok")
        .body("x")
        .send()
        .expect(200);
}

#[test]
fn a_worker_is_ready_once_it_has_answered_its_samples() {
    let server = server().start();
    let sample = |model: &str, yaml: &str| {
        server.echo_model(model, "1.0", yaml);
        let file = server.folder().join("store").join(model).join("a.txt");
        fs_err::write(file, "abc").unwrap();
        let path = format!("/models?url={model}&initial_workers=1");
        let started = Instant::now();
        (server.manage("POST", &path).send(), started.elapsed())
    };
    let warm = "warmup:\n  - file: a.txt\n";
    let (answer, took) = sample("m", &format!("{warm}echo:\n  batchMicros: 300000\n"));
    answer.expect(200);
    assert!(
        took >= Duration::from_millis(900),
        "three runs took {took:?}"
    );
    let slow = format!("startupTimeout: 1\n{warm}echo:\n  batchMicros: 700000\n");
    let error = sample("slow", &slow).0.expect(500).json()["message"].to_string();
    assert!(error.contains("while it warmed up"), "{error}");
    let error = sample("none", "warmup:\n  - file: b.txt\n")
        .0
        .expect(400)
        .json();
    assert!(
        error["message"]
            .to_string()
            .contains("`b.txt` is not in the archive"),
        "{error}"
    );
    server.manage("GET", "/models/slow").send().expect(404);
}

#[test]
fn many_deaths_leave_no_defunct_process_and_no_descriptor() {
    let server = isolated("process", "");
    let descriptors = || {
        fs_err::read_dir(format!("/proc/{}/fd", server.pid()))
            .unwrap()
            .count()
    };
    let die = || {
        let before = server.worker_pids("m");
        kill(before[0]);
        server.wait_until("another process serves", || {
            let now = server.worker_pids("m");
            !now.is_empty() && now != before
        });
        server
            .infer("POST", "/predictions/m")
            .body("x")
            .send()
            .expect(200);
    };
    die();
    let base = descriptors();
    for _ in 0..4 {
        die();
    }
    server.wait_until("descriptors are given back", || descriptors() <= base);
    let children = server.children();
    assert_eq!(children, server.worker_pids("m"));
    for child in children {
        let stat = fs_err::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        assert!(!stat.contains(") Z "), "defunct: {stat}");
    }
}

#[test]
fn hosts_are_gone_when_the_server_is_gone_even_by_sigkill() {
    for isolation in ISOLATIONS {
        let server = isolated(isolation, "echo:\n  batchMicros: 30000000\n");
        let pids = server.worker_pids("m");
        let busy = server.infer("POST", "/predictions/m").body("x");
        assert!(busy.limit(Duration::from_millis(300)).try_send().is_err());
        server.signal(Signal::KILL);
        server.wait_until("hosts have ended", || {
            pids.iter().all(|pid| !is_running(*pid))
        });
    }
}

fn is_running(pid: u32) -> bool {
    fs_err::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn scaling_down_lets_a_batch_finish() {
    for isolation in ISOLATIONS {
        let server = isolated(isolation, "echo:\n  batchMicros: 700000\n");
        std::thread::scope(|scope| {
            let request = server.infer("POST", "/predictions/m").body("x");
            let call = scope.spawn(move || request.send());
            std::thread::sleep(Duration::from_millis(200));
            let path = "/models/m?min_worker=0&max_worker=0&synchronous=true";
            server.manage("PUT", path).send().expect(200);
            assert_eq!(call.join().unwrap().expect(200).text(), "x", "{isolation}");
        });
        server.wait_without_hosts();
    }
}

#[test]
fn scaling_to_zero_answers_what_waits() {
    for isolation in ISOLATIONS {
        let server = isolated(isolation, "echo:\n  batchMicros: 500000\n");
        std::thread::scope(|scope| {
            let calls: Vec<_> = (0..4)
                .map(|_| {
                    let request = server.infer("POST", "/predictions/m").body("x");
                    scope.spawn(move || request.send())
                })
                .collect();
            server.wait_until("three wait", || {
                server.describe("m")["jobQueueStatus"]["pendingRequests"] == 3
            });
            let path = "/models/m?min_worker=0&max_worker=0&synchronous=true";
            server.manage("PUT", path).send().expect(200);
            let mut statuses: Vec<u16> = calls
                .into_iter()
                .map(|call| call.join().unwrap().status)
                .collect();
            statuses.sort_unstable();
            assert_eq!(statuses, [200, 503, 503, 503], "{isolation}");
        });
    }
}

#[test]
fn a_model_whose_workers_are_all_given_up_refuses_at_once() {
    let server = server().start();
    server.echo_model(
        "bad",
        "1.0",
        "maxRetryTimeoutInSec: 0\necho:\n  loadError: broken\n",
    );
    let path = "/models?url=bad&initial_workers=1&synchronous=false";
    server.manage("POST", path).send().expect(202);
    server.wait_until("the worker is given up", || {
        server
            .infer("POST", "/predictions/bad")
            .body("x")
            .send()
            .status
            == 503
    });
    server.infer("GET", "/ping").send().expect(500);
    server.manage("DELETE", "/models/bad").send().expect(200);
    server.infer("GET", "/ping").send().expect(200);
}

#[test]
fn a_worker_that_finishes_keeps_the_shared_host_that_others_leave() {
    let server = isolated("thread", "echo:\n  batchMicros: 1500000\n");
    server
        .manage("PUT", "/models/m?min_worker=2&synchronous=true")
        .send()
        .expect(200);
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..2)
            .map(|_| {
                let request = server.infer("POST", "/predictions/m").body("x");
                scope.spawn(move || request.send())
            })
            .collect();
        server.wait_until("both run", || {
            server.describe("m")["jobQueueStatus"]["pendingRequests"] == 0
        });
        std::thread::sleep(Duration::from_millis(300));
        // Each call takes one worker away; the second leaves the pool empty.
        server
            .manage("PUT", "/models/m?min_worker=1&max_worker=1")
            .send()
            .expect(202);
        server.manage("DELETE", "/models/m").send().expect(200);
        for call in calls {
            call.join().unwrap().expect(200);
        }
    });
    server.wait_without_hosts();
}

#[test]
fn removing_a_model_answers_everything_it_accepted() {
    at_once(ISOLATIONS, |isolation| {
        let server = isolated(isolation, "echo:\n  batchMicros: 20000\n");
        std::thread::scope(|scope| {
            let calls: Vec<_> = (0..40)
                .map(|_| {
                    let request = server.infer("POST", "/predictions/m").body("x");
                    scope.spawn(move || request.send())
                })
                .collect();
            server.wait_until("all are accepted", || {
                let answer = server.manage("GET", "/models/m").send().json();
                answer[0]["jobQueueStatus"]["pendingRequests"]
                    .as_u64()
                    .is_some_and(|waiting| waiting > 20)
            });
            server.manage("DELETE", "/models/m").send().expect(200);
            for call in calls {
                // Accepted, or come after the removal.
                let answer = call.join().unwrap();
                assert!(matches!(answer.status, 200 | 404), "{}", answer.text());
            }
        });
    });
}

#[test]
fn a_worker_over_its_memory_limit_answers_507_and_is_replaced_while_others_go_on() {
    at_once(ISOLATIONS, |isolation| {
        let server = server()
            .config("max_request_size=100000000")
            .config("max_response_size=100000000")
            .start();
        let yaml = format!("workerIsolation: {isolation}\n");
        server.echo_model("small", "1.0", &format!("{yaml}memoryLimitMb: 32\n"));
        server.echo_model("large", "1.0", &yaml);
        for model in ["small", "large"] {
            let path = format!("/models?url={model}&initial_workers=1");
            server.manage("POST", &path).send().expect(200);
        }
        let others = server.worker_pids("large");
        // Echoing it takes a copy.
        let body = vec![b'x'; 48 << 20];
        let call = |model: &str, body: &[u8]| {
            let path = format!("/predictions/{model}");
            server.infer("POST", &path).body(body.to_owned()).send()
        };
        let error = call("small", &body).expect(507).json();
        assert_eq!(error["message"], "Worker died.", "{isolation}");
        call("small", b"x").expect(200);
        let described = server.describe("small");
        assert_eq!(described["memoryLimitMb"], 32);
        assert!(described["limitsEnforcedBy"].is_string(), "{described}");
        let worker = &described["workers"][0];
        assert_eq!(worker["generation"], 2);
        let failure = worker["lastFailure"].to_string();
        assert!(
            failure.contains("out of memory under its limit of 32 MiB"),
            "{failure}"
        );
        call("large", &body).expect(200);
        assert_eq!(server.worker_pids("large"), others);
        assert!(server.describe("large")["memoryLimitMb"].is_null());
    });
}

#[test]
fn a_worker_that_was_refused_memory_finishes_what_it_has_and_is_replaced() {
    for exchange in ["continuousBatching", "asyncCommunication"] {
        let server = isolated(
            "process",
            &format!(
                "{exchange}: true\nbatchSize: 4\nmemoryLimitMb: 64\necho:\n  batchMicros: 50000\n"
            ),
        );
        let stream = server.infer("POST", "/predictions/m").body("x");
        let mut stream = stream.header("x-echo-stream", "20").open().unwrap();
        let greedy = server.infer("POST", "/predictions/m").body("x");
        let greedy = greedy.header("x-echo-fault", "out-of-memory");
        greedy.send().expect(507);
        let mut text = String::new();
        stream.body.read_to_string(&mut text).unwrap();
        assert_eq!(text.lines().count(), 20, "{exchange}");
        server.wait_until("it is replaced", || {
            server.describe("m")["workers"][0]["generation"] == 2
        });
        let failure = server.describe("m")["workers"][0]["lastFailure"].to_string();
        assert!(failure.contains("under its limit of 64 MiB"), "{failure}");
    }
}

#[test]
fn a_limit_on_processor_time_holds_a_host_to_its_cores() {
    let server = isolated("process", "cpuLimit: 0.5\n");
    let described = server.describe("m");
    assert_eq!(described["cpuLimit"], 0.5);
    let by = described["limitsEnforcedBy"].as_str().unwrap();
    let pid = server.worker_pids("m")[0];
    let read = |file: &str| fs_err::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    if by == "control group" {
        let group = read("cgroup");
        assert!(group.contains(&format!("host-{pid}")), "{group}");
    } else {
        // Of every thread: the worker's is not the first.
        for task in fs_err::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let id = task.unwrap().file_name().into_string().unwrap();
            let status = read(&format!("task/{id}/status"));
            let allowed = |line: &str| line.strip_prefix("Cpus_allowed:").map(str::to_owned);
            let mask = status.lines().find_map(allowed).unwrap();
            let cores: u32 = mask
                .chars()
                .filter_map(|c| c.to_digit(16))
                .map(u32::count_ones)
                .sum();
            assert_eq!(cores, 1, "{mask}");
        }
    }
    server
        .infer("POST", "/predictions/m")
        .body("x")
        .send()
        .expect(200);
}
