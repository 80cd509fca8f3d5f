//! From the bytes of a body to the named fields that handlers see (*torchserve-contract* 4.4).

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use actix_web::{HttpRequest, web};
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use tokio::sync::watch;
use ts_types::Part;

use super::RestError;
use super::coding::Coding;
use crate::budget::{BodyMemory, Growing, Received, Taken, counted};

/// Bytes a second that a body has to bring on average after that: a client that drips holds a
/// connection and memory for nothing.
const SLOWEST_RATE: u64 = 1024;

/// How long a body may pause once the server takes no more requests, and how long it may take then
/// before its rate counts: one that drips must not hold up the end.
const PAUSE_AT_THE_END: Duration = Duration::from_secs(1);

/// Bytes set aside on a client's word for how long its body will be.
const TRUSTED_BYTES: usize = 256 * 1024;

/// Bytes that the name of a field may have.
const MAX_NAME_BYTES: usize = 1024;

/// What a body may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Bytes at most.
    pub(crate) bytes: usize,
    /// Fields of a form at most.
    pub(crate) parts: usize,
}

/// How bodies are taken in.
#[derive(Debug)]
pub(crate) struct Intake {
    /// What one may be.
    pub(crate) limits: Limits,
    /// What all of them may take.
    pub(crate) memory: Arc<BodyMemory>,
    /// How long one may pause, and how long it may take before its rate counts.
    pub(crate) pause: Duration,
    /// Whether the server takes no more requests.
    pub(crate) draining: watch::Receiver<bool>,
}

#[cfg(any(test, feature = "fuzzing"))]
impl Intake {
    /// For a single body, without a server around it.
    pub(crate) fn alone(limits: Limits) -> Self {
        Self {
            limits,
            memory: BodyMemory::new(None),
            pause: Duration::from_secs(60),
            draining: watch::channel(false).1,
        }
    }
}

/// Reads a body, and decompresses it if its head says so. The limits hold for what arrives and for
/// what comes of it.
///
/// # Errors
/// Over a limit, broken off, stalled, or not in a coding that is known.
pub(crate) async fn collect(
    request: &HttpRequest,
    payload: web::Payload,
    intake: &Intake,
) -> Result<Received, RestError> {
    let coding = Coding::of_body(request)?;
    let body = arrived(request, payload, intake).await?;
    match coding {
        None => Ok(body),
        Some(coding) => coding.decode(body, intake).await,
    }
}

/// Reads a body. One that arrives in one piece, as most do, is not copied.
async fn arrived(
    request: &HttpRequest,
    mut payload: web::Payload,
    intake: &Intake,
) -> Result<Received, RestError> {
    let announced = request
        .headers()
        .get(CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok());
    // Whoever announces more than a number can hold announces more than the limit.
    let announced = announced.map(|text| text.parse::<usize>().unwrap_or(usize::MAX));
    let limit = intake.limits.bytes;
    let too_large = || RestError::TooLarge { limit };
    if announced.is_some_and(|bytes| bytes > limit) {
        return Err(too_large());
    }
    let mut taken = Taken::none(&intake.memory);
    let mut pace = Pace::begin(intake);
    let Some(first) = pace.next(&mut payload).await? else {
        let bytes = Bytes::new();
        return Ok(Received { bytes, taken });
    };
    if first.len() > limit {
        return Err(too_large());
    }
    let Some(second) = pace.next(&mut payload).await? else {
        taken.take(first.len())?;
        let bytes = first;
        return Ok(Received { bytes, taken });
    };
    let expected = announced.unwrap_or(0).min(TRUSTED_BYTES);
    let room = expected.max(first.len() + second.len());
    let mut body = Growing::new(taken, room, announced.unwrap_or(limit))?;
    body.push(&first)?;
    drop(first);
    let mut chunk = Some(second);
    while let Some(bytes) = chunk {
        if bytes.len() > limit - body.len() {
            return Err(too_large());
        }
        body.push(&bytes)?;
        chunk = pace.next(&mut payload).await?;
    }
    Ok(body.finish())
}

/// How fast a body arrives.
struct Pace {
    /// How long it may pause.
    pause: Duration,
    draining: watch::Receiver<bool>,
    /// Since when its rate is measured.
    since: Instant,
    /// Bytes since then.
    bytes: u64,
}

impl Pace {
    fn begin(intake: &Intake) -> Self {
        let mut pace = Self {
            pause: intake.pause,
            draining: intake.draining.clone(),
            since: Instant::now(),
            bytes: 0,
        };
        if *pace.draining.borrow_and_update() {
            pace.hurry();
        }
        pace
    }

    /// From here on the server waits for it.
    fn hurry(&mut self) {
        self.pause = self.pause.min(PAUSE_AT_THE_END);
        (self.since, self.bytes) = (Instant::now(), 0);
    }

    /// The next piece; none at the end.
    async fn next(&mut self, payload: &mut web::Payload) -> Result<Option<Bytes>, RestError> {
        let mut paused = pin!(tokio::time::sleep(self.pause));
        let piece = loop {
            tokio::select! {
                biased;
                piece = payload.next() => break piece,
                Ok(()) = self.draining.changed() => {
                    self.hurry();
                    paused.set(tokio::time::sleep(self.pause));
                }
                () = &mut paused => return Err(RestError::StalledBody {
                    seconds: self.pause.as_secs(),
                }),
            }
        };
        let Some(piece) = piece else { return Ok(None) };
        let piece = piece.map_err(|error| RestError::BrokenBody {
            reason: error.to_string(),
        })?;
        self.bytes += piece.len() as u64;
        let elapsed = self.since.elapsed();
        if elapsed > self.pause && self.bytes < elapsed.as_secs() * SLOWEST_RATE {
            return Err(RestError::SlowBody {
                bytes_per_second: SLOWEST_RATE,
            });
        }
        Ok(Some(piece))
    }
}

