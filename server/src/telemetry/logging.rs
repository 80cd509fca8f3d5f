//! Logs on standard output, in TorchServe's layout (*torchserve-contract* 11.1):
//! `<date> [<LEVEL>] <thread> <logger> - <message>`.
//!
//! A line is put into memory by the thread that logs it and written by a thread of its own, many
//! at once: a request never waits for a terminal or a pipe.

use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

/// How long lines are gathered before they are written.
const GATHER: Duration = Duration::from_millis(10);

/// Bytes kept for a reader that does not read; what comes on top is dropped, and counted.
const MOST_WAITING: usize = 8 << 20;

/// What the HTTP library says of itself: a client's malformed request is no error of ours. The
/// operator's filter comes after it and may ask for more.
const LIBRARIES: &str = "actix_http=warn,actix_http::h1::dispatcher=off,actix_server=warn";

#[derive(Default)]
struct Waiting {
    bytes: Vec<u8>,
    dropped: u64,
    closed: bool,
}

#[derive(Default)]
struct Shared {
    waiting: Mutex<Waiting>,
    filled: Condvar,
}

/// The log of this process. Dropping it writes what is left.
pub(crate) struct Log {
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

impl Log {
    /// Starts the log; `filter` was checked by the settings.
    ///
    /// # Errors
    /// The writing thread cannot be started, or there is a log already.
    pub(crate) fn start(filter: &str) -> anyhow::Result<Self> {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let writer = std::thread::Builder::new()
            .name("log-writer".to_owned())
            .spawn(move || write_all(&own, &mut io::stdout()))?;
        let log = Self {
            shared: Arc::clone(&shared),
            writer: Some(writer),
        };
        let subscriber = tracing_subscriber::fmt()
            .with_env_filter(EnvFilter::try_new(format!("{LIBRARIES},{filter}"))?)
            .event_format(Layout)
            .with_writer(Lines(shared))
            .finish();
        tracing::subscriber::set_global_default(subscriber)?;
        Ok(log)
    }

    /// Puts a line out as it is: one that scripts wait for.
    pub(crate) fn announce(&self, line: &str) {
        self.shared.add(format!("{line}\n").as_bytes());
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.shared.waiting.lock().closed = true;
        self.shared.filled.notify_one();
        if let Some(writer) = self.writer.take() {
            // It ends by itself; if it panicked there is nobody left to tell.
            let _panicked = writer.join();
        }
    }
}

impl Shared {
    fn add(&self, line: &[u8]) {
        let mut waiting = self.waiting.lock();
        if waiting.bytes.len() + line.len() > MOST_WAITING {
            waiting.dropped += 1;
            return;
        }
        let was_empty = waiting.bytes.is_empty();
        waiting.bytes.extend_from_slice(line);
        drop(waiting);
        if was_empty {
            self.filled.notify_one();
        }
    }
}

fn write_all(shared: &Shared, output: &mut impl Write) {
    let mut taken = Vec::new();
    loop {
        let (dropped, closed) = {
            let mut waiting = shared.waiting.lock();
            while waiting.bytes.is_empty() && !waiting.closed {
                shared.filled.wait(&mut waiting);
            }
            if !waiting.closed {
                // Under load this makes one write of many lines.
                shared.filled.wait_for(&mut waiting, GATHER);
            }
            taken.clear();
            std::mem::swap(&mut taken, &mut waiting.bytes);
            (std::mem::take(&mut waiting.dropped), waiting.closed)
        };
        // A log that nobody can read any more must not end the server.
        let _unreadable = output.write_all(&taken).and_then(|()| {
            if dropped > 0 {
                writeln!(
                    output,
                    "{dropped} log lines were dropped: nobody read them in time"
                )?;
            }
            output.flush()
        });
        if closed {
            return;
        }
    }
}

#[derive(Clone)]
struct Lines(Arc<Shared>);

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.add(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'w> MakeWriter<'w> for Lines {
    type Writer = Self;

    fn make_writer(&'w self) -> Self {
        self.clone()
    }
}

struct Layout;

impl<S, N> FormatEvent<S, N> for Layout
where
    S: Subscriber + for<'l> LookupSpan<'l>,
    N: for<'w> FormatFields<'w> + 'static,
{
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let now = jiff::ZonedDateTime::now();
        let metadata = event.metadata();
        let (date, milliseconds) = (now.datetime(), now.millisecond());
        write!(
            writer,
            "{:04}-{:02}-{:02}T{:02}:{:02}:{:02},{milliseconds:03}",
            date.year(),
            date.month(),
            date.day(),
            date.hour(),
            date.minute(),
            date.second(),
        )?;
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or("unnamed");
        let (level, target) = (metadata.level().as_str(), metadata.target());
        write!(writer, " [{level:<5}] {thread} {target} - ")?;
        let mut fields = Fields {
            message: String::new(),
            others: String::new(),
        };
        event.record(&mut fields);
        writeln!(writer, "{}{}", fields.message, fields.others)
    }
}

/// The message first, then the other fields as ` name=value`.
struct Fields {
    message: String,
    others: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _infallible = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.others, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_logged_before_the_end_is_written_in_order() {
        let shared = Arc::new(Shared::default());
        for number in 0..3 {
            shared.add(format!("{number}\n").as_bytes());
        }
        shared.waiting.lock().closed = true;
        let mut written = Vec::new();
        write_all(&shared, &mut written);
        assert_eq!(written, b"0\n1\n2\n");
    }

    #[test]
    fn lines_that_nobody_reads_are_dropped_and_counted() {
        let shared = Arc::new(Shared::default());
        shared.add(&vec![b'x'; MOST_WAITING]);
        shared.add(b"lost\n");
        shared.waiting.lock().closed = true;
        let mut written = Vec::new();
        write_all(&shared, &mut written);
        let end = String::from_utf8_lossy(&written[MOST_WAITING..]).into_owned();
        assert_eq!(end, "1 log lines were dropped: nobody read them in time\n");
    }

    #[test]
    fn an_event_has_torchserves_layout() {
        let shared = Arc::new(Shared::default());
        let subscriber = tracing_subscriber::fmt()
            .event_format(Layout)
            .with_writer(Lines(Arc::clone(&shared)))
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(target: "ACCESS_LOG", request = 7, "a {}", "b");
        });
        let line = String::from_utf8(shared.waiting.lock().bytes.clone()).unwrap();
        let pattern =
            r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} \[INFO \] \S+ ACCESS_LOG - a b request=7\n$";
        assert!(
            regex::Regex::new(pattern).unwrap().is_match(&line),
            "{line}"
        );
    }
}
