//! How a line looks: as TorchServe's (*torchserve-contract* 11.1), or as a JSON object.
//!
//! Nothing that comes from outside can make a line of its own: what is no letter of a line is
//! written as an escape, and a text of several lines, as a handler may print, has the same head on
//! each.

use std::cell::RefCell;
use std::fmt::{self, Write as _};
use std::io::Write as _;

use jiff::{Timestamp, tz::TimeZone};
use serde_json::ser;
use tracing::field::{Field, Visit};
use tracing::{Event, Level};

use super::Book;
use crate::telemetry::RequestContext;

/// Memory of a long line that is kept for the next one.
const KEPT: usize = 64 << 10;

/// How lines look.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Format {
    /// As TorchServe's.
    #[default]
    Plain,
    /// A JSON object for each record.
    Json,
}

/// Which plain lines end with the id of their request. JSON always has it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum MarkedLines {
    /// None.
    None,
    /// Those of the server itself.
    #[default]
    Server,
    /// Those of handlers as well.
    All,
}

/// One record, laid out.
#[derive(Debug, Default)]
pub(super) struct Record {
    /// With its head in full.
    pub(super) full: Vec<u8>,
    /// For files whose lines have a date only; empty where the same as `full`.
    pub(super) brief: Vec<u8>,
    fields: Fields,
}

impl Record {
    /// Names the request, unless the event names one itself.
    pub(super) fn request(&mut self, id: &str) {
        self.fields.request_id.push_str(id);
    }

    /// As its file has it.
    pub(super) fn for_file(&self) -> &[u8] {
        if self.brief.is_empty() {
            &self.full
        } else {
            &self.brief
        }
    }

    /// Makes it one that nothing was written to.
    pub(super) fn clear(&mut self) {
        for bytes in [&mut self.full, &mut self.brief] {
            bytes.clear();
            bytes.shrink_to(KEPT);
        }
        self.fields.clear();
    }
}

/// What a record says, as far as it is known before the record is laid out.
#[derive(Clone, Copy)]
struct Head<'h> {
    now: Timestamp,
    level: Level,
    logger: &'h str,
    thread: &'h str,
}

/// The request that a span is of: where a task of its own works for a request, its lines have the
/// id from here.
#[derive(Debug, Default)]
pub(super) struct RequestOfSpan(pub(super) String);

impl Visit for RequestOfSpan {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "request_id" {
            let _infallible = write!(self.0, "{value:?}");
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "request_id" {
            self.0.push_str(value);
        }
    }
}

/// Lays records out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    format: Format,
    marked: MarkedLines,
}

impl Layout {
    pub(super) fn new(format: Format, marked: MarkedLines) -> Self {
        Self { format, marked }
    }

    /// An event of the calling thread.
    pub(super) fn event(&self, event: &Event<'_>, now: Timestamp, record: &mut Record) {
        let metadata = event.metadata();
        record.fields.book = Some(Book::of(metadata.target()));
        record.fields.json = self.format == Format::Json;
        event.record(&mut record.fields);
        with_thread_name(|thread| {
            let head = Head {
                now,
                level: *metadata.level(),
                logger: metadata.target(),
                thread,
            };
            self.lay_out(head, record);
        });
    }

    /// Something that is said of the log itself, in the form of one of the files.
    pub(super) fn notice(&self, level: Level, logger: &str, text: &str, book: Book) -> Record {
        let mut record = Record::default();
        record.fields.book = Some(book);
        record.fields.message.push_str(text);
        with_thread_name(|thread| {
            let head = Head {
                now: Timestamp::now(),
                level,
                logger,
                thread,
            };
            self.lay_out(head, &mut record);
        });
        record
    }

    /// What scripts wait for: a plain line has nothing else.
    pub(super) fn announcement(&self, logger: &str, text: &str) -> Record {
        match self.format {
            Format::Json => self.notice(Level::INFO, logger, text, Book::Server),
            Format::Plain => Record {
                full: format!("{text}\n").into_bytes(),
                ..Record::default()
            },
        }
    }

    fn lay_out(&self, head: Head<'_>, record: &mut Record) {
        let book = record.fields.book.unwrap_or(Book::Server);
        // Lines of metrics have a form of their own, and ids are part of it.
        let is_metric = matches!(book, Book::ServerMetrics | Book::ModelMetrics);
        if !is_metric {
            let Fields {
                request_id,
                trace_id,
                ..
            } = &mut record.fields;
            RequestContext::with(|context| {
                if request_id.is_empty() {
                    request_id.push_str(context.id.as_str());
                }
                trace_id.push_str(context.trace_id().unwrap_or_default());
            });
        }
        match self.format {
            Format::Json => json(head, record),
            Format::Plain => {
                let marked = match book {
                    _ if is_metric => false,
                    Book::Model => self.marked == MarkedLines::All,
                    _ => self.marked != MarkedLines::None,
                };
                plain(head, book, marked, record);
            }
        }
    }
}

