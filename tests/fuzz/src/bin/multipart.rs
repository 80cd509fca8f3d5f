//! Multipart bodies.

#![no_main]

use std::cell::LazyCell;

use libfuzzer_sys::fuzz_target;
use tokio::runtime::Runtime;

thread_local! {
    static CLOCK: LazyCell<Runtime> = LazyCell::new(ts_fuzz::clock);
}

fuzz_target!(|data: &[u8]| {
    CLOCK.with(|clock| ts_fuzz::check_body(clock, "multipart/form-data", data));
});
