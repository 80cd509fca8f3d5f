//! One connection: its bytes, encrypted or not, its place, and how long its client may take.

use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use actix_web::web;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_rustls::server::TlsStream;

use super::places::{HEARD_OUT, Place};
use crate::rest::{Edge, Owed, Surface};
use crate::settings::Connections;

/// How much later than the HTTP library's limit on the first head ours counts: it answers 408, we
/// only close.
const AFTER_THE_LIBRARY: Duration = Duration::from_secs(1);

/// How long a connection that is to close waits for its client's word.
pub(super) const FAREWELL: Duration = Duration::from_secs(1);

/// What the bytes go through.
pub(super) enum Stream {
    /// As they are, to a port.
    Tcp(TcpStream),
    /// Encrypted.
    Tls(Box<TlsStream<TcpStream>>),
    /// As they are, to a file.
    Unix(UnixStream),
}

impl From<TcpStream> for Stream {
    fn from(stream: TcpStream) -> Self {
        // Answers are written whole; to wait for more of one would only delay it.
        let _as_it_is = stream.set_nodelay(true);
        Self::Tcp(stream)
    }
}

impl From<UnixStream> for Stream {
    fn from(stream: UnixStream) -> Self {
        Self::Unix(stream)
    }
}

impl Stream {
    /// The client's address, if it has one.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(stream) => stream.peer_addr().ok(),
            Self::Tls(stream) => stream.get_ref().0.peer_addr().ok(),
            Self::Unix(_) => None,
        }
    }
}

