//! Archives over HTTP.

use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use regex::RegexSet;
use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, DATE, ETAG, HeaderMap, HeaderName, IF_RANGE,
    LAST_MODIFIED, RANGE,
};
use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, Response, StatusCode, Url};
use ts_types::with_causes;

use super::addresses::{GuardedNames, may_fetch};
use super::download::{CONNECT_LIMIT, Failure, Opened, Remote, Resume};

const MAX_REDIRECTS: usize = 5;

/// How much older than an answer a file has to be for its date to tell it from any later one:
/// dates count seconds, and clocks differ.
const SETTLED: Duration = Duration::from_secs(60);

/// A file of an HTTP server.
pub(super) struct Http {
    client: Client,
    url: Url,
}

impl Http {
    /// To be checked against the list before.
    ///
    /// # Errors
    /// No client can be made.
    pub(super) fn new(allowed: &RegexSet, url: &Url) -> Result<Self, Failure> {
        let listed = allowed.clone();
        // The operator's list holds for every address on the way, not only for the first.
        let redirects = Policy::custom(move |attempt| {
            if attempt.previous().len() > MAX_REDIRECTS {
                return attempt.error(format!("over the limit of {MAX_REDIRECTS} redirects"));
            }
            if !may_fetch(&listed, attempt.url()) {
                return attempt.error("redirected to a URL that does not match any allowed URL");
            }
            attempt.follow()
        });
        let client = guarded(allowed).redirect(redirects).build();
        Ok(Self {
            client: client.map_err(|error| failure(error, false))?,
            url: url.clone(),
        })
    }

    async fn ask(&self, resume: Option<&Resume>) -> Result<Response, Failure> {
        // A length that is not that of the file would be of no use here.
        let mut request = self
            .client
            .get(self.url.clone())
            .header(ACCEPT_ENCODING, "identity");
        if let Some(resume) = resume {
            request = request
                .header(RANGE, format!("bytes={}-", resume.from))
                .header(IF_RANGE, &resume.version);
        }
        request.send().await.map_err(|error| {
            let passing = !error.is_redirect() && !error.is_builder();
            failure(error, passing)
        })
    }
}

impl Remote for Http {
    async fn open(&self, resume: Option<&Resume>) -> Result<Opened, Failure> {
        let mut response = self.ask(resume).await?;
        if resume.is_some() && response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
            response = self.ask(None).await?;
        }
        let (status, headers) = (response.status(), response.headers());
        let (start, total) = if status == StatusCode::OK {
            (0, number(headers, &CONTENT_LENGTH))
        } else if status == StatusCode::PARTIAL_CONTENT && resume.is_some() {
            let range = text(headers, &CONTENT_RANGE).and_then(content_range);
            range
                .ok_or_else(|| Failure::lasting("the server answered 206 without a valid range"))?
        } else {
            return Err(Failure {
                reason: format!("the server answered {status}"),
                // Those of a server that may have time later.
                passing: status.is_server_error() || matches!(status.as_u16(), 408 | 429),
            });
        };
        Ok(Opened {
            start,
            total,
            version: version(headers),
            body: response.bytes_stream().map_err(told).boxed(),
        })
    }
}

/// A client that looks names up without the guarded addresses and trusts no proxy.
pub(super) fn guarded(allowed: &RegexSet) -> ClientBuilder {
    prepare_tls();
    Client::builder()
        .connect_timeout(CONNECT_LIMIT)
        .dns_resolver(Arc::new(GuardedNames {
            allowed: allowed.clone(),
        }))
        // A proxy would look names up, and fetch, where nobody checks.
        .no_proxy()
}

/// Settles which cryptography TLS uses.
pub(super) fn prepare_tls() {
    // Fails where it was settled before, which is as good.
    let _settled = rustls::crypto::ring::default_provider().install_default();
}

/// The error without the URL, which may hold a signature.
fn told(error: reqwest::Error) -> String {
    with_causes(&error.without_url())
}

fn failure(error: reqwest::Error, passing: bool) -> Failure {
    Failure {
        reason: told(error),
        passing,
    }
}

fn text<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn number(headers: &HeaderMap, name: &HeaderName) -> Option<u64> {
    text(headers, name).and_then(|text| text.trim().parse().ok())
}

/// Start and total of `bytes 5-9/10`; the end is that of the total, as was asked for.
fn content_range(text: &str) -> Option<(u64, Option<u64>)> {
    let (range, total) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (start, end) = range.split_once('-')?;
    let (start, end): (u64, u64) = (start.trim().parse().ok()?, end.trim().parse().ok()?);
    let total: u64 = total.trim().parse().ok()?;
    (start <= end && end.checked_add(1)? == total).then_some((start, Some(total)))
}

/// What may stand in `If-Range`: a strong tag, or a date that no later change can share.
fn version(headers: &HeaderMap) -> Option<String> {
    if let Some(tag) = text(headers, &ETAG) {
        return (tag.starts_with('"')).then(|| tag.to_owned());
    }
    let modified = text(headers, &LAST_MODIFIED)?;
    let instant = |text| httpdate::parse_http_date(text).ok();
    let age = instant(text(headers, &DATE)?)?.duration_since(instant(modified)?);
    age.is_ok_and(|age| age >= SETTLED)
        .then(|| modified.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        let pairs = pairs
            .iter()
            .map(|(name, value)| (name.clone(), value.parse().unwrap()));
        pairs.collect()
    }

    #[test]
    fn ranges_that_do_not_reach_the_end_are_none() {
        assert_eq!(content_range("bytes 5-9/10"), Some((5, Some(10))));
        for bad in [
            "bytes 5-8/10",
            "bytes 5-9/*",
            "bytes 9-5/10",
            "bytes */10",
            "5-9/10",
            "",
        ] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
        assert_eq!(
            content_range(&format!("bytes 0-{}/{}", u64::MAX, u64::MAX)),
            None
        );
    }

    #[test]
    fn a_version_is_what_changes_with_every_byte() {
        let late = (DATE, "Mon, 30 Nov 2026 18:00:00 GMT");
        let settled = (LAST_MODIFIED, "Mon, 30 Nov 2026 17:59:00 GMT");
        let fresh = (LAST_MODIFIED, "Mon, 30 Nov 2026 17:59:01 GMT");
        let version = |pairs: &[_]| version(&headers(pairs));
        assert_eq!(version(&[(ETAG, "\"a\"")]), Some("\"a\"".to_owned()));
        assert_eq!(
            version(&[late.clone(), settled.clone()]),
            Some(settled.1.to_owned())
        );
        assert_eq!(
            version(&[(ETAG, "W/\"a\""), late.clone(), settled.clone()]),
            None
        );
        assert_eq!(version(&[late, fresh]), None);
        assert_eq!(version(&[settled]), None);
        assert_eq!(version(&[]), None);
    }
}
