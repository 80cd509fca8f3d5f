//! A small HTTP client: every status is an answer, not an error.

use std::io::{BufReader, Read};
use std::sync::Arc;
use std::time::Duration;

use rustls::crypto::ring;
use serde_json::Value;
use ureq::Agent;
use ureq::http::Method;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use crate::Page;

/// What the server answered.
#[derive(Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Headers in order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// Body.
    pub body: Vec<u8>,
}

impl Answer {
    /// The first header of this name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("not JSON ({error}): {}", self.text()))
    }

    /// The body as a page of metrics; fails unless that is well-formed.
    pub fn page(&self) -> Page {
        let text = self.text();
        Page::parse(&text).unwrap_or_else(|reason| panic!("{reason}\n{text}"))
    }

    /// Fails unless the status is this one; returns itself.
    #[track_caller]
    pub fn expect(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{}", self.text());
        self
    }
}

/// An answer whose body is still to be read.
pub struct Opened {
    /// HTTP status.
    pub status: u16,
    /// Headers in order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// The rest; an error where the server broke it off.
    pub body: BufReader<Box<dyn Read + Send>>,
}

/// A request being put together.
pub struct Request {
    method: &'static str,
    url: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    limit: Duration,
    trusted: Option<Arc<[u8]>>,
}

impl Request {
    /// To any URL.
    pub fn new(method: &'static str, url: String) -> Self {
        Self {
            method,
            url,
            headers: Vec::new(),
            body: Vec::new(),
            limit: Duration::from_secs(60),
            trusted: None,
        }
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Sets the body.
    #[must_use]
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// Believes servers that this authority, a certificate in DER, vouches for, and no others.
    #[must_use]
    pub fn trusting(mut self, authority: Option<Arc<[u8]>>) -> Self {
        self.trusted = authority;
        self
    }

    /// Gives up after this long.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sends it.
    #[track_caller]
    pub fn send(self) -> Answer {
        let shown = format!("{} {}", self.method, self.url);
        self.try_send()
            .unwrap_or_else(|error| panic!("{shown}: {error}"))
    }

    /// Sends it; a connection that breaks is the test's to judge.
    ///
    /// # Errors
    /// No answer, or half of one.
    pub fn try_send(self) -> Result<Answer, ureq::Error> {
        let mut opened = self.open()?;
        let mut body = Vec::new();
        opened.body.read_to_end(&mut body)?;
        let answer = Answer {
            status: opened.status,
            headers: opened.headers,
            body,
        };
        // Whichever test asks for it, a page of metrics is well-formed.
        let kind = answer.header("content-type");
        if kind.is_some_and(|kind| kind.starts_with("text/plain; version=0.0.4")) {
            answer.page();
        }
        Ok(answer)
    }

    /// Sends it and returns with the head of the answer; the body is the test's to read, and
    /// dropping it closes the connection.
    ///
    /// # Errors
    /// No answer.
    pub fn open(self) -> Result<Opened, ureq::Error> {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(self.limit))
            .allow_non_standard_methods(true);
        if let Some(authority) = &self.trusted {
            let authority = Certificate::from_der(authority).to_owned();
            let tls = TlsConfig::builder()
                .root_certs(RootCerts::new_with_certs(&[authority]))
                .unversioned_rustls_crypto_provider(Arc::new(ring::default_provider()));
            config = config.tls_config(tls.build());
        }
        let agent: Agent = config.build().into();
        let method = Method::from_bytes(self.method.as_bytes()).expect("a method");
        let mut request = ureq::http::Request::builder().method(method).uri(&self.url);
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request.body(self.body).expect("a valid request");
        let response = agent.run(request)?;
        let headers = response.headers().iter().map(|(name, value)| {
            (
                name.to_string(),
                String::from_utf8_lossy(value.as_bytes()).into_owned(),
            )
        });
        let headers = headers.collect();
        let status = response.status().as_u16();
        let body = response.into_body().into_with_config().limit(1 << 30);
        Ok(Opened {
            status,
            headers,
            body: BufReader::new(Box::new(body.reader())),
        })
    }
}
