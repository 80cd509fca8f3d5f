//! What lets pages of other origins use the API: headers on every response, errors too. TorchServe
//! sends them as they are configured; of several origins the one that asks is answered.

use actix_web::http::header::{
    ACCESS_CONTROL_ALLOW_ORIGIN, HeaderMap, HeaderName, HeaderValue, ORIGIN, VARY,
};

/// The headers.
#[derive(Debug, Default)]
pub(crate) struct Cors {
    /// The same for everybody.
    fixed: Vec<(HeaderName, HeaderValue)>,
    /// The origins that are allowed, where they are several.
    origins: Vec<HeaderValue>,
}

impl Cors {
    /// Of names and values that the settings have checked.
    pub(crate) fn new(configured: &[(&'static str, String)]) -> Self {
        let mut cors = Self::default();
        for (name, value) in configured {
            let name = HeaderName::from_static(name);
            let header = |text: &str| HeaderValue::from_str(text).ok();
            if name == ACCESS_CONTROL_ALLOW_ORIGIN && value.contains(',') {
                let all = value.split(',').map(str::trim);
                cors.origins = all
                    .filter(|one| !one.is_empty())
                    .filter_map(header)
                    .collect();
            } else if let Some(value) = header(value) {
                cors.fixed.push((name, value));
            }
        }
        cors
    }

    /// Adds them, but for what a handler has set itself.
    pub(crate) fn add(&self, request: &HeaderMap, response: &mut HeaderMap) {
        for (name, value) in &self.fixed {
            if !response.contains_key(name) {
                response.insert(name.clone(), value.clone());
            }
        }
        if self.origins.is_empty() {
            return;
        }
        // Caches keep the answers to different origins apart, refused ones too.
        response.append(VARY, HeaderValue::from_name(ORIGIN));
        let asking = request.get(ORIGIN);
        if let Some(asking) = asking.filter(|asking| self.origins.contains(asking))
            && !response.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN)
        {
            response.insert(ACCESS_CONTROL_ALLOW_ORIGIN, asking.clone());
        }
    }
}
