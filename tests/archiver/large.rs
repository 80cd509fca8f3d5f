//! Weights are larger than memory: packing them must not depend on it.

use std::time::{Duration, Instant};

use fs_err as fs;

use crate::sandbox::Sandbox;

/// Peak memory of a process in KiB, while it runs or waits to be reaped.
fn peak_kib(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

#[test]
fn ar_10_packing_a_large_file_takes_little_memory() {
    // Eight times the bound on memory; more would only test the disk.
    const BYTES: u64 = 512 << 20;
    let sandbox = Sandbox::new();
    fs::File::create(sandbox.path("big.bin"))
        .unwrap()
        .file()
        .set_len(BYTES)
        .unwrap();
    let mut child = sandbox
        .command()
        .args([
            "--model-name",
            "m",
            "-v",
            "1",
            "--handler",
            "h.py",
            "--serialized-file",
            "big.bin",
        ])
        .args(["--archive-format", "zip-store"])
        .spawn()
        .unwrap();
    let begun = Instant::now();
    let mut peak = 0;
    let status = loop {
        peak = peak.max(peak_kib(child.id()).unwrap_or(0));
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(120),
            "packing does not end"
        );
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.success());
    assert!(fs::metadata(sandbox.path("m.mar")).unwrap().len() > BYTES);
    assert!(peak > 0 && peak < 64 << 10, "peak memory was {peak} KiB");
}
