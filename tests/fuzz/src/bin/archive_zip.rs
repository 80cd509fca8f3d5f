//! Zip archives.

#![no_main]

use std::cell::LazyCell;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

thread_local! {
    static SCRATCH: LazyCell<TempDir> = LazyCell::new(ts_fuzz::scratch);
}

fuzz_target!(|data: &[u8]| {
    SCRATCH.with(|scratch| {
        ts_fuzz::check_archive(scratch.path(), "m.mar", data);
    });
});
