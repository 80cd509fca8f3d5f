//! The `models` property and the list of models to load at start.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_server::fuzzing;

fuzz_target!(|text: &str| {
    if let Err(fault) = fuzzing::models(text) {
        assert!(!fault.is_empty());
    }
    for (_, url) in fuzzing::startup_models(text).into_iter().flatten() {
        assert!(!url.contains(','), "`{url}` is several");
    }
});
