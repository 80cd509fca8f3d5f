//! HTTP/2: the streams of one connection, each a request like any other. Written here because the
//! HTTP library lets nobody limit the streams, the heads and the time of a connection, and drops no
//! request that its client has given up.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use actix_http::body::{BodySize, MessageBody};
use actix_http::error::PayloadError;
use actix_http::{BoxedPayloadStream, HttpMessage as _, Method, Payload, Request, Response};
use actix_service::Service;
use actix_web::body::BoxBody;
use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use h2::RecvStream;
use h2::server::SendResponse;
use http::header::{
    CONNECTION, CONTENT_LENGTH, DATE, HeaderName, HeaderValue, TRANSFER_ENCODING, UPGRADE,
};
use tokio::time::{Instant, sleep_until, timeout};

use super::connection::{Connection, FAREWELL, Origin};
use crate::rest::Traffic;
use crate::settings::Connections;

/// Requests that one connection may have in work.
const MAX_STREAMS: u32 = 100;

/// Bytes that the headers of one may have: as much as the HTTP library takes over HTTP/1.
const MAX_HEAD_BYTES: u32 = 128 << 10;

/// Bytes of a body that may be under way unread: of one request, and of a connection.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 1 << 20;

/// Bytes of a response that are handed over at a time.
const PART: usize = 16 << 10;

/// Requests that a client may give up beyond those that are answered: each costs work for nothing,
/// and a client that resets what it opens is not held up by [`MAX_STREAMS`] (CVE-2023-44487).
const MAX_GIVEN_UP: u32 = 200;

/// Headers that only HTTP/1 has (RFC 9113, 8.2.2).
const OF_HTTP1: [HeaderName; 5] = [
    CONNECTION,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// Serves a connection until either side closes it, or it has been idle for too long. While the server
/// stops, it takes leave of its client after the next answer, and at last when connections close:
/// what has begun is finished, and a client sends nothing more by it.
///
/// # Errors
/// The client broke the protocol or is gone.
pub(super) async fn serve<S, B>(
    connection: Connection,
    service: &S,
    limits: &Connections,
    traffic: &Traffic,
) -> Result<(), h2::Error>
where
    S: Service<Request>,
    S::Response: Into<Response<B>>,
    S::Error: Into<Response<BoxBody>>,
    B: MessageBody,
{
    let (origin, peer) = (connection.origin(), connection.peer());
    let mut settings = h2::server::Builder::new();
    settings
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEAD_BYTES)
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buffer_size(PART);
    let Ok(shaken) = timeout(limits.head, settings.handshake::<_, Bytes>(connection)).await else {
        return Ok(());
    };
    let mut connection = shaken?;
    let mut streams = FuturesUnordered::new();
    let mut draining = traffic.draining();
    let mut farewell = None;
    let mut closing = false;
    let mut given_up = 0;
    let mut idle_until = Instant::now() + limits.idle;
    loop {
        let leave = tokio::select! {
            accepted = connection.accept() => {
                let Some(accepted) = accepted else { return Ok(()) };
                let (request, respond) = accepted?;
                let request = request_of(request, peer, &origin);
                streams.push(answer(service, request, respond, limits.write, traffic));
                false
            }
            Some(end) = streams.next() => {
                idle_until = Instant::now() + if closing { FAREWELL } else { limits.idle };
                given_up = match end {
                    End::Answered => u32::saturating_sub(given_up, 1),
                    End::GivenUp => given_up + 1,
                };
                if given_up == MAX_GIVEN_UP {
                    tracing::debug!(?peer, "a client gives up what it asks for, again and again");
                    connection.abrupt_shutdown(h2::Reason::ENHANCE_YOUR_CALM);
                }
                traffic.is_stopping()
            }
            Ok(_) = draining.wait_for(|begun| *begun), if farewell.is_none() => {
                // Its client shall hear of it before the server is gone.
                farewell = Some(traffic.owes());
                true
            }
            () = sleep_until(idle_until), if streams.is_empty() => {
                if closing {
                    return Ok(());
                }
                true
            }
        };
        if leave && !closing {
            closing = true;
            idle_until = Instant::now() + FAREWELL;
            connection.graceful_shutdown();
        }
    }
}

