//! Answers in the order of arrival (`preserve_ordering`): one that is ready early waits for those
//! that came before it.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// The requests of a model version that have not been answered, in order of arrival.
#[derive(Debug, Default)]
pub(crate) struct Order {
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    next: u64,
    /// By number; those whose answers are ready have something to wake them.
    open: BTreeMap<u64, Option<oneshot::Sender<()>>>,
}

impl Order {
    /// A place at the end of the line.
    pub(crate) fn enter(self: &Arc<Self>) -> Turn {
        let mut line = self.line.lock();
        let number = line.next;
        line.next += 1;
        line.open.insert(number, None);
        Turn {
            order: Arc::clone(self),
            number,
        }
    }
}

/// A request's place in the line, which it leaves when this is dropped, answered or not.
#[derive(Debug)]
pub(crate) struct Turn {
    order: Arc<Order>,
    number: u64,
}

impl Turn {
    /// Waits until everything that came before has left.
    pub(crate) async fn come(&self) {
        let waiting = {
            let mut line = self.order.line.lock();
            if line.open.keys().next() == Some(&self.number) {
                return;
            }
            let (wake, waiting) = oneshot::channel();
            line.open.insert(self.number, Some(wake));
            waiting
        };
        let _woken = waiting.await;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut line = self.order.line.lock();
        line.open.remove(&self.number);
        if let Some(mut first) = line.open.first_entry()
            && let Some(wake) = first.get_mut().take()
        {
            let _left_meanwhile = wake.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_turn_comes_when_all_before_it_have_left_in_whatever_way() {
        let order = Arc::new(Order::default());
        let [first, second, third] = std::array::from_fn(|_| order.enter());
        let mut turn = Box::pin(third.come());
        assert!(turn.as_mut().now_or_never().is_none());
        drop(first);
        assert!(turn.as_mut().now_or_never().is_none());
        drop(second);
        assert!(turn.as_mut().now_or_never().is_some());
        drop(turn);
        drop(third);
        assert!(order.enter().come().now_or_never().is_some());
    }

    #[test]
    fn one_that_leaves_in_the_middle_lets_nobody_past_the_first() {
        let order = Arc::new(Order::default());
        let [first, second, third] = std::array::from_fn(|_| order.enter());
        let mut turn = Box::pin(third.come());
        assert!(turn.as_mut().now_or_never().is_none());
        drop(second);
        assert!(turn.as_mut().now_or_never().is_none());
        drop(first);
        assert!(turn.as_mut().now_or_never().is_some());
    }
}
