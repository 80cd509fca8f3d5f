//! Binds every listener before any of them serves, and tells where they are.

use std::net::{SocketAddr, TcpListener};
use std::path::Path;

use anyhow::Context as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

use crate::rest::Surface;
use crate::settings::{Address, Http};

/// Connections that may wait to be taken.
const BACKLOG: i32 = 1024;

/// Of the files that may be open, those kept for everything but connections: a worker that is lost
/// has to be replaced however many clients there are. Of a small limit it is half.
const OTHER_FILES: u64 = 1024;

/// Raises the limit on open files as far as this process may, and returns how many of them may be
/// connections of clients. Those beyond wait to be taken.
pub(crate) fn connection_limit() -> usize {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    // `None` is a limit that is none.
    let files = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(_) => limit.current,
    };
    let files = files.unwrap_or(u64::MAX);
    usize::try_from(files - OTHER_FILES.min(files / 2)).unwrap_or(usize::MAX)
}

/// A bound socket and what it serves.
pub(crate) struct Listener {
    /// The socket.
    pub(crate) socket: TcpListener,
    /// Where it is bound, with the port that the system chose.
    pub(crate) address: SocketAddr,
    /// The APIs.
    pub(crate) surface: Surface,
}

/// All listeners.
pub(crate) struct Listeners {
    /// In the order inference, management, metrics; one less where two share a socket.
    pub(crate) all: Vec<Listener>,
}

impl Listeners {
    /// Binds all of them or none.
    ///
    /// # Errors
    /// `Failed to bind to address: …`.
    pub(crate) fn bind(http: &Http) -> anyhow::Result<Self> {
        let inference = Surface {
            inference: true,
            ..Surface::NONE
        };
        let management = Surface {
            management: true,
            ..Surface::NONE
        };
        let metrics = Surface {
            metrics: true,
            ..Surface::NONE
        };
        // Two free ports are two listeners, although they are written alike.
        let shared = http.inference == http.management && http.inference.port != 0;
        let mut all = if shared {
            let everything = Surface {
                inference: true,
                management: true,
                metrics: http.metrics.is_some(),
            };
            vec![bind(&http.inference, everything)?]
        } else {
            vec![
                bind(&http.inference, inference)?,
                bind(&http.management, management)?,
            ]
        };
        if let Some(address) = &http.metrics {
            all.push(bind(address, metrics)?);
        }
        Ok(Self { all })
    }

    fn serving(&self, api: impl Fn(&Surface) -> bool) -> Option<SocketAddr> {
        // The metrics listener of its own comes last, and is what scrapers are told.
        let listener = self
            .all
            .iter()
            .rev()
            .find(|listener| api(&listener.surface));
        listener.map(|listener| listener.address)
    }

    /// Where the APIs are.
    pub(crate) fn whereabouts(&self) -> Whereabouts {
        Whereabouts {
            inference: self.serving(|surface| surface.inference),
            management: self.serving(|surface| surface.management),
            metrics: self.serving(|surface| surface.metrics),
            pid: std::process::id(),
        }
    }
}

/// Where the APIs of this process are.
#[derive(Debug, Serialize)]
pub(crate) struct Whereabouts {
    inference: Option<SocketAddr>,
    management: Option<SocketAddr>,
    metrics: Option<SocketAddr>,
    pid: u32,
}

impl Whereabouts {
    /// Tells them in a file that appears all at once.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn tell(&self, file: &Path) -> anyhow::Result<()> {
        let beside = file.with_extension("tmp");
        fs_err::write(&beside, serde_json::to_vec_pretty(self)?)?;
        Ok(fs_err::rename(beside, file)?)
    }
}

fn bind(address: &Address, surface: Surface) -> anyhow::Result<Listener> {
    let failed = || format!("Failed to bind to address: {address}");
    let socket = TcpListener::bind((address.host.as_str(), address.port)).with_context(failed)?;
    // The standard library's backlog is short for a burst of clients; listening again is how it
    // is changed.
    rustix::net::listen(&socket, BACKLOG).with_context(failed)?;
    socket.set_nonblocking(true).with_context(failed)?;
    let address = socket.local_addr().with_context(failed)?;
    Ok(Listener {
        socket,
        address,
        surface,
    })
}
