//! Workers that are groups of processes, on the echo backend. Those that meet in `torch.distributed`
//! are in `tests/python/test_parallel.py`.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use ts_test::{Request, Running, at_once};

use crate::{server, serving};

const TWO: &str = "parallelType: tp\nparallelLevel: 2\n";

fn group(yaml: &str) -> Running {
    serving(&format!("{TWO}{yaml}"))
}

/// Processes of the model's workers, rank by rank.
fn pids(server: &Running) -> Vec<u32> {
    let workers = server.describe("m")["workers"].clone();
    let workers = workers.as_array().unwrap().iter();
    let ranks = workers.flat_map(|worker| worker["ranks"].as_array().cloned().unwrap_or_default());
    ranks.map(|rank| number(&rank["pid"])).collect()
}

fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

fn predict(server: &Running) -> Request {
    server.infer("POST", "/predictions/m").body("x")
}

fn on_rank(server: &Running, fault: &str, rank: u32) -> Request {
    let request = predict(server).header("x-echo-fault", fault);
    request.header("x-echo-fault-rank", &rank.to_string())
}

fn lives(pid: u32) -> bool {
    fs_err::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[test]
fn one_worker_is_several_processes_with_the_environment_of_torchrun() {
    let server = serving(
        "parallelType: pptp\ntorchrun:\n  nnodes: 1\n  nproc-per-node: 3\n  \
         OMP_NUMBER_THREADS: 5\n",
    );
    let described = server.describe("m");
    let of_model = ["parallelType", "parallelLevel", "workerIsolation"];
    let of_model = of_model.map(|member| described[member].clone());
    assert_eq!(
        Value::from(of_model.to_vec()),
        json!(["pptp", 3, "process"])
    );
    let worker = &described["workers"][0];
    assert_eq!(
        (&worker["pid"], &worker["threads"]),
        (&worker["ranks"][0]["pid"], &5.into())
    );
    let pids = pids(&server);
    let mut children = server.children();
    children.sort_unstable();
    let mut sorted = pids.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, children);
    let mut ports = Vec::new();
    for (rank, pid) in pids.iter().enumerate() {
        let environment = fs_err::read_to_string(format!("/proc/{pid}/environ")).unwrap();
        let variable = |name: &str| {
            let mut all = environment
                .split('\0')
                .filter_map(|one| one.split_once('='));
            all.find(|(own, _)| *own == name)
                .map(|(_, value)| value.to_owned())
        };
        for (name, value) in [
            ("RANK", &*rank.to_string()),
            ("LOCAL_RANK", &*rank.to_string()),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("GROUP_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("OMP_NUM_THREADS", "5"),
            ("TORCHELASTIC_RUN_ID", "m_9000"),
        ] {
            assert_eq!(
                variable(name).as_deref(),
                Some(value),
                "{name} of rank {rank}"
            );
        }
        ports.push(variable("MASTER_PORT").unwrap());
    }
    ports.dedup();
    assert_eq!(ports.len(), 1, "{ports:?}");
    assert_ne!(ports[0], "0");
}

#[test]
fn all_ranks_run_a_batch_and_the_first_one_answers() {
    let server = group("batchSize: 4\n");
    let large = vec![b'x'; 300_000];
    for body in [&b"one"[..], &large, b"two", &large] {
        let answer = server.infer("POST", "/predictions/m").body(body).send();
        assert_eq!(answer.expect(200).body, body);
    }
    // The others are waited for.
    let began = Instant::now();
    on_rank(&server, "delay=400", 1).send().expect(200);
    assert!(began.elapsed() >= Duration::from_millis(400));
    let parts = predict(&server).header("x-echo-stream", "5").send();
    assert_eq!(parts.expect(200).text(), "0 x\n1 x\n2 x\n3 x\n4 x\n");
    assert_eq!(server.describe("m")["workers"][0]["generation"], 1);
}

#[test]
fn steps_of_a_continuous_batch_reach_all_ranks() {
    let server = group("continuousBatching: true\nbatchSize: 2\n");
    let parts = predict(&server).header("x-echo-stream", "3").send();
    assert_eq!(parts.expect(200).text(), "0 x\n1 x\n2 x\n");
    // A reply that breaks off is no whole one.
    let broken = on_rank(&server, "abort", 1).header("x-echo-fault-at", "1");
    let broken = broken.header("x-echo-stream", "3");
    assert!(broken.try_send().is_err());
    predict(&server).send().expect(200);
    assert_eq!(server.describe("m")["workers"][0]["generation"], 2);
}

#[test]
fn a_rank_that_is_lost_or_parts_costs_one_batch_and_one_generation() {
    let cases = ["abort", "panic", "hang", "raise-batch"];
    let cases = cases.iter().flat_map(|fault| [(fault, 0), (fault, 1)]);
    at_once(cases, |(fault, rank)| {
        let server = group("responseTimeout: 2\n");
        let before = pids(&server);
        let error = on_rank(&server, fault, rank).send().expect(500).json();
        assert_eq!(error["message"], "Worker died.", "{fault} of rank {rank}");
        // The next one waits for the replacement.
        predict(&server).send().expect(200);
        let worker = server.describe("m")["workers"][0].clone();
        let failure = worker["lastFailure"].as_str().unwrap();
        assert_eq!(worker["generation"], 2, "{fault} of rank {rank}: {failure}");
        let named = format!("rank {rank}");
        // One whose thread ends by itself is rank 0's, as with any other worker.
        let unnamed = (*fault, rank) == ("panic", 0);
        assert!(failure.contains(&named) || unnamed, "{fault}: {failure}");
        assert_eq!(pids(&server).len(), 2);
        server.wait_until("the ranks of before are gone", || {
            before.iter().all(|pid| !lives(*pid))
        });
    });
}

#[test]
fn a_batch_that_all_ranks_raise_on_is_its_own_fault() {
    let server = group("");
    let before = pids(&server);
    let request = predict(&server).header("x-echo-fault", "raise-batch");
    let error = request.send().expect(503).json();
    assert_eq!(error["message"], "Prediction failed");
    predict(&server).send().expect(200);
    assert_eq!(pids(&server), before);
}

#[test]
fn in_a_pipeline_the_first_rank_is_handed_the_batches() {
    let server = serving("parallelType: pp\nparallelLevel: 2\n");
    let before = pids(&server);
    assert_eq!(before.len(), 2);
    on_rank(&server, "abort", 1).send().expect(200);
    assert_eq!(pids(&server), before);
    on_rank(&server, "abort", 0).send().expect(500);
    predict(&server).send().expect(200);
    let after = pids(&server);
    assert!(after.len() == 2 && after.iter().all(|pid| !before.contains(pid)));
}

#[test]
fn a_rank_killed_while_it_is_idle_takes_the_others_along() {
    at_once([0, 1], |rank| {
        let server = group("");
        let before = pids(&server);
        let pid = i32::try_from(before[rank]).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        server.wait_until("another group serves", || {
            let now = pids(&server);
            now.len() == 2 && now.iter().all(|pid| !before.contains(pid))
        });
        predict(&server).send().expect(200);
        server.wait_until("its other ranks are gone", || {
            before.iter().all(|pid| !lives(*pid))
        });
    });
}

#[test]
fn a_rank_that_does_not_load_is_named() {
    let server = server().start();
    let register = |model: &str, yaml: &str| {
        server.echo_model(model, "1.0", &format!("{TWO}{yaml}"));
        let path = format!("/models?url={model}&initial_workers=1");
        let error = server.manage("POST", &path).send().expect(500).json();
        error["message"].as_str().unwrap().to_owned()
    };
    let error = register("bad", "echo:\n  loadError: broken\n  loadRank: 1\n");
    assert!(error.contains("rank 1: broken"), "{error}");
    let slow = "startupTimeout: 1\necho:\n  loadMicros: 20000000\n  loadRank: 1\n";
    let error = register("slow", slow);
    assert!(error.contains("no answer of rank 1 within 1 s"), "{error}");
    server.wait_without_hosts();
}

#[test]
fn groups_come_and_go_whole() {
    let server = group("");
    let scale = |workers: usize| {
        let path = format!("/models/m?min_worker={workers}&max_worker={workers}&synchronous=true");
        server.manage("PUT", &path).send().expect(200);
        let found = pids(&server);
        assert_eq!(found.len(), 2 * workers);
        server.wait_until("no process is left over", || {
            server.children().len() == 2 * workers
        });
        found
    };
    let one = scale(1);
    let two = scale(2);
    assert_eq!(one[..], two[..2]);
    assert_eq!(scale(1), one);
    scale(0);
    let three = scale(3);
    let mut server = server;
    server.stop();
    assert!(three.iter().all(|pid| !lives(*pid)));
}

#[test]
fn ranks_are_gone_when_the_server_is_gone_even_by_sigkill() {
    let server = group("echo:\n  batchMicros: 30000000\n");
    let pids = pids(&server);
    let busy = predict(&server).limit(Duration::from_millis(300));
    assert!(busy.try_send().is_err());
    server.signal(Signal::KILL);
    server.wait_until("ranks have ended", || pids.iter().all(|pid| !lives(*pid)));
}

#[test]
fn many_lost_groups_leave_nothing() {
    let server = group("");
    let descriptors = || {
        let all = fs_err::read_dir(format!("/proc/{}/fd", server.pid()));
        all.unwrap().count()
    };
    let die = |rank| {
        on_rank(&server, "abort", rank).send().expect(500);
        predict(&server).send().expect(200);
    };
    die(0);
    let base = descriptors();
    for rank in [0, 1, 1] {
        die(rank);
    }
    server.wait_until("descriptors are given back", || descriptors() <= base);
    server.wait_until("two processes are left", || server.children().len() == 2);
}

#[test]
fn what_one_machine_cannot_do_is_refused() {
    let server = server().config("worker_isolation=thread").start();
    for (yaml, told) in [
        (
            "torchrun:\n  nnodes: 2\n  nproc-per-node: 2\n",
            "one machine",
        ),
        ("parallelLevel: 65\n", "at most 64"),
        ("parallelLevel: 2\nworkerIsolation: thread\n", "`thread`"),
        (
            "parallelLevel: 2\nasyncCommunication: true\n",
            "`asyncCommunication`",
        ),
    ] {
        server.echo_model("m", "1.0", &format!("parallelType: tp\n{yaml}"));
        let path = "/models?url=m&initial_workers=1";
        let error = server.manage("POST", path).send().expect(400).json();
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(told), "{message}");
    }
    server.echo_model("m", "1.0", TWO);
    let path = "/models?url=m&initial_workers=1&worker_isolation=thread";
    server.manage("POST", path).send().expect(400);
    // A setting for all models gives way.
    let path = "/models?url=m&initial_workers=1";
    server.manage("POST", path).send().expect(200);
    assert_eq!(pids(&server).len(), 2);
}

#[test]
fn a_handler_that_starts_its_own_processes_has_one() {
    let server = serving("parallelType: custom\nparallelLevel: 2\nasyncCommunication: true\n");
    let described = server.describe("m");
    assert_eq!(described["parallelType"], "custom");
    assert_eq!(described["workers"][0].get("ranks"), None);
    assert_eq!(server.children().len(), 1);
    predict(&server).send().expect(200);
}
