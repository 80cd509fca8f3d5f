//! What an archive says of its model.

use std::path::{Component, Path};

use ts_archive::{Manifest, ModelConfig};

/// `MAR-INF/MANIFEST.json` survives being written, and the files that it names are in the archive.
pub fn manifest(data: &[u8]) {
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
}

/// What is kept of `model-config.yaml` is within its bounds.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let Ok(config) = ModelConfig::parse(text, Path::new("model-config.yaml")) else {
        return;
    };
    let at_least_one = [
        config.batch_size,
        config.response_timeout,
        config.startup_timeout,
        config.max_num_sequence,
        config.max_sequence_job_queue_size,
        config.scale_down_idle_seconds,
        config.quarantine_after,
        config.memory_limit_mb,
    ];
    assert!(at_least_one.iter().all(|value| *value != Some(0)));
    assert!(config.min_workers != Some(0) || config.autoscale == Some(true));
    assert!(config.cpu_limit.is_none_or(|cores| cores > 0.0));
}
