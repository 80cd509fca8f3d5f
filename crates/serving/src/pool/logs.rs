//! What a host writes to its standard output and error, line by line into the model log.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::handler_metrics::PrintedMetrics;

/// A longer line is cut here, so that a handler that never ends one costs no more memory.
const MAX_LINE_BYTES: usize = 16 << 10;

/// What is still read once the process has ended: a pipe holds no more of its own words, and a
/// grandchild that goes on writing must not hold up the news of its end.
const MAX_AFTER_END_BYTES: usize = 1 << 20;

/// Where the lines of one host go.
#[derive(Debug, Clone)]
pub(crate) struct ModelLog {
    /// As in `W-9000-mnist_1.0`; several workers that share a host share its lines.
    pub(crate) name: String,
    /// Lines that are metrics go there.
    pub(crate) metrics: PrintedMetrics,
}

struct Lines {
    pipe: Option<OwnedFd>,
    partial: Vec<u8>,
    stream: &'static str,
}

impl ModelLog {
    /// Copies until both pipes have ended, or the process has and nothing more is in them.
    pub(crate) fn copy(
        &self,
        stdout: Option<OwnedFd>,
        stderr: Option<OwnedFd>,
        process: BorrowedFd<'_>,
    ) {
        let lines = |pipe, stream| Lines {
            pipe,
            partial: Vec::new(),
            stream,
        };
        let mut streams = [lines(stdout, "stdout"), lines(stderr, "stderr")];
        let mut buffer = vec![0; 16 << 10];
        let mut process_ended = false;
        let mut after_end = 0;
        while streams.iter().any(|lines| lines.pipe.is_some()) {
            let readable = match self.wait(&streams, process, &mut process_ended) {
                Ok(readable) => readable,
                Err(error) => {
                    tracing::error!(%error, host = self.name, "the model log stops");
                    break;
                }
            };
            // A grandchild may keep the pipes open for ever; the host's own words are all read.
            if process_ended && readable == [false, false] {
                break;
            }
            for (lines, readable) in streams.iter_mut().zip(readable) {
                if readable {
                    after_end += usize::from(process_ended) * self.read(lines, &mut buffer);
                }
            }
            if after_end > MAX_AFTER_END_BYTES {
                break;
            }
        }
        for lines in &mut streams {
            self.end_line(lines);
        }
    }

    fn wait(
        &self,
        streams: &[Lines; 2],
        process: BorrowedFd<'_>,
        process_ended: &mut bool,
    ) -> io::Result<[bool; 2]> {
        let mut watched: Vec<PollFd<'_>> = Vec::with_capacity(3);
        let mut owner = Vec::with_capacity(3);
        for (index, lines) in streams.iter().enumerate() {
            if let Some(pipe) = &lines.pipe {
                watched.push(PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::IN));
                owner.push(index);
            }
        }
        let mut timeout = None;
        if *process_ended {
            timeout = Some(rustix::event::Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            });
        } else {
            watched.push(PollFd::from_borrowed_fd(process, PollFlags::IN));
        }
        loop {
            match poll(&mut watched, timeout.as_ref()) {
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        let mut readable = [false; 2];
        for (index, watched) in watched.iter().enumerate() {
            if watched.revents().is_empty() {
                continue;
            }
            match owner.get(index) {
                Some(stream) => readable[*stream] = true,
                None => *process_ended = true,
            }
        }
        Ok(readable)
    }

    /// Returns how many bytes there were.
    fn read(&self, lines: &mut Lines, buffer: &mut [u8]) -> usize {
        let Some(pipe) = &lines.pipe else { return 0 };
        match rustix::io::read(pipe, &mut *buffer) {
            Err(Errno::INTR) => 0,
            Ok(0) | Err(_) => {
                lines.pipe = None;
                0
            }
            Ok(count) => {
                for piece in buffer[..count].split_inclusive(|byte| *byte == b'\n') {
                    match piece.strip_suffix(b"\n") {
                        Some(end) => {
                            lines.partial.extend_from_slice(end);
                            self.end_line(lines);
                        }
                        None => lines.partial.extend_from_slice(piece),
                    }
                    if lines.partial.len() >= MAX_LINE_BYTES {
                        self.end_line(lines);
                    }
                }
                count
            }
        }
    }

    fn end_line(&self, lines: &mut Lines) {
        if lines.partial.is_empty() {
            return;
        }
        let text = String::from_utf8_lossy(&lines.partial);
        let text = text.trim_end_matches('\r');
        if lines.stream == "stdout" && self.metrics.take(text) {
            lines.partial.clear();
            return;
        }
        // TorchServe's thread names, which log shippers parse (contract 11.2).
        if lines.stream == "stderr" {
            tracing::warn!(target: "MODEL_LOG", worker = %self.name, stream = lines.stream, "{text}");
        } else {
            tracing::info!(target: "MODEL_LOG", worker = %self.name, stream = lines.stream, "{text}");
        }
        lines.partial.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use rustix::process::{Pid, PidfdFlags, Signal};

    use super::*;

    #[test]
    fn a_host_that_leaves_a_grandchild_with_its_pipes_does_not_hold_the_log() {
        let mut child = Command::new("sh")
            .args(["-c", "printf 'one\\ntwo'; sleep 30 & exit 0"])
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let pid = Pid::from_child(&child);
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let started = std::time::Instant::now();
        let stdout = child.stdout.take().map(OwnedFd::from);
        ModelLog {
            name: "W-9000-m_1.0".to_owned(),
            metrics: PrintedMetrics::default(),
        }
        .copy(stdout, None, pidfd.as_fd());
        assert!(
            started.elapsed().as_secs() < 20,
            "waited for the grandchild"
        );
        // The grandchild too.
        rustix::process::kill_process_group(pid, Signal::KILL).unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_line_that_never_ends_is_cut() {
        let mut lines = Lines {
            pipe: None,
            partial: Vec::new(),
            stream: "stdout",
        };
        let (read, write) = rustix::pipe::pipe().unwrap();
        lines.pipe = Some(read);
        rustix::io::write(&write, &vec![b'x'; MAX_LINE_BYTES + 100]).unwrap();
        let log = ModelLog {
            name: "w".to_owned(),
            metrics: PrintedMetrics::default(),
        };
        let mut buffer = vec![0; MAX_LINE_BYTES * 2];
        log.read(&mut lines, &mut buffer);
        assert!(lines.partial.len() <= MAX_LINE_BYTES);
    }
}
