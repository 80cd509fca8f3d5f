//! Logs: what is told, where it goes, and that nobody waits for it.
//!
//! Every line goes to the console, and to one of five files by its target (*torchserve-contract*
//! 11.1). A thread that logs puts bytes into memory ([`queue`]) and goes on; one thread writes to
//! the console and one to the files, many lines at once, so that a terminal or a disk that is slow
//! holds up nobody, not even the other. How lines look is [`layout`]'s matter, when a file is
//! followed by the next one [`file`]'s, and what becomes of old ones [`archive`]'s.

mod archive;
mod file;
mod filter;
mod layout;
mod queue;

use std::cell::RefCell;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use jiff::{Timestamp, tz::TimeZone};
use tracing::span::{Attributes, Id};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Registry, reload};

use self::file::{Limits, LogFile, Moment, News};
use self::layout::{Layout, Record, RequestOfSpan};
use self::queue::{Lane, Queue};

pub(crate) use self::filter::{LogFilter, checked as checked_filter};
pub(crate) use self::layout::{Format, MarkedLines};

/// How long the last lines may take at the end of the server, if nobody reads them.
const FAREWELL: Duration = Duration::from_secs(5);

/// The logger of what this module says itself.
const OWN: &str = module_path!();

/// What the operator settled about logs.
#[derive(Debug, Clone, Default)]
pub(crate) struct LogSettings {
    /// What is logged; checked.
    pub(crate) filter: String,
    /// How lines look.
    pub(crate) format: Format,
    /// Which plain lines end with the id of their request.
    pub(crate) marked: MarkedLines,
    /// Bytes from which a file is followed by the next one.
    pub(crate) max_file_bytes: u64,
    /// Old files kept of each.
    pub(crate) files_kept: usize,
}

/// Where files lie.
#[derive(Debug, Clone)]
pub(crate) struct LogFolders {
    /// `LOG_LOCATION`.
    pub(crate) logs: PathBuf,
    /// `METRICS_LOCATION`.
    pub(crate) metrics: PathBuf,
}

/// The files, by what they hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Book {
    /// A line for each response.
    Access,
    /// What handlers print and log.
    Model,
    /// What no other file has.
    Server,
    /// Metrics of the server and its host.
    ServerMetrics,
    /// Metrics of handlers.
    ModelMetrics,
}

impl Book {
    const ALL: [Self; 5] = [
        Self::Access,
        Self::Model,
        Self::Server,
        Self::ServerMetrics,
        Self::ModelMetrics,
    ];

    /// The one that lines of this target belong to.
    fn of(target: &str) -> Self {
        match target {
            "ACCESS_LOG" => Self::Access,
            "MODEL_LOG" => Self::Model,
            "TS_METRICS" => Self::ServerMetrics,
            "MODEL_METRICS" => Self::ModelMetrics,
            _ => Self::Server,
        }
    }

    /// Its file's name without `.log`.
    fn name(self) -> &'static str {
        match self {
            Self::Access => "access_log",
            Self::Model => "model_log",
            Self::Server => "ts_log",
            Self::ServerMetrics => "ts_metrics",
            Self::ModelMetrics => "model_metrics",
        }
    }

    /// Its folder, and the variable that names another one.
    fn place(self, folders: &LogFolders) -> (&Path, &'static str) {
        match self {
            Self::Access | Self::Model | Self::Server => (&folders.logs, "LOG_LOCATION"),
            Self::ServerMetrics | Self::ModelMetrics => (&folders.metrics, "METRICS_LOCATION"),
        }
    }

    /// Its lines are a date and a message; those of the others name level, thread and logger.
    fn is_brief(self) -> bool {
        !matches!(self, Self::Model | Self::Server)
    }
}

/// Where lines go.
struct Sinks {
    layout: Layout,
    console: Queue<1>,
    files: Queue<5>,
}

impl Sinks {
    fn new(layout: Layout) -> Self {
        Self {
            layout,
            console: Queue::default(),
            files: Queue::default(),
        }
    }

    fn add(&self, book: Book, record: &Record) {
        self.console.add(0, &record.full);
        self.files.add(book as usize, record.for_file());
    }

    /// Says something about the log itself, whatever the filter.
    fn tell(&self, level: Level, text: &str) {
        let record = self.layout.notice(level, OWN, text, Book::Server);
        self.add(Book::Server, &record);
    }

    /// The line that stands for those that are missing.
    fn gap(&self, count: u64, why: &str, book: Book) -> Vec<u8> {
        let text = format!("{count} log lines are missing here: {why}");
        let record = self.layout.notice(Level::WARN, OWN, &text, book);
        record.for_file().to_owned()
    }
}

/// The log of this process. Dropping it writes what is left.
pub(crate) struct Log {
    sinks: Arc<Sinks>,
    filter: LogFilter,
}

impl Log {
    /// Starts the log, and makes its files. Where they cannot be, it says so and goes on without.
    ///
    /// # Errors
    /// The writing threads cannot be started, or there is a log already.
    pub(crate) fn start(settings: &LogSettings, folders: &LogFolders) -> anyhow::Result<Self> {
        let sinks = Arc::new(Sinks::new(Layout::new(settings.format, settings.marked)));
        let (layer, handle) = reload::Layer::<_, Registry>::new(filter::read(&settings.filter)?);
        let subscriber = tracing_subscriber::registry()
            .with(layer)
            .with(Logs(Arc::clone(&sinks)));
        tracing::subscriber::set_global_default(subscriber)?;
        let files = open_files(&sinks, settings, folders);
        let archiving = archive::start(&files)?;
        let own = Arc::clone(&sinks);
        std::thread::Builder::new()
            .name("log-console".to_owned())
            .spawn(move || write_console(&own, &mut io::stdout()))?;
        let own = Arc::clone(&sinks);
        std::thread::Builder::new()
            .name("log-files".to_owned())
            .spawn(move || write_files(&own, files, &archiving))?;
        let filter = LogFilter::new(&settings.filter, handle, Arc::clone(&sinks));
        Ok(Self { sinks, filter })
    }

