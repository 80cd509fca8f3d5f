//! A host's main: take the control socket, set up, start workers as asked, end with the server.

use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use ts_types::with_causes;
use ts_wire::frame::{ControlRequest, HostReply, HostSetup};
use ts_wire::{Channel, WireError};

use crate::echo::EchoFactory;
use crate::plugin::Plugin;
use crate::{BackendFactory, HostError, worker};

/// Control messages carry paths and texts, never bodies.
pub(crate) const MAX_CONTROL_PAYLOAD_BYTES: u64 = 1 << 20;

/// What `ps` and `top` call a host, which would otherwise look like another server.
pub(crate) const HOST_NAME: &std::ffi::CStr = c"ts-host";

/// The `worker` command: serves on the socket that is this process's standard input.
pub fn run() -> ExitCode {
    let _shown_as_the_server = rustix::thread::set_name(HOST_NAME);
    let result = take_stdin().and_then(|socket| {
        let mut control = Channel::new(socket, MAX_CONTROL_PAYLOAD_BYTES);
        set_up(&mut control).map(|setup| (control, setup))
    });
    let (mut control, setup) = match result {
        Ok(set_up) => set_up,
        Err(error) => {
            // No server to tell: someone ran the command by hand.
            return report(&error);
        }
    };
    let ended = match &setup.python {
        None => serve(control, &(Arc::new(EchoFactory) as Arc<dyn BackendFactory>)),
        Some(places) => match Plugin::open(places) {
            // From here on the plugin reports for itself.
            Ok(plugin) => run_in(&plugin, &setup, control),
            Err(error) => {
                let failed = HostReply::Failed {
                    message: with_causes(&error),
                };
                let _server_may_be_gone = control.send(&failed, None);
                Err(error)
            }
        },
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report(&error),
    }
}

/// Serves until the server closes the control channel. `factory` builds what the workers hold.
///
/// # Errors
/// [`HostError::Control`] when the channel fails otherwise.
pub fn serve(mut control: Channel, factory: &Arc<dyn BackendFactory>) -> Result<(), HostError> {
    control.send(&HostReply::Ready, None)?;
    loop {
        let (request, socket) = match control.receive(None) {
            Ok(incoming) => (incoming.header::<ControlRequest>()?, incoming.descriptor),
            // The server is gone or has no more use for this host. Workers may sit in a call that
            // never ends; returning from here ends the process under them.
            Err(WireError::Closed) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        match (request, socket) {
            (ControlRequest::AddWorker { worker }, Some(socket)) => {
                if let Err(error) = worker::spawn(worker, socket, Arc::clone(factory)) {
                    // Its socket is closed by now, which tells the server; the others go on.
                    report(&error);
                }
            }
            (ControlRequest::AddWorker { .. }, None) => {
                return Err(WireError::Malformed("a worker without its socket").into());
            }
        }
    }
}

fn run_in(plugin: &Plugin, setup: &HostSetup, control: Channel) -> Result<(), HostError> {
    plugin.run(&ts_wire::encode(setup)?, control.into_socket()?)
}

fn set_up(control: &mut Channel) -> Result<HostSetup, HostError> {
    let incoming = control.receive(None)?;
    incoming
        .header::<HostSetup>()
        .map_err(|_| HostError::NotSetUp {
            got: "something else",
        })
}

/// Moves standard input to a descriptor that is closed on exec, and puts the null device in its
/// place, so that no grandchild inherits the control socket.
fn take_stdin() -> Result<OwnedFd, HostError> {
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin().as_fd(), 3)
        .map_err(HostError::system("fcntl(F_DUPFD_CLOEXEC)"))?;
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(HostError::system("open(/dev/null)"))?;
    rustix::stdio::dup2_stdin(&null).map_err(HostError::system("dup2"))?;
    Ok(socket)
}

#[expect(
    clippy::print_stderr,
    reason = "a host's standard error is the model log"
)]
fn report(error: &HostError) -> ExitCode {
    eprintln!("model host: {}", with_causes(error));
    ExitCode::FAILURE
}
