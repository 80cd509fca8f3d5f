//! Probes: what they tell, to whom, and that nobody has to call a model for it.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use ts_test::{Answer, Running};

use crate::{server, serving};

fn ready(server: &Running) -> Answer {
    server.infer("GET", "/v2/health/ready").send()
}

fn is_ready(server: &Running) -> bool {
    let answer = ready(server);
    let told = answer.json()["ready"] == true;
    assert_eq!(answer.status, if told { 200 } else { 400 });
    told
}

const SLOW: &str = "minWorkers: 2\nmaxWorkers: 2\necho:\n  loadMicros: 1500000\n";

#[test]
fn a_server_lives_at_once_and_is_ready_when_every_model_has_loaded() {
    let server = server()
        .echo_model("quick", "minWorkers: 1\nmaxWorkers: 1")
        .echo_model("slow", SLOW)
        .args(&["--models", "quick", "slow"])
        .start();
    let live = server.infer("GET", "/v2/health/live").send().expect(200);
    assert_eq!(live.json(), json!({ "live": true }));
    server.wait_ready("quick");
    let not_ready = ready(&server).expect(400);
    // Whoever may only call models learns nothing of them.
    assert_eq!(not_ready.json(), json!({ "ready": false }));
    let managed = server.manage("GET", "/v2/health/ready").send().expect(400);
    assert_eq!(
        managed.json(),
        json!({
            "ready": false,
            "starting": false,
            "stopping": false,
            "models": [{ "name": "slow", "version": "1.0", "reason": "loading" }],
        })
    );
    for (path, status) in [
        ("/v2/models/quick/ready", 200),
        ("/v2/models/quick/versions/1.0/ready", 200),
        ("/v2/models/slow/ready", 400),
        ("/v2/models/slow/versions/1.0/ready", 400),
        ("/v2/models/slow/versions/2.0/ready", 404),
        ("/v2/models/other/ready", 404),
        // As in TorchServe, which counts workers that load.
        ("/ping", 200),
    ] {
        server.infer("GET", path).send().expect(status);
        if path != "/ping" {
            server.manage("GET", path).send().expect(status);
        }
    }
    let of_slow = server.infer("GET", "/v2/models/slow/ready").send();
    assert_eq!(of_slow.json(), json!({ "name": "slow", "ready": false }));
    server.wait_until("it is ready", || is_ready(&server));
    assert_eq!(ready(&server).json(), json!({ "ready": true }));
    server.infer("HEAD", "/v2/health/ready").send().expect(200);
    server.infer("POST", "/v2/health/ready").send().expect(405);
}

#[test]
fn ping_can_ask_for_readiness() {
    let server = server()
        .echo_model("slow", SLOW)
        .config("ping_requires_ready=true")
        .args(&["--models", "slow"])
        .start();
    let ping = server.infer("GET", "/ping").send().expect(500);
    assert_eq!(ping.json(), json!({ "status": "Unhealthy" }));
    server.wait_until("it is ready", || is_ready(&server));
    server.infer("GET", "/ping").send().expect(200);
}

#[test]
fn a_model_without_a_minimum_of_workers_keeps_nobody_from_being_ready() {
    let server = server().echo_model("m", "batchSize: 1").start();
    assert!(is_ready(&server));
    let register = |workers| {
        let path = format!("/models?url=m&initial_workers={workers}");
        server.manage("POST", &path).send().expect(200);
    };
    register(0);
    assert!(is_ready(&server));
    server.infer("GET", "/v2/models/m/ready").send().expect(400);
    let path = "/models/m?min_worker=1&synchronous=true";
    server.manage("PUT", path).send().expect(200);
    assert!(is_ready(&server));
    let path = "/models/m?min_worker=0&max_worker=0&synchronous=true";
    server.manage("PUT", path).send().expect(200);
    // Taken out of service on purpose.
    assert!(is_ready(&server));
}

