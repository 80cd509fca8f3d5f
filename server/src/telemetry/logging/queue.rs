//! Lines on their way to the thread that writes them.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// How long lines are gathered before they are written.
const GATHER: Duration = Duration::from_millis(10);

/// Bytes kept while they are not written; what comes on top is dropped, and counted.
pub(super) const MOST_WAITING: usize = 8 << 20;

/// Of memory that a burst has needed, what is kept for the next one.
const KEPT: usize = 1 << 20;

/// The lines for one place.
#[derive(Debug, Default)]
pub(super) struct Lane {
    /// As they are written.
    pub(super) bytes: Vec<u8>,
    /// Lines that there was no room for. They would have come last.
    pub(super) dropped: u64,
}

struct Waiting<const N: usize> {
    lanes: [Lane; N],
    bytes: usize,
    closed: bool,
    ended: bool,
}

/// A bounded queue for one writer of several places.
pub(super) struct Queue<const N: usize> {
    waiting: Mutex<Waiting<N>>,
    changed: Condvar,
}

impl<const N: usize> Default for Queue<N> {
    fn default() -> Self {
        Self {
            waiting: Mutex::new(Waiting {
                lanes: std::array::from_fn(|_| Lane::default()),
                bytes: 0,
                closed: false,
                ended: false,
            }),
            changed: Condvar::new(),
        }
    }
}

impl<const N: usize> Queue<N> {
    /// Adds whole lines. Never waits for the writer.
    pub(super) fn add(&self, lane: usize, lines: &[u8]) {
        let mut waiting = self.waiting.lock();
        let was_empty = waiting.bytes == 0;
        let fits = waiting.bytes + lines.len() <= MOST_WAITING;
        let Some(lane) = waiting.lanes.get_mut(lane) else {
            return;
        };
        if !fits {
            lane.dropped += newlines(lines);
            return;
        }
        lane.bytes.extend_from_slice(lines);
        waiting.bytes += lines.len();
        drop(waiting);
        if was_empty {
            self.changed.notify_all();
        }
    }

    /// Waits for lines and takes them; what `lanes` had is let go. Returns whether these were the
    /// last ones.
    pub(super) fn take(&self, lanes: &mut [Lane; N]) -> bool {
        for lane in lanes.iter_mut() {
            lane.bytes.clear();
            lane.bytes.shrink_to(KEPT);
            lane.dropped = 0;
        }
        let mut waiting = self.waiting.lock();
        while waiting.bytes == 0 && !waiting.closed {
            self.changed.wait(&mut waiting);
        }
        if !waiting.closed {
            // Under load this makes one write of many lines.
            self.changed.wait_for(&mut waiting, GATHER);
        }
        std::mem::swap(lanes, &mut waiting.lanes);
        waiting.bytes = 0;
        waiting.closed
    }

    /// Nothing is added any more.
    pub(super) fn close(&self) {
        self.waiting.lock().closed = true;
        self.changed.notify_all();
    }

    /// The writer has written all there was.
    pub(super) fn end(&self) {
        self.waiting.lock().ended = true;
        self.changed.notify_all();
    }

    /// Waits for that, at most until the deadline.
    pub(super) fn ended(&self, deadline: Instant) {
        let mut waiting = self.waiting.lock();
        while !waiting.ended {
            if self.changed.wait_until(&mut waiting, deadline).timed_out() {
                return;
            }
        }
    }
}

/// How many lines these are.
pub(super) fn newlines(lines: &[u8]) -> u64 {
    lines.iter().filter(|byte| **byte == b'\n').count() as u64
}
