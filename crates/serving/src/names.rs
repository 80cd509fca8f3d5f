//! Ids of requests that clients chose. Workers and handlers tell requests apart by their ids, as they
//! do in TorchServe, where every id is random; clients may send one again, at once or later. So one
//! that is in use, or was a short while ago, gets a random end before anything else sees it.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use ts_types::RequestId;

/// Ids that are remembered after their requests have ended: a handler may keep something by the id
/// of a request that has just left, and look it up for the next one.
const REMEMBERED: usize = 1 << 16;

/// Ids that are looked at to forget one, when many of the oldest are in use.
const LOOKED_AT: usize = 8;

/// The ids that are known.
#[derive(Debug, Clone, Default)]
pub(crate) struct Names(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Whether a request has it.
    in_use: HashMap<Arc<str>, bool>,
    /// The oldest first.
    order: VecDeque<Arc<str>>,
}

/// Keeps an id in use until the last clone is dropped.
#[derive(Debug, Clone)]
pub(crate) struct Claim(#[expect(dead_code, reason = "held for its drop")] Arc<Release>);

#[derive(Debug)]
struct Release {
    names: Names,
    text: Arc<str>,
}

impl Names {
    /// An id that no other request has, and the claim on it; random ones need none.
    pub(crate) fn claim(&self, id: &RequestId) -> (RequestId, Option<Claim>) {
        if !id.is_of_client() {
            return (id.clone(), None);
        }
        let mut state = self.0.lock();
        if state.in_use.contains_key(id.as_str()) {
            return (id.with_random_end(), None);
        }
        let text: Arc<str> = Arc::from(id.as_str());
        state.in_use.insert(Arc::clone(&text), true);
        state.order.push_back(Arc::clone(&text));
        state.forget_over(REMEMBERED);
        drop(state);
        let names = self.clone();
        let claim = Claim(Arc::new(Release { names, text }));
        (id.clone(), Some(claim))
    }
}

impl State {
    /// Forgets what is over the limit, oldest first; what is in use stays.
    fn forget_over(&mut self, limit: usize) {
        for _ in 0..LOOKED_AT {
            if self.order.len() <= limit {
                return;
            }
            let Some(oldest) = self.order.pop_front() else {
                return;
            };
            if self.in_use.get(&oldest) == Some(&true) {
                self.order.push_back(oldest);
            } else {
                self.in_use.remove(&oldest);
            }
        }
    }
}

impl Drop for Release {
    fn drop(&mut self) {
        if let Some(in_use) = self.names.0.lock().in_use.get_mut(&self.text) {
            *in_use = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> RequestId {
        RequestId::of_client(text).unwrap()
    }

    #[test]
    fn an_id_is_given_once_while_it_is_in_use_and_for_a_while_after() {
        let names = Names::default();
        let (first, claim) = names.claim(&id("a"));
        assert_eq!(first.as_str(), "a");
        let (second, none) = names.claim(&id("a"));
        assert!(none.is_none() && second.as_str().starts_with("a~"));
        let (third, _) = names.claim(&id("a"));
        assert_ne!(second, third);
        drop(claim);
        assert_ne!(names.claim(&id("a")).0.as_str(), "a");
        let random = RequestId::random();
        assert_eq!(names.claim(&random).0, random);
    }

    #[test]
    fn old_ids_are_forgotten_but_not_while_they_are_in_use() {
        let names = Names::default();
        let (_, held) = names.claim(&id("held"));
        drop(names.claim(&id("gone")));
        for number in 0..REMEMBERED + 10 {
            drop(names.claim(&id(&number.to_string())));
        }
        let state = names.0.lock();
        assert_eq!(state.in_use.len(), REMEMBERED);
        assert_eq!(state.order.len(), REMEMBERED);
        assert_eq!(state.in_use.get("held"), Some(&true));
        assert!(!state.in_use.contains_key("gone"));
        drop(state);
        drop(held);
        assert_eq!(names.0.lock().in_use.get("held"), Some(&false));
    }
}
