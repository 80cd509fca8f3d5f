//! One end of a socket pair.
//!
//! A message on the socket:
//!
//! ```text
//! u32 header bytes | u32 flags | u64 payload bytes | header (postcard) | payload, unless shared
//! ```
//!
//! Numbers are little-endian. Flag 1: the payload is in the shared buffer. Flag 2: that buffer is
//! new, its descriptor comes with this message. Flag 4: another descriptor comes with it. (The
//! flags are needed because one read may return two messages, and then does not tell whose
//! descriptor it was.)

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, send, sendmsg, socketpair,
};
use serde::{Deserialize, Serialize};

use crate::WireError;
use crate::error::SENDING;
use crate::shared::{SharedReader, SharedWriter};

const PREFIX_BYTES: usize = 16;
const SHARED: u32 = 1;
const NEW_BUFFER: u32 = 2;
const DESCRIPTOR: u32 = 4;

/// Payloads from this size on go through shared memory: below it the socket is as fast and needs
/// no extra memory.
const SHARED_FROM_BYTES: u64 = 64 << 10;

/// Headers hold names and short texts; whatever is longer is not ours.
const MAX_HEADER_BYTES: u64 = 64 << 20;

/// How much is read at once; a small message arrives in one call.
const READ_BYTES: usize = 64 << 10;

/// How long one call waits for room, where sending has a limit: the limit is looked at in between.
const SEND_PAUSE: Duration = Duration::from_millis(100);

/// Most slices that one `sendmsg` takes (Linux: 1024).
const MAX_SLICES: usize = 512;

/// One end of a socket pair: both halves, owned by one thread. [`Channel::split`] gives each half
/// to a thread of its own.
pub struct Channel {
    sender: Sender,
    receiver: Receiver,
}

/// The half that sends. Blocking, see [`Sender::limit`].
pub struct Sender {
    socket: Arc<OwnedFd>,
    limit: Option<Duration>,
    header: Vec<u8>,
    writer: Option<SharedWriter>,
}

/// The half that receives. Blocking.
pub struct Receiver {
    socket: Arc<OwnedFd>,
    max_payload_bytes: u64,
    /// What the kernel was last told to wait for a read at most; zero is for ever.
    read_limit: Duration,
    received: Vec<u8>,
    /// Bytes received and not yet consumed: `received[start..end]`.
    start: usize,
    end: usize,
    descriptors: Vec<OwnedFd>,
    reader: Option<SharedReader>,
}

/// A received message; its parts live in the channel until the next call.
pub struct Incoming<'a> {
    header: &'a [u8],
    /// The payload.
    pub payload: &'a [u8],
    /// A descriptor that was sent with the message.
    pub descriptor: Option<OwnedFd>,
}

/// Where a received message lies until the next one is waited for; [`Receiver::view`] shows it.
struct Arrived {
    header: Range<usize>,
    /// In the shared buffer, from its start, if that is where it is.
    payload: Range<usize>,
    shared: bool,
    descriptor: Option<OwnedFd>,
}

/// How long a read waits.
enum Wait {
    /// Until then, or for ever.
    Until(Option<Instant>),
    /// About this long.
    Pause(Duration),
}

/// Ends a channel from another thread: what was received can still be read, then it is closed. A
/// channel that is gone already is none to end.
///
/// This is how the end of a process reaches whoever waits for its words, even where a grandchild
/// has inherited its end of the socket: the wait itself stays a single system call.
#[derive(Debug)]
pub struct HangUp(Weak<OwnedFd>);

impl HangUp {
    /// Ends it.
    pub fn now(&self) {
        if let Some(socket) = self.0.upgrade() {
            let _closed_before = rustix::net::shutdown(&*socket, rustix::net::Shutdown::Both);
        }
    }

    /// Whether there is a channel left to end.
    pub fn is_pending(&self) -> bool {
        self.0.strong_count() > 0
    }
}

impl<'a> Incoming<'a> {
    /// Decodes the header.
    ///
    /// # Errors
    /// [`WireError::Header`] if it is not a `T`.
    pub fn header<T: Deserialize<'a>>(&self) -> Result<T, WireError> {
        Ok(postcard::from_bytes(self.header)?)
    }
}

impl Channel {
    /// Two connected ends, both closed on exec.
    ///
    /// # Errors
    /// [`WireError::System`] when descriptors run out.
    pub fn pair() -> Result<(OwnedFd, OwnedFd), WireError> {
        socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(WireError::system("socketpair"))
    }

