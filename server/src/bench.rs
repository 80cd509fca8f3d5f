//! What every request pays for being counted and named, for `benches/telemetry.rs`: the calls that
//! the server makes, without the request around them.

use std::hint::black_box;
use std::time::{Duration, Instant};

use actix_web::http::StatusCode;
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use actix_web::test::TestRequest;
use ts_serving::bench::{Counted, Named};
use ts_types::ModelName;

use crate::rest::trace::request_id;
use crate::telemetry::{Exporter, RequestContext, ResponseCounts};

/// Time of so many requests.
#[derive(Debug, Clone, Copy)]
pub struct Spent {
    /// Making ids, passing them on, and telling them in a header.
    pub ids: Duration,
    /// Counting requests, responses and times.
    pub metrics: Duration,
}

/// Tells of requests.
pub struct Telling {
    counts: ResponseCounts,
    counted: Counted,
    named: Named,
    exporter: Exporter,
}

impl Telling {
    /// Installs the recorder that the server has.
    ///
    /// # Errors
    /// There is one already.
    pub fn start(model: &ModelName) -> anyhow::Result<Self> {
        let exporter = Exporter::install()?;
        Ok(Self {
            counts: ResponseCounts::new(),
            counted: Counted::new(model)?,
            named: Named::default(),
            exporter,
        })
    }

    /// Does for some requests what the server does for each.
    pub fn requests(&self, count: u32) -> Spent {
        let request = TestRequest::default().to_http_request();
        let began = Instant::now();
        for _ in 0..count {
            let id = request_id(&request);
            let context = RequestContext { id: id.clone() };
            let (id, claim) = self.named.claim(&id);
            let mut headers = HeaderMap::new();
            if let Ok(value) = HeaderValue::from_str(context.id.as_str()) {
                headers.insert(HeaderName::from_static("x-request-id"), value);
            }
            black_box((id, claim, headers));
        }
        let ids = began.elapsed();
        let began = Instant::now();
        for _ in 0..count {
            self.counted.request(black_box(began));
            self.counts.count(black_box(StatusCode::OK));
        }
        let metrics = began.elapsed();
        self.exporter.upkeep();
        Spent { ids, metrics }
    }
}
