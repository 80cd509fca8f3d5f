//! The parts of a reply after its first, between a dispatcher and whoever sends them on.
//!
//! The writer never waits: a reader that falls behind by more than the limit loses its stream, and
//! neither the worker nor the other requests of the batch notice.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::error::ServingError;

/// What a waiting part counts beside its bytes, so that many small ones have a bound too.
const PART_BYTES: usize = 64;

/// Makes a stream of which at most `limit` bytes, and one part, wait to be read.
pub(crate) fn stream(limit: usize) -> (StreamWriter, StreamReader) {
    let shared = Arc::new(Mutex::new(State {
        parts: VecDeque::new(),
        unread: 0,
        end: None,
        reading: true,
        waker: None,
    }));
    let writer = StreamWriter {
        shared: Arc::clone(&shared),
        limit,
    };
    (writer, StreamReader { shared })
}

#[derive(Debug)]
struct State {
    parts: VecDeque<Bytes>,
    unread: usize,
    /// How the stream ended; taken by the reader.
    end: Option<Result<(), ServingError>>,
    reading: bool,
    waker: Option<Waker>,
}

impl State {
    fn wake(&mut self) -> Option<Waker> {
        self.waker.take()
    }
}

/// Why a part was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unread {
    /// Nobody reads any more.
    Left,
    /// The reader is too far behind; its stream has ended with that.
    Behind,
}

/// The dispatcher's end. Dropped without an end, it ends as its worker does when it dies.
#[derive(Debug)]
pub(crate) struct StreamWriter {
    shared: Arc<Mutex<State>>,
    limit: usize,
}

impl StreamWriter {
    /// Adds a part.
    ///
    /// # Errors
    /// [`Unread`] when it cannot reach the reader any more.
    pub(crate) fn push(&self, part: Bytes) -> Result<(), Unread> {
        let mut state = self.shared.lock();
        if !state.reading {
            return Err(Unread::Left);
        }
        if state.end.is_some() {
            return Err(Unread::Behind);
        }
        let bytes = part.len() + PART_BYTES;
        let pushed = if state.parts.is_empty() || bytes <= self.limit.saturating_sub(state.unread) {
            state.unread += bytes;
            state.parts.push_back(part);
            Ok(())
        } else {
            state.parts = VecDeque::new();
            state.end = Some(Err(ServingError::ReadTooSlowly { limit: self.limit }));
            Err(Unread::Behind)
        };
        let waker = state.wake();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
        pushed
    }

    /// Ends the stream.
    pub(crate) fn end(self, how: Result<(), ServingError>) {
        self.set_end(how);
    }

    /// Whether nobody reads any more, or the reader has lost its stream.
    pub(crate) fn is_unread(&self) -> bool {
        let state = self.shared.lock();
        !state.reading || state.end.is_some()
    }

    fn set_end(&self, how: Result<(), ServingError>) {
        let mut state = self.shared.lock();
        if state.end.is_none() {
            state.end = Some(how);
        }
        let waker = state.wake();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Drop for StreamWriter {
    fn drop(&mut self) {
        // Without effect after an end.
        self.set_end(Err(ServingError::WorkerDied {
            out_of_memory: false,
        }));
    }
}

/// The caller's end. Dropping it gives the request up.
#[derive(Debug)]
pub(crate) struct StreamReader {
    shared: Arc<Mutex<State>>,
}

impl StreamReader {
    /// The next part; `None` after the last one, an error instead of it where the stream broke off.
    pub(crate) fn poll_part(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, ServingError>>> {
        let mut state = self.shared.lock();
        if let Some(part) = state.parts.pop_front() {
            state.unread -= part.len() + PART_BYTES;
            return Poll::Ready(Some(Ok(part)));
        }
        match &mut state.end {
            Some(how) => {
                let how = std::mem::replace(how, Ok(()));
                Poll::Ready(how.err().map(Err))
            }
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for StreamReader {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.reading = false;
        state.parts = VecDeque::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(reader: &mut StreamReader) -> Poll<Option<Result<Bytes, ServingError>>> {
        reader.poll_part(&mut Context::from_waker(Waker::noop()))
    }

    fn part(bytes: usize) -> Bytes {
        Bytes::from(vec![b'x'; bytes])
    }

    #[test]
    fn parts_come_in_order_and_then_the_end() {
        let (writer, mut reader) = stream(1000);
        assert!(read(&mut reader).is_pending());
        writer.push(Bytes::from_static(b"1")).unwrap();
        writer.push(Bytes::from_static(b"2")).unwrap();
        writer.end(Ok(()));
        for expected in ["1", "2"] {
            assert!(matches!(read(&mut reader), Poll::Ready(Some(Ok(part))) if part == expected));
        }
        assert!(matches!(read(&mut reader), Poll::Ready(None)));
        assert!(matches!(read(&mut reader), Poll::Ready(None)));
    }

    #[test]
    fn a_slow_reader_loses_its_stream_and_the_memory_is_free() {
        let (writer, mut reader) = stream(1000);
        writer.push(part(500)).unwrap();
        assert_eq!(writer.push(part(500)), Err(Unread::Behind));
        assert_eq!(writer.push(part(1)), Err(Unread::Behind));
        assert!(writer.is_unread());
        assert!(reader.shared.lock().parts.is_empty());
        let error = ServingError::ReadTooSlowly { limit: 1000 }.to_string();
        assert!(
            matches!(read(&mut reader), Poll::Ready(Some(Err(told))) if told.to_string() == error)
        );
        assert!(matches!(read(&mut reader), Poll::Ready(None)));
    }

    #[test]
    fn many_tiny_parts_have_a_bound_and_one_large_part_always_fits() {
        let (writer, _reader) = stream(1000);
        let taken = (0..1000).take_while(|_| writer.push(part(0)).is_ok());
        assert_eq!(taken.count(), 1000 / PART_BYTES);
        let (writer, mut reader) = stream(10);
        for _ in 0..3 {
            writer.push(part(500)).unwrap();
            assert!(matches!(read(&mut reader), Poll::Ready(Some(Ok(_)))));
        }
    }

    #[test]
    fn a_reader_that_leaves_is_noticed_and_a_writer_that_is_dropped_is_a_dead_worker() {
        let (writer, reader) = stream(1000);
        writer.push(part(1)).unwrap();
        drop(reader);
        assert!(writer.is_unread());
        assert_eq!(writer.push(part(1)), Err(Unread::Left));
        let (writer, mut reader) = stream(1000);
        writer.push(part(1)).unwrap();
        drop(writer);
        assert!(matches!(read(&mut reader), Poll::Ready(Some(Ok(_)))));
        assert!(matches!(
            read(&mut reader),
            Poll::Ready(Some(Err(ServingError::WorkerDied { .. })))
        ));
    }
}
