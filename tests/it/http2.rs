//! HTTP/2: the same answers and limits as over HTTP/1, and what only it has: streams, windows,
//! resets, and a farewell.

mod floods;
mod stop;

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::FutureExt as _;
use h2::client::SendRequest;
use http::{Method, Request, StatusCode};
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;
use ts_test::Running;

use crate::tls::Authority;

struct Client {
    send: SendRequest<Bytes>,
    server: String,
    /// Ends with the connection.
    connection: tokio::task::JoinHandle<Result<(), h2::Error>>,
}

impl Client {
    async fn connect(authority: &Authority, server: &Running) -> Self {
        let mut config = authority.client(None, rustls::ALL_VERSIONS);
        config.alpn_protocols = vec![b"h2".to_vec()];
        let place = crate::tls::place(&server.inference);
        let socket = tokio::net::TcpStream::connect(place).await.unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let connector = TlsConnector::from(Arc::new(config));
        let stream = connector.connect(name, socket).await.unwrap();
        let mut builder = h2::client::Builder::new();
        let shaken = builder.initial_max_send_streams(7).handshake(stream).await;
        let (send, mut connection) = shaken.unwrap();
        // The server says how many requests there may be at one time.
        let told = poll_fn(|context| {
            assert!(connection.poll_unpin(context).is_pending());
            match connection.max_concurrent_send_streams() {
                100 => Poll::Ready(()),
                _ => Poll::Pending,
            }
        });
        tokio::time::timeout(Duration::from_secs(20), told)
            .await
            .unwrap();
        Self {
            send,
            server: server.inference.clone(),
            connection: tokio::spawn(connection),
        }
    }

    fn request(&self, method: Method, path: &str) -> Request<()> {
        let uri = format!("{}{path}", self.server);
        Request::builder().method(method).uri(uri).body(()).unwrap()
    }

    async fn call(&self, method: Method, path: &str, body: Vec<u8>) -> (StatusCode, Vec<u8>) {
        self.send(self.request(method, path), body).await.unwrap()
    }

    async fn send(
        &self,
        request: Request<()>,
        body: Vec<u8>,
    ) -> Result<(StatusCode, Vec<u8>), h2::Error> {
        let mut send = self.send.clone().ready().await?;
        let (response, mut stream) = send.send_request(request, body.is_empty())?;
        let mut rest = Bytes::from(body);
        while !rest.is_empty() {
            stream.reserve_capacity(rest.len());
            // None, or an error: it was answered before all of it was sent.
            let Some(Ok(room)) = poll_fn(|context| stream.poll_capacity(context)).await else {
                break;
            };
            let part = rest.split_to(room.min(rest.len()));
            if stream.send_data(part, rest.is_empty()).is_err() {
                break;
            }
        }
        let response = response.await?;
        let status = response.status();
        let mut body = response.into_body();
        let mut answer = Vec::new();
        while let Some(part) = body.data().await {
            let part = match part {
                // The rest of the request is not wanted; the answer is whole (RFC 9113, 8.1).
                Err(error) if error.reason() == Some(h2::Reason::NO_ERROR) => break,
                part => part?,
            };
            body.flow_control().release_capacity(part.len())?;
            answer.extend_from_slice(&part);
        }
        Ok((status, answer))
    }
}

fn run(test: impl AsyncFnOnce(&Authority, &mut Running), more: &[&str]) {
    let authority = Authority::new();
    let mut server = crate::tls::serving(&authority, more);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(test(&authority, &mut server));
}

