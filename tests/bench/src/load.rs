//! A closed loop: every connection sends its next request when it has the last one's reply, or,
//! where a rate is given, at its next turn after that.
//!
//! All connections live on one thread, so that the generator takes as little as it can of the cores
//! it shares with what it measures: a request costs it one write, one read and a share of a wait.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde::Serialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::reply::Head;

/// How long after the end the replies still missing may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// What is read at once, and the most that a reply's head may have.
const RECEIVE_BYTES: usize = 64 * 1024;

/// What to send, where, and for how long.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Where to, as `http://host:port/path`
    #[arg(long)]
    url: String,

    /// Connections, each with one request at a time
    #[arg(long, default_value_t = 1)]
    connections: usize,

    /// Requests per second of all connections together, which take turns; none is as fast as it
    /// goes. A request that has to wait for its connection counts from its turn on
    #[arg(long, value_parser = rate)]
    rate: Option<f64>,

    /// Seconds that are counted
    #[arg(long, default_value_t = 4.0)]
    seconds: f64,

    /// Seconds before that, under the same load
    #[arg(long, default_value_t = 0.5)]
    warm_up: f64,

    /// Send a body of so many bytes
    #[arg(long, default_value_t = 100, conflicts_with = "body_file")]
    body_bytes: usize,

    /// Send this file as the body
    #[arg(long, value_name = "FILE")]
    body_file: Option<PathBuf>,

    /// The body's media type
    #[arg(long, default_value = "application/octet-stream")]
    content_type: String,

    /// Print the report as one line of JSON
    #[arg(long)]
    pub(crate) json: bool,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (0.001..=1e6).contains(&rate) => Ok(rate),
        _ => Err("it is no number from 0.001 to 1000000".to_owned()),
    }
}

/// What was counted.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    /// Replies with status 200.
    requests: usize,
    /// Replies with any other status.
    failures: usize,
    /// All replies, those before and after the seconds that are counted included.
    replies: usize,
    /// Replies with status 200 per second.
    per_second: f64,
    /// The latency of the median reply, in milliseconds.
    p50_ms: f64,
    /// The latency that one reply in a hundred exceeds.
    p99_ms: f64,
    /// The greatest latency.
    max_ms: f64,
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            requests,
            failures,
            per_second,
            p50_ms,
            p99_ms,
            max_ms,
            ..
        } = self;
        write!(
            out,
            "{per_second:.1} requests/s ({requests}, and {failures} failures); \
             latency p50 {p50_ms:.3} ms, p99 {p99_ms:.3} ms, max {max_ms:.3} ms"
        )
    }
}

/// Loads the server and reports.
///
/// # Errors
/// When it cannot be reached, does not speak HTTP/1.1 with lengths, or leaves a request unanswered.
pub(crate) fn run(options: &Options) -> anyhow::Result<Report> {
    let target = Arc::new(Target::of(options)?);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let tally = runtime.block_on(async {
        let began = Instant::now();
        let from = began + Duration::try_from_secs_f64(options.warm_up)?;
        let window = from..from + Duration::try_from_secs_f64(options.seconds)?;
        let mut connections = JoinSet::new();
        for number in 0..options.connections {
            let turns = options
                .rate
                .map(|rate| Turns::new(began, rate, number, options.connections))
                .transpose()?;
            connections.spawn(Arc::clone(&target).drive(window.clone(), turns));
        }
        let all = async {
            let mut total = Tally::default();
            while let Some(tally) = connections.join_next().await {
                total.add(tally??);
            }
            anyhow::Ok(total)
        };
        tokio::time::timeout_at((window.end + PATIENCE).into(), all)
            .await
            .with_context(|| {
                format!(
                    "`{}` left a request unanswered for {PATIENCE:?}",
                    options.url
                )
            })?
    })?;
    ensure!(
        !tally.latencies.is_empty() || tally.failures > 0,
        "no reply came within {} seconds",
        options.seconds
    );
    Ok(tally.report(options.seconds))
}

/// What was counted, on one connection or on all.
#[derive(Debug, Default)]
struct Tally {
    latencies: Vec<Duration>,
    failures: usize,
    replies: usize,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.latencies.extend(other.latencies);
        self.failures += other.failures;
        self.replies += other.replies;
    }

    fn report(mut self, seconds: f64) -> Report {
        self.latencies.sort_unstable();
        let requests = self.latencies.len();
        let at = |permille: usize| {
            let index = (requests * permille / 1000).min(requests.saturating_sub(1));
            self.latencies
                .get(index)
                .map_or(0.0, |latency| latency.as_secs_f64() * 1000.0)
        };
        #[expect(
            clippy::cast_precision_loss,
            reason = "a count of requests is far below 2^52"
        )]
        let per_second = requests as f64 / seconds;
        Report {
            requests,
            failures: self.failures,
            replies: self.replies,
            per_second,
            p50_ms: at(500),
            p99_ms: at(990),
            max_ms: at(1000),
        }
    }
}