#[test]
fn a_model_registered_beside_others_counts_when_its_workers_have_been_up() {
    let server = serving("");
    server.wait_until("it is ready", || is_ready(&server));
    server.echo_model("slow", "1.0", SLOW);
    server.echo_model(
        "bad",
        "1.0",
        "minWorkers: 1\nmaxWorkers: 1\necho:\n  loadError: broken\n",
    );
    for model in ["slow", "bad"] {
        let path = format!("/models?url={model}&initial_workers=1&synchronous=false");
        server.manage("POST", &path).send().expect(202);
    }
    // They load; whoever is served goes on.
    server.wait_until("one of them does not come up", || {
        assert!(is_ready(&server));
        server.output().contains("broken")
    });
    server.wait_until("the other one serves", || {
        assert!(is_ready(&server));
        let path = "/v2/models/slow/ready";
        server.infer("GET", path).send().status == 200
    });
    // From here on it is missed: by its last worker as by that of any other.
    kill(server.worker_pids("slow")[0]);
    server.wait_until("its loss is told", || !is_ready(&server));
    let why = server.manage("GET", "/v2/health/ready").send();
    if why.status == 400 {
        assert_eq!(why.json()["models"][0]["name"], "slow");
    }
    server.wait_until("it is ready again", || is_ready(&server));
    // One that was scaled to zero is nobody's, until its workers have come back.
    for (path, status) in [
        (
            "/models/slow?min_worker=0&max_worker=0&synchronous=true",
            200,
        ),
        ("/models/slow?min_worker=1&max_worker=1", 202),
    ] {
        server.manage("PUT", path).send().expect(status);
        assert!(is_ready(&server));
    }
}

#[test]
fn the_last_worker_decides() {
    for isolation in ["process", "thread"] {
        let config = format!(
            "minWorkers: 2\nmaxWorkers: 2\nworkerIsolation: {isolation}\nmaxRetryTimeoutInSec: 60\n\
             echo:\n  loadMicros: 700000\n"
        );
        let server = server()
            .echo_model("m", &config)
            .args(&["--models", "m"])
            .start();
        server.wait_until("it is ready", || is_ready(&server));
        let mut pids = server.worker_pids("m");
        pids.dedup();
        let (last, others) = pids.split_last().unwrap();
        for pid in others {
            kill(*pid);
            server.wait_until("it is missed", || !server.worker_pids("m").contains(pid));
            // The other one serves on.
            assert!(is_ready(&server));
        }
        server.wait_ready("m");
        let lost = Instant::now();
        for pid in server.worker_pids("m") {
            kill(pid);
        }
        server.wait_until("it is not ready", || !is_ready(&server));
        let took = lost.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
        server.infer("GET", "/v2/models/m/ready").send().expect(400);
        server.infer("GET", "/ping").send().expect(200);
        let v1 = server.manage("GET", "/v1/models/m").send().expect(200);
        assert_eq!(v1.json()["ready"], false);
        server.wait_until("it is ready again", || is_ready(&server));
        assert!(!server.worker_pids("m").contains(last));
        server
            .infer("POST", "/predictions/m")
            .body("x")
            .send()
            .expect(200);
    }
}

fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    // Workers may share a host.
    let _may_be_gone = rustix::process::kill_process(pid, Signal::KILL);
}

#[test]
fn a_model_that_the_start_could_not_load_is_missed_until_somebody_registers_it() {
    let server = server()
        .echo_model("good", "minWorkers: 1\nmaxWorkers: 1")
        .args(&["--models", "missing.mar", "good"])
        .start();
    server.wait_ready("good");
    server.wait_until("it is told", || {
        server
            .output()
            .contains("Failed to load model: missing.mar")
    });
    assert!(!is_ready(&server));
    server.infer("GET", "/ping").send().expect(200);
    let why = server.manage("GET", "/v2/health/ready").send().expect(400);
    assert_eq!(
        why.json()["models"],
        json!([{ "name": "missing", "reason": "not registered" }])
    );
    let slow = "minWorkers: 1\nmaxWorkers: 1\necho:\n  loadMicros: 1500000\n";
    server.echo_model("missing", "1.0", slow);
    server
        .manage(
            "POST",
            "/models?url=missing&initial_workers=1&synchronous=false",
        )
        .send()
        .expect(202);
    // It was to be there from the start.
    assert!(!is_ready(&server));
    server.wait_until("it has loaded", || is_ready(&server));
}

