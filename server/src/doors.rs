//! How the listeners close without losing anybody: the system takes connections before the server
//! does, and those that it has taken are gone if their listener closes first. So new ones are kept
//! out, those that wait are let in, and only then may the listeners close.

use std::io;
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{SockFilter, Socket};

use crate::listen::{self, Listeners, SocketFile};

/// How long nobody may have waited: a client may still be in the middle of its handshake.
const SETTLED: Duration = Duration::from_millis(50);

/// How often it is looked.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Drops segments that ask for a connection (SYN without ACK, in the 14th byte of the TCP header), and
/// takes all others: those of handshakes that have begun.
const NO_NEW_CONNECTIONS: [SockFilter; 5] = [
    SockFilter::new(0x30, 0, 0, 13),       // load that byte
    SockFilter::new(0x54, 0, 0, 0x12),     // keep SYN and ACK
    SockFilter::new(0x15, 0, 1, 0x02),     // SYN alone?
    SockFilter::new(0x06, 0, 0, 0),        // drop
    SockFilter::new(0x06, 0, 0, u32::MAX), // take
];

/// The listeners, beside those who serve them.
pub(crate) struct Doors {
    tcp: Vec<Socket>,
    unix: Vec<Socket>,
    /// A socket without its file cannot be connected to. They go with this value, however it ends.
    files: Vec<SocketFile>,
}

impl Doors {
    /// Those of these listeners, whose files it takes.
    ///
    /// # Errors
    /// There are too many files open.
    pub(crate) fn of(listeners: &mut Listeners) -> io::Result<Self> {
        let mut doors = Self {
            tcp: Vec::new(),
            unix: Vec::new(),
            files: std::mem::take(&mut listeners.files),
        };
        for listener in &listeners.all {
            match &listener.socket {
                listen::Socket::Tcp(socket, _) => doors.tcp.push(socket.try_clone()?.into()),
                listen::Socket::Unix(socket, _) => {
                    let socket = socket.try_clone()?;
                    doors.unix.push(std::os::fd::OwnedFd::from(socket).into());
                }
            }
        }
        Ok(doors)
    }

    /// Lets nobody in any more, and waits until whoever waited has been, at most until the deadline.
    /// Returns whether nobody waits.
    pub(crate) async fn close(&mut self, deadline: Instant) -> bool {
        self.files.clear();
        for socket in &self.tcp {
            if let Err(error) = socket.attach_filter(&NO_NEW_CONNECTIONS) {
                // Where a sandbox forbids it, those that come in the last moment are lost.
                tracing::debug!(%error, "new connections cannot be kept out before the listeners close");
            }
        }
        let mut empty_since = None;
        loop {
            let now = Instant::now();
            if self.somebody_waits() {
                empty_since = None;
            } else if now - *empty_since.get_or_insert(now) >= SETTLED {
                return true;
            }
            if now >= deadline {
                return empty_since.is_some();
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    fn somebody_waits(&self) -> bool {
        let sockets = self.tcp.iter().chain(&self.unix);
        let mut asked: Vec<_> = sockets
            .map(|socket| PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN))
            .collect();
        let at_once = Timespec::default();
        poll(&mut asked, Some(&at_once)).is_ok_and(|waiting| waiting > 0)
    }
}