fn with_thread_name(work: impl FnOnce(&str)) {
    let thread = std::thread::current();
    work(thread.name().unwrap_or("unnamed"));
}

fn plain(head: Head<'_>, book: Book, marked: bool, record: &mut Record) {
    let Record {
        full,
        brief,
        fields,
    } = record;
    let mut line = |text: &str, fields: &Fields, is_first: bool| {
        let start = full.len();
        Clock::with(head.now, |clock| full.extend_from_slice(&clock.comma));
        let dated = full.len();
        let (level, logger, thread) = (head.level.as_str(), head.logger, head.thread);
        let _infallible = if book == Book::Model && !fields.worker.is_empty() {
            // TorchServe's thread names, which log shippers parse (contract 11.2).
            let (worker, stream) = (&fields.worker, &fields.stream);
            write!(full, " [{level:<5}] {worker}-{stream} {logger}")
        } else {
            write!(full, " [{level:<5}] {thread} {logger}")
        };
        let named = full.len();
        full.extend_from_slice(b" - ");
        push_escaped(full, text);
        if is_first {
            push_escaped(full, &fields.others);
        }
        if marked && !fields.request_id.is_empty() {
            full.extend_from_slice(b" request_id=");
            push_escaped(full, &fields.request_id);
        }
        full.push(b'\n');
        if book.is_brief() {
            brief.extend_from_slice(&full[start..dated]);
            brief.extend_from_slice(&full[named..]);
        }
    };
    if book == Book::Model {
        let lines = fields.message.split('\n');
        for text in lines.filter(|text| !text.is_empty()) {
            line(text, fields, false);
        }
    } else {
        line(&fields.message, fields, true);
        // What Java's loggers put below a line that tells of an exception.
        if !fields.exception.is_empty() {
            line(&fields.exception, fields, false);
        }
    }
}

fn json(head: Head<'_>, record: &mut Record) {
    let Record { full, fields, .. } = record;
    full.extend_from_slice(b"{\"timestamp\":\"");
    Clock::with(head.now, |clock| full.extend_from_slice(&clock.zoned));
    full.extend_from_slice(b"\"");
    let (worker, stream) = (&fields.worker, &fields.stream);
    push_field(full, "level", head.level.as_str());
    push_field(full, "logger", head.logger);
    if fields.book == Some(Book::Model) && !worker.is_empty() {
        push_field(full, "thread", &format!("{worker}-{stream}"));
    } else {
        push_field(full, "thread", head.thread);
    }
    push_field(full, "message", &fields.message);
    for (name, text) in [
        ("request_id", &fields.request_id),
        ("trace_id", &fields.trace_id),
        ("worker", worker),
        ("exception", &fields.exception),
    ] {
        if !text.is_empty() {
            push_field(full, name, text);
        }
    }
    full.extend_from_slice(fields.others.as_bytes());
    full.extend_from_slice(b"}\n");
}

fn push_field(out: &mut Vec<u8>, name: &str, text: &str) {
    out.push(b',');
    push_json(out, name);
    out.push(b':');
    push_json(out, text);
}

fn push_json(out: &mut Vec<u8>, text: &str) {
    use serde::Serialize as _;
    // Writing text to memory does not fail.
    let _infallible = text.serialize(&mut ser::Serializer::new(out));
}

/// Appends a text as part of a line.
fn push_escaped(out: &mut Vec<u8>, text: &str) {
    // The first bytes of whatever has to be escaped; most lines have none of them.
    let suspect = |byte: u8| (byte < b' ' && byte != b'\t') || matches!(byte, 0x7f | 0xc2 | 0xe2);
    if !text.bytes().any(suspect) {
        out.extend_from_slice(text.as_bytes());
        return;
    }
    for c in text.chars() {
        let ends_a_line = matches!(c, '\u{2028}' | '\u{2029}');
        let _infallible = if (c.is_control() && c != '\t') || ends_a_line {
            write!(out, "{}", c.escape_default())
        } else {
            write!(out, "{c}")
        };
    }
}

/// The fields of an event.
#[derive(Debug, Default)]
struct Fields {
    book: Option<Book>,
    json: bool,
    message: String,
    request_id: String,
    trace_id: String,
    worker: String,
    stream: String,
    exception: String,
    /// All others: ` name=value` each, or members of an object.
    others: String,
    /// A value on its way into JSON.
    value: String,
}