    /// Takes one end. `max_payload_bytes` bounds what the peer may send in one message.
    pub fn new(socket: OwnedFd, max_payload_bytes: u64) -> Self {
        let socket = Arc::new(socket);
        Self {
            sender: Sender {
                socket: Arc::clone(&socket),
                limit: None,
                header: Vec::with_capacity(1024),
                writer: None,
            },
            receiver: Receiver {
                socket,
                max_payload_bytes,
                read_limit: Duration::ZERO,
                received: vec![0; READ_BYTES],
                start: 0,
                end: 0,
                descriptors: Vec::new(),
                reader: None,
            },
        }
    }

    /// The two halves, for two threads.
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }

    /// The two halves, lent.
    pub fn halves(&mut self) -> (&mut Sender, &mut Receiver) {
        (&mut self.sender, &mut self.receiver)
    }

    /// A descriptor of its own for the same socket, for handing the channel on; whatever was
    /// received and not read is lost.
    ///
    /// # Errors
    /// [`WireError::System`] when descriptors run out.
    pub fn into_socket(self) -> Result<OwnedFd, WireError> {
        let Self { sender, receiver } = self;
        drop(receiver);
        match Arc::try_unwrap(sender.socket) {
            Ok(socket) => Ok(socket),
            Err(shared) => shared.try_clone().map_err(|source| WireError::System {
                call: "fcntl(F_DUPFD)",
                source,
            }),
        }
    }

    /// What ends this channel from another thread.
    pub fn hang_up(&self) -> HangUp {
        HangUp(Arc::downgrade(&self.sender.socket))
    }

    /// As [`Sender::limit`].
    ///
    /// # Errors
    /// Its own.
    pub fn limit_sending(&mut self, limit: Duration) -> Result<(), WireError> {
        self.sender.limit(limit)
    }

    /// As [`Sender::send`].
    ///
    /// # Errors
    /// Its own.
    pub fn send<T: Serialize>(
        &mut self,
        header: &T,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), WireError> {
        self.sender.send(header, descriptor)
    }

    /// As [`Sender::send_payload`].
    ///
    /// # Errors
    /// Its own.
    pub fn send_payload<T: Serialize>(
        &mut self,
        header: &T,
        chunks: &[&[u8]],
    ) -> Result<(), WireError> {
        self.sender.send_payload(header, chunks)
    }

    /// As [`Receiver::receive`].
    ///
    /// # Errors
    /// Its own.
    pub fn receive(&mut self, deadline: Option<Instant>) -> Result<Incoming<'_>, WireError> {
        self.receiver.receive(deadline)
    }
}

impl Sender {
    /// What ends the channel from another thread.
    pub fn hang_up(&self) -> HangUp {
        HangUp(Arc::downgrade(&self.socket))
    }

    /// Limits how long a message may take to go out from now on. Without a limit it waits for as
    /// long as the peer does not read.
    ///
    /// # Errors
    /// [`WireError::System`].
    pub fn limit(&mut self, limit: Duration) -> Result<(), WireError> {
        if self.limit == Some(limit) {
            return Ok(());
        }
        let pause = limit.clamp(Duration::from_millis(1), SEND_PAUSE);
        set_socket_timeout(&*self.socket, Timeout::Send, Some(pause))
            .map_err(WireError::system("setsockopt(SO_SNDTIMEO)"))?;
        self.limit = Some(limit);
        Ok(())
    }