    /// What is logged, to be changed while the server runs.
    pub(crate) fn filter(&self) -> LogFilter {
        self.filter.clone()
    }

    /// Says on the console, and only there, what scripts wait for.
    pub(crate) fn announce(&self, text: &str) {
        let record = self.sinks.layout.announcement(OWN, text);
        self.sinks.console.add(0, &record.full);
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let deadline = Instant::now() + FAREWELL;
        self.sinks.console.close();
        self.sinks.files.close();
        // A console that nobody reads must not keep the server from ending.
        self.sinks.files.ended(deadline);
        self.sinks.console.ended(deadline);
    }
}

fn open_files(sinks: &Sinks, settings: &LogSettings, folders: &LogFolders) -> [LogFile; 5] {
    let now = moment();
    let mut told: Vec<&Path> = Vec::new();
    Book::ALL.map(|book| {
        let (folder, setting) = book.place(folders);
        let limits = Limits {
            bytes: settings.max_file_bytes,
            kept: settings.files_kept,
        };
        let mut file = LogFile::new(folder, book.name(), limits);
        if let Err(error) = file.open(now)
            && !told.contains(&folder)
        {
            told.push(folder);
            let reason = format!(
                "there are no log files in `{}`, and the console has all lines: {error}. \
                 `{setting}` names another folder",
                folder.display()
            );
            sinks.tell(Level::WARN, &reason);
        }
        file
    })
}

fn moment() -> Moment {
    Moment {
        day: Timestamp::now()
            .to_zoned_datetime(TimeZone::system())
            .date(),
        instant: Instant::now(),
    }
}

fn write_console(sinks: &Sinks, output: &mut impl Write) {
    let mut lanes = [Lane::default()];
    loop {
        let closed = sinks.console.take(&mut lanes);
        let [Lane { bytes, dropped }] = &lanes;
        // A console that is gone must not end the server.
        let _unreadable = output.write_all(bytes).and_then(|()| {
            if *dropped > 0 {
                let why = "nobody read the console in time";
                output.write_all(&sinks.gap(*dropped, why, Book::Server))?;
            }
            output.flush()
        });
        if closed {
            sinks.console.end();
            return;
        }
    }
}

fn write_files(sinks: &Sinks, mut files: [LogFile; 5], archiving: &SyncSender<()>) {
    let mut lanes: [Lane; 5] = Default::default();
    loop {
        let closed = sinks.files.take(&mut lanes);
        for ((file, book), lane) in files.iter_mut().zip(Book::ALL).zip(&lanes) {
            write_file(sinks, file, book, lane, archiving);
        }
        if closed {
            sinks.files.end();
            return;
        }
    }
}

fn write_file(
    sinks: &Sinks,
    file: &mut LogFile,
    book: Book,
    lane: &Lane,
    archiving: &SyncSender<()>,
) {
    let now = moment();
    let mut tell = |news| match news {
        News::Rolled => {
            // One request that is waiting is as good as two.
            let _asked_already = archiving.try_send(());
            None
        }
        News::Failing { path, reason } => {
            let text = format!(
                "the log file `{}` cannot be written, and the console has its lines: {reason}",
                path.display()
            );
            sinks.tell(Level::ERROR, &text);
            None
        }
        News::NotRolled { path, reason } => {
            let text = format!(
                "the log file `{}` is full and goes on, since it cannot be renamed: {reason}",
                path.display()
            );
            sinks.tell(Level::WARN, &text);
            None
        }
        News::WritableAgain { lost } => {
            Some(sinks.gap(lost, "the file could not be written", book))
        }
    };
    file.write(&lane.bytes, now, &mut tell);
    if lane.dropped > 0 {
        let why = "they came faster than the disk took them";
        file.write(&sinks.gap(lane.dropped, why, book), now, tell);
    }
}

thread_local! {
    /// Where a line is put together; kept, since most threads log again.
    static SCRATCH: RefCell<Record> = RefCell::default();
}

/// The part of the subscriber that lays lines out.
struct Logs(Arc<Sinks>);

impl<S: Subscriber + for<'l> LookupSpan<'l>> Layer<S> for Logs {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut request = RequestOfSpan::default();
        attributes.record(&mut request);
        if let (false, Some(span)) = (request.0.is_empty(), context.span(id)) {
            span.extensions_mut().insert(request);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let log = |record: &mut Record| {
            let book = Book::of(event.metadata().target());
            for span in context.event_scope(event).into_iter().flatten() {
                if let Some(request) = span.extensions().get::<RequestOfSpan>() {
                    record.request(&request.0);
                    break;
                }
            }
            self.0.layout.event(event, Timestamp::now(), record);
            self.0.add(book, record);
            record.clear();
        };
        SCRATCH.with(|scratch| match scratch.try_borrow_mut() {
            Ok(mut record) => log(&mut record),
            // A value that logs while it is shown.
            Err(_) => log(&mut Record::default()),
        });
    }
}

#[cfg(test)]
mod tests;
