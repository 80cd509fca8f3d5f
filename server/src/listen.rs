//! Binds every listener before any of them serves, and tells where they are.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

use crate::rest::Surface;
use crate::settings::{Address, Http, scheme};
use crate::tls::Tls;

/// Connections that may wait to be taken.
const BACKLOG: i32 = 1024;

/// Of the files that may be open, those kept for everything but connections: a worker that is lost
/// has to be replaced however many clients there are. Of a small limit it is half.
const OTHER_FILES: u64 = 1024;

/// Raises the limit on open files as far as this process may, and returns how many of them may be
/// connections of clients: no more than were asked for.
pub(crate) fn connection_limit(wanted: Option<usize>) -> usize {
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
    let possible = usize::try_from(files - OTHER_FILES.min(files / 2)).unwrap_or(usize::MAX);
    if let Some(wanted) = wanted.filter(|wanted| *wanted > possible) {
        tracing::warn!(
            "of {wanted} connections (`max_connections`) only {possible} are possible: the process \
             may have {files} files open (`ulimit -n`)"
        );
    }
    wanted.unwrap_or(possible).min(possible)
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
    /// What encrypts its connections, if they are.
    pub(crate) tls: Option<Arc<Tls>>,
}

impl Listener {
    /// `http://host:port`, `https://host:port` or `unix:/path`.
    pub(crate) fn url(&self) -> String {
        match &self.socket {
            Socket::Tcp(..) => format!("{}://{}", scheme(self.tls.is_some()), self.address()),
            Socket::Unix(..) => self.address(),
        }
    }

    /// `host:port` or `unix:/path`.
    pub(crate) fn address(&self) -> String {
        match &self.socket {
            Socket::Tcp(_, address) => address.to_string(),
            Socket::Unix(_, path) => format!("unix:{}", path.display()),
        }
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
    pub(crate) fn bind(http: &Http, tls: Option<&Arc<Tls>>) -> anyhow::Result<Self> {
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
        let shared = http.inference.is_place_of(&http.management);
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
            bound.add(&http.inference, everything, tls)?;
        } else {
            bound.add(&http.inference, inference, tls)?;
            bound.add(&http.management, management, tls)?;
        }
        if let Some(address) = &http.metrics {
            bound.add(address, metrics, tls)?;
        }
        Ok(bound)
    }

    fn add(
        &mut self,
        address: &Address,
        surface: Surface,
        tls: Option<&Arc<Tls>>,
    ) -> anyhow::Result<()> {
        let failed = || format!("Failed to bind to address: {address}");
        let socket = match address {
            Address::Tcp { host, port, .. } => {
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
        let tls = tls.filter(|_| address.is_encrypted()).cloned();
        self.all.push(Listener {
            socket,
            surface,
            tls,
        });
        Ok(())
    }

    fn serving(&self, api: impl Fn(&Surface) -> bool) -> Option<&Listener> {
        // The metrics listener of its own comes last, and is what scrapers are told.
        let mut all = self.all.iter().rev();
        all.find(|listener| api(&listener.surface))
    }

    /// Where the APIs are.
    pub(crate) fn whereabouts(&self) -> Whereabouts {
        let inference = self.serving(|surface| surface.inference);
        let management = self.serving(|surface| surface.management);
        let metrics = self.serving(|surface| surface.metrics);
        Whereabouts {
            inference: inference.map(Listener::address),
            management: management.map(Listener::address),
            metrics: metrics.map(Listener::address),
            urls: Urls {
                inference: inference.map(Listener::url),
                management: management.map(Listener::url),
                metrics: metrics.map(Listener::url),
            },
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
    urls: Urls,
    pid: u32,
}

/// The same with what is spoken there.
#[derive(Debug, Serialize)]
struct Urls {
    inference: Option<String>,
    management: Option<String>,
    metrics: Option<String>,
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