    /// Sends a small message without a payload, if that needs no wait. Returns whether it went
    /// out.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn try_send<T: Serialize>(&mut self, header: &T) -> Result<bool, WireError> {
        self.encode(header, 0, 0)?;
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match retry(|| send(&self.socket, &self.header, flags)) {
            Ok(count) if count == self.header.len() => Ok(true),
            // What has begun has to go out whole.
            Ok(count) => self
                .send_all(&self.header[count..], &[], None)
                .map(|()| true),
            Err(Errno::AGAIN) => Ok(false),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(WireError::Closed),
            Err(errno) => Err(WireError::system(SENDING)(errno)),
        }
    }

    /// Sends a message without a payload, with a descriptor if given.
    ///
    /// # Errors
    /// [`WireError::Closed`] when the peer is gone, [`WireError::TimedOut`] when it does not read.
    pub fn send<T: Serialize>(
        &mut self,
        header: &T,
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), WireError> {
        self.encode(header, if descriptor.is_some() { DESCRIPTOR } else { 0 }, 0)?;
        self.send_all(&self.header, &[], descriptor)
    }

    /// Sends a message whose payload is `chunks`, one after another.
    ///
    /// The previous payload sent this way must have been answered by now: a large payload reuses
    /// the one shared buffer.
    ///
    /// # Errors
    /// As [`Sender::send`], and [`WireError::System`] when shared memory cannot be had.
    pub fn send_payload<T: Serialize>(
        &mut self,
        header: &T,
        chunks: &[&[u8]],
    ) -> Result<(), WireError> {
        let bytes: u64 = chunks.iter().map(|chunk| chunk.len() as u64).sum();
        if bytes < SHARED_FROM_BYTES {
            return self.send_inline(header, chunks);
        }
        let mut flags = SHARED;
        if self
            .writer
            .as_ref()
            .is_none_or(|writer| writer.capacity() < bytes)
        {
            self.writer = None;
            self.writer = Some(SharedWriter::with_room_for(bytes)?);
            flags |= NEW_BUFFER;
        }
        self.encode(header, flags, bytes)?;
        let Some(writer) = self.writer.as_mut() else {
            return Err(WireError::Malformed("no shared buffer"));
        };
        writer.fill(chunks);
        let writer = self.writer.as_ref();
        let new = writer.filter(|_| flags & NEW_BUFFER != 0);
        let descriptor = new.map(SharedWriter::file);
        self.send_all(&self.header, &[], descriptor)
    }

    /// Sends a message whose payload, however large, goes through the socket: the way for messages
    /// that follow one another without an answer.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn send_inline<T: Serialize>(
        &mut self,
        header: &T,
        chunks: &[&[u8]],
    ) -> Result<(), WireError> {
        let bytes = chunks.iter().map(|chunk| chunk.len() as u64).sum();
        self.encode(header, 0, bytes)?;
        self.send_all(&self.header, chunks, None)
    }

    fn encode<T: Serialize>(
        &mut self,
        header: &T,
        flags: u32,
        payload_bytes: u64,
    ) -> Result<(), WireError> {
        let mut buffer = std::mem::take(&mut self.header);
        buffer.clear();
        buffer.resize(PREFIX_BYTES, 0);
        buffer = postcard::to_extend(header, buffer)?;
        let announced = (buffer.len() - PREFIX_BYTES) as u64;
        if announced > MAX_HEADER_BYTES {
            // The peer would refuse it after the fact.
            return Err(WireError::TooLarge {
                announced,
                limit: MAX_HEADER_BYTES,
            });
        }
        let header_bytes = announced as u32;
        buffer[0..4].copy_from_slice(&header_bytes.to_le_bytes());
        buffer[4..8].copy_from_slice(&flags.to_le_bytes());
        buffer[8..16].copy_from_slice(&payload_bytes.to_le_bytes());
        self.header = buffer;
        Ok(())
    }

    /// Writes `head`, then `chunks`, however many calls that takes. A descriptor goes with the
    /// first byte.
    fn send_all(
        &self,
        head: &[u8],
        chunks: &[&[u8]],
        descriptor: Option<BorrowedFd<'_>>,
    ) -> Result<(), WireError> {
        let mut pieces = Vec::with_capacity(1 + chunks.len());
        pieces.push(IoSlice::new(head));
        pieces.extend(
            chunks
                .iter()
                .filter(|chunk| !chunk.is_empty())
                .map(|chunk| IoSlice::new(chunk)),
        );
        let mut pieces = pieces.as_mut_slice();
        let mut descriptor = descriptor;
        // Most messages go out in one call, and need no look at the clock.
        let mut deadline = None;
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut ancillary = SendAncillaryBuffer::new(&mut space);
            let attached;
            if let Some(descriptor) = descriptor {
                attached = [descriptor];
                ancillary.push(SendAncillaryMessage::ScmRights(&attached));
            }
            let window = &pieces[..pieces.len().min(MAX_SLICES)];
            let sent = retry(|| sendmsg(&self.socket, window, &mut ancillary, SendFlags::NOSIGNAL));
            match sent {
                Ok(count) => {
                    descriptor = None;
                    IoSlice::advance_slices(&mut pieces, count);
                }
                // Its pause is over.
                Err(Errno::AGAIN) if self.limit.is_some() => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(WireError::Closed),
                Err(errno) => return Err(WireError::system(SENDING)(errno)),
            }
            if pieces.is_empty() {
                return Ok(());
            }
            if let Some(limit) = self.limit {
                let now = Instant::now();
                let deadline = *deadline.get_or_insert_with(|| now.checked_add(limit));
                if deadline.is_some_and(|deadline| deadline <= now) {
                    return Err(WireError::TimedOut);
                }
            }
        }
    }
}

