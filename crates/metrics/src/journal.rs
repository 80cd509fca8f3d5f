//! Updates on their way to the log of metrics (*torchserve-contract* 6.5).
//!
//! Whoever updates a metric only notes it; a thread of the log's own makes lines of the notes. So
//! that a busy server does not spend itself on its log, only so many updates in a span of time get a
//! line of their own. The rest is put together by series: what was added to a counter adds up,
//! of all else the latest value is told.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use parking_lot::{Condvar, Mutex};

use crate::hostname;
use crate::number;
use crate::registry::Family;
use crate::series::{Kind, Series};

/// How often lines are written.
const SPAN: Duration = Duration::from_millis(100);

/// Updates that get a line of their own in one span; with the ids of their requests bounded, this is
/// also the most memory that notes take.
const SINGLE_NOTES: usize = 200;

/// Bytes of the ids of one update's requests.
const MAX_ID_BYTES: usize = 16 << 10;

/// Which log lines go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogTarget {
    /// `TS_METRICS`: of the server and its machine.
    Server,
    /// `MODEL_METRICS`: of handlers.
    Model,
}

impl LogTarget {
    fn is_read(self) -> bool {
        match self {
            Self::Server => tracing::enabled!(target: "TS_METRICS", tracing::Level::INFO),
            Self::Model => tracing::enabled!(target: "MODEL_METRICS", tracing::Level::INFO),
        }
    }

    fn tell(self, line: &str) {
        match self {
            Self::Server => tracing::info!(target: "TS_METRICS", "{line}"),
            Self::Model => tracing::info!(target: "MODEL_METRICS", "{line}"),
        }
    }
}

/// What waits to be written.
#[derive(Debug, Default)]
pub struct Journal {
    notes: Mutex<Notes>,
    filled: Condvar,
}

#[derive(Debug, Default)]
struct Notes {
    single: Vec<Note>,
    /// Series with updates that were put together.
    together: Vec<(Arc<Family>, Arc<Series>, LogTarget)>,
    closed: bool,
}

#[derive(Debug)]
struct Note {
    family: Arc<Family>,
    series: Arc<Series>,
    target: LogTarget,
    value: f64,
    seconds: u64,
    request_ids: Box<str>,
}

impl Notes {
    fn is_empty(&self) -> bool {
        self.single.is_empty() && self.together.is_empty()
    }
}

impl Journal {
    pub(crate) fn note(
        &self,
        family: &Arc<Family>,
        series: &Arc<Series>,
        target: LogTarget,
        value: f64,
        request_ids: &str,
    ) {
        if !target.is_read() {
            return;
        }
        // Without the lock first: most updates of a busy server end here.
        if series.waits_for_log.load(Ordering::Relaxed) {
            put_together(family, series, value);
            if series.waits_for_log.swap(true, Ordering::AcqRel) {
                return;
            }
            // The writer has taken the series meanwhile, perhaps without this update.
            self.add(|notes| {
                notes
                    .together
                    .push((Arc::clone(family), Arc::clone(series), target));
            });
            return;
        }
        let end = request_ids.floor_char_boundary(MAX_ID_BYTES);
        self.add(|notes| {
            if notes.single.len() < SINGLE_NOTES {
                notes.single.push(Note {
                    family: Arc::clone(family),
                    series: Arc::clone(series),
                    target,
                    value,
                    seconds: now(),
                    request_ids: request_ids[..end].into(),
                });
                return;
            }
            put_together(family, series, value);
            if !series.waits_for_log.swap(true, Ordering::AcqRel) {
                notes
                    .together
                    .push((Arc::clone(family), Arc::clone(series), target));
            }
        });
    }

    fn add(&self, change: impl FnOnce(&mut Notes)) {
        let mut notes = self.notes.lock();
        let was_empty = notes.is_empty();
        change(&mut notes);
        drop(notes);
        if was_empty {
            self.filled.notify_one();
        }
    }

    /// Writes lines until [`Journal::close`] is called, and then what is left.
    pub fn write(&self) {
        let hostname = hostname();
        loop {
            let closed = {
                let mut notes = self.notes.lock();
                while notes.is_empty() && !notes.closed {
                    self.filled.wait(&mut notes);
                }
                if !notes.closed {
                    self.filled.wait_for(&mut notes, SPAN);
                }
                notes.closed
            };
            self.write_waiting(&hostname);
            if closed {
                return;
            }
        }
    }

    /// Nothing more is to be written than what waits.
    pub fn close(&self) {
        self.notes.lock().closed = true;
        self.filled.notify_all();
    }