/// The media type as sent, or nothing.
pub(crate) fn content_type(request: &HttpRequest) -> &str {
    request
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}

/// Splits a body into fields. Only forms have names; anything else is the one field `body`.
///
/// # Errors
/// A form that cannot be read or has too many fields.
pub(crate) async fn parts(
    content_type: &str,
    body: Received,
    limits: Limits,
) -> Result<Vec<Part>, RestError> {
    let Received { bytes, mut taken } = body;
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    let mut parts = if essence.eq_ignore_ascii_case("multipart/form-data") {
        // Splitting it copies it.
        taken.take(bytes.len())?;
        // In a box, for the size that the future has where there is no form.
        Box::pin(multipart(content_type, bytes, limits)).await?
    } else if essence.eq_ignore_ascii_case("application/x-www-form-urlencoded") {
        taken.take(bytes.len())?;
        let mut fields = Fields::new(limits);
        for (name, value) in form_urlencoded::parse(&bytes) {
            fields.add(text_part(name.into_owned(), value.into_owned()))?;
        }
        fields.finish()
    } else {
        let content_type = content_type.to_owned();
        vec![Part {
            name: "body".to_owned(),
            content_type,
            value: bytes,
        }]
    };
    let taken = Arc::new(taken);
    for part in &mut parts {
        part.value = counted(std::mem::take(&mut part.value), &taken);
    }
    Ok(parts)
}

/// A field that is plain text in a form or a query: without a type, so handlers get its bytes.
pub(crate) fn text_part(name: String, value: String) -> Part {
    Part {
        name,
        content_type: String::new(),
        value: Bytes::from(value),
    }
}

async fn multipart(
    content_type: &str,
    body: Bytes,
    limits: Limits,
) -> Result<Vec<Part>, RestError> {
    let bad = |error: multer::Error| RestError::BadForm {
        reason: error.to_string(),
    };
    let boundary = multer::parse_boundary(content_type).map_err(bad)?;
    let whole = stream::iter([Ok::<_, std::convert::Infallible>(body)]);
    let mut form = multer::Multipart::new(whole, boundary);
    let mut fields = Fields::new(limits);
    while let Some(field) = form.next_field().await.map_err(bad)? {
        let name = field.name().map(str::to_owned);
        let name = name.ok_or_else(|| RestError::BadForm {
            reason: "a field has no name".to_owned(),
        })?;
        // A file has a type even if it does not say so; a plain field has none even if it does.
        // The file's name says nothing: it is neither looked at nor kept.
        let content_type = if is_file(&field) {
            // As sent: what a handler gets depends on its letters' case too.
            field
                .headers()
                .get(CONTENT_TYPE.as_str())
                .and_then(|value| value.to_str().ok())
                .unwrap_or("application/octet-stream")
                .to_owned()
        } else {
            String::new()
        };
        let value = field.bytes().await.map_err(bad)?;
        fields.add(Part {
            name,
            content_type,
            value,
        })?;
    }
    Ok(fields.finish())
}

/// Whether a field says that it is a file, by a name in either of the two forms (RFC 6266).
fn is_file(field: &multer::Field<'_>) -> bool {
    let extended = || {
        let disposition = field.headers().get("content-disposition");
        let text = disposition.map(|value| String::from_utf8_lossy(value.as_bytes()));
        text.is_some_and(|text| text.to_ascii_lowercase().contains("filename*="))
    };
    field.file_name().is_some() || extended()
}

/// The fields of a form; of several with one name the last counts, as in TorchServe.
pub(crate) struct Fields {
    parts: Vec<Part>,
    limit: usize,
    /// All that were added, those with a name that came before too.
    added: usize,
    /// The first name that came again.
    repeated: Option<String>,
}

impl Fields {
    /// No fields yet.
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            parts: Vec::new(),
            limit: limits.parts,
            added: 0,
            repeated: None,
        }
    }

    /// Adds one.
    ///
    /// # Errors
    /// More than a form may have, however they are called.
    pub(crate) fn add(&mut self, part: Part) -> Result<(), RestError> {
        if part.name.len() > MAX_NAME_BYTES {
            return Err(RestError::BadForm {
                reason: format!("the name of a field has over {MAX_NAME_BYTES} bytes"),
            });
        }
        if self.added == self.limit {
            return Err(RestError::TooManyParts { limit: self.limit });
        }
        self.added += 1;
        match self
            .parts
            .iter_mut()
            .find(|earlier| earlier.name == part.name)
        {
            Some(earlier) => {
                self.repeated.get_or_insert_with(|| part.name.clone());
                *earlier = part;
            }
            None => self.parts.push(part),
        }
        Ok(())
    }

    /// The fields. However many came more than once, the log has one line of it.
    pub(crate) fn finish(self) -> Vec<Part> {
        if let Some(field) = self.repeated {
            let replaced = self.added - self.parts.len();
            tracing::warn!(
                field,
                replaced,
                "a form has this field more than once; the last counts"
            );
        }
        self.parts
    }
}

#[cfg(test)]
mod tests;
