//! From sockets to requests: takes connections in, speaks TLS where the listener does, and serves
//! HTTP/1 or HTTP/2 to the same endpoints. What a client may hold and how long it may take is
//! limited here, below every dialect.

mod connection;
mod http2;
mod places;

use std::convert::Infallible;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use actix_http::{Extensions, HttpServiceBuilder, Request};
use actix_server::{Server, ServerBuilder};
use actix_service::{
    IntoServiceFactory as _, Service as _, ServiceFactory, fn_factory, fn_service, map_config,
};
use actix_web::body::BoxBody;
use actix_web::dev::{AppConfig, ServiceResponse};
use actix_web::{App, web};
use anyhow::Context as _;
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use self::connection::{Connection, Stream};
use self::places::Places;
use crate::listen::{Listener, Socket};
use crate::rest::{self, Edge, Surface};
use crate::settings::Connections;
use crate::tls::Tls;

pub(crate) use self::connection::{Busy, Origin};

/// How long a connection that is closed may take to take leave.
const DISCONNECT_LIMIT: Duration = Duration::from_secs(1);

/// What the threads of all listeners share.
#[derive(Clone)]
struct Shared {
    edge: web::Data<Edge>,
    limits: Arc<Connections>,
    places: Arc<Places>,
    stopping: actix_server::GracefulShutdownSignal,
}

/// What the threads of one listener share.
#[derive(Clone)]
struct Door {
    shared: Shared,
    surface: Surface,
    tls: Option<Arc<Tls>>,
}

/// Serves all listeners with one set of threads.
///
/// # Errors
/// A listener cannot be watched.
pub(crate) fn serve(
    edge: &web::Data<Edge>,
    threads: usize,
    limits: Connections,
    drain: Duration,
    listeners: Vec<Listener>,
) -> anyhow::Result<Server> {
    let mut builder = ServerBuilder::new()
        .workers(threads)
        // A few beyond the places: those are told that there is none. More of them at once would
        // take the files that the server keeps for itself.
        .max_concurrent_connections(
            limits.max.unwrap_or(usize::MAX / 2) / threads + places::TOLD_AT_ONCE,
        )
        .shutdown_timeout(drain.as_secs())
        .disable_signals();
    let shared = Shared {
        edge: edge.clone(),
        places: Places::new(limits.max.unwrap_or(usize::MAX), limits.max_per_client),
        limits: Arc::new(limits),
        stopping: builder.graceful_shutdown_signal(),
    };
    for listener in listeners {
        let address = listener.address();
        let door = Door {
            shared: shared.clone(),
            surface: listener.surface,
            tls: listener.tls,
        };
        let served = match listener.socket {
            Socket::Tcp(socket, _) => {
                builder.listen(&address, socket, move || thread::<TcpStream>(door.clone()))
            }
            Socket::Unix(socket, _) => {
                builder.listen_uds(&address, socket, move || thread::<UnixStream>(door.clone()))
            }
        };
        builder = served.with_context(|| format!("`{address}` cannot be served"))?;
    }
    Ok(builder.run())
}

/// What one thread does with the connections of one listener.
fn thread<I>(
    door: Door,
) -> impl ServiceFactory<I, Config = (), Response = (), Error = Infallible, InitError = ()>
where
    I: Into<Stream> + 'static,
{
    fn_factory(move || {
        let door = Rc::new(door.clone());
        async move {
            let edge = &door.shared.edge;
            let limits = &door.shared.limits;
            let stopping = door.shared.stopping.clone();
            let http1 = HttpServiceBuilder::default()
                .keep_alive(limits.idle)
                .client_request_timeout(limits.head)
                .client_disconnect_timeout(DISCONNECT_LIMIT)
                // A client that closes has given its request up. (Allowing half-closed connections
                // would mean running requests for clients that are gone.)
                .h1_allow_half_closed(false)
                .graceful_shutdown_signal(move || {
                    let stopping = stopping.clone();
                    async move { stopping.notified().await }
                })
                .on_connect_ext(|connection: &Connection, marks: &mut Extensions| {
                    marks.insert(connection.origin());
                })
                .h1(endpoints(edge))
                .new_service(())
                .await?;
            let http2 = endpoints(edge).new_service(()).await?;
            let (http1, http2) = (Rc::new(http1), Rc::new(http2));
            Ok(fn_service(move |stream: I| {
                let (door, http1, http2) = (Rc::clone(&door), Rc::clone(&http1), Rc::clone(&http2));
                async move {
                    let Some(entered) = door.enter(stream.into()).await else {
                        return Ok(());
                    };
                    let peer = entered.connection.peer();
                    if entered.speaks_http2 {
                        let Shared { edge, limits, .. } = &door.shared;
                        let traffic = &edge.traffic;
                        let served = http2::serve(entered.connection, &*http2, limits, traffic);
                        if let Err(error) = served.await {
                            tracing::debug!(?peer, "a connection ended: {error}");
                        }
                    } else if let Err(error) = http1.call((entered.connection, peer)).await {
                        tracing::debug!(?peer, "a connection ended: {error}");
                    }
                    Ok(())
                }
            }))
        }
    })
}