fn request_of(
    request: http::Request<RecvStream>,
    peer: Option<std::net::SocketAddr>,
    origin: &Origin,
) -> Request {
    let (parts, body) = request.into_parts();
    let payload: BoxedPayloadStream = Box::pin(Body(body));
    let mut request = Request::with_payload(Payload::Stream { payload });
    request.extensions_mut().insert(origin.clone());
    let head = request.head_mut();
    head.uri = parts.uri;
    head.method = parts.method;
    head.version = parts.version;
    head.headers = parts.headers.into();
    head.peer_addr = peer;
    request
}

/// The body of a request; what is read of it makes room for more.
struct Body(RecvStream);

impl futures_util::Stream for Body {
    type Item = Result<Bytes, PayloadError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let told = |error: h2::Error| PayloadError::Io(std::io::Error::other(error));
        self.0.poll_data(context).map(|read| {
            let read = read?.and_then(|bytes| {
                self.0.flow_control().release_capacity(bytes.len())?;
                Ok(bytes)
            });
            Some(read.map_err(told))
        })
    }
}

/// How a request ended.
enum End {
    /// Its client has been sent what there is.
    Answered,
    /// Its client did not take it.
    GivenUp,
}

/// Answers one request, unless its client gives it up before.
async fn answer<S, B>(
    service: &S,
    request: Request,
    mut respond: SendResponse<Bytes>,
    write_limit: Duration,
    traffic: &Traffic,
) -> End
where
    S: Service<Request>,
    S::Response: Into<Response<B>>,
    S::Error: Into<Response<BoxBody>>,
    B: MessageBody,
{
    let without_body = request.method() == Method::HEAD;
    let work = service.call(request);
    let answered = tokio::select! {
        answered = work => answered,
        _given_up = poll_fn(|context| respond.poll_reset(context)) => return End::GivenUp,
    };
    // The windows of its client say when it is sent, and the end of the server waits for that.
    let _owed = traffic.owes();
    let sent = match answered {
        Ok(response) => send(response.into(), respond, without_body, write_limit).await,
        Err(error) => send(error.into(), respond, without_body, write_limit).await,
    };
    sent.unwrap_or_else(|error| {
        tracing::debug!("an answer was not sent: {error}");
        End::GivenUp
    })
}

async fn send<B: MessageBody>(
    response: Response<B>,
    mut respond: SendResponse<Bytes>,
    without_body: bool,
    write_limit: Duration,
) -> Result<End, h2::Error> {
    let (response, body) = response.into_parts();
    let size = body.size();
    let ends = size.is_eof() || without_body;
    let mut stream = respond.send_response(head(&response, size), ends)?;
    if ends {
        return Ok(End::Answered);
    }
    let mut body = pin!(body);
    loop {
        let next = poll_fn(|context| body.as_mut().poll_next(context));
        let next = tokio::select! {
            next = next => next,
            _given_up = poll_fn(|context| stream.poll_reset(context)) => return Ok(End::GivenUp),
        };
        let mut rest = match next {
            None => {
                stream.send_data(Bytes::new(), true)?;
                return Ok(End::Answered);
            }
            Some(Ok(bytes)) => bytes,
            Some(Err(_broken)) => {
                // The client has to see that it is not whole.
                stream.send_reset(h2::Reason::INTERNAL_ERROR);
                return Ok(End::Answered);
            }
        };
        while !rest.is_empty() {
            stream.reserve_capacity(rest.len().min(PART));
            let room = poll_fn(|context| stream.poll_capacity(context));
            let Ok(room) = timeout(write_limit, room).await else {
                tracing::debug!("a client took nothing of its answer (`response_write_timeout`)");
                stream.send_reset(h2::Reason::CANCEL);
                return Ok(End::GivenUp);
            };
            let Some(room) = room else {
                return Ok(End::GivenUp);
            };
            let part = rest.split_to(room?.min(rest.len()));
            stream.send_data(part, false)?;
        }
    }
}

fn head(response: &Response<()>, size: BodySize) -> http::Response<()> {
    let mut head = http::Response::new(());
    *head.status_mut() = response.status();
    *head.version_mut() = http::Version::HTTP_2;
    let headers = head.headers_mut();
    for (name, value) in response.headers() {
        if !OF_HTTP1.contains(name) && name != CONTENT_LENGTH {
            headers.append(name.clone(), value.clone());
        }
    }
    if let BodySize::Sized(length) = size {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    if !headers.contains_key(DATE)
        && let Ok(now) = HeaderValue::from_str(&httpdate::fmt_http_date(SystemTime::now()))
    {
        headers.insert(DATE, now);
    }
    head
}
