//! Tar archives. The data is what gzip gives back, since its checksum would refuse nearly every
//! mutation; data that begins like gzip is taken as it is.

#![no_main]

use std::cell::LazyCell;
use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

thread_local! {
    static SCRATCH: LazyCell<TempDir> = LazyCell::new(ts_fuzz::scratch);
}

fuzz_target!(|data: &[u8]| {
    let mut packed = data.to_vec();
    if !data.starts_with(b"\x1f\x8b") {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(data).expect("memory takes bytes");
        packed = encoder.finish().expect("memory takes bytes");
    }
    SCRATCH.with(|scratch| {
        ts_fuzz::check_archive(scratch.path(), "m.tar.gz", &packed);
    });
});