/// Calls a method of whichever stream it is.
macro_rules! forward {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream {
            Stream::Tcp($inner) => {
                let $inner = Pin::new($inner);
                $call
            }
            Stream::Tls($inner) => {
                let $inner = Pin::new(&mut **$inner);
                $call
            }
            Stream::Unix($inner) => {
                let $inner = Pin::new($inner);
                $call
            }
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        forward!(self.get_mut(), inner => inner.poll_read(context, buffer))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        forward!(self.get_mut(), inner => inner.poll_write(context, bytes))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        forward!(self.get_mut(), inner => inner.poll_write_vectored(context, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Tcp(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
            Self::Unix(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self.get_mut(), inner => inner.poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        forward!(self.get_mut(), inner => inner.poll_shutdown(context))
    }
}

/// What a request knows of the connection that it came in by.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    /// The APIs of its listener.
    pub(crate) surface: Surface,
    /// Whether it is encrypted on its way.
    pub(crate) encrypted: bool,
    requests: Arc<Requests>,
}

impl Origin {
    /// Of a request that came in by no connection.
    pub(crate) fn none() -> Self {
        Self::of(Surface::NONE, false)
    }

    fn of(surface: Surface, encrypted: bool) -> Self {
        Self {
            surface,
            encrypted,
            requests: Arc::default(),
        }
    }

    /// Marks that a request is in work, for as long as that value is kept.
    pub(crate) fn begin(&self) -> Busy {
        self.requests.begun.fetch_add(1, Ordering::AcqRel);
        self.requests.in_work.fetch_add(1, Ordering::AcqRel);
        Busy(Arc::clone(&self.requests))
    }
}

/// The requests of one connection.
#[derive(Debug, Default)]
struct Requests {
    begun: AtomicUsize,
    in_work: AtomicUsize,
    /// Kept from the response that ends the connection until the connection is over.
    ending: OnceLock<Owed>,
}

/// A request in work.
#[derive(Debug)]
pub(crate) struct Busy(Arc<Requests>);

impl Busy {
    /// The response to this request ends its connection.
    pub(crate) fn connection_ends(&self, owed: impl FnOnce() -> Owed) {
        self.0.ending.get_or_init(owed);
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.in_work.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A moment that may be set again for every request: the timer behind it is moved only when it
/// goes off too early.
#[derive(Default)]
struct Deadline {
    at: Option<Instant>,
    timer: Option<Pin<Box<Sleep>>>,
}

impl Deadline {
    /// Sets it unless it is set.
    fn arm(&mut self, after: Duration) {
        if self.at.is_none() {
            self.at = Some(Instant::now() + after);
        }
    }

    fn clear(&mut self) {
        self.at = None;
    }

    /// Whether it has come; if not, whoever asks is woken when it has.
    fn has_come(&mut self, context: &mut Context<'_>) -> bool {
        let Some(at) = self.at else { return false };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(at)));
        if timer.deadline() > at {
            timer.as_mut().reset(at);
        }
        while timer.as_mut().poll(context).is_ready() {
            if Instant::now() >= at {
                return true;
            }
            timer.as_mut().reset(at);
        }
        false
    }
}

/// A connection that has a place.
pub(super) struct Connection {
    stream: Stream,
    peer: Option<SocketAddr>,
    origin: Origin,
    limits: Arc<Connections>,
    /// Heads of HTTP/2 are watched where streams are counted.
    speaks_http2: bool,
    /// Requests that had begun when something was read last.
    begun: usize,
    /// Until when what has come has to be the head of a request.
    head: Deadline,
    /// Until when the client has to take something.
    write: Deadline,
    /// Kept while it has not taken all.
    unsent: Option<Owed>,
    /// Until when it may say that it has heard the end.
    leave: Deadline,
    /// Bytes that it has sent meanwhile.
    heard_out: u64,
    edge: web::Data<Edge>,
    _place: Place,
}

impl Connection {
    pub(super) fn new(
        stream: Stream,
        peer: Option<SocketAddr>,
        place: Place,
        surface: Surface,
        limits: Arc<Connections>,
        edge: web::Data<Edge>,
        speaks_http2: bool,
    ) -> Self {
        let encrypted = matches!(stream, Stream::Tls(_));
        Self {
            stream,
            peer,
            origin: Origin::of(surface, encrypted),
            limits,
            speaks_http2,
            begun: 0,
            head: Deadline::default(),
            write: Deadline::default(),
            unsent: None,
            leave: Deadline::default(),
            heard_out: 0,
            edge,
            _place: place,
        }
    }

    /// The client's address, if it has one.
    pub(super) fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// For the requests that come by it.
    pub(super) fn origin(&self) -> Origin {
        self.origin.clone()
    }

    /// Whether the client owes the rest of a head, or sends what is no request. A client that is
    /// being answered owes nothing; it may send its next request meanwhile.
    fn owes_a_head(&mut self) -> bool {
        let requests = &self.origin.requests;
        let begun = requests.begun.load(Ordering::Acquire);
        if begun != self.begun {
            self.begun = begun;
            self.head.clear();
        }
        let answering = requests.in_work.load(Ordering::Acquire) > 0 || self.write.at.is_some();
        !self.speaks_http2 && !answering
    }

    /// Throws away some of what the client still sends, until it closes too, for a short time: a
    /// connection that is closed over unread bytes takes the last answer with it, and a client of
    /// HTTP/2 tells what it has read of that.
    fn poll_leave(&mut self, context: &mut Context<'_>) -> Poll<()> {
        self.leave.arm(FAREWELL);
        let mut unread = [MaybeUninit::uninit(); 4096];
        while self.heard_out < HEARD_OUT && !self.leave.has_come(context) {
            let mut buffer = ReadBuf::uninit(&mut unread);
            let read = ready!(Pin::new(&mut self.stream).poll_read(context, &mut buffer));
            if read.is_err() || buffer.filled().is_empty() {
                break;
            }
            self.heard_out += buffer.filled().len() as u64;
        }
        Poll::Ready(())
    }

    /// Passes on how a write went; one that waits for the client too long has failed.
    fn written<T>(
        &mut self,
        context: &mut Context<'_>,
        went: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if went.is_ready() {
            self.write.clear();
            return went;
        }
        self.unsent.get_or_insert_with(|| self.edge.traffic.owes());
        self.write.arm(self.limits.write);
        if self.write.has_come(context) {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!(
                    "the client took nothing of its answer for {} s (`response_write_timeout`)",
                    self.limits.write.as_secs()
                ),
            )));
        }
        Poll::Pending
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let owes_a_head = this.owes_a_head();
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        if !owes_a_head {
            this.head.clear();
        } else if read.is_ready() {
            this.head.arm(this.limits.head + AFTER_THE_LIBRARY);
        } else if this.head.has_come(context) {
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!(
                    "no head of a request within {} s (`request_head_timeout`)",
                    this.limits.head.as_secs()
                ),
            )));
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let went = Pin::new(&mut this.stream).poll_write(context, bytes);
        this.written(context, went)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let went = Pin::new(&mut this.stream).poll_write_vectored(context, slices);
        this.written(context, went)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let went = Pin::new(&mut this.stream).poll_flush(context);
        if went.is_ready() {
            this.unsent = None;
        }
        this.written(context, went)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let went = Pin::new(&mut this.stream).poll_shutdown(context);
        if this.speaks_http2 && matches!(went, Poll::Ready(Ok(()))) {
            ready!(this.poll_leave(context));
        }
        this.written(context, went)
    }
}
