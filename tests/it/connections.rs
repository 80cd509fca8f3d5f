//! Limits below requests (K6): connections, heads, bodies that drip or stall, clients that do not
//! read, and the memory of all bodies.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use ts_test::Running;

use crate::server;

fn serving(lines: &[&str]) -> Running {
    let server = server().echo_model("m", "minWorkers: 1\nmaxWorkers: 1");
    let server = server.args(&["--models", "m"]);
    let server = lines
        .iter()
        .fold(server, |server, line| server.config(line));
    let server = server.start();
    server.wait_ready("m");
    server
}

fn connect(server: &Running) -> TcpStream {
    let place = server.inference.strip_prefix("http://").unwrap();
    let client = TcpStream::connect(place).unwrap();
    client
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    client
}

/// Sends a request and reads to the end of its answer's head.
fn head_of(client: &mut TcpStream, request: &str) -> String {
    // A refused client may find that it cannot write.
    let _refused = client.write_all(request.as_bytes());
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match client.read(&mut byte) {
            Ok(1) => head.push(byte[0]),
            _ => break,
        }
    }
    String::from_utf8(head).unwrap()
}

/// What comes until the server closes.
fn rest(client: &mut TcpStream) -> Vec<u8> {
    let mut left = Vec::new();
    match client.read_to_end(&mut left) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => panic!("the server keeps it open"),
        _ => left,
    }
}

/// So many clients that have a place. Those of the harness may still be giving theirs back.
fn served(server: &Running, clients: usize) -> Vec<TcpStream> {
    let begun = Instant::now();
    let mut served = Vec::new();
    while served.len() < clients {
        let mut client = connect(server);
        if head_of(&mut client, PING).starts_with("HTTP/1.1 200") {
            served.push(client);
        }
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "only {}",
            served.len()
        );
    }
    served
}

const PING: &str = "GET /ping HTTP/1.1\r\nhost: x\r\n\r\n";

/// RS-14.
#[test]
fn beyond_the_limit_clients_are_refused_at_once_and_old_ones_go_on() {
    let server = serving(&["max_connections=8"]);
    let mut old = served(&server, 8);
    let begun = Instant::now();
    for _ in 0..20 {
        let mut fresh = connect(&server);
        let answer = head_of(&mut fresh, PING);
        assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
        assert!(answer.contains("x-refusal-reason: connections"), "{answer}");
        let body = String::from_utf8(rest(&mut fresh)).unwrap();
        assert!(body.contains("`max_connections`"), "{body}");
    }
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "{:?}",
        begun.elapsed()
    );
    server.wait_until("it is told", || {
        let told = "connections are refused: raise `max_connections`";
        server.output().contains(told)
    });
    let used = &mut old[3];
    let answer = head_of(used, PING);
    assert!(answer.contains("HTTP/1.1 200"), "{answer}");
    old.clear();
    server.wait_until("there is room again", || {
        head_of(&mut connect(&server), PING).starts_with("HTTP/1.1 200")
    });
}

#[test]
fn one_address_has_no_more_than_its_share() {
    let server = serving(&["max_connections_per_client=3"]);
    let mut kept = served(&server, 3);
    assert!(head_of(&mut connect(&server), PING).starts_with("HTTP/1.1 503"));
    drop(kept.pop());
    server.wait_until("its place is free", || {
        head_of(&mut connect(&server), PING).starts_with("HTTP/1.1 200")
    });
}

/// RS-06: of every request, not only of the first on a connection.
#[test]
fn heads_that_do_not_arrive_end_their_connection() {
    let server = serving(&["request_head_timeout=1"]);
    let begun = Instant::now();
    let first = connect(&server);
    (&first).write_all(b"GET /pi").unwrap();
    let mut second = connect(&server);
    assert!(head_of(&mut second, PING).starts_with("HTTP/1.1 200"));
    second.write_all(b"GET /pi").unwrap();
    for mut client in [first, second] {
        let left = String::from_utf8(rest(&mut client)).unwrap();
        assert!(
            left.is_empty() || left.contains("408") || left.contains("Healthy"),
            "{left}"
        );
    }
    assert!(
        begun.elapsed() < Duration::from_secs(20),
        "{:?}",
        begun.elapsed()
    );
    // A connection that is kept without a request is none of these.
    let mut kept = connect(&server);
    assert!(head_of(&mut kept, PING).starts_with("HTTP/1.1 200"));
    let waited = Instant::now();
    server.wait_until("longer than a head may take", || {
        waited.elapsed() > Duration::from_millis(2500)
    });
    assert!(head_of(&mut kept, PING).contains("HTTP/1.1 200"));
}

