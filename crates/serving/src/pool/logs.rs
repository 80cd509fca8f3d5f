//! What a host writes to its standard output and error, record by record into the model log.
//!
//! A record is a line, or the lines that Python code has written in one go, which stay together
//! whatever other hosts write. `handlers/ts/_runtime/logs.py` marks what a line cannot say itself:
//! how many more lines belong to it, and which requests it was written for. Nothing depends on a
//! mark being true: it names what stands in the log, and how long a record may wait is bounded.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::handler_metrics::PrintedMetrics;

/// A longer line is cut here, so that a handler that never ends one costs no more memory.
const MAX_LINE_BYTES: usize = 16 << 10;

/// A longer record is told in parts.
const MAX_RECORD_BYTES: usize = 64 << 10;

/// Begins the line that a mark stands in: `<MARK><further lines>;<ids><MARK_END><text>`.
const MARK: u8 = 0x1e;
const MARK_END: u8 = 0x1f;

/// Bytes that a mark may have.
const MAX_MARK_BYTES: usize = 4 << 10;

/// How long the rest of a record is waited for. Python writes all of it at once.
const REST_WITHIN: Duration = Duration::from_millis(200);

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
    /// The line that is being read.
    partial: Vec<u8>,
    /// A part of that line is told already.
    is_cut: bool,
    /// Complete lines of the record.
    record: String,
    /// Lines that belong to it and have not come.
    more: usize,
    /// When the last of it came.
    read: Instant,
    /// The requests that it is of.
    request_id: String,
    stream: &'static str,
}

impl Lines {
    fn new(pipe: Option<OwnedFd>, stream: &'static str) -> Self {
        Self {
            pipe,
            partial: Vec::new(),
            is_cut: false,
            record: String::new(),
            more: 0,
            read: Instant::now(),
            request_id: String::new(),
            stream,
        }
    }
}

impl ModelLog {
    /// Copies until both pipes have ended, or the process has and nothing more is in them.
    pub(crate) fn copy(
        &self,
        stdout: Option<OwnedFd>,
        stderr: Option<OwnedFd>,
        process: BorrowedFd<'_>,
    ) {
        let mut streams = [Lines::new(stdout, "stdout"), Lines::new(stderr, "stderr")];
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
                if lines.more > 0 && lines.read.elapsed() >= REST_WITHIN {
                    // What was said to follow does not.
                    self.tell(lines);
                }
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
            self.tell(lines);
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
        let is_open = streams.iter().any(|lines| lines.more > 0);
        let mut timeout = is_open.then_some(REST_WITHIN);
        if *process_ended {
            timeout = Some(Duration::ZERO);
        } else {
            watched.push(PollFd::from_borrowed_fd(process, PollFlags::IN));
        }
        let timeout = timeout.map(|limit| Timespec {
            tv_sec: 0,
            tv_nsec: limit.subsec_nanos().into(),
        });
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
                lines.read = Instant::now();
                for piece in buffer[..count].split_inclusive(|byte| *byte == b'\n') {
                    match piece.strip_suffix(b"\n") {
                        Some(end) => {
                            lines.partial.extend_from_slice(end);
                            self.end_line(lines);
                        }
                        None => lines.partial.extend_from_slice(piece),
                    }
                    if lines.partial.len() >= MAX_LINE_BYTES {
                        self.cut_line(lines);
                    }
                }
                count
            }
        }
    }

    /// A line has come to its end.
    fn end_line(&self, lines: &mut Lines) {
        let follows = self.take_partial(lines);
        lines.is_cut = false;
        lines.more = lines.more.saturating_sub(usize::from(follows));
        if lines.more == 0 {
            self.tell(lines);
        } else if lines.record.len() > MAX_RECORD_BYTES {
            self.tell_part(lines);
        } else {
            lines.record.push('\n');
        }
    }

    /// A line is too long to wait for its end.
    fn cut_line(&self, lines: &mut Lines) {
        self.take_partial(lines);
        lines.is_cut = true;
        self.tell_part(lines);
    }

    /// Moves what was read of a line into the record, and what its mark says beside it. Returns
    /// whether the line is one of those that were said to follow.
    fn take_partial(&self, lines: &mut Lines) -> bool {
        let partial = std::mem::take(&mut lines.partial);
        let mut text = &partial[..];
        let mark = if lines.is_cut { None } else { marked(text) };
        let begins = mark.is_some();
        if let Some((more, request_id, rest)) = mark {
            // One whose rest has not come is over.
            self.tell(lines);
            lines.more = more;
            lines.request_id.push_str(request_id);
            text = rest;
        }
        let text = String::from_utf8_lossy(text.strip_suffix(b"\r").unwrap_or(text));
        let is_metric = !lines.is_cut && lines.stream == "stdout" && self.metrics.take(&text);
        // As for Java's readers of lines it ends one: progress bars have nothing else.
        if !is_metric {
            lines.record.push_str(&text.replace('\r', "\n"));
        }
        lines.partial = partial;
        lines.partial.clear();
        !begins
    }

    fn tell(&self, lines: &mut Lines) {
        self.tell_part(lines);
        lines.more = 0;
        lines.request_id.clear();
    }

    fn tell_part(&self, lines: &mut Lines) {
        let text = lines.record.trim_end_matches('\n');
        let (worker, stream, request_id) = (&self.name, lines.stream, &lines.request_id);
        match (text, stream) {
            ("", _) => {}
            (text, "stderr") => {
                tracing::warn!(target: "MODEL_LOG", worker, stream, request_id, "{text}");
            }
            (text, _) => {
                tracing::info!(target: "MODEL_LOG", worker, stream, request_id, "{text}");
            }
        }
        lines.record.clear();
    }
}

