//! JSON bodies of registrations: they say what a query string with the same names says.

#![no_main]

use form_urlencoded::Serializer;
use libfuzzer_sys::fuzz_target;
use ts_server::fuzzing;

fuzz_target!(|data: &[u8]| {
    if let Ok((pairs, uses)) = fuzzing::json(data) {
        let query = Serializer::new(String::new()).extend_pairs(&pairs).finish();
        assert_eq!(fuzzing::query(&query), (pairs, uses));
    }
});
