//! Addresses of listeners: one that is understood is written in a form that is understood as well.

#![no_main]

use libfuzzer_sys::fuzz_target;
use ts_server::fuzzing;

fuzz_target!(|text: &str| {
    match fuzzing::address(text, 8080) {
        Ok(address) => assert_eq!(fuzzing::address(&address, 1), Ok(address)),
        Err(fault) => assert!(fault.contains(text), "{fault}"),
    }
});
