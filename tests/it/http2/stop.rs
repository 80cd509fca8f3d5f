//! The end of the server over TLS and HTTP/2: what was accepted is answered to the last byte, and
//! every client hears a farewell.

use std::cell::Cell;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::SendRequest;
use http::{Request, StatusCode};
use rustix::process::Signal;
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;
use ts_test::Running;

use super::floods::{Kind, Raw};
use super::run;
use crate::shutdown::phases;
use crate::tls::Authority;

const LIMIT: Duration = Duration::from_secs(30);

/// How long a slow client does nothing: longer than the end waits for requests to come.
const PAUSE: Duration = Duration::from_millis(700);

/// Whether a request that failed so was not accepted: the server has said before which ones it
/// takes, and a client may send the others again (RFC 9113, 6.8).
fn was_not_accepted(error: &h2::Error) -> bool {
    let calm = error.reason() == Some(h2::Reason::NO_ERROR) && error.is_go_away();
    (calm && error.is_remote()) || error.reason() == Some(h2::Reason::REFUSED_STREAM)
}

/// Calls over one connection, several at once, until its server says farewell. Returns whether it
/// was one to connect again after.
async fn call_until_farewell(send: &SendRequest<Bytes>, uri: &str, answered: &Cell<usize>) {
    let one_after_the_other = || async {
        loop {
            let Ok(mut ready) = send.clone().ready().await else {
                return;
            };
            let request = Request::post(uri).body(()).unwrap();
            let Ok((response, mut body)) = ready.send_request(request, false) else {
                return;
            };
            // Where it has gone already, the response tells.
            let _sent = body.send_data(Bytes::from_static(b"x"), true);
            let response = match response.await {
                Ok(response) => response,
                Err(error) => {
                    assert!(was_not_accepted(&error), "a request is lost: {error:?}");
                    return;
                }
            };
            assert_eq!(response.status(), StatusCode::OK);
            let mut body = response.into_body();
            let mut got = Vec::new();
            while let Some(part) = body.data().await {
                let part = part.unwrap();
                body.flow_control().release_capacity(part.len()).unwrap();
                got.extend_from_slice(&part);
            }
            assert_eq!(got, b"x");
            answered.set(answered.get() + 1);
        }
    };
    futures_util::future::join_all((0..4).map(|_| one_after_the_other())).await;
}

/// Connects again and again until nobody listens any more.
async fn call_until_refused(authority: &Authority, server: String, answered: Rc<Cell<usize>>) {
    let mut config = authority.client(None, rustls::ALL_VERSIONS);
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connector = TlsConnector::from(Arc::new(config));
    let uri = format!("{server}/predictions/m");
    while let Ok(socket) = tokio::net::TcpStream::connect(crate::tls::place(&server)).await {
        let name = ServerName::try_from("localhost").unwrap();
        let stream = connector.connect(name, socket).await.unwrap();
        let (send, connection) = h2::client::handshake(stream).await.unwrap();
        let connection = tokio::spawn(connection);
        call_until_farewell(&send, &uri, &answered).await;
        drop(send);
        // Its own farewell may find the connection closed.
        let _ended = tokio::time::timeout(LIMIT, connection).await.unwrap();
    }
}

const BUSY: [&str; 2] = ["job_queue_size=1000", "drain_timeout=30"];

