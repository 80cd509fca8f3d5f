//! Content codings (RFC 9110, 8.4): bodies that come compressed, and bodies that go so to clients
//! that accept it.

use std::io::{Read, Write as _};

use actix_web::body::{BodySize, BoxBody, MessageBody as _};
use actix_web::http::header::{
    ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderMap, HeaderName,
    HeaderValue, VARY,
};
use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;
use flate2::{Decompress, FlushDecompress, Status};

use super::RestError;
use super::body::Intake;
use crate::budget::{Growing, MemoryFull, Received, Taken};

/// The codings that bodies may come in, for those who used another.
pub(crate) const KNOWN: &str = "gzip, deflate, br, zstd";

/// Bodies up to this size are compressed where they are; larger ones on a thread that may take its
/// time.
const COMPRESSED_IN_PLACE: usize = 16 << 10;

/// Bytes that decoding asks for at a time.
const STEP: usize = 64 << 10;

/// Bytes that a frame of zstd may refer back to, as a power of two: what RFC 9659 allows, since a
/// decoder sets them aside before it has seen anything.
const ZSTD_WINDOW: u32 = 23;

/// Speed before size: the best levels take many times as long for a few percent.
const GZIP_LEVEL: u32 = 4;
const ZSTD_LEVEL: i32 = 3;
const BROTLI_LEVEL: u32 = 4;
const BROTLI_WINDOW: u32 = 20;

/// Headers of a handler that speak of the very bytes of its body.
pub(crate) const OF_THE_BYTES: [HeaderName; 6] = [
    CONTENT_ENCODING,
    CONTENT_RANGE,
    ETAG,
    HeaderName::from_static("content-md5"),
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("digest"),
];

/// A way to compress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Coding {
    /// `gzip`.
    Gzip,
    /// `deflate`: zlib's format, or what is inside of it.
    Deflate,
    /// `br`.
    Brotli,
    /// `zstd`.
    Zstd,
}

impl Coding {
    /// In the order in which they are chosen between equals: what costs the least time first.
    const ALL: [Self; 4] = [Self::Zstd, Self::Brotli, Self::Gzip, Self::Deflate];

    fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
            Self::Brotli => "br",
            Self::Zstd => "zstd",
        }
    }

    fn of(name: &str) -> Option<Self> {
        let name = if name.eq_ignore_ascii_case("x-gzip") {
            "gzip"
        } else {
            name
        };
        let mut all = Self::ALL.into_iter();
        all.find(|coding| coding.name().eq_ignore_ascii_case(name))
    }

    /// The coding of a request's body, if it has one.
    ///
    /// # Errors
    /// One that is not known, or several.
    pub(crate) fn of_body(request: &HttpRequest) -> Result<Option<Self>, RestError> {
        let mut found = None;
        for value in request.headers().get_all(CONTENT_ENCODING) {
            let value = String::from_utf8_lossy(value.as_bytes());
            let names = value.split(',').map(str::trim);
            for name in
                names.filter(|name| !name.is_empty() && !name.eq_ignore_ascii_case("identity"))
            {
                let coding = Self::of(name).filter(|_| found.is_none());
                found = Some(coding.ok_or_else(|| RestError::UnknownCoding {
                    coding: value.chars().take(100).collect(),
                })?);
            }
        }
        Ok(found)
    }

    /// The body as it was before it was compressed.
    ///
    /// # Errors
    /// Over a limit, which counts while it grows, or not compressed that way.
    pub(crate) async fn decode(
        self,
        body: Received,
        intake: &Intake,
    ) -> Result<Received, RestError> {
        if body.bytes.is_empty() {
            return Ok(body);
        }
        let limit = intake.limits.bytes;
        let decoded = Growing::new(Taken::none(&intake.memory), 0, limit)?;
        let decoded = web::block(move || self.decoded(&body.bytes, decoded, limit)).await;
        decoded.unwrap_or_else(|_gone| {
            Err(RestError::BrokenBody {
                reason: "the server is stopping".to_owned(),
            })
        })
    }

    fn decoded(
        self,
        body: &[u8],
        mut decoded: Growing,
        limit: usize,
    ) -> Result<Received, RestError> {
        let into = &mut decoded;
        let done = match self {
            Self::Gzip => read(flate2::read::MultiGzDecoder::new(body), into, limit),
            Self::Deflate => inflate(body, into, limit),
            Self::Brotli => read(brotli::Decompressor::new(body, STEP), into, limit),
            Self::Zstd => zstd::stream::read::Decoder::with_buffer(body)
                .and_then(|mut decoder| {
                    decoder.window_log_max(ZSTD_WINDOW)?;
                    Ok(decoder)
                })
                .map_err(Undecoded::from)
                .and_then(|decoder| read(decoder, into, limit)),
        };
        match done {
            Ok(()) => Ok(decoded.finish()),
            Err(Undecoded::TooLarge) => Err(RestError::TooLarge { limit }),
            Err(Undecoded::Full(full)) => Err(full.into()),
            Err(Undecoded::Broken(reason)) => Err(RestError::BadCoding {
                coding: self.name(),
                reason: reason.to_string(),
            }),
        }
    }

    /// The bytes, compressed.
    fn encoded(self, body: &[u8]) -> std::io::Result<Vec<u8>> {
        let room = Vec::with_capacity(body.len() / 4);
        match self {
            Self::Gzip => {
                let level = flate2::Compression::new(GZIP_LEVEL);
                let mut encoder = flate2::write::GzEncoder::new(room, level);
                encoder.write_all(body)?;
                encoder.finish()
            }
            Self::Deflate => {
                let level = flate2::Compression::new(GZIP_LEVEL);
                let mut encoder = flate2::write::ZlibEncoder::new(room, level);
                encoder.write_all(body)?;
                encoder.finish()
            }
            Self::Brotli => {
                let mut encoder =
                    brotli::CompressorWriter::new(room, STEP, BROTLI_LEVEL, BROTLI_WINDOW);
                encoder.write_all(body)?;
                Ok(encoder.into_inner())
            }
            Self::Zstd => zstd::bulk::compress(body, ZSTD_LEVEL),
        }
    }
}