/// When one connection of several that share a rate sends.
struct Turns {
    next: Instant,
    interval: Duration,
}

impl Turns {
    fn new(began: Instant, rate: f64, number: usize, connections: usize) -> anyhow::Result<Self> {
        let share = |count: usize| Duration::try_from_secs_f64(count as f64 / rate);
        Ok(Self {
            next: began + share(number)?,
            interval: share(connections)?,
        })
    }

    /// Waits for the next turn, which may be over, and returns when it was.
    async fn come(&mut self) -> Instant {
        let turn = self.next;
        self.next += self.interval;
        tokio::time::sleep_until(turn.into()).await;
        turn
    }
}

/// A server, and the request that it gets again and again.
struct Target {
    authority: String,
    request: Vec<u8>,
}

impl Target {
    fn of(options: &Options) -> anyhow::Result<Self> {
        let rest = options
            .url
            .strip_prefix("http://")
            .context("the URL must begin with http://")?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        ensure!(authority.contains(':'), "the URL must name a port");
        let body = match &options.body_file {
            Some(path) => fs_err::read(path)?,
            None => vec![b'x'; options.body_bytes],
        };
        let head = format!(
            "POST /{path} HTTP/1.1\r\nhost: {authority}\r\ncontent-type: {}\r\n\
             content-length: {}\r\n\r\n",
            options.content_type,
            body.len()
        );
        Ok(Self {
            authority: authority.to_owned(),
            request: [head.into_bytes(), body].concat(),
        })
    }

    async fn connect(&self) -> anyhow::Result<TcpStream> {
        let stream = TcpStream::connect(&self.authority)
            .await
            .with_context(|| format!("cannot connect to `{}`", self.authority))?;
        stream.set_nodelay(true)?;
        Ok(stream)
    }

    /// Keeps one connection busy until the end, or sends at its turns; counts the replies that come
    /// within the window.
    async fn drive(
        self: Arc<Self>,
        window: Range<Instant>,
        mut turns: Option<Turns>,
    ) -> anyhow::Result<Tally> {
        let mut tally = Tally::default();
        let mut stream = self.connect().await?;
        let mut received = vec![0; RECEIVE_BYTES];
        loop {
            let sent = match &mut turns {
                Some(turns) => turns.come().await,
                None => Instant::now(),
            };
            if sent >= window.end {
                return Ok(tally);
            }
            stream.write_all(&self.request).await?;
            let head = receive(&mut stream, &mut received).await?;
            let now = Instant::now();
            tally.replies += 1;
            if window.contains(&now) {
                if head.status == 200 {
                    tally.latencies.push(now - sent);
                } else {
                    tally.failures += 1;
                }
            }
            if head.closes {
                stream = self.connect().await?;
            }
        }
    }
}

/// Reads one reply to its end; its body is not kept.
async fn receive(stream: &mut TcpStream, buffer: &mut [u8]) -> anyhow::Result<Head> {
    let mut filled = 0;
    let head = loop {
        filled += read(stream, &mut buffer[filled..]).await?;
        if let Some(head) = Head::parse(&buffer[..filled]).map_err(anyhow::Error::msg)? {
            break head;
        }
        ensure!(
            filled < buffer.len(),
            "the head of a reply is over {RECEIVE_BYTES} bytes"
        );
    };
    let end = head.length + head.body_length;
    while filled < end {
        let wanted = (end - filled).min(buffer.len());
        filled += read(stream, &mut buffer[..wanted]).await?;
    }
    // One request was sent, so there is one reply.
    ensure!(filled == end, "a reply is longer than it says");
    Ok(head)
}

async fn read(stream: &mut TcpStream, buffer: &mut [u8]) -> anyhow::Result<usize> {
    match stream.read(buffer).await? {
        0 => bail!("the server ended a connection within a reply"),
        count => Ok(count),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn connections_share_a_rate_in_turns() {
        // So that no turn is still to come.
        let began = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
        let mut sent = Vec::new();
        for number in 0..2 {
            let mut turns = Turns::new(began, 100.0, number, 2).unwrap();
            for _ in 0..3 {
                sent.push((turns.come().await - began).as_millis());
            }
        }
        assert_eq!(sent, [0, 20, 40, 10, 30, 50]);
    }

    #[test]
    fn a_report_counts_what_succeeded() {
        let latencies = (1..=200).rev().map(Duration::from_millis).collect();
        let report = Tally {
            latencies,
            failures: 3,
            replies: 210,
        }
        .report(4.0);
        assert_eq!(
            (report.requests, report.failures, report.replies),
            (200, 3, 210)
        );
        let expected = [50.0, 101.0, 199.0, 200.0];
        let found = [
            report.per_second,
            report.p50_ms,
            report.p99_ms,
            report.max_ms,
        ];
        for (found, expected) in found.into_iter().zip(expected) {
            assert!((found - expected).abs() < 1e-9, "{found} is not {expected}");
        }
    }
}
