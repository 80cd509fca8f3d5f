//! A host's main: take the control socket, set up, start workers as asked, end with the server.

use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use ts_types::with_causes;
use ts_wire::frame::{ControlRequest, HostReply, HostSetup};
use ts_wire::{Channel, WireError};

use crate::echo::EchoFactory;
use crate::plugin::run_plugin;
use crate::{BackendFactory, HostError, worker};

/// Control messages carry paths and texts, never bodies.
const MAX_CONTROL_PAYLOAD_BYTES: u64 = 1 << 20;

/// The `worker` command: serves on the socket that is this process's standard input.
pub fn run() -> ExitCode {
    let result = take_stdin().and_then(|socket| {
        let mut control = Channel::new(socket, MAX_CONTROL_PAYLOAD_BYTES);
        set_up(&mut control).map(|setup| (control, setup))
    });
    let (control, setup) = match result {
        Ok(set_up) => set_up,
        Err(error) => {
            // No server to tell: someone ran the command by hand.
            return report(&error);
        }
    };
    let ended = match &setup.python {
        None => serve(control, &(Arc::new(EchoFactory) as Arc<dyn BackendFactory>)),
        Some(places) => {
            let socket = match control.into_socket() {
                Ok(socket) => socket,
                Err(error) => return report(&error.into()),
            };
            let kept = socket.try_clone().ok();
            let ran = postcard_bytes(&setup).and_then(|bytes| run_plugin(places, &bytes, socket));
            // Whatever kept the plugin from running; the plugin reports for itself.
            if let (Err(error), Some(socket)) = (&ran, kept)
                && !matches!(error, HostError::Plugin(_))
            {
                let mut control = Channel::new(socket, MAX_CONTROL_PAYLOAD_BYTES);
                let failed = HostReply::Failed {
                    message: with_causes(error),
                };
                let _server_may_be_gone = control.send(&failed, None);
            }
            ran
        }
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

fn set_up(control: &mut Channel) -> Result<HostSetup, HostError> {
    let incoming = control.receive(None)?;
    incoming
        .header::<HostSetup>()
        .map_err(|_| HostError::NotSetUp {
            got: "something else",
        })
}

fn postcard_bytes(setup: &HostSetup) -> Result<Vec<u8>, HostError> {
    ts_wire::encode(setup).map_err(HostError::from)
}

/// Moves standard input to a descriptor that is closed on exec, and puts the null device in its
/// place, so that no grandchild inherits the control socket.
fn take_stdin() -> Result<OwnedFd, HostError> {
    let system = |call| {
        move |errno: rustix::io::Errno| HostError::System {
            call,
            source: errno.into(),
        }
    };
    let socket = rustix::io::fcntl_dupfd_cloexec(std::io::stdin().as_fd(), 3)
        .map_err(system("fcntl(F_DUPFD_CLOEXEC)"))?;
    let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
        .map_err(system("open(/dev/null)"))?;
    rustix::stdio::dup2_stdin(&null).map_err(system("dup2"))?;
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
