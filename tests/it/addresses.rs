//! Where listeners bind (*torchserve-contract* 2.4, CF-13): IPv4, IPv6, unix sockets, and one
//! listener for all APIs.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use crate::server;

/// One request over a unix socket: status and body.
fn over(socket: &Path, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(socket).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    (status, body.to_owned())
}

fn path(address: &str) -> &Path {
    Path::new(address.strip_prefix("unix:").unwrap())
}

fn listening_on(server: ts_test::Server, files: [&str; 3]) -> ts_test::Server {
    let folder = server.folder().to_owned();
    let keys = ["inference_address", "management_address", "metrics_address"];
    keys.iter().zip(files).fold(server, |server, (key, file)| {
        server.config(&format!("{key}=unix:{}", folder.join(file).display()))
    })
}

#[test]
fn each_api_answers_on_a_unix_socket_of_its_own_and_the_files_go_at_the_end() {
    let server = server().echo_model("m", "minWorkers: 1\nmaxWorkers: 1");
    let server = listening_on(server, ["ü #.sock", "m.sock", "x.sock"]);
    let mut server = server.args(&["--models", "m"]).start();
    let [inference, management, metrics] = [&server.inference, &server.management, &server.metrics]
        .map(|address| path(address).to_owned());
    assert_eq!(inference.file_name().unwrap(), "ü #.sock");
    assert_eq!(
        over(&inference, "POST", "/predictions/m", "hi"),
        (200, "hi".to_owned())
    );
    assert_eq!(over(&management, "GET", "/models", "").0, 200);
    assert!(
        over(&metrics, "GET", "/metrics", "")
            .1
            .contains("Requests2XX")
    );
    // No API is where it was not asked for.
    assert_eq!(over(&inference, "GET", "/models", "").0, 404);
    assert_eq!(over(&management, "POST", "/predictions/m", "hi").0, 404);
    assert_eq!(over(&metrics, "GET", "/ping", "").0, 404);
    for socket in [&inference, &management, &metrics] {
        let mode = fs_err::metadata(socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o660, "the owner and the group may connect");
    }
    assert!(server.stop().success());
    assert!(
        ![inference, management, metrics]
            .iter()
            .any(|socket| socket.exists())
    );
}

#[test]
fn the_same_place_is_one_listener_of_all_apis() {
    let unix = listening_on(server(), ["all.sock", "all.sock", "metrics.sock"]).start();
    let socket = path(&unix.inference).to_owned();
    assert_eq!(unix.inference, unix.management);
    for path in ["/ping", "/models", "/metrics"] {
        assert_eq!(over(&socket, "GET", path, "").0, 200, "{path}");
    }

    let free = {
        let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        probe.local_addr().unwrap().port()
    };
    let tcp = server()
        .config(&format!("inference_address=http://127.0.0.1:{free}"))
        .config(&format!("management_address=http://127.0.0.1:{free}"))
        .start();
    assert_eq!(tcp.inference, tcp.management);
    for path in ["/ping", "/models", "/metrics"] {
        tcp.infer("GET", path).send().expect(200);
    }
}

#[test]
fn a_stale_socket_file_is_replaced_and_one_in_use_is_not() {
    let file = |server: &ts_test::Server| server.folder().join("i.sock");
    let files = ["i.sock", "m.sock", "x.sock"];

    let stale = listening_on(server(), files);
    drop(UnixListener::bind(file(&stale)).unwrap());
    assert!(file(&stale).exists(), "what a killed server leaves");
    let stale = stale.start();
    assert_eq!(over(path(&stale.inference), "GET", "/ping", "").0, 200);

    let used = listening_on(server(), files);
    let place = file(&used);
    let listener = UnixListener::bind(&place).unwrap();
    let (status, output) = used.start_and_fail();
    assert_eq!(status.code(), Some(1));
    assert!(
        output.contains("Failed to bind to address: unix:"),
        "{output}"
    );
    assert!(output.contains("another process listens there"), "{output}");
    drop(listener);

    let other = listening_on(server(), files);
    fs_err::write(file(&other), "kept").unwrap();
    let kept = other.folder().join("i.sock");
    let folder = other.folder().to_owned();
    let ran = other.run(&[
        "--start",
        "--foreground",
        "--model-store",
        "store",
        "--ts-config",
        "config.properties",
    ]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert!(ran.stderr.contains("not a socket"), "{ran:?}");
    assert_eq!(fs_err::read_to_string(kept).unwrap(), "kept");
    // A start that fails takes away what it had bound.
    assert!(!folder.join("m.sock").exists());
}

#[test]
fn a_server_that_took_over_a_socket_keeps_it_when_the_old_one_ends() {
    let old = listening_on(server(), ["i.sock", "m.sock", "x.sock"]);
    let socket = old.folder().join("i.sock");
    let mut old = old.start();
    // As if nobody had listened there.
    fs_err::remove_file(&socket).unwrap();
    let new = server()
        .config(&format!("inference_address=unix:{}", socket.display()))
        .start();
    assert!(old.stop().success());
    assert_eq!(over(&socket, "GET", "/ping", "").0, 200);
    drop(new);
}

#[test]
fn addresses_of_ipv6_work_and_are_told_in_brackets() {
    let server = server()
        .config("inference_address=http://[::1]:0")
        .config("management_address=http://[::]:0")
        .start();
    assert!(
        server.inference.starts_with("http://[::1]:"),
        "{}",
        server.inference
    );
    server.infer("GET", "/ping").send().expect(200);
    let management = server.management.replace("[::]", "[::1]");
    assert!(management.starts_with("http://[::1]:"), "{management}");
    let port = management.rsplit(':').next().unwrap();
    let mut stream = std::net::TcpStream::connect(format!("[::1]:{port}")).unwrap();
    write!(
        stream,
        "GET /models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    server.wait_until("it is told that the second is open", || {
        server
            .output()
            .contains("http://[::]:0 is open to every network")
    });
}

#[test]
fn what_cannot_be_bound_is_refused_with_the_reason() {
    for (address, told) in [
        (
            "http://[fe80::1%nosuch]:0",
            "Failed to bind to address: http://[fe80::1%nosuch]:0",
        ),
        ("http://::1:80", "Invalid binding address: http://::1:80"),
        (
            "http://127.0.0.1:65535",
            "Invalid port number: http://127.0.0.1:65535",
        ),
        ("http://127.0.0.1:0/", "Invalid port number: "),
        ("https://127.0.0.1:0/", "Invalid port number: "),
        (
            "unix:/no/such/folder/s",
            "Failed to bind to address: unix:/no/such/folder/s",
        ),
        ("unix:relative", "Invalid binding address: unix:relative"),
    ] {
        let (status, output) = server()
            .config(&format!("inference_address={address}"))
            .start_and_fail();
        assert_eq!(status.code(), Some(1), "{address}: {output}");
        assert!(output.contains(told), "{address}: {output}");
    }
    let long = format!("unix:/{}", "x".repeat(107));
    let (_, output) = server()
        .config(&format!("metrics_address={long}"))
        .start_and_fail();
    assert!(
        output.contains("108 bytes") && output.contains("107"),
        "{output}"
    );
}