/// What the mark of a line says, if it has one: how many lines follow, the ids of requests, and
/// the text behind it. Whoever forges one can only say something of a line of its own.
fn marked(line: &[u8]) -> Option<(usize, &str, &[u8])> {
    let rest = line.strip_prefix(&[MARK])?;
    let end = rest
        .iter()
        .take(MAX_MARK_BYTES)
        .position(|byte| *byte == MARK_END)?;
    let (more, ids) = str::from_utf8(&rest[..end]).ok()?.split_once(';')?;
    let more = more.parse().ok()?;
    // Those of `RequestId`, and a comma between them.
    let is_id = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:~+=@,".contains(&byte);
    ids.bytes()
        .all(is_id)
        .then_some((more, ids, &rest[end + 1..]))
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

    /// What becomes of bytes that come in these pieces, as the state after each, and the end.
    fn read(pieces: &[&[u8]]) -> (Lines, Vec<(usize, String, String)>) {
        let (read, write) = rustix::pipe::pipe().unwrap();
        let mut lines = Lines::new(Some(read), "stdout");
        let log = ModelLog {
            name: "w".to_owned(),
            metrics: PrintedMetrics::default(),
        };
        let mut seen = Vec::new();
        for piece in pieces {
            rustix::io::write(&write, piece).unwrap();
            log.read(&mut lines, &mut vec![0; 1 << 10]);
            seen.push((lines.more, lines.request_id.clone(), lines.record.clone()));
        }
        (lines, seen)
    }

    #[test]
    fn lines_of_one_record_are_held_until_all_of_it_is_there() {
        let (_, seen) = read(&[b"\x1e2;a,b\x1fone\n", b"two\nthr", b"ee\nplain\n"]);
        let state = |more, ids: &str, text: &str| (more, ids.to_owned(), text.to_owned());
        assert_eq!(seen[0], state(2, "a,b", "one\n"));
        assert_eq!(seen[1], state(1, "a,b", "one\ntwo\n"));
        assert_eq!(seen[2], state(0, "", ""));
    }

    #[test]
    fn a_mark_that_says_what_is_not_so_holds_nothing_up() {
        let (_, seen) = read(&[b"\x1e999999999;a\x1fx\n", b"\x1e0;b\x1fnext\n"]);
        assert_eq!((seen[0].0, seen[1].0), (999_999_999, 0));
        let mut many = vec![&b"\x1e999999999;a\x1fx\n"[..]];
        let line = [&[b'x'; 900][..], b"\n"].concat();
        many.extend(std::iter::repeat_n(&line[..], 200));
        let (_, seen) = read(&many);
        let most = seen.iter().map(|(_, _, record)| record.len()).max();
        assert!(most.unwrap() <= MAX_RECORD_BYTES + MAX_LINE_BYTES);
    }

    #[test]
    fn a_mark_is_only_what_python_would_write() {
        let mark = |text: &'static str| marked(text.as_bytes());
        assert_eq!(mark("\x1e1;\x1ftext"), Some((1, "", &b"text"[..])));
        for text in [
            "text",
            "\x1e",
            "\x1e1;a",
            "\x1e-1;a\x1ft",
            "\x1e1;a b\x1ft",
            "\x1e1;a\n\x1ft",
            "\x1e;\x1ft",
            " \x1e1;a\x1ft",
        ] {
            assert_eq!(mark(text), None, "{text:?}");
        }
        let long = format!("\x1e0;{}\x1ft", "a".repeat(MAX_MARK_BYTES));
        assert_eq!(marked(long.as_bytes()), None);
    }

    #[test]
    fn a_line_that_never_ends_is_cut() {
        let mut lines = Lines::new(None, "stdout");
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
