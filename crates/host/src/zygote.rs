//! The zygote: a host that has started its interpreter and imported what most models import, and
//! then forks hosts that are ready at once and share its memory.
//!
//! It runs no model and has one thread, so that nothing is locked or half done in its copies.

use std::os::fd::OwnedFd;

use ts_wire::frame::{ForkedSetup, HostReply, ZygoteReply, ZygoteRequest};
use ts_wire::{Channel, WireError};

use crate::HostError;
use crate::host::{HOST_NAME, MAX_CONTROL_PAYLOAD_BYTES};

/// What `ps` and `top` call it.
const ZYGOTE_NAME: &std::ffi::CStr = c"ts-zygote";

/// An environment variable and its value, or `None` to remove it.
pub type Variable = (String, Option<String>);

/// What the zygote asks of its interpreter. A call that fails says why in one line.
pub struct Interpreter {
    /// Imports modules and names those that are installed and failed. Fails when one has started a
    /// thread.
    pub preload: fn(&[String]) -> Result<Vec<String>, String>,
    /// Of these modules, one that was imported ahead.
    pub conflict: fn(&[String]) -> Result<Option<String>, String>,
    /// Forks a process whose parent is the server.
    pub fork: fn() -> Result<Fork, String>,
    /// Makes a fresh copy what a host of its own making would be: its variables, its threads.
    pub adapt: fn(&[Variable], u32) -> Result<(), String>,
}

/// The side of a fork that one is on.
#[derive(Debug)]
pub enum Fork {
    /// In the zygote; the new host's process.
    Zygote(u32),
    /// In the new host.
    Host,
}

/// Why the zygote's loop has ended.
#[derive(Debug)]
pub enum ZygoteEnd {
    /// The server has gone, or wants no more hosts.
    ServerGone,
    /// This process is a new host; its control socket, for [`take_up`].
    Host(OwnedFd),
}

/// Forks hosts until the server closes the control channel. Comes back in each of them, too.
///
/// # Errors
/// [`HostError::Control`] when the channel fails otherwise.
pub fn serve_zygote(
    mut control: Channel,
    interpreter: &Interpreter,
) -> Result<ZygoteEnd, HostError> {
    let _shown_as_a_host = rustix::thread::set_name(ZYGOTE_NAME);
    control.send(&HostReply::Ready, None)?;
    loop {
        let (request, socket) = match control.receive(None) {
            Ok(incoming) => (incoming.header()?, incoming.descriptor),
            Err(WireError::Closed) => return Ok(ZygoteEnd::ServerGone),
            Err(error) => return Err(error.into()),
        };
        let reply = match (request, socket) {
            (ZygoteRequest::Preload { modules }, _) => {
                (interpreter.preload)(&modules).map(|failed| ZygoteReply::Preloaded { failed })
            }
            (ZygoteRequest::Fork { own_modules }, Some(socket)) => {
                match fork(interpreter, &own_modules) {
                    // The channel to the zygote closes here as it is dropped.
                    Ok(Forked::Host) => return Ok(ZygoteEnd::Host(socket)),
                    Ok(Forked::Answer(reply)) => Ok(reply),
                    Err(message) => Err(message),
                }
            }
            (ZygoteRequest::Fork { .. }, None) => {
                return Err(WireError::Malformed("a host without its socket").into());
            }
        };
        let reply = reply.unwrap_or_else(|message| ZygoteReply::Refused { message });
        control.send(&reply, None)?;
    }
}

enum Forked {
    Host,
    Answer(ZygoteReply),
}

fn fork(interpreter: &Interpreter, own_modules: &[String]) -> Result<Forked, String> {
    if let Some(module) = (interpreter.conflict)(own_modules)? {
        return Ok(Forked::Answer(ZygoteReply::Declined { module }));
    }
    Ok(match (interpreter.fork)()? {
        Fork::Host => Forked::Host,
        Fork::Zygote(pid) => Forked::Answer(ZygoteReply::Forked { pid }),
    })
}

/// Makes a fresh copy of the zygote a host of its own. [`crate::serve`] comes next.
///
/// # Errors
/// [`HostError`] when the server's words do not come or cannot be followed.
pub fn take_up(socket: OwnedFd, interpreter: &Interpreter) -> Result<Channel, HostError> {
    let _shown_as_the_zygote = rustix::thread::set_name(HOST_NAME);
    let mut control = Channel::new(socket, MAX_CONTROL_PAYLOAD_BYTES);
    loop {
        let incoming = control.receive(None)?;
        match (incoming.header()?, incoming.descriptor) {
            (ForkedSetup::Stdout, Some(pipe)) => {
                rustix::stdio::dup2_stdout(&pipe).map_err(HostError::system("dup2"))?;
            }
            (ForkedSetup::Stderr, Some(pipe)) => {
                rustix::stdio::dup2_stderr(&pipe).map_err(HostError::system("dup2"))?;
            }
            (ForkedSetup::Stdout | ForkedSetup::Stderr, None) => {
                return Err(WireError::Malformed("an output without its pipe").into());
            }
            (
                ForkedSetup::Begin {
                    environment,
                    threads,
                },
                _,
            ) => {
                (interpreter.adapt)(&environment, threads).map_err(HostError::NotAdapted)?;
                return Ok(control);
            }
        }
    }
}