#[test]
fn no_accepted_request_is_lost_under_load() {
    for grace in [0, 0, 1, 0] {
        let test = async |authority: &Authority, server: &mut Running| {
            let answered = Rc::new(Cell::new(0));
            let callers = (0..6).map(|_| {
                call_until_refused(authority, server.inference.clone(), Rc::clone(&answered))
            });
            let callers = futures_util::future::join_all(callers);
            let stop = async {
                let begun = Instant::now();
                while answered.get() < 300 {
                    assert!(begun.elapsed() < LIMIT, "{} calls", answered.get());
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                server.signal(Signal::TERM);
            };
            let both = futures_util::future::join(callers, stop);
            tokio::time::timeout(2 * LIMIT, both).await.unwrap();
            assert!(server.wait_for_exit(LIMIT).success());
            phases(server);
        };
        let grace = format!("shutdown_grace={grace}");
        run(test, &[&BUSY[..], &[grace.as_str()]].concat());
    }
}

/// A client that has not read its answer when the server is told to stop reads it to the end.
#[test]
fn an_answer_is_sent_to_its_end_however_slowly_it_is_read() {
    let size = 24 << 20;
    let head = format!(
        "POST /predictions/m HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\
         connection: keep-alive\r\n\r\n"
    );
    let test = async |authority: &Authority, server: &mut Running| {
        let config = || authority.client(None, rustls::ALL_VERSIONS);
        // Over HTTP/1.
        let mut one = crate::tls::connect(&server.inference, config()).unwrap();
        one.write_all(head.as_bytes()).unwrap();
        one.write_all(&vec![b'x'; size]).unwrap();
        let mut first = [0; 64];
        one.read_exact(&mut first).unwrap();
        assert!(first.starts_with(b"HTTP/1.1 200"));
        // And over HTTP/2, where the client's windows hold the server up.
        let client = super::Client::connect(authority, server).await;
        let mut send = client.send.clone().ready().await.unwrap();
        let request = client.request(http::Method::POST, "/predictions/m");
        let (response, mut body) = send.send_request(request, false).unwrap();
        body.send_data(Bytes::from(vec![b'y'; 3 << 20]), true)
            .unwrap();
        let mut two = response.await.unwrap().into_body();
        drop(send);

        server.signal(Signal::TERM);
        server.wait_until("the listeners are closed", || {
            server.output().contains("no new connections after")
        });
        tokio::time::sleep(PAUSE).await;
        let mut got = 0;
        while let Some(part) = two.data().await {
            let part = part.unwrap();
            assert!(part.iter().all(|byte| *byte == b'y'));
            got += part.len();
            two.flow_control().release_capacity(part.len()).unwrap();
        }
        assert_eq!(got, 3 << 20);
        let mut rest = Vec::new();
        let read = one.read_to_end(&mut rest);
        let body = rest.iter().filter(|byte| **byte == b'x').count();
        assert!(body >= size, "{body} of {size} bytes, then {read:?}");
        assert!(server.wait_for_exit(LIMIT).success());
        phases(server);
    };
    let lines = [
        "drain_timeout=30",
        "max_request_size=67108864",
        "max_response_size=67108864",
    ];
    run(test, &lines);
}

#[test]
fn every_idle_client_hears_the_farewell() {
    let test = async |authority: &Authority, server: &mut Running| {
        let mut idle: Vec<_> = (0..20).map(|_| Raw::connect(authority, server)).collect();
        for client in &mut idle {
            // It is served: there is somebody to say farewell to.
            client.get(1, "/ping");
            assert_eq!(client.wait_for(&[Kind::Headers]).kind, Kind::Headers);
        }
        let begun = Instant::now();
        server.signal(Signal::TERM);
        for client in &mut idle {
            let farewell = client.wait_for(&[Kind::GoAway]);
            // No error, and all that was sent is taken.
            assert_eq!(farewell.payload[4..8], [0; 4], "{farewell:?}");
        }
        drop(idle);
        assert!(server.wait_for_exit(LIMIT).success());
        assert!(begun.elapsed() < Duration::from_secs(10));
        phases(server);
    };
    run(test, &["drain_timeout=30"]);
}

#[test]
fn while_the_server_is_not_ready_a_connection_ends_with_its_next_answer() {
    let test = async |authority: &Authority, server: &mut Running| {
        let (mut old, mut idle) = (
            Raw::connect(authority, server),
            Raw::connect(authority, server),
        );
        old.get(1, "/ping");
        old.wait_for(&[Kind::Headers]);
        server.signal(Signal::TERM);
        server.wait_until("it is not ready", || {
            server.infer("GET", "/v2/health/ready").send().status == 400
        });
        for client in [&mut old, &mut Raw::connect(authority, server)] {
            client.get(3, "/v2/health/live");
            // The answer first, or the word that no other will come; both come.
            let both = [Kind::Headers, Kind::GoAway];
            let first = client.wait_for(&both).kind;
            let second = client.wait_for(&both).kind;
            assert!(first != second, "{first:?} twice");
        }
        // Whoever asks for nothing hears of it when connections close.
        assert_eq!(idle.wait_for(&[Kind::GoAway]).kind, Kind::GoAway);
        assert!(server.wait_for_exit(LIMIT).success());
        phases(server);
    };
    run(test, &["drain_timeout=30", "shutdown_grace=2"]);
}

#[test]
fn a_reply_in_parts_comes_to_its_end() {
    let test = async |authority: &Authority, server: &mut Running| {
        let client = super::Client::connect(authority, server).await;
        let mut send = client.send.clone().ready().await.unwrap();
        let mut request = client.request(http::Method::POST, "/predictions/m");
        let headers = request.headers_mut();
        headers.insert("x-echo-stream", http::HeaderValue::from_static("4"));
        headers.insert("x-echo-fault", http::HeaderValue::from_static("delay=300"));
        let (response, mut body) = send.send_request(request, false).unwrap();
        body.send_data(Bytes::from_static(b"part"), true).unwrap();
        drop(send);
        let mut parts = response.await.unwrap().into_body();
        let mut got = parts.data().await.unwrap().unwrap().to_vec();
        server.signal(Signal::TERM);
        while let Some(part) = parts.data().await {
            let part = part.unwrap();
            parts.flow_control().release_capacity(part.len()).unwrap();
            got.extend_from_slice(&part);
        }
        let got = String::from_utf8(got).unwrap();
        assert_eq!(got.matches("part").count(), 4, "{got}");
        assert!(server.wait_for_exit(LIMIT).success());
        phases(server);
    };
    run(test, &["drain_timeout=30"]);
}

/// The half of a handshake holds nobody up, and neither does one that is finished and says nothing.
#[test]
fn who_has_not_asked_for_anything_does_not_hold_up_the_end() {
    let test = async |authority: &Authority, server: &mut Running| {
        let half: Vec<_> = (0..20)
            .map(|_| {
                let mut client = TcpStream::connect(crate::tls::place(&server.inference)).unwrap();
                client.write_all(&[22, 3, 1, 2, 0, 1]).unwrap();
                client
            })
            .collect();
        let config = authority.client(None, rustls::ALL_VERSIONS);
        let silent = crate::tls::connect(&server.inference, config).unwrap();
        server.infer("GET", "/ping").send().expect(200);
        let begun = Instant::now();
        server.signal(Signal::TERM);
        assert!(server.wait_for_exit(LIMIT).success());
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            begun.elapsed()
        );
        phases(server);
        drop((half, silent));
    };
    run(test, &["drain_timeout=30", "tls_handshake_timeout=30"]);
}
