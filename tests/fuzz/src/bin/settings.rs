//! Whole configuration files, up to the settings that they make.

#![no_main]

use std::cell::LazyCell;

use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;
use ts_server::fuzzing;

thread_local! {
    static SCRATCH: LazyCell<TempDir> = LazyCell::new(ts_fuzz::scratch);
}

fuzz_target!(|data: &[u8]| {
    SCRATCH.with(|scratch| {
        let file = scratch.path().join("config.properties");
        fs_err::write(&file, data).expect("the scratch folder takes files");
        let told = match fuzzing::settings(&file, scratch.path()) {
            Ok(warnings) => warnings,
            Err(faults) => {
                assert!(!faults.is_empty(), "refused without a word");
                faults
            }
        };
        assert!(told.iter().all(|line| !line.is_empty()));
    });
});