/// The same for every listener and protocol.
fn endpoints(
    edge: &web::Data<Edge>,
) -> impl ServiceFactory<
    Request,
    Config = (),
    Response = ServiceResponse<BoxBody>,
    Error = actix_web::Error,
    InitError = (),
    Service: 'static,
    Future: 'static,
> + use<> {
    let app = App::new()
        .app_data(edge.clone())
        .default_service(web::to(rest::serve));
    map_config(app.into_factory(), |()| AppConfig::default())
}

/// A connection that has a place, and has shaken hands where that is asked for.
struct Entered {
    connection: Connection,
    speaks_http2: bool,
}

impl Door {
    /// Takes a connection in; none where it is refused, or does not come about.
    async fn enter(&self, stream: Stream) -> Option<Entered> {
        let traffic = &self.shared.edge.traffic;
        traffic.somebody_came();
        let peer = stream.peer();
        let Some(place) = self.shared.places.take(peer.map(|peer| peer.ip())) else {
            self.shared.places.refuse(stream, self.tls.is_some()).await;
            return None;
        };
        let limits = &self.shared.limits;
        let (stream, speaks_http2) = match (&self.tls, stream) {
            (Some(tls), Stream::Tcp(stream)) => {
                let shaken = handshake(stream, tls);
                let shaken = tokio::time::timeout(limits.handshake, shaken).await;
                let told = match shaken {
                    Ok(Ok(Some(stream))) => Ok(stream),
                    Ok(Ok(None)) => Err("it sent plain HTTP".to_owned()),
                    Ok(Err(error)) => Err(error.to_string()),
                    Err(_) => Err(format!("no TLS within {} s", limits.handshake.as_secs())),
                };
                match told {
                    Ok(stream) => {
                        let protocol = stream.get_ref().1.alpn_protocol();
                        let speaks_http2 = protocol == Some(b"h2");
                        (Stream::Tls(Box::new(stream)), speaks_http2)
                    }
                    Err(reason) => {
                        tracing::debug!(?peer, "a client could not connect: {reason}");
                        return None;
                    }
                }
            }
            (_, stream) => (stream, false),
        };
        traffic.somebody_came();
        let limits = Arc::clone(limits);
        let edge = self.shared.edge.clone();
        let surface = self.surface;
        let connection = Connection::new(stream, peer, place, surface, limits, edge, speaks_http2);
        Some(Entered {
            connection,
            speaks_http2,
        })
    }
}

/// Whoever talks HTTP where TLS is spoken is told, in TorchServe's words.
const HTTPS_ONLY: &[u8] = b"HTTP/1.1 403 Forbidden\r\ncontent-type: application/json\r\n\
    content-length: 71\r\nconnection: close\r\n\r\n\
    {\n  \"status\": \"This TorchServe instance only accepts HTTPS requests\"\n}\n";

/// The connection, encrypted; none for a client that does not want it to be.
async fn handshake(
    mut stream: TcpStream,
    tls: &Tls,
) -> std::io::Result<Option<TlsStream<TcpStream>>> {
    let mut first = [0];
    let read = stream.peek(&mut first).await?;
    // A record of TLS begins with 22, a request with the name of its method.
    if read == 1 && first[0].is_ascii_alphabetic() {
        places::say(&mut stream, HTTPS_ONLY).await;
        return Ok(None);
    }
    let acceptor = TlsAcceptor::from(tls.config());
    acceptor.accept(stream).await.map(Some)
}
