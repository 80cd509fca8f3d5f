use super::*;

fn parse(text: &str) -> ModelConfig {
    ModelConfig::parse(text, Path::new("/models/x/model-config.yaml")).unwrap()
}

fn error(text: &str) -> String {
    ModelConfig::parse(text, Path::new("/models/x/model-config.yaml"))
        .unwrap_err()
        .to_string()
}

#[test]
fn known_keys_are_typed_and_the_rest_is_kept_for_the_handler() {
    let config = parse(
        "minWorkers: 1\nmaxWorkers: 4\nbatchSize: 8\nmaxBatchDelay: 50\nresponseTimeout: 30\n\
         startupTimeout: 60\ndeviceType: gpu\ndeviceIds: [0, 1]\nparallelType: PP\n\
         parallelLevel: 2\nmaxRetryTimeoutInSec: 5\nclientTimeoutInMills: 9\njobQueueSize: 7\n\
         useJobTicket: true\ncontinuousBatching: false\nsequenceBatching: true\n\
         sequenceMaxIdleMSec: 3\nsequenceTimeoutMSec: 4\nmaxNumSequence: 5\n\
         maxSequenceJobQueueSize: 6\nasyncCommunication: true\nuseVenv: true\n\
         workerIsolation: thread\nnativeHandlers: true\nautoscale: true\n\
         scaleDownIdleSeconds: 2\nquarantineAfter: 3\nmemoryLimitMb: 512\ncpuLimit: 1.5\n\
         handler:\n  profile: true\npt2: inductor\n",
    );
    assert_eq!(config.warnings, Vec::<String>::new());
    assert_eq!((config.min_workers, config.max_workers), (Some(1), Some(4)));
    assert_eq!(
        (config.batch_size, config.max_batch_delay),
        (Some(8), Some(50))
    );
    assert_eq!(
        (config.response_timeout, config.startup_timeout),
        (Some(30), Some(60))
    );
    assert_eq!(config.device_type, Some(DeviceType::Gpu));
    assert_eq!(config.device_ids, Some(vec![0, 1]));
    assert_eq!(config.parallel_type, Some(ParallelType::Pipeline));
    assert_eq!(config.parallel_level, Some(2));
    assert_eq!(config.max_retry_timeout_in_sec, Some(5));
    assert_eq!(
        (config.client_timeout_in_mills, config.job_queue_size),
        (Some(9), Some(7))
    );
    assert_eq!(
        (config.use_job_ticket, config.continuous_batching),
        (Some(true), Some(false))
    );
    assert_eq!(config.sequence_batching, Some(true));
    assert_eq!(
        (config.sequence_max_idle_msec, config.sequence_timeout_msec),
        (Some(3), Some(4))
    );
    assert_eq!(
        (config.max_num_sequence, config.max_sequence_job_queue_size),
        (Some(5), Some(6))
    );
    assert_eq!(
        (config.async_communication, config.use_venv),
        (Some(true), Some(true))
    );
    assert_eq!(config.worker_isolation, Some(Isolation::Thread));
    assert_eq!(config.native_handlers, Some(true));
    assert_eq!(
        (
            config.autoscale,
            config.scale_down_idle_seconds,
            config.quarantine_after
        ),
        (Some(true), Some(2), Some(3))
    );
    assert_eq!(
        (config.memory_limit_mb, config.cpu_limit),
        (Some(512), Some(1.5))
    );
    assert_eq!(config.other["handler"]["profile"], Value::Bool(true));
    assert_eq!(config.other["pt2"], "inductor");
}

#[test]
fn a_wrong_type_costs_the_key_and_a_warning() {
    let config = parse(
        "batchSize: \"4\"\nmaxBatchDelay: 1.5\ndeviceIds: [0, x]\nuseVenv: 1\ndeviceType: neuron\n\
         torchrun: 3\nresponseTimeout: 0\njobQueueSize: -1\nclientTimeoutInMills: 99999999999\n\
         parallelType: ring\nworkerIsolation: fiber\nmemoryLimitMb: 0\ncpuLimit: -2\n",
    );
    let empty = ModelConfig {
        warnings: config.warnings.clone(),
        ..ModelConfig::default()
    };
    assert_eq!(config, empty);
    assert_eq!(config.warnings.len(), 13, "{:#?}", config.warnings);
    assert_eq!(
        config.warnings[0],
        "`batchSize` must be an integer, not a text; it is ignored"
    );
    assert!(
        config.warnings[2].contains("whole list is ignored"),
        "{}",
        config.warnings[2]
    );
}

