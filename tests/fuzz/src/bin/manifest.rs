//! `MAR-INF/MANIFEST.json`: it survives being written, and its files stay in the archive.

#![no_main]

use std::path::{Component, Path};

use libfuzzer_sys::fuzz_target;
use ts_archive::Manifest;

fuzz_target!(|data: &[u8]| {
    let archive = Path::new("m.mar");
    let Ok(manifest) = Manifest::parse(data, archive) else {
        return;
    };
    let again = Manifest::parse(&manifest.to_json(), archive);
    assert_eq!(again.expect("what was written can be read"), manifest);
    for (field, file) in manifest.model.file_fields() {
        let mut parts = Path::new(file.unwrap_or("x")).components();
        let below = parts.all(|part| matches!(part, Component::Normal(_)));
        assert!(below, "{field}: {file:?}");
    }
});
