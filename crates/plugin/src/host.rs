//! The border to the host: one C function that takes the control socket and never comes back.

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use ts_host::{BackendFactory, PluginEntry, ZygoteEnd, serve_zygote};
use ts_wire::Channel;
use ts_wire::frame::{HostReply, HostSetup};

use crate::error::PluginError;
use crate::factory::Factory;
use crate::python;

/// As in the host: control messages carry paths and texts.
const MAX_CONTROL_PAYLOAD_BYTES: u64 = 1 << 20;

// The compiler checks that the function has the type with which hosts call it.
const _: PluginEntry = ts_plugin_host;

/// Runs a host with Python on the control socket `control_fd`, until the server closes it.
///
/// The process ends inside: 0 when the server has gone, 1 after a fault, which the server is told
/// and the model log has. Returning would run the destructors of libtorch and unload libpython
/// under worker threads that may still be in both; for the same reason the interpreter is never
/// finalised.
///
/// # Safety
/// `control_fd` is a socket that the caller gives away; `setup` points to `setup_len` bytes that
/// stay as they are during the call. No other thread uses Python or changes signal handlers.
#[expect(unsafe_code, reason = "the exported function that hosts look up")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ts_plugin_host(
    control_fd: c_int,
    setup: *const u8,
    setup_len: usize,
) -> c_int {
    // SAFETY: the caller gives the descriptor away and keeps the bytes alive, see above.
    let (control, setup) = unsafe {
        (
            OwnedFd::from_raw_fd(control_fd),
            std::slice::from_raw_parts(setup, setup_len),
        )
    };
    let status = catch_unwind(AssertUnwindSafe(|| run(control, setup))).unwrap_or(1);
    // SAFETY: always sound; it skips whatever would run at an ordinary exit, as explained above.
    unsafe { libc::_exit(status) }
}

fn run(control: OwnedFd, setup: &[u8]) -> c_int {
    let forks = reporting(&control, || {
        die_by_faults();
        start(setup)
    });
    let (control, forked) = match forks {
        None => return 1,
        Some(false) => (control, false),
        Some(true) => {
            let zygote = reporting(&control, || {
                let control = Channel::new(control.try_clone()?, MAX_CONTROL_PAYLOAD_BYTES);
                Ok(serve_zygote(control, &python::ZYGOTE)?)
            });
            match zygote {
                None => return 1,
                Some(ZygoteEnd::ServerGone) => return 0,
                Some(ZygoteEnd::Host(socket)) => {
                    // The new host must not hold the zygote's channel, nor report to it.
                    drop(control);
                    (socket, true)
                }
            }
        }
    };
    let served = reporting(&control, || {
        let socket = control.try_clone()?;
        let control = if forked {
            ts_host::take_up(socket, &python::ZYGOTE)?
        } else {
            Channel::new(socket, MAX_CONTROL_PAYLOAD_BYTES)
        };
        let factory: Arc<dyn BackendFactory> = Arc::new(Factory);
        Ok(ts_host::serve(control, &factory)?)
    });
    c_int::from(served.is_none())
}

/// Runs a part of the host. Its failure, or panic, is told to the server and to the model log.
fn reporting<T>(control: &OwnedFd, part: impl FnOnce() -> Result<T, PluginError>) -> Option<T> {
    let ended = catch_unwind(AssertUnwindSafe(part)).unwrap_or(Err(PluginError::Panic));
    let error = match ended {
        Ok(value) => return Some(value),
        Err(error) => error,
    };
    let message = ts_types::with_causes(&error);
    python::log(&format!("model host: {message}"));
    if let Ok(spare) = control.try_clone() {
        let failed = HostReply::Failed { message };
        let _server_may_be_gone =
            Channel::new(spare, MAX_CONTROL_PAYLOAD_BYTES).send(&failed, None);
    }
    None
}

/// Returns whether this host is to be the zygote.
fn start(setup: &[u8]) -> Result<bool, PluginError> {
    let setup: HostSetup = ts_wire::decode(setup).map_err(PluginError::SetUp)?;
    let places = setup.python.ok_or(PluginError::NoPython)?;
    python::start(&places)?;
    Ok(setup.zygote)
}

/// Lets faults end the process at once. Rust's runtime catches SIGSEGV and SIGBUS to report stack
/// overflows, and swallows the first one that `kill` sends; the others may have been ignored by
/// whoever started the server.
fn die_by_faults() {
    for signal in [
        libc::SIGSEGV,
        libc::SIGBUS,
        libc::SIGFPE,
        libc::SIGILL,
        libc::SIGABRT,
    ] {
        // SAFETY: the default action is valid for each of these signals, and no other thread of
        // this process exists yet.
        #[expect(unsafe_code, reason = "the standard library cannot reset a signal")]
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}