#[test]
fn bodies_that_stall_or_drip_are_ended() {
    let server = serving(&["request_body_timeout=1"]);
    let head = "POST /predictions/m HTTP/1.1\r\nhost: x\r\ncontent-length: 10000\r\n\r\nx";
    let mut stalled = connect(&server);
    let answer = head_of(&mut stalled, head);
    assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    let told = String::from_utf8_lossy(&rest(&mut stalled)).into_owned();
    assert!(told.contains("`request_body_timeout`"), "{told}");

    let mut dripping = connect(&server);
    dripping.write_all(head.as_bytes()).unwrap();
    let begun = Instant::now();
    let mut drips = dripping.try_clone().unwrap();
    let ended = std::thread::scope(|scope| {
        scope.spawn(move || {
            while begun.elapsed() < Duration::from_secs(20) && drips.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        let answer = head_of(&mut dripping, "");
        let _closes = dripping.shutdown(Shutdown::Both);
        answer
    });
    assert!(ended.starts_with("HTTP/1.1 400"), "{ended}");
    assert!(begun.elapsed() < Duration::from_secs(15));
}

#[test]
fn a_body_that_stalls_does_not_hold_up_the_end() {
    let mut server = serving(&["drain_timeout=30"]);
    let mut stalled = connect(&server);
    stalled
        .write_all(b"POST /predictions/m HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\nx")
        .unwrap();
    server
        .infer("POST", "/predictions/m")
        .body("x")
        .send()
        .expect(200);
    let begun = Instant::now();
    assert!(server.stop().success());
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn a_client_that_does_not_read_its_answer_is_left() {
    let lines = [
        "response_write_timeout=1",
        "log_filter=info,ts_server::transport=debug",
        "max_request_size=67108864",
        "max_response_size=67108864",
    ];
    let server = serving(&lines);
    let size = 32 << 20;
    let head = format!("POST /predictions/m HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n");
    let mut deaf = connect(&server);
    deaf.write_all(head.as_bytes()).unwrap();
    deaf.write_all(&vec![b'x'; size]).unwrap();
    server.wait_until("its answer is given up", || {
        server.output().contains("`response_write_timeout`")
    });
    drop(deaf);
}

/// A budget for all bodies: what has no room is refused, and room comes back.
#[test]
fn bodies_beyond_the_memory_for_them_are_refused() {
    let server = serving(&["max_body_memory=4194304"]);
    let body = vec![b'x'; 3 << 20];
    let request = || server.infer("POST", "/predictions/m");
    assert_eq!(
        request().body(body.clone()).send().expect(200).body.len(),
        body.len()
    );
    // Larger than all there is can never be taken.
    request().body(vec![b'x'; 5 << 20]).send().expect(413);
    let half = "POST /predictions/m HTTP/1.1\r\nhost: x\r\ncontent-length: 3145728\r\n\r\n";
    let mut held = connect(&server);
    held.write_all(half.as_bytes()).unwrap();
    held.write_all(&body[..3 << 19]).unwrap();
    let refused = || {
        let answer = request().body(body.clone()).send();
        if answer.status == 200 {
            return None;
        }
        assert_eq!(answer.status, 503, "{}", answer.text());
        assert_eq!(answer.header("x-refusal-reason"), Some("body-memory"));
        assert_eq!(answer.header("retry-after"), Some("1"));
        assert!(
            answer.text().contains("`max_body_memory`"),
            "{}",
            answer.text()
        );
        Some(())
    };
    server.wait_until("the half is there, and takes its place", || {
        refused().is_some()
    });
    request().body("small").send().expect(200);
    drop(held);
    server.wait_until("its place is given back", || refused().is_none());
}