impl Receiver {
    /// Bounds what the peer may send in one message from now on.
    pub fn limit_payload(&mut self, bytes: u64) {
        self.max_payload_bytes = bytes;
    }

    /// Waits for the next message, until `deadline` if given.
    ///
    /// # Errors
    /// [`WireError`]; after any of them but [`WireError::TimedOut`] the channel is of no more use.
    pub fn receive(&mut self, deadline: Option<Instant>) -> Result<Incoming<'_>, WireError> {
        let arrived = self.arrive(&Wait::Until(deadline))?;
        self.view(arrived)
    }

    /// Waits for the next message for about `pause`; `None` leaves the channel as it was. For
    /// whoever has something else to look at now and then: the kernel is told the pause once and
    /// not before each read, as it is with deadlines.
    ///
    /// # Errors
    /// As [`Receiver::receive`].
    pub fn receive_within(&mut self, pause: Duration) -> Result<Option<Incoming<'_>>, WireError> {
        match self.arrive(&Wait::Pause(pause)) {
            Ok(arrived) => self.view(arrived).map(Some),
            Err(WireError::TimedOut) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn arrive(&mut self, wait: &Wait) -> Result<Arrived, WireError> {
        self.fill_to(PREFIX_BYTES, wait)?;
        let prefix = &self.received[self.start..self.start + PREFIX_BYTES];
        let header_bytes = u64::from(read_u32(&prefix[0..4]));
        let flags = read_u32(&prefix[4..8]);
        let payload_bytes =
            u64::from(read_u32(&prefix[8..12])) | u64::from(read_u32(&prefix[12..16])) << 32;
        for (announced, limit) in [
            (header_bytes, MAX_HEADER_BYTES),
            (payload_bytes, self.max_payload_bytes),
        ] {
            if announced > limit {
                return Err(WireError::TooLarge { announced, limit });
            }
        }
        let shared = flags & SHARED != 0;
        let inline_bytes = if shared { 0 } else { payload_bytes };
        let payload_at = PREFIX_BYTES + header_bytes as usize;
        let total = payload_at + inline_bytes as usize;
        self.fill_to(total, wait)?;

        let message = self.start;
        self.start += total;
        if flags & NEW_BUFFER != 0 {
            let file = self.take_descriptor("a message without its shared buffer")?;
            self.reader = Some(SharedReader::open(&file)?);
        }
        let descriptor = if flags & DESCRIPTOR == 0 {
            None
        } else {
            Some(self.take_descriptor("a message without its descriptor")?)
        };
        Ok(Arrived {
            header: message + PREFIX_BYTES..message + payload_at,
            payload: if shared {
                0..usize::try_from(payload_bytes).unwrap_or(usize::MAX)
            } else {
                message + payload_at..message + total
            },
            shared,
            descriptor,
        })
    }

    fn view(&self, arrived: Arrived) -> Result<Incoming<'_>, WireError> {
        let payload = if arrived.shared {
            let reader = self
                .reader
                .as_ref()
                .ok_or(WireError::Malformed("a payload without its buffer"))?;
            reader.first(arrived.payload.end as u64)?
        } else {
            &self.received[arrived.payload]
        };
        Ok(Incoming {
            header: &self.received[arrived.header],
            payload,
            descriptor: arrived.descriptor,
        })
    }

    fn take_descriptor(&mut self, what: &'static str) -> Result<OwnedFd, WireError> {
        if self.descriptors.is_empty() {
            return Err(WireError::Malformed(what));
        }
        Ok(self.descriptors.remove(0))
    }

    /// Reads until at least `bytes` are buffered.
    fn fill_to(&mut self, bytes: usize, wait: &Wait) -> Result<(), WireError> {
        if self.end - self.start >= bytes {
            return Ok(());
        }
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
        if self.received.len() - self.start < bytes {
            self.received.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            if self.received.len() < bytes {
                self.received.resize(bytes.next_power_of_two(), 0);
            }
        }
        let mut first_read = None;
        while self.end - self.start < bytes {
            self.limit_read(wait)?;
            let came = self.read_some()?;
            if let Wait::Pause(pause) = *wait {
                // A message that drips is none either: the caller gets its turn.
                let began = *first_read.get_or_insert_with(Instant::now);
                if !came || began.elapsed() >= pause {
                    return Err(WireError::TimedOut);
                }
            }
        }
        Ok(())
    }

    /// Tells the kernel how long the next read may wait. A deadline further away than a moment is
    /// approached in whole seconds, so that one setting serves a whole series of reads.
    fn limit_read(&mut self, wait: &Wait) -> Result<(), WireError> {
        let limit = match *wait {
            Wait::Pause(pause) => pause,
            Wait::Until(None) => Duration::ZERO,
            Wait::Until(Some(deadline)) => {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(WireError::TimedOut);
                }
                if left > Duration::from_secs(2) {
                    Duration::from_secs(left.as_secs())
                } else {
                    left.max(Duration::from_millis(1))
                }
            }
        };
        if limit != self.read_limit {
            let given = (!limit.is_zero()).then_some(limit);
            set_socket_timeout(&*self.socket, Timeout::Recv, given)
                .map_err(WireError::system("setsockopt(SO_RCVTIMEO)"))?;
            self.read_limit = limit;
        }
        Ok(())
    }

    /// Reads what is there. Nothing may come before the read's limit, which is told; the caller
    /// looks at its deadline again.
    fn read_some(&mut self) -> Result<bool, WireError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut self.received[self.end..])];
        let result = retry(|| {
            recvmsg(
                &self.socket,
                &mut slices,
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            )
        });
        let count = match result {
            Ok(message) if message.bytes == 0 => return Err(WireError::Closed),
            Ok(message) => message.bytes,
            Err(Errno::CONNRESET) => return Err(WireError::Closed),
            Err(Errno::AGAIN) => return Ok(false),
            Err(errno) => return Err(WireError::system("recvmsg")(errno)),
        };
        self.end += count;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                self.descriptors.extend(descriptors);
            }
        }
        Ok(true)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.sender.socket.as_fd()
    }
}

