//! Resources that models share: "of these heavy models at most two at a time"
//! (*batching-and-scheduling* 4). A batch holds what its model demands while it runs.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};
use ts_types::ResourceDemand;

/// The resources of a server, by name.
#[derive(Debug, Default)]
pub(crate) struct Resources {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stocks: HashMap<String, Stock>,
    /// Batches that wait, in order. One that shares a resource with an earlier one waits for it,
    /// so that small demands do not starve large ones.
    waiting: VecDeque<(u64, Vec<ResourceDemand>)>,
    next: u64,
}

#[derive(Debug, Default, Clone, Copy)]
struct Stock {
    size: usize,
    used: usize,
    /// The operator named the size; otherwise it is the largest single demand.
    fixed: bool,
}

/// What a running batch holds; given back when dropped.
#[derive(Debug)]
pub(crate) struct Permit {
    resources: Arc<Resources>,
    demands: Vec<ResourceDemand>,
}

impl Resources {
    /// Resources with the sizes that the operator named.
    pub(crate) fn new(sizes: &[ResourceDemand]) -> Self {
        let stock = |size| Stock {
            size,
            used: 0,
            fixed: true,
        };
        let stocks = sizes
            .iter()
            .map(|named| (named.name.clone(), stock(named.count)));
        Self {
            state: Mutex::new(State {
                stocks: stocks.collect(),
                ..State::default()
            }),
            changed: Condvar::new(),
        }
    }

    /// Makes the demands of a model known.
    ///
    /// # Errors
    /// The demand that is larger than all there is, and how much that is.
    pub(crate) fn declare(
        &self,
        demands: &[ResourceDemand],
    ) -> Result<(), (ResourceDemand, usize)> {
        let mut state = self.state.lock();
        for demand in demands {
            let known = state.stocks.get(&demand.name).copied().unwrap_or_default();
            if known.fixed && demand.count > known.size {
                return Err((demand.clone(), known.size));
            }
        }
        for demand in demands {
            let stock = state.stocks.entry(demand.name.clone()).or_default();
            stock.size = stock.size.max(demand.count);
        }
        Ok(())
    }

    /// Waits until the demands can be met. `None` as soon as `stop` says so; call
    /// [`Resources::wake_all`] after changing what it reads.
    pub(crate) fn acquire(
        self: &Arc<Self>,
        demands: &[ResourceDemand],
        stop: impl Fn() -> bool,
    ) -> Option<Permit> {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.waiting.push_back((number, demands.to_vec()));
        let met = loop {
            if stop() {
                break false;
            }
            if state.can_meet(number, demands) {
                state.take(demands);
                break true;
            }
            self.changed.wait(&mut state);
        };
        state.waiting.retain(|(waiting, _)| *waiting != number);
        drop(state);
        self.changed.notify_all();
        met.then(|| Permit {
            resources: Arc::clone(self),
            demands: demands.to_vec(),
        })
    }

    /// Makes every waiting batch look at its stop condition again.
    pub(crate) fn wake_all(&self) {
        drop(self.state.lock());
        self.changed.notify_all();
    }
}

impl State {
    fn can_meet(&self, number: u64, demands: &[ResourceDemand]) -> bool {
        let earlier = self
            .waiting
            .iter()
            .take_while(|(waiting, _)| *waiting != number);
        let shares = |other: &ResourceDemand| demands.iter().any(|own| own.name == other.name);
        let is_behind = earlier.flat_map(|(_, others)| others).any(shares);
        let is_free = |demand: &ResourceDemand| {
            let stock = self.stocks.get(&demand.name).copied().unwrap_or_default();
            stock.size - stock.used >= demand.count
        };
        !is_behind && demands.iter().all(is_free)
    }

    fn take(&mut self, demands: &[ResourceDemand]) {
        for demand in demands {
            if let Some(stock) = self.stocks.get_mut(&demand.name) {
                stock.used += demand.count;
            }
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let mut state = self.resources.state.lock();
        for demand in &self.demands {
            if let Some(stock) = state.stocks.get_mut(&demand.name) {
                stock.used -= demand.count;
            }
        }
        drop(state);
        self.resources.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;

    fn demand(name: &str, count: usize) -> Vec<ResourceDemand> {
        vec![ResourceDemand {
            name: name.to_owned(),
            count,
        }]
    }

    #[test]
    fn never_more_is_held_than_there_is_and_everybody_gets_a_turn() {
        let resources = Arc::new(Resources::new(&demand("r", 3)));
        let held = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for count in [1, 2, 3, 1, 2, 3] {
                let (resources, held) = (&resources, &held);
                scope.spawn(move || {
                    for _ in 0..200 {
                        let permit = resources.acquire(&demand("r", count), || false).unwrap();
                        let now = held.fetch_add(count, Ordering::SeqCst) + count;
                        assert!(now <= 3, "{now} held");
                        held.fetch_sub(count, Ordering::SeqCst);
                        drop(permit);
                    }
                });
            }
        });
        let all = resources.acquire(&demand("r", 3), || false);
        assert!(all.is_some(), "everything came back");
    }

    #[test]
    fn a_size_that_nobody_named_is_the_largest_demand() {
        let resources = Resources::default();
        resources.declare(&demand("r", 2)).unwrap();
        resources.declare(&demand("r", 1)).unwrap();
        assert_eq!(resources.state.lock().stocks["r"].size, 2);
        let named = Resources::new(&demand("r", 1));
        let (refused, size) = named.declare(&demand("r", 2)).unwrap_err();
        assert_eq!((refused.count, size), (2, 1));
    }

    #[test]
    fn a_wait_ends_when_it_is_told_to() {
        let resources = Arc::new(Resources::new(&demand("r", 1)));
        let held = resources.acquire(&demand("r", 1), || false).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| {
                let stopped = || stop.load(Ordering::SeqCst);
                resources.acquire(&demand("r", 1), stopped).is_none()
            });
            while resources.state.lock().waiting.is_empty() {
                std::thread::yield_now();
            }
            stop.store(true, Ordering::SeqCst);
            resources.wake_all();
            assert!(waiting.join().unwrap());
        });
        drop(held);
    }
}
