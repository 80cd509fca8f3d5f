//! Start, announcement, and a stop that answers what it accepted.

use std::io::{BufRead as _, BufReader, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use ts_test::Running;

use crate::{server, serving};

/// Calls one after the other, over one connection as long as the server keeps it or over a new one
/// each time, until nobody can connect any more. Whatever was sent has to be answered.
fn call_until_refused(address: SocketAddr, keeps: bool, answered: &AtomicUsize) {
    let mut kept: Option<BufReader<TcpStream>> = None;
    loop {
        let mut connection = match kept.take() {
            Some(connection) => connection,
            None => match TcpStream::connect(address) {
                Ok(stream) => BufReader::new(stream),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
                    return;
                }
            },
        };
        let how = if keeps { "keep-alive" } else { "close" };
        let request = format!(
            "POST /predictions/m HTTP/1.1\r\nhost: m\r\nconnection: {how}\r\n\
             content-length: 1\r\n\r\nx"
        );
        connection.get_mut().write_all(request.as_bytes()).unwrap();
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            let read = connection.read_line(&mut head).unwrap();
            assert_ne!(read, 0, "the connection ended after {head:?}");
        }
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        let mut body = [0];
        connection.read_exact(&mut body).unwrap();
        answered.fetch_add(1, Ordering::SeqCst);
        let ends = head.to_ascii_lowercase().contains("connection: close");
        if keeps && !ends {
            kept = Some(connection);
        }
        // Some 500 calls a second in all.
        std::thread::sleep(Duration::from_millis(12));
    }
}

fn stop_under_load(server: &mut Running) {
    let address: SocketAddr = {
        let url = server.inference.trim_start_matches("http://");
        url.parse().unwrap()
    };
    let answered = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..8)
            .map(|number| {
                let answered = &answered;
                scope.spawn(move || call_until_refused(address, number % 2 == 0, answered))
            })
            .collect();
        server.wait_until("calls are answered", || {
            answered.load(Ordering::SeqCst) > 200
        });
        server.signal(Signal::TERM);
        for caller in callers {
            caller.join().unwrap();
        }
    });
    let status = server.wait_for_exit(Duration::from_secs(20));
    assert!(status.success(), "{status}\n{}", server.output());
    phases(server);
}

/// The phases of the end are told one after the other (docs/health.md).
pub(crate) fn phases(server: &Running) {
    let output = server.output();
    let mut rest = output.as_str();
    for phase in [
        "SIGTERM: stopping",
        "no new connections after",
        "every accepted request was answered after",
        "all workers ended after",
        "stopped, ",
    ] {
        let at = rest.find(phase);
        let at = at.unwrap_or_else(|| panic!("no `{phase}` where it belongs in\n{output}"));
        rest = &rest[at..];
    }
}

#[test]
fn no_request_that_was_sent_before_the_listeners_closed_is_lost() {
    for round in 0..6 {
        let mut server = server()
            .echo_model(
                "m",
                "minWorkers: 2\nmaxWorkers: 2\nbatchSize: 4\nmaxBatchDelay: 0\necho:\n  batchMicros: 2000\n",
            )
            .config(&format!("shutdown_grace={}", u32::from(round % 3 == 2)))
            .args(&["--models", "m"])
            .start();
        server.wait_ready("m");
        stop_under_load(&mut server);
    }
}

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

#[test]
fn a_registration_that_has_begun_is_finished() {
    let mut server = serving("");
    let slow = "minWorkers: 1\nmaxWorkers: 1\necho:\n  loadMicros: 1500000\n";
    server.echo_model("slow", "1.0", slow);
    let registering = server.manage("POST", "/models?url=slow&initial_workers=1");
    let call = std::thread::Builder::new()
        .spawn(move || registering.send())
        .unwrap();
    server.wait_until("its worker is started", || server.children().len() > 1);
    let status = server.stop();
    assert!(status.success(), "{status}");
    let answer = call.join().unwrap().expect(200);
    assert!(answer.text().contains("registered with 1 initial workers"));
    assert!(server.children().is_empty());
}

#[test]
fn requests_that_do_not_end_are_given_up_and_their_workers_killed() {
    let server = server()
        .echo_model(
            "m",
            "minWorkers: 1\nmaxWorkers: 1\necho:\n  batchMicros: 60000000\n",
        )
        .config("drain_timeout=1")
        .args(&["--models", "m"]);
    let mut server = server.start();
    server.wait_ready("m");
    let pids = server.worker_pids("m");
    let busy = server.infer("POST", "/predictions/m").body("x");
    assert!(busy.limit(Duration::from_millis(300)).try_send().is_err());
    let request = server.infer("POST", "/predictions/m").body("x");
    let call = std::thread::Builder::new()
        .spawn(move || request.try_send())
        .unwrap();
    server.wait_until("it waits", || {
        server.describe("m")["jobQueueStatus"]["pendingRequests"] == 1
    });
    let began = Instant::now();
    assert!(server.stop().success());
    let took = began.elapsed();
    assert!(took < Duration::from_secs(6), "{took:?}");
    let output = server.output();
    assert!(output.contains("given up: 1"), "{output}");
    drop(call.join().unwrap());
    for pid in pids {
        assert!(fs_err::metadata(format!("/proc/{pid}")).is_err(), "{pid}");
    }
}
