//! The server's child processes: hosts and the like, which it has made or taken in and waits for
//! itself, and orphans, which nobody waits for.
//!
//! The server takes in orphans: those that the zygote forks become hosts, and what a handler has
//! started and left ends up here, too. As process 1 of a container it gets all orphans there are.
//! They are reaped here, in one place, which leaves the known children to who waits for them.

use std::collections::HashSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitOptions};
use tokio::signal::unix::{SignalKind, signal};

/// All children of this process that somebody waits for.
#[derive(Debug, Default)]
pub(crate) struct Children {
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    pids: HashSet<Pid>,
    /// Forks under way: of a child that nobody knows yet none can tell that it is not an orphan.
    adoptions: usize,
}

impl Children {
    /// Takes in orphans, and reaps them for as long as the runtime runs that this is called in.
    pub(crate) fn start() -> Arc<Self> {
        let children = Arc::new(Self::default());
        // Without it, orphans would go to process 1, and forked hosts with them.
        if let Err(error) = rustix::process::set_child_subreaper(Some(rustix::process::getpid())) {
            tracing::warn!(%error, "orphaned processes cannot be taken in");
        }
        match signal(SignalKind::child()) {
            Ok(ended) => drop(tokio::spawn(reap_orphans(Arc::downgrade(&children), ended))),
            Err(error) => tracing::warn!(%error, "orphaned processes will not be reaped"),
        }
        children
    }

    /// Starts a process. The [`Child`] is for its pipes; it is the [`OwnChild`] that is waited for.
    pub(crate) fn spawn(self: &Arc<Self>, command: &mut Command) -> io::Result<(Child, OwnChild)> {
        // Held, so that it is known before it can be taken for an orphan.
        let mut known = self.known.lock();
        let child = command.spawn()?;
        let pid = Pid::from_child(&child);
        known.pids.insert(pid);
        let own = OwnChild {
            pid,
            all: Some(Arc::clone(self)),
        };
        Ok((child, own))
    }

    /// To be had before a process is forked that this one is to adopt.
    pub(crate) fn adoption(self: &Arc<Self>) -> Adoption {
        self.known.lock().adoptions += 1;
        Adoption {
            all: Arc::clone(self),
        }
    }

    fn reap_orphans(&self) {
        let known = self.known.lock();
        if known.adoptions > 0 {
            // Done when the last of them ends.
            return;
        }
        for pid in children_of("self") {
            if !known.pids.contains(&pid)
                && let Ok(Some(_)) = rustix::process::waitpid(Some(pid), WaitOptions::NOHANG)
            {
                tracing::debug!(pid = pid.as_raw_nonzero(), "an orphaned process has ended");
            }
        }
    }
}

async fn reap_orphans(children: Weak<Children>, mut ended: tokio::signal::unix::Signal) {
    while let Some(children) = children.upgrade() {
        children.reap_orphans();
        drop(children);
        if ended.recv().await.is_none() {
            return;
        }
    }
}

/// Ends a process, all of its group, and all below it: what a handler has started with a session of
/// its own is in no group of its host's. Children that have let go of their parent stay.
pub(crate) fn kill_tree(root: Pid) {
    let mut tree = vec![root];
    let mut looked_at = 0;
    while let Some(process) = tree.get(looked_at) {
        let children = children_of(&process.as_raw_nonzero().to_string());
        tree.extend(children);
        looked_at += 1;
    }
    let _already_ending = rustix::process::kill_process_group(root, Signal::KILL);
    for process in tree.into_iter().skip(1) {
        let _in_its_group = rustix::process::kill_process(process, Signal::KILL);
    }
}

/// Those of every thread: an orphan is given to any of them.
fn children_of(process: &str) -> Vec<Pid> {
    let Ok(threads) = fs_err::read_dir(format!("/proc/{process}/task")) else {
        return Vec::new();
    };
    let lists = threads.flatten().filter_map(|thread| {
        // A thread that has just ended has none.
        fs_err::read_to_string(thread.path().join("children")).ok()
    });
    let mut pids = Vec::new();
    for list in lists {
        let listed = list.split_whitespace().filter_map(|pid| pid.parse().ok());
        pids.extend(listed.filter_map(Pid::from_raw));
    }
    pids
}

/// A fork under way, see [`Children::adoption`].
pub(crate) struct Adoption {
    all: Arc<Children>,
}

impl Adoption {
    /// Takes in what was forked.
    ///
    /// # Errors
    /// It is no child of this process.
    pub(crate) fn take(&self, pid: Pid) -> io::Result<OwnChild> {
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        rustix::process::waitid(WaitId::Pid(pid), look)?;
        self.all.known.lock().pids.insert(pid);
        Ok(OwnChild {
            pid,
            all: Some(Arc::clone(&self.all)),
        })
    }
}

impl Drop for Adoption {
    fn drop(&mut self) {
        self.all.known.lock().adoptions -= 1;
        self.all.reap_orphans();
    }
}

/// A child that its owner waits for. Forgotten when dropped: an orphan from then on.
#[derive(Debug)]
pub(crate) struct OwnChild {
    pid: Pid,
    /// Until it is reaped.
    all: Option<Arc<Children>>,
}

impl OwnChild {
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// What becomes readable at its end.
    pub(crate) fn pidfd(&self) -> io::Result<OwnedFd> {
        Ok(rustix::process::pidfd_open(self.pid, PidfdFlags::empty())?)
    }

    /// Waits for its end. Its number stays taken until it is reaped.
    pub(crate) fn wait(&self) {
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(Errno::INTR) = rustix::process::waitid(WaitId::Pid(self.pid), ended) {}
    }

    /// Takes its status, once it has ended.
    pub(crate) fn reap(mut self) -> io::Result<ExitStatus> {
        let all = self.all.take();
        // Held, so that nobody makes a child of the same number in between.
        let mut known = all.as_ref().map(|all| all.known.lock());
        if let Some(known) = &mut known {
            known.pids.remove(&self.pid);
        }
        match rustix::process::waitpid(Some(self.pid), WaitOptions::NOHANG)? {
            Some((_, status)) => Ok(ExitStatus::from_raw(status.as_raw())),
            None => Err(io::Error::from(io::ErrorKind::WouldBlock)),
        }
    }

    /// Ends it and everything in its group, and reaps it.
    pub(crate) fn discard(self) {
        let _already_gone = rustix::process::kill_process_group(self.pid, Signal::KILL);
        self.wait();
        let _its_status_tells_nothing = self.reap();
    }
}

impl Drop for OwnChild {
    fn drop(&mut self) {
        if let Some(all) = &self.all {
            all.known.lock().pids.remove(&self.pid);
        }
    }
}
