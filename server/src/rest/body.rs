//! From the bytes of a body to the named fields that handlers see (*torchserve-contract* 4.4).

use std::time::{Duration, Instant};

use actix_web::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use actix_web::{HttpRequest, web};
use bytes::{Bytes, BytesMut};
use futures_util::{FutureExt as _, StreamExt as _, stream};
use ts_types::Part;

use super::RestError;
use super::coding::Coding;

/// How long a body may pause, and how long it may take before its rate counts.
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// Bytes a second that a body has to bring on average after that: a client that drips holds a
/// connection and memory for nothing.
const SLOWEST_RATE: u64 = 1024;

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

/// Reads a body, and decompresses it if its head says so. The limit holds for what arrives and for
/// what comes of it.
///
/// # Errors
/// Over the limit, broken off, stalled, or not in a coding that is known.
pub(crate) async fn collect(
    request: &HttpRequest,
    payload: web::Payload,
    limits: Limits,
) -> Result<Bytes, RestError> {
    let coding = Coding::of_body(request)?;
    let body = arrived(request, payload, limits).await?;
    match coding {
        None => Ok(body),
        Some(coding) => coding.decode(body, limits.bytes).await,
    }
}

/// Reads a body. One that arrives in one piece, as most do, is not copied.
async fn arrived(
    request: &HttpRequest,
    mut payload: web::Payload,
    limits: Limits,
) -> Result<Bytes, RestError> {
    let announced = request
        .headers()
        .get(CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok());
    // Whoever announces more than a number can hold announces more than the limit.
    let announced = announced.map(|text| text.parse::<usize>().unwrap_or(usize::MAX));
    let too_large = || RestError::TooLarge {
        limit: limits.bytes,
    };
    if announced.is_some_and(|bytes| bytes > limits.bytes) {
        return Err(too_large());
    }
    let started = Instant::now();
    let Some(first) = next(&mut payload).await? else {
        return Ok(Bytes::new());
    };
    if first.len() > limits.bytes {
        return Err(too_large());
    }
    let Some(second) = next(&mut payload).await? else {
        return Ok(first);
    };
    let expected = announced.unwrap_or(0).min(TRUSTED_BYTES);
    let mut body = BytesMut::with_capacity(expected.max(first.len() + second.len()));
    body.extend_from_slice(&first);
    let mut chunk = Some(second);
    while let Some(bytes) = chunk {
        if bytes.len() > limits.bytes - body.len() {
            return Err(too_large());
        }
        body.extend_from_slice(&bytes);
        let elapsed = started.elapsed();
        if elapsed > STALL_LIMIT && (body.len() as u64) < elapsed.as_secs() * SLOWEST_RATE {
            return Err(RestError::SlowBody {
                bytes_per_second: SLOWEST_RATE,
            });
        }
        chunk = next(&mut payload).await?;
    }
    Ok(body.freeze())
}

async fn next(payload: &mut web::Payload) -> Result<Option<Bytes>, RestError> {
    // What is there already needs no clock.
    let chunk = match payload.next().now_or_never() {
        Some(chunk) => chunk,
        None => tokio::time::timeout(STALL_LIMIT, payload.next())
            .await
            .map_err(|_| RestError::StalledBody {
                seconds: STALL_LIMIT.as_secs(),
            })?,
    };
    chunk.transpose().map_err(|error| RestError::BrokenBody {
        reason: error.to_string(),
    })
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
    body: Bytes,
    limits: Limits,
) -> Result<Vec<Part>, RestError> {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("multipart/form-data") {
        // In a box, for the size that the future has where there is no form.
        Box::pin(multipart(content_type, body, limits)).await
    } else if essence.eq_ignore_ascii_case("application/x-www-form-urlencoded") {
        let mut fields = Fields::new(limits);
        for (name, value) in form_urlencoded::parse(&body) {
            fields.add(text_part(name.into_owned(), value.into_owned()))?;
        }
        Ok(fields.finish())
    } else {
        let content_type = content_type.to_owned();
        Ok(vec![Part {
            name: "body".to_owned(),
            content_type,
            value: body,
        }])
    }
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