#[test]
fn a_strict_start_fails_with_a_model_that_does_not_come_up() {
    let strict = |models: &[&str]| {
        let server = server()
            .echo_model("good", "minWorkers: 1\nmaxWorkers: 1")
            .echo_model(
                "bad",
                "minWorkers: 1\nmaxWorkers: 1\necho:\n  loadError: broken\n",
            )
            .config("exit_on_model_failure=true");
        server.args(&[&["--models"], models].concat())
    };
    for lost in ["missing.mar", "bad"] {
        let (status, output) = strict(&["good", lost]).start_and_fail();
        assert_eq!(status.code(), Some(1), "{output}");
        let name = lost.trim_end_matches(".mar");
        let line = output
            .lines()
            .find(|line| line.contains("models did not come up"));
        let line = line.unwrap_or_else(|| panic!("not told in {output}"));
        assert!(line.contains(&format!("`{name}`")), "{line}");
        assert!(!line.contains("`good`"), "{line}");
    }
    let server = strict(&["good"]).start();
    assert!(is_ready(&server));
}

#[test]
fn probes_need_no_token_and_tell_only_those_why_who_may_know() {
    let server = server()
        .echo_model(
            "slow",
            "minWorkers: 1\nmaxWorkers: 1\necho:\n  loadMicros: 60000000\n",
        )
        .with_default_safety()
        .args(&["--models", "slow"])
        .start();
    for base in [&server.inference, &server.management] {
        let ask = |path: &str| ts_test::Request::new("GET", format!("{base}{path}"));
        ask("/v2/health/live").send().expect(200);
        let bare = ask("/v2/health/ready").send().expect(400);
        assert_eq!(bare.json(), json!({ "ready": false }));
        ask("/v2/models/slow/ready").send().expect(400).json();
    }
    let keys = fs_err::read_to_string(server.folder().join("key_file.json")).unwrap();
    let keys: serde_json::Value = serde_json::from_str(&keys).unwrap();
    let bearer = |kind: &str| format!("Bearer {}", keys[kind]["key"].as_str().unwrap());
    let (inference, management) = (bearer("inference"), bearer("management"));
    let ask = |token: &str, path: &str| {
        let request = server.manage("GET", path).header("authorization", token);
        request.send()
    };
    let told = ask(&management, "/v2/health/ready").expect(400).json();
    assert_eq!(told["models"][0]["name"], "slow");
    let told = ask(&inference, "/v2/health/ready").expect(400).json();
    assert_eq!(told, json!({ "ready": false }));
    for token in [&inference, &management] {
        let told = ask(token, "/v2/models/slow/ready").expect(400).json();
        assert_eq!(told, json!({ "name": "slow", "ready": false }));
    }
}

#[test]
fn a_server_that_stops_is_not_ready_and_answers_still() {
    let mut server = server()
        .echo_model("m", "minWorkers: 1\nmaxWorkers: 1")
        .config("shutdown_grace=2")
        .args(&["--models", "m"])
        .start();
    server.wait_until("it is ready", || is_ready(&server));
    server.signal(Signal::INT);
    server.wait_until("it is not ready", || !is_ready(&server));
    let why = server.manage("GET", "/v2/health/ready").send().expect(400);
    assert_eq!(why.json()["stopping"], true);
    server.infer("GET", "/ping").send().expect(500);
    server.infer("GET", "/v2/models/m/ready").send().expect(400);
    server.infer("GET", "/v2/health/live").send().expect(200);
    let answer = server.infer("POST", "/predictions/m").body("x").send();
    assert_eq!(answer.expect(200).header("connection"), Some("close"));
    assert!(server.wait_for_exit(Duration::from_secs(20)).success());
    assert!(server.output().contains("serving on for 2 s"));
}

#[test]
fn probes_cost_no_call_of_a_worker() {
    let server = serving("echo:\n  batchMicros: 60000000\n");
    let request = server.infer("POST", "/predictions/m").body("x");
    // Its only worker is busy from here on.
    assert!(
        request
            .limit(Duration::from_millis(300))
            .try_send()
            .is_err()
    );
    let began = Instant::now();
    for _ in 0..50 {
        assert!(is_ready(&server));
        server.infer("GET", "/v2/models/m/ready").send().expect(200);
    }
    assert!(began.elapsed() < Duration::from_secs(10));
}