#[test]
fn requests_are_answered_as_over_http_1_and_limited_alike() {
    let test = async |authority: &Authority, server: &mut Running| {
        let client = Client::connect(authority, server).await;
        let body = vec![b'x'; 3 << 20];
        let (status, answer) = client
            .call(Method::POST, "/predictions/m", body.clone())
            .await;
        assert!(status == 200 && answer == body);
        let (status, answer) = client.call(Method::HEAD, "/ping", Vec::new()).await;
        assert!(status == 200 && answer.is_empty());
        // Each API on its own listener, by whatever protocol.
        assert_eq!(client.call(Method::GET, "/models", Vec::new()).await.0, 404);
        let large = vec![b'x'; 4 << 20];
        assert_eq!(
            client.call(Method::POST, "/predictions/m", large).await.0,
            413
        );
        // The connection goes on.
        assert_eq!(client.call(Method::GET, "/ping", Vec::new()).await.0, 200);
        let mut request = client.request(Method::GET, "/ping");
        let value = http::HeaderValue::from_str(&"y".repeat(100 << 10)).unwrap();
        request.headers_mut().insert("x-one", value.clone());
        request.headers_mut().insert("x-two", value);
        assert_eq!(client.send(request, Vec::new()).await.unwrap().0, 431);
        assert_eq!(client.call(Method::GET, "/ping", Vec::new()).await.0, 200);
    };
    run(test, &["max_request_size=3500000"]);
}

#[test]
fn many_requests_share_a_connection_up_to_a_limit() {
    let test = async |authority: &Authority, server: &mut Running| {
        let client = Client::connect(authority, server).await;
        let calls = (0..300).map(|number| {
            let body = format!("number {number}").into_bytes();
            let client = &client;
            async move {
                let (status, answer) = client
                    .call(Method::POST, "/predictions/m", body.clone())
                    .await;
                assert!(status == 503 || answer == body, "{status}");
                status
            }
        });
        let statuses = futures_util::future::join_all(calls).await;
        assert!(statuses.iter().filter(|status| **status == 200).count() >= 100);
    };
    run(test, &["job_queue_size=1000"]);
}

#[test]
fn a_request_that_its_client_resets_is_given_up_and_a_stalled_body_is_ended() {
    let test = async |authority: &Authority, server: &mut Running| {
        let client = Client::connect(authority, server).await;
        let mut send = client.send.clone().ready().await.unwrap();
        let request = client.request(Method::POST, "/predictions/m");
        let (response, mut stream) = send.send_request(request, false).unwrap();
        stream.send_data(Bytes::from_static(b"x"), false).unwrap();
        // Nothing more of it comes.
        let answer = response.await.unwrap();
        assert_eq!(answer.status(), 400);
        let request = client.request(Method::POST, "/predictions/m");
        let (_response, mut stream) = send.send_request(request, false).unwrap();
        stream.send_data(Bytes::from_static(b"x"), false).unwrap();
        // Whoever resets a request before any of it is sent sends nothing.
        assert_eq!(client.call(Method::GET, "/ping", Vec::new()).await.0, 200);
        stream.send_reset(h2::Reason::CANCEL);
        let (status, _) = client
            .call(Method::POST, "/predictions/m", b"y".to_vec())
            .await;
        assert_eq!(status, 200);
    };
    run(test, &["request_body_timeout=1"]);
}

#[test]
fn a_stop_takes_leave_of_idle_connections() {
    let test = async |authority: &Authority, server: &mut Running| {
        let client = Client::connect(authority, server).await;
        assert_eq!(client.call(Method::GET, "/ping", Vec::new()).await.0, 200);
        let begun = Instant::now();
        server.signal(rustix::process::Signal::TERM);
        // A word of it, then the end; the client's own farewell may find it closed.
        let ended = tokio::time::timeout(Duration::from_secs(20), client.connection).await;
        let ended = ended.unwrap().unwrap();
        assert!(ended.is_ok() || ended.is_err_and(|error| error.is_io()));
        assert!(server.wait_for_exit(Duration::from_secs(20)).success());
        assert!(begun.elapsed() < Duration::from_secs(10));
    };
    run(test, &["drain_timeout=30"]);
}

#[test]
fn an_idle_connection_is_closed() {
    let test = async |authority: &Authority, server: &mut Running| {
        let client = Client::connect(authority, server).await;
        assert_eq!(client.call(Method::GET, "/ping", Vec::new()).await.0, 200);
        let ended = tokio::time::timeout(Duration::from_secs(20), client.connection).await;
        // Its own farewell may find the connection closed.
        let ended = ended.unwrap().unwrap();
        assert!(ended.is_ok() || ended.is_err_and(|error| error.is_io()));
    };
    run(test, &["idle_connection_timeout=1"]);
}
