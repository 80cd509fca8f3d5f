//! From the bytes of a body to the named fields that handlers see (*torchserve-contract* 4.4).

use std::time::Duration;

use actix_web::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use actix_web::{HttpRequest, web};
use bytes::{Bytes, BytesMut};
use futures_util::{StreamExt as _, stream};
use ts_types::Part;

use super::RestError;

/// How long a body may pause. Only a client that stopped sending is cut off by it.
const STALL_LIMIT: Duration = Duration::from_secs(60);

/// Bytes set aside on a client's word for how long its body will be.
const TRUSTED_BYTES: usize = 256 * 1024;

/// What a body may be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Bytes at most.
    pub(crate) bytes: usize,
    /// Fields of a form at most.
    pub(crate) parts: usize,
}

/// Reads a body. One that arrives in one piece, as most do, is not copied.
///
/// # Errors
/// Over the limit, broken off, or stalled.
pub(crate) async fn collect(
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
        chunk = next(&mut payload).await?;
    }
    Ok(body.freeze())
}

async fn next(payload: &mut web::Payload) -> Result<Option<Bytes>, RestError> {
    match tokio::time::timeout(STALL_LIMIT, payload.next()).await {
        Ok(None) => Ok(None),
        Ok(Some(Ok(chunk))) => Ok(Some(chunk)),
        Ok(Some(Err(error))) => Err(RestError::BrokenBody {
            reason: error.to_string(),
        }),
        Err(_) => Err(RestError::StalledBody {
            seconds: STALL_LIMIT.as_secs(),
        }),
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
    body: Bytes,
    limits: Limits,
) -> Result<Vec<Part>, RestError> {
    let essence = content_type.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("multipart/form-data") {
        multipart(content_type, body, limits).await
    } else if essence.eq_ignore_ascii_case("application/x-www-form-urlencoded") {
        let fields = form_urlencoded::parse(&body);
        let mut parts = Vec::new();
        for (name, value) in fields {
            add(
                &mut parts,
                limits,
                text_part(name.into_owned(), value.into_owned()),
            )?;
        }
        Ok(parts)
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
    let mut parts = Vec::new();
    while let Some(field) = form.next_field().await.map_err(bad)? {
        let name = field.name().map(str::to_owned);
        let name = name.ok_or_else(|| RestError::BadForm {
            reason: "a field has no name".to_owned(),
        })?;
        // A file has a type even if it does not say so; a plain field has none even if it does.
        // The file's name says nothing: it is neither looked at nor kept.
        let content_type = match field.file_name() {
            None => String::new(),
            // As sent: what a handler gets depends on its letters' case too.
            Some(_) => field
                .headers()
                .get(CONTENT_TYPE.as_str())
                .and_then(|value| value.to_str().ok())
                .unwrap_or("application/octet-stream")
                .to_owned(),
        };
        let value = field.bytes().await.map_err(bad)?;
        add(
            &mut parts,
            limits,
            Part {
                name,
                content_type,
                value,
            },
        )?;
    }
    Ok(parts)
}

/// Adds a field; of several with one name the last counts, as in TorchServe.
fn add(parts: &mut Vec<Part>, limits: Limits, part: Part) -> Result<(), RestError> {
    if let Some(earlier) = parts.iter_mut().find(|earlier| earlier.name == part.name) {
        tracing::warn!(
            field = part.name,
            "a form has this field more than once; the last counts"
        );
        *earlier = part;
        return Ok(());
    }
    if parts.len() == limits.parts {
        return Err(RestError::TooManyParts {
            limit: limits.parts,
        });
    }
    parts.push(part);
    Ok(())
}

#[cfg(test)]
mod tests;
