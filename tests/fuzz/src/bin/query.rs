//! Query strings, as registrations and scalings read them.

#![no_main]

use form_urlencoded::Serializer;
use libfuzzer_sys::fuzz_target;
use ts_server::fuzzing;

fuzz_target!(|text: &str| {
    let (pairs, uses) = fuzzing::query(text);
    let again = Serializer::new(String::new()).extend_pairs(&pairs).finish();
    assert_eq!(fuzzing::query(&again), (pairs, uses));
});