impl Fields {
    fn clear(&mut self) {
        self.book = None;
        for text in [
            &mut self.message,
            &mut self.request_id,
            &mut self.trace_id,
            &mut self.worker,
            &mut self.stream,
            &mut self.exception,
            &mut self.others,
            &mut self.value,
        ] {
            text.clear();
            text.shrink_to(KEPT);
        }
    }

    /// A field that has a place of its own.
    fn place(&mut self, name: &str) -> Option<&mut String> {
        match name {
            "message" => Some(&mut self.message),
            "request_id" => Some(&mut self.request_id),
            "exception" => Some(&mut self.exception),
            // In a plain line of the server the worker is a field as others are.
            "worker" if self.json || self.book == Some(Book::Model) => Some(&mut self.worker),
            "stream" if self.book == Some(Book::Model) => Some(&mut self.stream),
            _ => None,
        }
    }

    fn record(&mut self, field: &Field, is_text: bool, value: fmt::Arguments<'_>) {
        let name = field.name();
        if name == "request_id" {
            self.request_id.clear();
        }
        if self.book == Some(Book::Access) {
            self.record_access(name, value);
        }
        // Writing to text does not fail; what a value's own words fail with is left out.
        if let Some(place) = self.place(name) {
            let _refused = place.write_fmt(value);
        } else if self.json {
            self.value.clear();
            let _refused = self.value.write_fmt(value);
            let _infallible = write!(self.others, ",\"{name}\":");
            if is_text {
                let text = serde_json::Value::from(std::mem::take(&mut self.value));
                let _infallible = write!(self.others, "{text}");
            } else {
                self.others.push_str(&self.value);
            }
        } else if self.book != Some(Book::Access) {
            let _refused = write!(self.others, " {name}={value}");
        }
    }

    /// The line that is parsed by others, out of the fields in the order in which `rest/trace.rs`
    /// names them.
    fn record_access(&mut self, name: &str, value: fmt::Arguments<'_>) {
        let line = &mut self.message;
        let _infallible = match name {
            "peer" => write!(line, "{value}"),
            "method" => write!(line, " \"{value} "),
            "path" => write!(line, "{value} "),
            "protocol" => write!(line, "{value}\""),
            "status" | "ms" => write!(line, " {value}"),
            _ => Ok(()),
        };
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record(field, true, format_args!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let as_it_is = self.json || self.book == Some(Book::Access);
        if as_it_is || self.place(field.name()).is_some() {
            self.record(field, true, format_args!("{value}"));
        } else {
            self.record(field, true, format_args!("{value:?}"));
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.record(field, false, format_args!("{value}"));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.record(field, false, format_args!("{value}"));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.record(field, false, format_args!("{value}"));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        // JSON has no word for what is no number.
        self.record(field, !value.is_finite(), format_args!("{value}"));
    }
}

thread_local! {
    static CLOCK: RefCell<Clock> = const { RefCell::new(Clock::new()) };
}

/// The time as text; put together once a second.
struct Clock {
    second: i64,
    /// `2026-11-30T21:49:47,123`, as TorchServe has it.
    comma: Vec<u8>,
    /// `2026-11-30T21:49:47.123+00:00`, as RFC 3339 has it.
    zoned: Vec<u8>,
}

impl Clock {
    /// Where the milliseconds stand in both texts.
    const MILLIS: std::ops::Range<usize> = 20..23;

    const fn new() -> Self {
        Self {
            second: i64::MIN,
            comma: Vec::new(),
            zoned: Vec::new(),
        }
    }

    fn with(now: Timestamp, work: impl FnOnce(&Self)) {
        CLOCK.with_borrow_mut(|clock| {
            clock.set(now);
            work(clock);
        });
    }

    fn set(&mut self, now: Timestamp) {
        if now.as_second() != self.second {
            let zoned = now.to_zoned_datetime(TimeZone::system());
            self.comma = zoned.strftime("%Y-%m-%dT%H:%M:%S,000").to_string().into();
            self.zoned = zoned
                .strftime("%Y-%m-%dT%H:%M:%S.000%:z")
                .to_string()
                .into();
            self.second = now.as_second();
        }
        let millis = now.subsec_millisecond().unsigned_abs();
        let digit = |place: u32| b'0' + u8::try_from(millis / place % 10).unwrap_or(0);
        let digits = [digit(100), digit(10), digit(1)];
        for text in [&mut self.comma, &mut self.zoned] {
            if let Some(place) = text.get_mut(Self::MILLIS) {
                place.copy_from_slice(&digits);
            }
        }
    }
}
