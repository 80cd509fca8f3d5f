//! The word that a caller has left, for a worker that is busy with its request.
//!
//! A socket of its own beside the worker's channel: the channel's reader is the worker's thread,
//! which sits in the handler, while any thread of the handler may want to know whether to go on.
//! Each message is one request's id. Nothing depends on its arrival: a full socket drops it.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};

use crate::WireError;

/// Longer than any id.
const MAX_ID_BYTES: usize = 256;

/// The server's end.
#[derive(Debug)]
pub struct Departures {
    socket: OwnedFd,
    told: AtomicBool,
}

/// The worker's end.
#[derive(Debug)]
pub struct Departed(OwnedFd);

impl Departures {
    /// The server's end, and the worker's for sending on.
    ///
    /// # Errors
    /// [`WireError::System`] when descriptors run out.
    pub fn pair() -> Result<(Self, OwnedFd), WireError> {
        let (near, far) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(WireError::system("socketpair"))?;
        let told = AtomicBool::new(false);
        Ok((Self { socket: near, told }, far))
    }

    /// Says that the caller of a request has left. Never waits.
    pub fn tell(&self, request_id: &str) {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let _full_or_closed = send(&self.socket, request_id.as_bytes(), flags);
        self.told.store(true, Ordering::Relaxed);
    }

    /// Whether anything was told since this was asked last: a worker that need not look for it
    /// saves a system call.
    pub fn were_told(&self) -> bool {
        self.told.swap(false, Ordering::Relaxed)
    }
}

impl Departed {
    /// Takes the worker's end.
    pub fn new(socket: OwnedFd) -> Self {
        Self(socket)
    }

    /// Everything that was told since the last call. Never waits.
    pub fn each(&self, mut request: impl FnMut(&str)) {
        let mut id = [0; MAX_ID_BYTES];
        loop {
            match recv(&self.0, &mut id, RecvFlags::DONTWAIT) {
                Ok((bytes @ 1.., _)) => {
                    if let Ok(id) = std::str::from_utf8(&id[..bytes]) {
                        request(id);
                    }
                }
                Err(Errno::INTR) => {}
                // Nothing more, or nobody there any more.
                Ok(_) | Err(_) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_told_is_read_once_and_nobody_waits() {
        let (near, far) = Departures::pair().unwrap();
        let far = Departed::new(far);
        far.each(|id| panic!("nobody told {id}"));
        near.tell("one");
        near.tell("two");
        let mut told = Vec::new();
        far.each(|id| told.push(id.to_owned()));
        assert_eq!(told, ["one", "two"]);
        for _ in 0..10_000 {
            near.tell("nobody reads this");
        }
        drop(far);
        near.tell("nor this");
    }

    #[test]
    fn the_last_words_can_be_read_after_the_end() {
        let (near, far) = Departures::pair().unwrap();
        near.tell("one");
        drop(near);
        let mut told = 0;
        Departed::new(far).each(|_| told += 1);
        assert_eq!(told, 1);
    }
}
