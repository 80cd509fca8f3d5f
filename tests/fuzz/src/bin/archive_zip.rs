//! See [`ts_fuzz::archives::zip`].

#![no_main]
#![expect(
    clippy::disallowed_methods,
    reason = "the macro has a file of its own to write"
)]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ts_fuzz::archives::zip(data));
