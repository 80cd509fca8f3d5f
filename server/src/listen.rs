//! Binds every listener before any of them serves, and tells where they are.

use std::any::Any;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use actix_web::dev::Extensions;
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

/// Who may connect to a unix socket: its owner and its group.
const SOCKET_MODE: u32 = 0o660;

/// A bound socket.
pub(crate) enum Socket {
    /// With the port that the system chose.
    Tcp(TcpListener, SocketAddr),
    /// With its path.
    Unix(UnixListener, PathBuf),
}

/// A bound socket and what it serves.
pub(crate) struct Listener {
    /// The socket.
    pub(crate) socket: Socket,
    /// The APIs.
    pub(crate) surface: Surface,
}

impl Listener {
    /// `host:port` or `unix:/path`.
    pub(crate) fn address(&self) -> String {
        match &self.socket {
            Socket::Tcp(_, address) => address.to_string(),
            Socket::Unix(_, path) => format!("unix:{}", path.display()),
        }
    }
}

/// Which APIs a connection may use, by the listener that it came in at.
#[derive(Debug, Clone, Default)]
pub(crate) struct Surfaces {
    tcp: Vec<(SocketAddr, Surface)>,
    unix: Vec<(PathBuf, Surface)>,
}

impl Surfaces {
    /// Those of the listener bound there; a connection knows only this of it.
    pub(crate) fn of_tcp(&self, bound: SocketAddr) -> Surface {
        let found = self.tcp.iter().find(|(address, _)| *address == bound);
        found.map_or(Surface::NONE, |(_, surface)| *surface)
    }

    /// Marks a connection that came in at a unix socket with its [`Surface`]: the HTTP library has
    /// an address of TCP only.
    pub(crate) fn mark(&self, connection: &dyn Any, marks: &mut Extensions) {
        let Some(stream) = connection.downcast_ref::<tokio::net::UnixStream>() else {
            return;
        };
        let bound = stream.local_addr().ok();
        let path = bound.as_ref().and_then(|bound| bound.as_pathname());
        let found = path.and_then(|path| self.unix.iter().find(|(bound, _)| bound == path));
        marks.insert(found.map_or(Surface::NONE, |(_, surface)| *surface));
    }
}

/// All listeners.
pub(crate) struct Listeners {
    /// In the order inference, management, metrics; one less where two share a socket.
    pub(crate) all: Vec<Listener>,
    /// Those of unix sockets.
    pub(crate) files: Vec<SocketFile>,
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
        let shared = http.inference == http.management && http.inference.is_one_place();
        let mut bound = Self {
            all: Vec::new(),
            files: Vec::new(),
        };
        if shared {
            let everything = Surface {
                inference: true,
                management: true,
                metrics: http.metrics.is_some(),
            };
            bound.add(&http.inference, everything)?;
        } else {
            bound.add(&http.inference, inference)?;
            bound.add(&http.management, management)?;
        }
        if let Some(address) = &http.metrics {
            bound.add(address, metrics)?;
        }
        Ok(bound)
    }

    fn add(&mut self, address: &Address, surface: Surface) -> anyhow::Result<()> {
        let failed = || format!("Failed to bind to address: {address}");
        let socket = match address {
            Address::Tcp { host, port } => {
                let socket = TcpListener::bind((host.as_str(), *port)).with_context(failed)?;
                ready(&socket).with_context(failed)?;
                socket.set_nonblocking(true).with_context(failed)?;
                let bound = socket.local_addr().with_context(failed)?;
                Socket::Tcp(socket, bound)
            }
            Address::Unix(path) => {
                let (socket, file) = bind_unix(path).with_context(failed)?;
                // From here on it goes with this value, whatever comes.
                self.files.push(file);
                ready(&socket).with_context(failed)?;
                socket.set_nonblocking(true).with_context(failed)?;
                Socket::Unix(socket, path.clone())
            }
        };
        self.all.push(Listener { socket, surface });
        Ok(())
    }

    /// Which APIs each of them serves.
    pub(crate) fn surfaces(&self) -> Surfaces {
        let mut surfaces = Surfaces::default();
        for Listener { socket, surface } in &self.all {
            match socket {
                Socket::Tcp(_, address) => surfaces.tcp.push((*address, *surface)),
                Socket::Unix(_, path) => surfaces.unix.push((path.clone(), *surface)),
            }
        }
        surfaces
    }

    fn serving(&self, api: impl Fn(&Surface) -> bool) -> Option<String> {
        // The metrics listener of its own comes last, and is what scrapers are told.
        let listener = self
            .all
            .iter()
            .rev()
            .find(|listener| api(&listener.surface));
        listener.map(Listener::address)
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

/// Where the APIs of this process are: `host:port` or `unix:/path`.
#[derive(Debug, Serialize)]
pub(crate) struct Whereabouts {
    inference: Option<String>,
    management: Option<String>,
    metrics: Option<String>,
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

/// Lengthens the queue of connections: the standard library's is short for a burst of clients, and
/// listening again is how it is changed.
fn ready(socket: impl AsFd) -> io::Result<()> {
    Ok(rustix::net::listen(socket, BACKLOG)?)
}

/// Binds a unix socket. A file of that name goes first if it is a socket that nobody listens at,
/// which is what a server leaves that was killed.
fn bind_unix(path: &Path) -> anyhow::Result<(UnixListener, SocketFile)> {
    let socket = match UnixListener::bind(path) {
        Err(error) if error.kind() == ErrorKind::AddrInUse => {
            remove_stale(path)?;
            UnixListener::bind(path)?
        }
        bound => bound?,
    };
    let mode = std::fs::Permissions::from_mode(SOCKET_MODE);
    fs_err::set_permissions(path, mode)?;
    let file = SocketFile {
        path: path.to_owned(),
        identity: identity(path)?,
    };
    Ok((socket, file))
}

fn remove_stale(path: &Path) -> anyhow::Result<()> {
    let is_socket = fs_err::symlink_metadata(path)?.file_type().is_socket();
    anyhow::ensure!(
        is_socket,
        "there is a file of that name, which is not a socket. Remove it or choose another path"
    );
    match UnixStream::connect(path) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
            Ok(fs_err::remove_file(path)?)
        }
        Ok(_) => anyhow::bail!("another process listens there. Stop it or choose another path"),
        Err(error) => Err(error).context("it is not known whether another process listens there"),
    }
}

/// The file of a unix socket; goes with this value.
pub(crate) struct SocketFile {
    path: PathBuf,
    identity: [u64; 3],
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another server may have found nobody listening meanwhile and have put its own there.
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            let _may_be_gone = fs_err::remove_file(&self.path);
        }
    }
}

/// What tells a file from a later one of its name, whose number may be the same.
fn identity(path: &Path) -> io::Result<[u64; 3]> {
    let found = fs_err::symlink_metadata(path)?;
    let changed = found.ctime().wrapping_mul(1_000_000_000) + found.ctime_nsec();
    Ok([found.dev(), found.ino(), changed.cast_unsigned()])
}