/// Why a body is not decompressed.
enum Undecoded {
    TooLarge,
    Full(MemoryFull),
    Broken(std::io::Error),
}

impl From<MemoryFull> for Undecoded {
    fn from(full: MemoryFull) -> Self {
        Self::Full(full)
    }
}

impl From<std::io::Error> for Undecoded {
    fn from(error: std::io::Error) -> Self {
        Self::Broken(error)
    }
}

/// All that a decoder gives, up to a limit.
fn read(mut source: impl Read, into: &mut Growing, limit: usize) -> Result<(), Undecoded> {
    let mut step = vec![0; STEP];
    loop {
        match source.read(&mut step) {
            Ok(0) => return Ok(()),
            Ok(read) if read > limit - into.len() => return Err(Undecoded::TooLarge),
            Ok(read) => into.push(step.get(..read).unwrap_or_default())?,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// The same for `deflate`. Some clients leave zlib's frame out, which its first two bytes tell.
fn inflate(body: &[u8], into: &mut Growing, limit: usize) -> Result<(), Undecoded> {
    let framed = match body {
        [first, second, ..] => {
            first & 0x0f == 8 && u16::from_be_bytes([*first, *second]).is_multiple_of(31)
        }
        _ => false,
    };
    let mut state = Decompress::new(framed);
    let mut step = Vec::with_capacity(STEP);
    let broken = |text| std::io::Error::new(std::io::ErrorKind::InvalidData, text);
    loop {
        let read = usize::try_from(state.total_in()).unwrap_or(usize::MAX);
        let rest = body.get(read..).unwrap_or_default();
        step.clear();
        let status = state
            .decompress_vec(rest, &mut step, FlushDecompress::None)
            .map_err(std::io::Error::from)?;
        if step.len() > limit - into.len() {
            return Err(Undecoded::TooLarge);
        }
        into.push(&step)?;
        let consumed = usize::try_from(state.total_in()).unwrap_or(usize::MAX);
        match status {
            Status::StreamEnd if consumed == body.len() => return Ok(()),
            Status::StreamEnd => return Err(broken("there is more after its end").into()),
            Status::Ok | Status::BufError if consumed == read && step.is_empty() => {
                return Err(broken("it ends too early").into());
            }
            Status::Ok | Status::BufError => {}
        }
    }
}

/// Compresses a response, if its client accepts that and it is worth it. Replies in parts, and
/// those whose handler speaks of their very bytes, go as they are.
pub(crate) async fn compressed(
    request: &HttpRequest,
    response: HttpResponse,
    min_bytes: usize,
) -> HttpResponse {
    let BodySize::Sized(bytes) = response.body().size() else {
        return response;
    };
    let worth_it = min_bytes > 0 && bytes >= min_bytes as u64;
    let of_the_bytes = |headers: &HeaderMap| OF_THE_BYTES.iter().any(|h| headers.contains_key(h));
    if !worth_it || of_the_bytes(response.headers()) {
        return response;
    }
    let (mut response, body) = response.into_parts();
    let body = match body.try_into_bytes() {
        Ok(body) => body,
        Err(body) => return response.set_body(body),
    };
    if !is_compressible(response.headers(), &body) {
        return response.set_body(BoxBody::new(body));
    }
    vary_by_coding(response.headers_mut());
    let Some(coding) = accepted(request.headers()) else {
        return response.set_body(BoxBody::new(body));
    };
    let encoded = if body.len() <= COMPRESSED_IN_PLACE {
        coding.encoded(&body).ok()
    } else {
        let whole = body.clone();
        let encoded = web::block(move || coding.encoded(&whole)).await;
        encoded.ok().and_then(Result::ok)
    };
    match encoded {
        Some(encoded) if encoded.len() < body.len() => {
            let name = HeaderValue::from_static(coding.name());
            response.headers_mut().insert(CONTENT_ENCODING, name);
            response.set_body(BoxBody::new(Bytes::from(encoded)))
        }
        _ => response.set_body(BoxBody::new(body)),
    }
}

/// Caches keep the compressed and the plain form apart.
fn vary_by_coding(headers: &mut HeaderMap) {
    let name = ACCEPT_ENCODING.as_str();
    let value = match headers.get(VARY).map(HeaderValue::to_str) {
        None => name.to_owned(),
        Some(Ok(named)) => {
            let mut names = named.split(',').map(str::trim);
            if names.any(|other| other == "*" || other.eq_ignore_ascii_case(name)) {
                return;
            }
            format!("{named}, {name}")
        }
        Some(Err(_)) => return,
    };
    if let Ok(value) = HeaderValue::from_str(&value) {
        headers.insert(VARY, value);
    }
}

/// The coding that the client likes best, if it likes any better than none.
fn accepted(headers: &HeaderMap) -> Option<Coding> {
    let mut weights: Vec<(String, f32)> = Vec::new();
    for value in headers.get_all(ACCEPT_ENCODING) {
        for item in value.to_str().ok()?.split(',') {
            let (name, weight) = weighted(item);
            weights.push((name.to_ascii_lowercase(), weight));
        }
    }
    let weight = |name: &str| {
        let named = weights.iter().find(|(other, _)| other == name);
        named.map(|(_, weight)| *weight)
    };
    let any = weight("*");
    let plain = weight("identity").unwrap_or(0.0);
    let mut best = None;
    for coding in Coding::ALL {
        let weight = weight(coding.name()).or(any).unwrap_or(0.0);
        let least = best.map_or(0.0, |(_, weight)| weight);
        if weight > least && weight >= plain {
            best = Some((coding, weight));
        }
    }
    best.map(|(coding, _)| coding)
}

/// An item of a list with weights: `name;q=0.5`.
pub(crate) fn weighted(item: &str) -> (&str, f32) {
    let mut parts = item.split(';').map(str::trim);
    let name = parts.next().unwrap_or_default();
    let weight = parts.find_map(|part| {
        let (key, value) = part.split_once('=')?;
        let key = key.trim();
        key.eq_ignore_ascii_case("q")
            .then(|| value.trim().parse().unwrap_or(0.0))
    });
    (name, weight.unwrap_or(1.0))
}

/// Whether a body is likely to become smaller: text, by its type, or by its looks where it has
/// none, as most answers of handlers do not.
fn is_compressible(headers: &HeaderMap, body: &[u8]) -> bool {
    const LOOKED_AT: usize = 512;
    let Some(value) = headers.get(CONTENT_TYPE) else {
        let start = &body[..body.len().min(LOOKED_AT)];
        let is_text = |text: &str| !text.chars().any(|c| c.is_control() && !c.is_whitespace());
        return match std::str::from_utf8(start) {
            Ok(text) => is_text(text),
            // Cut in the midst of a character.
            Err(error) => {
                error.error_len().is_none()
                    && std::str::from_utf8(&start[..error.valid_up_to()]).is_ok_and(is_text)
            }
        };
    };
    let value = String::from_utf8_lossy(value.as_bytes());
    let essence = value.split(';').next().unwrap_or_default().trim();
    let essence = essence.to_ascii_lowercase();
    essence.starts_with("text/") && essence != "text/event-stream"
        || essence.ends_with("+json")
        || essence.ends_with("+xml")
        || matches!(
            essence.as_str(),
            "application/json"
                | "application/javascript"
                | "application/x-ndjson"
                | "application/xml"
                | "application/yaml"
        )
}

#[cfg(test)]
mod tests;
