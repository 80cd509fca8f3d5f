//! The memory that request bodies may take, all of them together: taken before bytes are kept,
//! given back when the last part of a body is gone. Without it many bodies that are each within
//! `max_request_size` would end the process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use rustix::process::{Resource, getrlimit};
use sysinfo::System;

/// The share of this process's memory that bodies get unless it is set.
const SHARE: u64 = 4;

/// There is no room for more. Names the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the request bodies that the server has now take all of the {limit} bytes that they may \
     (`max_body_memory`). Try again later"
)]
pub(crate) struct MemoryFull {
    /// The limit.
    pub(crate) limit: usize,
}

/// What there is for all bodies.
#[derive(Debug)]
pub(crate) struct BodyMemory {
    limit: usize,
    used: AtomicUsize,
}

impl BodyMemory {
    /// So many bytes, or a share of what this process may use.
    pub(crate) fn new(limit: Option<usize>) -> Arc<Self> {
        Arc::new(Self {
            limit: limit.unwrap_or_else(share_of_memory),
            used: AtomicUsize::new(0),
        })
    }

    /// Bytes that there are in all.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }
}

/// The part of it that one body has.
#[derive(Debug)]
pub(crate) struct Taken {
    memory: Arc<BodyMemory>,
    bytes: usize,
}

impl Taken {
    /// Nothing yet.
    pub(crate) fn none(memory: &Arc<BodyMemory>) -> Self {
        Self {
            memory: Arc::clone(memory),
            bytes: 0,
        }
    }

    /// Takes more.
    ///
    /// # Errors
    /// There is not as much.
    pub(crate) fn take(&mut self, more: usize) -> Result<(), MemoryFull> {
        let BodyMemory { limit, used } = &*self.memory;
        let fits = |used: usize| used.checked_add(more).filter(|sum| sum <= limit);
        used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits)
            .map_err(|_| MemoryFull { limit: *limit })?;
        self.bytes += more;
        Ok(())
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.memory.used.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// Bytes that are put together, with what they take.
#[derive(Debug)]
pub(crate) struct Growing {
    bytes: Vec<u8>,
    taken: Taken,
    limit: usize,
}

impl Growing {
    /// Room for so many bytes at once, and for `limit` at last.
    ///
    /// # Errors
    /// There is not as much memory.
    pub(crate) fn new(mut taken: Taken, room: usize, limit: usize) -> Result<Self, MemoryFull> {
        taken.take(room)?;
        Ok(Self {
            bytes: Vec::with_capacity(room),
            taken,
            limit,
        })
    }

    /// Bytes so far.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes, with room for as many more: twice as many as before where that is not enough, so
    /// that a long body is moved seldom.
    ///
    /// # Errors
    /// There is not as much memory.
    pub(crate) fn with_room(&mut self, more: usize) -> Result<&mut Vec<u8>, MemoryFull> {
        let (len, capacity) = (self.bytes.len(), self.bytes.capacity());
        if more > capacity - len {
            let doubled = capacity.saturating_mul(2).min(self.limit);
            let wanted = len.saturating_add(more).max(doubled);
            self.taken.take(wanted - capacity)?;
            self.bytes.reserve_exact(wanted - len);
        }
        Ok(&mut self.bytes)
    }

    /// Adds bytes.
    ///
    /// # Errors
    /// There is not as much memory.
    pub(crate) fn push(&mut self, more: &[u8]) -> Result<(), MemoryFull> {
        self.with_room(more.len())?.extend_from_slice(more);
        Ok(())
    }

    /// All of it.
    pub(crate) fn finish(self) -> Received {
        Received {
            bytes: Bytes::from(self.bytes),
            taken: self.taken,
        }
    }
}

/// A body with the memory that it takes.
#[derive(Debug)]
pub(crate) struct Received {
    /// The body.
    pub(crate) bytes: Bytes,
    /// What it takes.
    pub(crate) taken: Taken,
}

/// Bytes of a body; what all of it takes is given back with the last of them.
struct Counted(
    Bytes,
    #[expect(dead_code, reason = "kept for its end")] Arc<Taken>,
);

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

/// The bytes, which hold what their body takes.
pub(crate) fn counted(bytes: Bytes, taken: &Arc<Taken>) -> Bytes {
    Bytes::from_owner(Counted(bytes, Arc::clone(taken)))
}

/// What bodies get where nobody says how much.
fn share_of_memory() -> usize {
    let mut system = System::new().ok();
    if let Some(system) = &mut system {
        system.refresh_memory();
    }
    let of_group = system.as_ref().and_then(System::cgroup_limits);
    let found = [
        system.as_ref().map(System::total_memory),
        of_group.map(|limits| limits.total_memory),
        getrlimit(Resource::As).current,
        getrlimit(Resource::Data).current,
    ];
    let least = found.into_iter().flatten().filter(|bytes| *bytes > 0).min();
    let share = least.unwrap_or(u64::MAX) / SHARE;
    usize::try_from(share).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_taken_before_it_is_used_and_comes_back_with_the_last_part() {
        let memory = BodyMemory::new(Some(100));
        let mut body = Growing::new(Taken::none(&memory), 10, 1000).unwrap();
        body.push(&[1; 10]).unwrap();
        body.push(&[2; 10]).unwrap();
        assert_eq!(memory.used.load(Ordering::Acquire), 20);
        assert_eq!(body.push(&[3; 81]), Err(MemoryFull { limit: 100 }));
        assert_eq!(
            memory.used.load(Ordering::Acquire),
            20,
            "nothing of a refusal"
        );
        let received = body.finish();
        let taken = Arc::new(received.taken);
        let part = counted(received.bytes.slice(3..5), &taken);
        let other = counted(received.bytes.slice(9..11), &taken);
        drop((taken, received.bytes, part));
        assert_eq!(&other[..], [1, 2]);
        assert_eq!(memory.used.load(Ordering::Acquire), 20);
        drop(other);
        assert_eq!(memory.used.load(Ordering::Acquire), 0);
    }

    #[test]
    fn a_body_grows_to_its_limit_and_no_further() {
        let memory = BodyMemory::new(None);
        assert!(memory.limit() > 0);
        let mut body = Growing::new(Taken::none(&memory), 0, 24).unwrap();
        for _ in 0..3 {
            body.push(&[0; 8]).unwrap();
        }
        assert_eq!(memory.used.load(Ordering::Acquire), 24);
    }
}