#[test]
fn numbers_below_one_are_moved_up_with_a_warning() {
    let config = parse("minWorkers: 0\nbatchSize: -3\nmaxNumSequence: 0\n");
    assert_eq!(config.min_workers, Some(1));
    assert_eq!(config.batch_size, Some(1));
    assert_eq!(config.max_num_sequence, Some(1));
    assert_eq!(config.warnings.len(), 3);
    for warning in [
        "`batchSize` is -3; 1 is used, the least it can be",
        "`minWorkers` is 0; 1 is used, the least it can be without `autoscale`",
    ] {
        assert!(config.warnings.iter().any(|told| told == warning));
    }
    let config = parse("minWorkers: 0\nautoscale: true\n");
    assert_eq!((config.min_workers, config.warnings.len()), (Some(0), 0));
    let config = parse("minWorkers: -1\nautoscale: true\n");
    assert_eq!((config.min_workers, config.warnings.len()), (Some(1), 1));
}

#[test]
fn of_torchrun_and_parallel_level_the_later_wins() {
    let both = "parallelType: tp\ntorchrun:\n  nproc-per-node: 4\n  colour: red\n";
    let config = parse(both);
    assert_eq!(config.parallel_level, Some(4));
    assert_eq!(
        config.warnings,
        ["`torchrun.colour` is not known and is ignored"]
    );
    assert_eq!(
        parse(&format!("{both}parallelLevel: 2\n")).parallel_level,
        Some(2)
    );
    assert_eq!(
        parse(&format!("parallelLevel: 2\n{both}")).parallel_level,
        Some(4)
    );
    let alone = parse("parallelLevel: 2\n");
    assert_eq!(alone.parallel_level, Some(0));
    assert_eq!(alone.warnings.len(), 1);
}

#[test]
fn an_empty_file_says_nothing() {
    for text in ["", "\n", "# only a comment\n", "---\n", "~\n"] {
        assert_eq!(parse(text), ModelConfig::default(), "{text:?}");
    }
}

#[test]
fn plain_anchors_and_merge_keys_work() {
    let config = parse("defaults: &d\n  a: 1\nhandler:\n  <<: *d\n  b: 2\n");
    assert_eq!(config.other["handler"]["a"], 1);
}

#[test]
fn hostile_files_are_refused_with_file_and_line() {
    for (text, line) in [
        (
            "a: 1\nb: !!python/object/apply:os.system ['id']\n",
            "line 2",
        ),
        ("a: !mine 1\n", "line 1"),
        ("batchSize: 1\na: 2\nbatchSize: 3\n", "line 3"),
        ("a: [1\nb: }\n", "line 2"),
        ("- 1\n", "line 1"),
    ] {
        let error = error(text);
        assert!(
            error.starts_with("model configuration `model-config.yaml`"),
            "{error}"
        );
        assert!(error.contains(line), "{error}");
    }
}

#[test]
fn anchors_that_expand_without_end_are_refused_early() {
    let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..10 {
        let items = vec![format!("*a{}", level - 1); 10].join(", ");
        text.push_str(&format!("a{level}: &a{level} [{items}]\n"));
    }
    // The tenth line would hold 10^10 items; the fifth is the last that is looked at.
    let error = error(&text);
    assert!(
        error.contains("line 5") && error.contains("limit"),
        "{error}"
    );
}

#[test]
fn a_file_over_the_limit_is_refused_before_it_is_parsed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model-config.yaml");
    fs::write(&path, format!("a: {}", "x".repeat(1 << 20))).unwrap();
    let error = ModelConfig::read(&path).unwrap_err().to_string();
    assert!(error.contains("larger than 1 MiB"), "{error}");
}