    fn write_waiting(&self, hostname: &str) {
        let (single, together) = {
            let mut notes = self.notes.lock();
            (
                std::mem::take(&mut notes.single),
                std::mem::take(&mut notes.together),
            )
        };
        for note in single {
            let Note {
                family,
                series,
                target,
                value,
                seconds,
                request_ids,
            } = note;
            target.tell(&line(
                &family,
                &series,
                (target, hostname),
                value,
                (seconds, &request_ids),
            ));
        }
        for (family, series, target) in together {
            // First, so that who adds from here on sees that the series has to be noted again.
            series.waits_for_log.swap(false, Ordering::AcqRel);
            let value = series.untold.take();
            if value == 0.0 && family.kind() == Kind::Counter {
                continue;
            }
            target.tell(&line(
                &family,
                &series,
                (target, hostname),
                value,
                (now(), ""),
            ));
        }
    }
}

fn put_together(family: &Family, series: &Series, value: f64) {
    if family.kind() == Kind::Counter {
        series.untold.add(value);
    } else {
        series.untold.set(value);
    }
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

/// `<Name>.<Unit>:<value>|#<Dim>:<val>,…|#hostname:<h>[,requestID:<ids>],timestamp:<s>`.
fn line(
    family: &Family,
    series: &Series,
    (target, hostname): (LogTarget, &str),
    value: f64,
    (seconds, request_ids): (u64, &str),
) -> String {
    use std::fmt::Write as _;
    let mut line = String::with_capacity(160);
    line.push_str(family.name());
    line.push('.');
    let word = |c: char| c.is_alphanumeric() || c == '_' || c == ' ';
    line.extend(family.unit().chars().map(|c| if word(c) { c } else { '_' }));
    line.push(':');
    number::push(&mut line, value);
    line.push_str("|#");
    line.push_str(&series.labels.log);
    line.push_str("|#hostname:");
    line.push_str(hostname);
    if target == LogTarget::Model {
        line.push_str(",requestID:");
        line.push_str(request_ids);
    }
    let _infallible = write!(line, ",timestamp:{seconds}");
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names;
    use crate::{Labels, Metrics, Mode};

    /// Lines that a subscriber has seen, without their other fields.
    fn told(work: impl FnOnce(&Metrics)) -> Vec<String> {
        use std::io::Write;
        #[derive(Clone, Default)]
        struct Seen(Arc<Mutex<Vec<u8>>>);
        impl Write for Seen {
            fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
                self.0.lock().extend_from_slice(bytes);
                Ok(bytes.len())
            }
            fn flush(&mut self) -> std::io::Result<()> {
                Ok(())
            }
        }
        let seen = Seen::default();
        let writer = seen.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .without_time()
            .with_writer(move || writer.clone())
            .finish();
        let metrics = Metrics::new(Mode::Log, None, false);
        tracing::subscriber::with_default(subscriber, || {
            work(&metrics);
            metrics.journal().close();
            metrics.journal().write();
        });
        let text = String::from_utf8(seen.0.lock().clone()).unwrap();
        text.lines().map(|line| line.trim().to_owned()).collect()
    }

    #[test]
    fn lines_have_torchserves_form() {
        let lines = told(|metrics| {
            let requests = metrics.builtin(&names::REQUESTS_2XX, &["Host", "box"]);
            requests.count();
            let family = metrics.family("Words_", Kind::Gauge, "wid|gets").unwrap();
            let words = family.series(Labels::new([("ModelName", "m"), ("Level", "Model")]));
            words.record_for(1.5, "a,b");
        });
        let host = hostname();
        let start = format!(
            "INFO TS_METRICS: Requests2XX.Count:1.0|#Level:Host|#hostname:{host},timestamp:"
        );
        assert!(lines[0].starts_with(&start), "{}", lines[0]);
        let start = format!(
            "INFO MODEL_METRICS: Words_.wid_gets:1.5|#ModelName:m,Level:Model|#hostname:{host},\
             requestID:a,b,timestamp:"
        );
        assert!(lines[1].starts_with(&start), "{}", lines[1]);
        let seconds = lines[1].rsplit(':').next().unwrap();
        assert!(seconds.parse::<u64>().unwrap() > 1_700_000_000);
    }

    #[test]
    fn a_flood_is_put_together_and_no_count_is_lost() {
        let updates = 10 * SINGLE_NOTES;
        let lines = told(|metrics| {
            let requests = metrics.builtin(&names::REQUESTS_2XX, &["Host", "box"]);
            let time = metrics.builtin(&names::QUEUE_TIME, &["Host", "box"]);
            for number in 0..updates {
                requests.count();
                time.record(f64::from(u32::try_from(number).unwrap()));
            }
        });
        assert!(lines.len() <= SINGLE_NOTES + 2, "{}", lines.len());
        let value = |line: &String| -> f64 {
            let after = line.split_once(".Count:").unwrap().1;
            after.split('|').next().unwrap().parse().unwrap()
        };
        let counted: f64 = lines
            .iter()
            .filter(|line| line.contains("Requests2XX"))
            .map(value)
            .sum();
        assert_eq!(counted as usize, updates);
        let last = lines.iter().rfind(|line| line.contains("QueueTime"));
        assert!(
            last.unwrap()
                .contains(&format!(":{:?}|", (updates - 1) as f64))
        );
    }
}
