//! What is logged, and changing that while the server runs.

use std::sync::Arc;

use parking_lot::Mutex;
use tracing::Level;
use tracing_subscriber::{EnvFilter, Registry, reload};

use super::Sinks;

/// What the HTTP library says of itself: a client's malformed request is no error of ours. The
/// operator's filter comes after it and may ask for more.
const LIBRARIES: &str = "actix_http=warn,actix_http::h1::dispatcher=off,actix_server=warn";

/// Bytes of a filter at most.
const MAX_BYTES: usize = 4 << 10;

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Checks a filter and returns it.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn checked(text: &str) -> Result<String, String> {
    let shown = || {
        let short: String = text
            .chars()
            .take(200)
            .flat_map(char::escape_debug)
            .collect();
        format!("`{short}`")
    };
    if text.len() > MAX_BYTES {
        return Err(format!("{} is longer than {MAX_BYTES} bytes", shown()));
    }
    // To the library a lone word is a target of which everything is logged, and nothing of all
    // others: a level with a slip in it would switch the log off.
    let lone = text.split(',').map(str::trim).find(|part| {
        let is_word = !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_');
        is_word && !LEVELS.contains(&part.to_ascii_lowercase().as_str())
    });
    if let Some(word) = lone {
        return Err(format!(
            "{}: `{word}` is none of the levels `{}`. A level of a target is written `{word}=info`",
            shown(),
            LEVELS.join("`, `")
        ));
    }
    match read(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(format!("{}: {error}", shown())),
    }
}

/// The filter with that of libraries below it.
pub(super) fn read(text: &str) -> Result<EnvFilter, tracing_subscriber::filter::ParseError> {
    EnvFilter::try_new(format!("{LIBRARIES},{text}"))
}

/// The filter in force.
#[derive(Clone)]
pub(crate) struct LogFilter {
    text: Arc<Mutex<String>>,
    handle: reload::Handle<EnvFilter, Registry>,
    sinks: Arc<Sinks>,
}

impl LogFilter {
    pub(super) fn new(
        text: &str,
        handle: reload::Handle<EnvFilter, Registry>,
        sinks: Arc<Sinks>,
    ) -> Self {
        Self {
            text: Arc::new(Mutex::new(text.to_owned())),
            handle,
            sinks,
        }
    }

    /// As it was written.
    pub(crate) fn text(&self) -> String {
        self.text.lock().clone()
    }

    /// Puts another one in force, and tells the log whatever that filter lets through. `who` asked
    /// for it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn change(&self, text: &str, who: &str) -> Result<(), String> {
        let text = checked(text)?;
        let filter = read(&text).map_err(|error| error.to_string())?;
        // Held until it is told, so that the last one told is the one in force.
        let mut current = self.text.lock();
        self.handle
            .reload(filter)
            .map_err(|error| error.to_string())?;
        let told = format!("log filter changed from `{current}` to `{text}` by {who}");
        self.sinks.tell(Level::WARN, &told);
        *current = text;
        Ok(())
    }
}
