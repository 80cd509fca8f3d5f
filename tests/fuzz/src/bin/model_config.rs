//! `model-config.yaml`: what is kept is within its bounds.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use ts_archive::ModelConfig;

fuzz_target!(|text: &str| {
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
});
