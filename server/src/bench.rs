//! What every request pays for being counted and named, for `benches/telemetry.rs`: the calls that
//! the server makes, without the request around them.

use std::hint::black_box;
use std::time::{Duration, Instant};

use actix_web::http::StatusCode;
use actix_web::http::header::{HeaderMap, HeaderName, HeaderValue};
use actix_web::test::TestRequest;
use ts_metrics::{Metrics, Mode};
use ts_serving::bench::{Counted, Named};
use ts_types::{ModelName, Version};

use crate::rest::trace::request_id;
use crate::telemetry::ResponseCounts;

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
    responses: ResponseCounts,
    counted: Counted,
    named: Named,
}

impl Telling {
    /// Of requests to a version of a model.
    pub fn new(model: &ModelName, version: &Version) -> Self {
        let metrics = Metrics::new(Mode::Log, None, false);
        Self {
            responses: ResponseCounts::new(&metrics),
            counted: Counted::new(&metrics, model, version),
            named: Named::default(),
        }
    }

    /// Does for some requests what the server does for each.
    pub fn requests(&self, count: u32) -> Spent {
        let request = TestRequest::default().to_http_request();
        let began = Instant::now();
        for _ in 0..count {
            let id = request_id(&request);
            let (id, claim) = self.named.claim(&id);
            let mut headers = HeaderMap::new();
            if let Ok(value) = HeaderValue::from_str(id.as_str()) {
                headers.insert(HeaderName::from_static("x-request-id"), value);
            }
            black_box((id, claim, headers));
        }
        let ids = began.elapsed();
        let began = Instant::now();
        for _ in 0..count {
            self.counted.request(black_box(began));
            self.responses.count(black_box(StatusCode::OK));
        }
        Spent {
            ids,
            metrics: began.elapsed(),
        }
    }
}
