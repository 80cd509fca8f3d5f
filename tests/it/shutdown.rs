//! Start, announcement, and a stop that answers what it accepted.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::{server, serving};

#[test]
fn a_stop_under_load_answers_every_accepted_request() {
    let mut server = serving("batchSize: 4\nmaxBatchDelay: 0\necho:\n  batchMicros: 20000\n");
    let url = server.inference.clone();
    let stopped = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..8)
            .map(|_| {
                let (server, stopped, url) = (&server, &stopped, &url);
                scope.spawn(move || {
                    let mut answered = 0;
                    loop {
                        let before = stopped.load(std::sync::atomic::Ordering::SeqCst);
                        match server.infer("POST", "/predictions/m").body("x").try_send() {
                            Ok(answer) if answer.status == 200 => answered += 1,
                            // Draining, told so.
                            Ok(answer) => {
                                assert_eq!(answer.status, 503, "{}", answer.text());
                                return answered;
                            }
                            // Not accepted any more; before the signal that is a lost request.
                            Err(error) => {
                                let after = stopped.load(std::sync::atomic::Ordering::SeqCst);
                                assert!(before || after, "{url}: {error}");
                                return answered;
                            }
                        }
                    }
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(400));
        stopped.store(true, std::sync::atomic::Ordering::SeqCst);
        server.signal(Signal::TERM);
        let answered: usize = callers
            .into_iter()
            .map(|caller| caller.join().unwrap())
            .sum();
        assert!(answered > 20, "{answered}");
    });
    assert!(server.wait_for_exit(Duration::from_secs(20)).success());
}

#[test]
fn a_request_in_flight_is_finished_before_the_end() {
    let mut server = serving("echo:\n  batchMicros: 1000000\n");
    let pids = server.worker_pids("m");
    let request = server.infer("POST", "/predictions/m").body("late");
    let call = std::thread::Builder::new()
        .spawn(move || request.send())
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let status = server.stop();
    assert!(status.success(), "{status}");
    assert_eq!(call.join().unwrap().expect(200).text(), "late");
    for pid in pids {
        assert!(
            fs_err::metadata(format!("/proc/{pid}")).is_err(),
            "host {pid} is left"
        );
    }
    // Nothing unpacked, no pid file, no half-written thing stays behind.
    let left: Vec<_> = fs_err::read_dir(server.folder().join("tmp"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn a_second_signal_does_not_wait() {
    let mut server = serving("echo:\n  batchMicros: 60000000\n");
    let busy = server.infer("POST", "/predictions/m").body("x");
    assert!(busy.limit(Duration::from_millis(300)).try_send().is_err());
    let request = server.infer("POST", "/predictions/m").body("x");
    let call = std::thread::Builder::new()
        .spawn(move || request.try_send())
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    server.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(300));
    server.signal(Signal::TERM);
    server.wait_for_exit(Duration::from_secs(5));
    // Cut off or told so, but not left waiting.
    drop(call.join().unwrap());
}

#[test]
fn the_start_is_announced_once_everything_listens() {
    let started = Instant::now();
    let server = server().start();
    server.infer("GET", "/ping").send().expect(200);
    let took = started.elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    server.wait_until("the announcement", || {
        server
            .output()
            .lines()
            .any(|line| line == "Model server started.")
    });
    let ping = server.infer("GET", "/ping").send().expect(200);
    assert_eq!(ping.json()["status"], "Healthy");
}

#[test]
fn models_are_registered_before_the_start_is_announced() {
    let server = server()
        .echo_model("a", "minWorkers: 1\nmaxWorkers: 1")
        .echo_model(
            "b",
            "minWorkers: 1\nmaxWorkers: 1\necho:\n  loadMicros: 300000\n",
        )
        .args(&["--models", "a", "b"])
        .start();
    // Their workers may still be loading; a request waits for them.
    for model in ["a", "b"] {
        let path = format!("/predictions/{model}");
        server.infer("POST", &path).body("x").send().expect(200);
    }
}

#[test]
fn a_model_that_cannot_be_loaded_does_not_stop_the_others() {
    let server = server()
        .echo_model("good", "minWorkers: 1\nmaxWorkers: 1")
        .args(&["--models", "missing.mar", "good", "x=missing-too"])
        .start();
    server.wait_ready("good");
    server
        .infer("POST", "/predictions/good")
        .body("x")
        .send()
        .expect(200);
    server.wait_until("both are told", || {
        let output = server.output();
        ["missing.mar", "missing-too"]
            .iter()
            .all(|name| output.contains("Failed to load model") && output.contains(name))
    });
}