fn read_u32(bytes: &[u8]) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(bytes);
    u32::from_le_bytes(number)
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{BatchDone, BatchOutcome, WorkerReply, WorkerRequest};

    const LIMIT: u64 = 1 << 30;

    fn ends() -> (Channel, Channel) {
        let (one, other) = Channel::pair().unwrap();
        (Channel::new(one, LIMIT), Channel::new(other, LIMIT))
    }

    fn soon() -> Option<Instant> {
        Some(Instant::now() + Duration::from_secs(10))
    }

    #[test]
    fn payloads_of_every_size_arrive_as_sent() {
        let (mut one, mut other) = ends();
        let sizes = [
            0,
            1,
            100,
            65_535,
            65_536,
            65_537,
            5 << 20,
            70_000,
            10,
            12 << 20,
        ];
        let sender = std::thread::Builder::new()
            .spawn(move || {
                for size in sizes {
                    let body: Vec<u8> = (0..size).map(|at: usize| (at % 251) as u8).collect();
                    let (left, right) = body.split_at(size / 3);
                    one.send_payload(&size, &[left, right]).unwrap();
                    one.receive(soon()).unwrap();
                }
            })
            .unwrap();
        for size in sizes {
            let incoming = other.receive(soon()).unwrap();
            assert_eq!(incoming.header::<usize>().unwrap(), size);
            assert_eq!(incoming.payload.len(), size);
            let intact = incoming
                .payload
                .iter()
                .enumerate()
                .all(|(at, &b)| b == (at % 251) as u8);
            assert!(intact, "payload of {size} bytes differs");
            other.send(&(), None).unwrap();
        }
        sender.join().unwrap();
    }

    #[test]
    fn messages_sent_together_are_read_one_by_one() {
        let (mut one, mut other) = ends();
        for number in 0..100_u32 {
            one.send_payload(&number, &[&number.to_le_bytes()]).unwrap();
        }
        for number in 0..100_u32 {
            let incoming = other.receive(soon()).unwrap();
            assert_eq!(incoming.header::<u32>().unwrap(), number);
            assert_eq!(incoming.payload, number.to_le_bytes());
        }
    }

    #[test]
    fn a_descriptor_arrives_with_its_message() {
        let (mut one, mut other) = ends();
        let (near, far) = Channel::pair().unwrap();
        one.send(&1_u8, None).unwrap();
        one.send(&2_u8, Some(far.as_fd())).unwrap();
        drop(far);
        assert!(other.receive(soon()).unwrap().descriptor.is_none());
        let descriptor = other.receive(soon()).unwrap().descriptor.unwrap();
        let (mut near, mut far) = (Channel::new(near, LIMIT), Channel::new(descriptor, LIMIT));
        near.send(&WorkerRequest::Stop, None).unwrap();
        let stop = far.receive(soon()).unwrap();
        assert!(matches!(
            stop.header::<WorkerRequest<'_>>().unwrap(),
            WorkerRequest::Stop
        ));
    }

    #[test]
    fn a_wait_ends_at_its_deadline_and_when_the_peer_closes() {
        let (one, mut other) = ends();
        let soon = Instant::now() + Duration::from_millis(5);
        assert!(matches!(
            other.receive(Some(soon)),
            Err(WireError::TimedOut)
        ));
        drop(one);
        assert!(matches!(other.receive(None), Err(WireError::Closed)));
        assert!(matches!(other.send(&(), None), Err(WireError::Closed)));
    }

    #[test]
    fn a_pause_leaves_a_message_that_has_begun_as_it_was() {
        let (one, other) = Channel::pair().unwrap();
        let mut whole = Channel::new(one.try_clone().unwrap(), LIMIT);
        let (_, mut other) = Channel::new(other, LIMIT).split();
        let pause = Duration::from_millis(5);
        assert!(other.receive_within(pause).unwrap().is_none());
        let mut prefix = [0; PREFIX_BYTES];
        (prefix[0], prefix[8]) = (1, 3);
        // Header `7`, payload `abc`, cut in the middle of both.
        for piece in [&prefix[..5], &prefix[5..], &[7, b'a'], b"b"] {
            rustix::io::write(&one, piece).unwrap();
            assert!(other.receive_within(pause).unwrap().is_none());
        }
        rustix::io::write(&one, b"c").unwrap();
        let incoming = other.receive_within(pause).unwrap().unwrap();
        assert_eq!(incoming.header::<u8>().unwrap(), 7);
        assert_eq!(incoming.payload, b"abc");
        whole.send(&8_u8, None).unwrap();
        let incoming = other.receive_within(pause).unwrap().unwrap();
        assert_eq!(incoming.header::<u8>().unwrap(), 8);
    }

    #[test]
    fn halves_work_in_two_threads_and_large_payloads_need_no_answer_inline() {
        let (one, other) = ends();
        let (mut sender, _) = one.split();
        let (_, mut receiver) = other.split();
        let sending = std::thread::Builder::new()
            .spawn(move || {
                for number in 0..20_u8 {
                    let body = vec![number; 300_000];
                    sender.send_inline(&number, &[&body]).unwrap();
                }
            })
            .unwrap();
        for number in 0..20_u8 {
            let incoming = receiver.receive(soon()).unwrap();
            assert_eq!(incoming.header::<u8>().unwrap(), number);
            assert!(incoming.payload.len() == 300_000);
            assert!(incoming.payload.iter().all(|byte| *byte == number));
        }
        sending.join().unwrap();
    }

    #[test]
    fn sending_to_a_peer_that_does_not_read_ends_at_its_limit() {
        let (one, _other) = ends();
        let (mut one, _) = one.split();
        let limit = Duration::from_millis(150);
        one.limit(limit).unwrap();
        let began = Instant::now();
        let sent = one.send_inline(&7_u8, &[&vec![0; 8 << 20]]);
        assert!(matches!(sent, Err(WireError::TimedOut)));
        assert!(began.elapsed() >= limit);
        assert!(!one.try_send(&8_u8).unwrap(), "there is no room");

        let (one, _) = Channel::pair().unwrap();
        let (mut gone, _) = Channel::new(one, LIMIT).split();
        assert!(matches!(gone.try_send(&8_u8), Err(WireError::Closed)));
        let (near, far) = Channel::pair().unwrap();
        let (mut near, _) = Channel::new(near, LIMIT).split();
        assert!(near.try_send(&9_u8).unwrap());
        let mut other = Channel::new(far, LIMIT);
        assert_eq!(other.receive(soon()).unwrap().header::<u8>().unwrap(), 9);
    }

    #[test]
    fn a_message_goes_out_whole_while_its_peer_reads() {
        let (one, mut other) = ends();
        let (mut one, _) = one.split();
        one.limit(Duration::from_secs(10)).unwrap();
        let body = vec![3; 8 << 20];
        let expected = body.clone();
        let sending = std::thread::Builder::new()
            .spawn(move || one.send_inline(&7_u8, &[&body]).unwrap())
            .unwrap();
        let incoming = other.receive(soon()).unwrap();
        assert!(incoming.payload == expected);
        sending.join().unwrap();
    }

    #[test]
    fn hanging_up_ends_a_wait_after_the_last_words() {
        let (mut one, mut other) = ends();
        one.send(&7_u8, None).unwrap();
        let hang_up = other.hang_up();
        hang_up.now();
        // The other end is still open, as when a grandchild holds it.
        assert_eq!(other.receive(None).unwrap().header::<u8>().unwrap(), 7);
        assert!(matches!(other.receive(None), Err(WireError::Closed)));
        let hang_up = one.hang_up();
        let waiting = std::thread::Builder::new()
            .spawn(move || matches!(one.receive(soon()), Err(WireError::Closed)))
            .unwrap();
        hang_up.now();
        assert!(waiting.join().unwrap());
        assert!(!hang_up.is_pending());
    }

    #[test]
    fn a_deadline_holds_however_slowly_a_message_drips() {
        let (one, other) = Channel::pair().unwrap();
        let mut other = Channel::new(other, LIMIT);
        let writer = std::thread::Builder::new()
            .spawn(move || {
                // Fewer bytes than a prefix has.
                for _ in 0..PREFIX_BYTES - 1 {
                    let _reader_gave_up = rustix::io::write(&one, &[0]);
                    std::thread::sleep(Duration::from_millis(20));
                }
            })
            .unwrap();
        let started = Instant::now();
        let limit = Duration::from_millis(100);
        assert!(matches!(
            other.receive(Some(started + limit)),
            Err(WireError::TimedOut)
        ));
        assert!(started.elapsed() >= limit);
        writer.join().unwrap();
    }

    #[test]
    fn an_announced_size_over_the_limit_is_refused_before_memory_is_taken() {
        let (one, other) = Channel::pair().unwrap();
        let mut prefix = [0; PREFIX_BYTES];
        prefix[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        rustix::io::write(&one, &prefix).unwrap();
        let mut other = Channel::new(other, 1000);
        let error = other.receive(soon()).err().unwrap();
        assert!(matches!(
            error,
            WireError::TooLarge {
                announced: u64::MAX,
                limit: 1000
            }
        ));
    }

    #[test]
    fn a_header_that_the_peer_would_refuse_is_not_sent() {
        let (mut one, mut other) = ends();
        let text = "x".repeat(MAX_HEADER_BYTES as usize + 1);
        assert!(matches!(
            one.send(&text, None),
            Err(WireError::TooLarge { .. })
        ));
        one.send(&5_u8, None).unwrap();
        assert_eq!(other.receive(soon()).unwrap().header::<u8>().unwrap(), 5);
    }

    #[test]
    fn a_buffer_that_could_shrink_is_refused() {
        let (one, other) = Channel::pair().unwrap();
        let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let mut head = vec![0; PREFIX_BYTES];
        head[4] = (SHARED | NEW_BUFFER) as u8;
        head[8] = 100;
        let (one, _) = Channel::new(one, LIMIT).split();
        one.send_all(&head, &[], Some(file.as_fd())).unwrap();
        let mut other = Channel::new(other, LIMIT);
        assert!(matches!(
            other.receive(soon()),
            Err(WireError::Malformed(_))
        ));
    }

    #[test]
    fn garbage_in_a_header_is_an_error() {
        let (mut one, mut other) = ends();
        one.send(&u64::MAX, None).unwrap();
        let incoming = other.receive(soon()).unwrap();
        assert!(incoming.header::<WorkerReply<'_>>().is_err());
    }

    #[test]
    fn replies_borrow_their_texts() {
        let (mut one, mut other) = ends();
        let done = WorkerReply::Done(BatchDone {
            ran_micros: 1,
            outcome: BatchOutcome::Items(vec![]),
            metrics: vec![],
        });
        one.send_payload(&done, &[b"body"]).unwrap();
        let incoming = other.receive(soon()).unwrap();
        assert!(matches!(
            incoming.header::<WorkerReply<'_>>().unwrap(),
            WorkerReply::Done(_)
        ));
        assert_eq!(incoming.payload, b"body");
    }
}
