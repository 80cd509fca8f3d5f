//! How many connections there may be: in all, and from one address. Beyond that a client is told
//! so at once, where that costs nothing.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::connection::Stream;

/// Refused clients that are told why at one time; those beyond find their connection closed.
pub(super) const TOLD_AT_ONCE: usize = 8;

/// How long telling one may take.
const TELL_LIMIT: Duration = Duration::from_secs(1);

/// Bytes that a client may still send to a connection that ends, without losing the last answer.
pub(super) const HEARD_OUT: u64 = 64 << 10;

/// How often the log says that connections are refused.
const WARN_EVERY: Duration = Duration::from_secs(10);

const NO_PLACE: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\n\
    content-type: application/json\r\nx-refusal-reason: connections\r\nretry-after: 1\r\n\
    content-length: 189\r\nconnection: close\r\n\r\n\
    {\n  \"code\": 503,\n  \"type\": \"ServiceUnavailableException\",\n  \
    \"message\": \"the server has as many connections as it takes (`max_connections`, \
    `max_connections_per_client`). Try again later\"\n}\n";

/// The connections there may be.
pub(super) struct Places {
    limit: usize,
    per_client: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    taken: usize,
    /// How many each address has; counted only where that is limited.
    of_clients: HashMap<IpAddr, usize>,
    being_told: usize,
    refused: u64,
    warned: Option<Instant>,
}

/// The place of one connection; given back with this value.
pub(super) struct Place {
    places: Arc<Places>,
    client: Option<IpAddr>,
}

impl Places {
    /// So many in all, and so many from one address.
    pub(super) fn new(limit: usize, per_client: Option<usize>) -> Arc<Self> {
        Arc::new(Self {
            limit,
            per_client: per_client.unwrap_or(usize::MAX),
            state: Mutex::default(),
        })
    }

    /// A place, if there is one. Clients of unix sockets have no address.
    pub(super) fn take(self: &Arc<Self>, client: Option<IpAddr>) -> Option<Place> {
        let client = client.filter(|_| self.per_client < usize::MAX);
        let mut state = self.state.lock();
        let own = client.and_then(|client| state.of_clients.get(&client).copied());
        if state.taken >= self.limit || own.unwrap_or(0) >= self.per_client {
            return None;
        }
        state.taken += 1;
        if let Some(client) = client {
            *state.of_clients.entry(client).or_insert(0) += 1;
        }
        Some(Place {
            places: Arc::clone(self),
            client,
        })
    }

    /// Sends a client away. Where TLS is spoken the connection is just closed: shaking hands first
    /// would cost more than serving.
    pub(super) async fn refuse(&self, mut stream: Stream, silently: bool) {
        let tell = {
            let mut state = self.state.lock();
            state.refused += 1;
            let due = state.warned.is_none_or(|last| last.elapsed() >= WARN_EVERY);
            if due {
                state.warned = Some(Instant::now());
                tracing::warn!(
                    taken = state.taken,
                    limit = self.limit,
                    refused = state.refused,
                    "connections are refused: raise `max_connections`, \
                     `max_connections_per_client` or the limit on open files"
                );
            }
            let tell = !silently && state.being_told < TOLD_AT_ONCE;
            state.being_told += usize::from(tell);
            tell
        };
        if tell {
            let _being_told = BeingTold(self);
            say(&mut stream, NO_PLACE).await;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.places.state.lock();
        state.taken -= 1;
        if let Some(client) = self.client
            && let Some(own) = state.of_clients.get_mut(&client)
        {
            *own -= 1;
            if *own == 0 {
                state.of_clients.remove(&client);
            }
        }
    }
}

struct BeingTold<'p>(&'p Places);

impl Drop for BeingTold<'_> {
    fn drop(&mut self) {
        self.0.state.lock().being_told -= 1;
    }
}

/// Answers a client whose request nobody reads, and closes. What it has sent is thrown away first:
/// a connection closed over unread bytes takes the answer with it.
pub(super) async fn say(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), answer: &[u8]) {
    let told = async {
        stream.write_all(answer).await?;
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(HEARD_OUT), &mut tokio::io::sink()).await
    };
    let _gone_or_slow = tokio::time::timeout(TELL_LIMIT, told).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_given_back_and_counted_by_address() {
        let places = Places::new(3, Some(2));
        let [one, other] = ["10.0.0.1", "10.0.0.2"].map(|text| Some(text.parse().unwrap()));
        let first = places.take(one).unwrap();
        let _second = places.take(one).unwrap();
        assert!(places.take(one).is_none(), "two from one address");
        let third = places.take(other).unwrap();
        assert!(places.take(None).is_none(), "three in all");
        drop(first);
        let _fourth = places.take(one).unwrap();
        drop(third);
        assert!(!places.state.lock().of_clients.contains_key(&other.unwrap()));
        assert_eq!(places.state.lock().taken, 2);
    }

    #[test]
    fn the_refusal_has_the_length_it_says() {
        for answer in [NO_PLACE, super::super::HTTPS_ONLY] {
            let text = str::from_utf8(answer).unwrap();
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            assert!(
                head.contains(&format!("content-length: {}", body.len())),
                "{}",
                body.len()
            );
            let _json: serde_json::Value = serde_json::from_str(body).unwrap();
        }
    }
}
