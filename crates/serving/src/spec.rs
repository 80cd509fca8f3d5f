//! From an archive, a registration and the configuration to one resolved model. Pure.
//!
//! | setting | order, the first that is given wins |
//! |---|---|
//! | batch size and delay, time-outs | registration, archive, `models` property, default |
//! | isolation | registration, archive, default, kind of model |
//! | workers | archive (if its range is valid), registration, `models` property, default |
//! | autoscale | registration, archive |
//! | devices | archive, `models` property |
//! | queue size | archive, default |
//!
//! For time-outs TorchServe lets any `model-config.yaml` win with 120 s even where it is silent;
//! here a value that nobody gave never beats one that somebody gave.

use std::path::Path;
use std::time::Duration;

use ts_archive::{Artifact, ModelConfig};
use ts_types::{
    DeviceType, Gather, HostLimits, Isolation, LoadPolicy, ModelLimits, ModelName, Runtime,
    Scheduling, Version,
};
use ts_wire::frame::{BackendKind, EchoBehaviour, Exchange, LoadModel};

use crate::config::{ModelOverrides, ServingConfig};
use crate::error::ServingError;
use crate::management::Registration;
use crate::pool::{Parallel, Placement};
use crate::scheduling;
use crate::warmup::WarmUp;

/// The version of an archive that names none.
const DEFAULT_VERSION: &str = "1.0";

const DEFAULT_BATCH_DELAY: Duration = Duration::from_millis(100);
const DEFAULT_RETRY_WINDOW: Duration = Duration::from_secs(300);
const DEFAULT_SCALE_DOWN_IDLE: Duration = Duration::from_secs(60);

/// A registration with every question answered.
pub(crate) struct ResolvedModel {
    pub(crate) name: ModelName,
    pub(crate) version: Version,
    pub(crate) runtime: Runtime,
    pub(crate) isolation: Isolation,
    pub(crate) parallel: Option<Parallel>,
    pub(crate) device_type: Option<DeviceType>,
    pub(crate) device_ids: Option<Vec<u32>>,
    pub(crate) placement: Placement,
    pub(crate) limits: ModelLimits,
    pub(crate) scheduling: Scheduling,
    pub(crate) load: LoadModel,
    pub(crate) warm_up: WarmUp,
    pub(crate) isolate_bad_requests: Option<bool>,
}

/// Resolves a registration.
///
/// # Errors
/// A name, version or handler that is missing or unusable, a runtime that this server lacks.
pub(crate) fn resolve(
    config: &ServingConfig,
    registration: &Registration,
    artifact: &Artifact,
) -> Result<ResolvedModel, ServingError> {
    let archive = Path::new(&registration.url);
    let manifest = &artifact.manifest;
    let name = match &registration.model_name {
        Some(name) => name.clone(),
        None if registration.at_startup && manifest.model.model_name.is_none() => {
            name_from_file(&registration.url)
        }
        None => manifest.model_name(archive)?.to_owned(),
    };
    let name = ModelName::new(&name)?;
    let version = Version::new(
        manifest
            .model
            .model_version
            .as_deref()
            .unwrap_or(DEFAULT_VERSION),
    )?;
    let runtime = registration.runtime.unwrap_or(manifest.runtime);
    let backend = match runtime {
        Runtime::Python | Runtime::Python3 => BackendKind::Python,
        Runtime::Echo => BackendKind::Echo,
        Runtime::Lsp => {
            return Err(ServingError::Runtime(format!(
                "model `{name}` wants runtime `LSP`, TorchServe's C++ worker, which this server \
                 does not have. Register it with `runtime=python`"
            )));
        }
    };
    let handler = registration
        .handler
        .as_ref()
        .or(manifest.model.handler.as_ref())
        .or(config.defaults.handler.as_ref());
    let handler = match (handler, backend) {
        (Some(handler), _) => handler.clone(),
        (None, BackendKind::Echo) => "echo".to_owned(),
        (None, BackendKind::Python) => {
            return Err(ServingError::BadRegistration(format!(
                "the archive of model `{name}` names no handler. Give `handler=` at registration, \
                 or set `default_service_handler`"
            )));
        }
    };
    let none = ModelConfig::default();
    let yaml = artifact.config.as_ref().unwrap_or(&none);
    let of_model = config.per_model.get(&name);
    let property = of_model
        .and_then(|versions| versions.get(&version))
        .cloned()
        .unwrap_or_default();
    let device_type = yaml.device_type.or(property.device_type);
    let device_ids = yaml.device_ids.clone().or(property.device_ids.clone());
    let placement = place(config, &name, device_type, device_ids.as_deref())?;
    let parallel = Parallel::read(yaml)?;
    let automatic = automatic_workers(config, &placement, parallel);
    let mut limits = limits(config, registration, yaml, &property, automatic);
    if let Some((saved_version, saved)) = &registration.restored {
        if *saved_version != version {
            return Err(ServingError::BadRegistration(format!(
                "the archive `{}` has version `{version}` now, and version `{saved_version}` was \
                 saved. Register the model again",
                saved.mar_name
            )));
        }
        limits.min_workers = saved.min_workers;
        limits.max_workers = saved.max_workers.max(saved.min_workers);
        limits.job_queue_size = saved.job_queue_size.unwrap_or(limits.job_queue_size);
    }
    if let Some((parallel, devices)) = parallel.zip(placement.devices(&config.hosts.devices)) {
        fit_into_devices(&mut limits, parallel, devices)?;
    }
    let exchange = exchange(yaml)?;
    if exchange == Exchange::Asynchronous {
        // Each request is on its own, and none waits for company.
        limits.batch_size = 1;
    }
    let (scheduling, delay) = scheduling::read(yaml, limits.batch_size, config.defaults.gather)?;
    if let (None, Some(delay)) = (registration.max_batch_delay, delay) {
        limits.max_batch_delay = delay;
    }
    if scheduling.job_ticket && limits.autoscale && limits.min_workers == 0 {
        return Err(ServingError::BadRegistration(
            "`useJobTicket` takes a request only while a worker is idle, so a model without workers \
             would never be loaded by its requests. Set `minWorkers` to 1, or leave one of \
             `useJobTicket` and `autoscale` out"
                .to_owned(),
        ));
    }
    check_delay(&limits, &scheduling)?;
    let isolation = isolation(config, registration, yaml, backend, parallel)?;
    let load = LoadModel {
        model_name: name.to_string(),
        model_version: version.to_string(),
        model_dir: artifact.dir.path().to_owned(),
        handler,
        backend,
        // For each worker its own.
        gpu_id: None,
        batch_size: u32::try_from(limits.batch_size).unwrap_or(u32::MAX),
        exchange,
        service_envelope: config.hosts.service_envelope.clone(),
        limit_max_image_pixels: config.hosts.limit_max_image_pixels,
        decode_input_request: config.hosts.decode_input_request,
        load_policy: load_policy(config, artifact).to_string(),
        // For each start anew: a pool that grows shares the cores among more.
        intra_op_threads: 1,
        server_version: config.hosts.server_version.clone(),
        sequence_headers: config.sequence_headers.clone(),
        declared_metrics: config.handler_metrics.for_handlers(),
        max_response_bytes: config.hosts.max_response_bytes,
        // For each process its own.
        rank: 0,
        echo: echo_behaviour(yaml)?,
    };
    Ok(ResolvedModel {
        name,
        version,
        runtime,
        isolation,
        parallel,
        device_type,
        device_ids,
        placement,
        limits,
        scheduling,
        load,
        warm_up: WarmUp::read(yaml, artifact.dir.path())?,
        isolate_bad_requests: yaml.isolate_bad_requests,
    })
}

/// What the files of a model may make its workers deserialise: never more than the operator allows.
pub(crate) fn load_policy(config: &ServingConfig, artifact: &Artifact) -> LoadPolicy {
    let own = artifact.config.as_ref().and_then(|yaml| yaml.load_policy);
    config.load_policy.stricter(own.unwrap_or(LoadPolicy::Any))
}

/// Refuses a batch delay that outlasts the callers, where all of it is waited for.
///
/// # Errors
/// A lone request would always end at its client's limit.
pub(crate) fn check_delay(
    limits: &ModelLimits,
    scheduling: &Scheduling,
) -> Result<(), ServingError> {
    let waits_for_all =
        scheduling.gather != Gather::Auto || !scheduling.preferred_batch_sizes.is_empty();
    match limits.client_timeout {
        Some(limit)
            if waits_for_all && limits.batch_size > 1 && limits.max_batch_delay >= limit =>
        {
            Err(ServingError::BadRegistration(format!(
                "`max_batch_delay` of {} ms leaves no time within the `clientTimeoutInMills` of {} \
                 ms, so a request without company would never be answered. Make the delay shorter, \
                 or `batch_size` 1",
                limits.max_batch_delay.as_millis(),
                limit.as_millis()
            )))
        }
        _ => Ok(()),
    }
}

fn place(
    config: &ServingConfig,
    name: &ModelName,
    device_type: Option<DeviceType>,
    device_ids: Option<&[u32]>,
) -> Result<Placement, ServingError> {
    let present = &config.hosts.devices;
    Placement::of(device_type, device_ids, present).map_err(|unknown| {
        let there = match present.len() {
            0 => "no device".to_owned(),
            _ => format!("the devices {present:?}"),
        };
        ServingError::BadRegistration(format!(
            "`deviceIds` of model `{name}` has {unknown}, and this server has {there}. Change the \
             list, or set `deviceType: cpu`"
        ))
    })
}

/// Workers of a model that nobody said a number for, as TorchServe has it: one for each device, or
/// for each core.
pub(crate) fn automatic_workers(
    config: &ServingConfig,
    placement: &Placement,
    parallel: Option<Parallel>,
) -> usize {
    let places = match placement.devices(&config.hosts.devices) {
        Some(devices) => devices / parallel.map_or(1, Parallel::devices),
        None => config.hosts.cores / parallel.map_or(1, Parallel::processes) as usize,
    };
    places.max(1)
}

/// Keeps a model to the workers that there are devices for, where each has several: they hold a part
/// of a model each, and have no room for another one's.
fn fit_into_devices(
    limits: &mut ModelLimits,
    parallel: Parallel,
    devices: usize,
) -> Result<(), ServingError> {
    let each = parallel.devices();
    if each == 1 {
        return Ok(());
    }
    let room = devices / each;
    if room == 0 {
        return Err(ServingError::BadRegistration(format!(
            "each worker of the model has {each} devices (`parallelLevel`, `torchrun`), and there              are {devices} for it. Make it less, or set `deviceType: cpu`"
        )));
    }
    if limits.max_workers > room {
        tracing::warn!(
            wanted = limits.max_workers,
            room,
            "there are devices for fewer workers"
        );
    }
    limits.min_workers = limits.min_workers.min(room);
    limits.max_workers = limits.max_workers.min(room);
    Ok(())
}

/// Who asks for a thread for each worker and for several processes is refused; what only holds for
/// most models gives way.
fn isolation(
    config: &ServingConfig,
    registration: &Registration,
    yaml: &ModelConfig,
    backend: BackendKind,
    parallel: Option<Parallel>,
) -> Result<Isolation, ServingError> {
    let asked = registration.isolation.or(yaml.worker_isolation);
    if let Some(parallel) = parallel.filter(|parallel| parallel.needs_own_processes()) {
        if asked == Some(Isolation::Thread) {
            return Err(ServingError::BadRegistration(format!(
                "`parallelType: {}` gives each worker processes of its own, and worker isolation \
                 `thread` has them share one. Leave one of them out",
                parallel.kind()
            )));
        }
        return Ok(Isolation::Process);
    }
    let usual = match backend {
        BackendKind::Python => Isolation::Process,
        BackendKind::Echo => Isolation::Thread,
    };
    Ok(asked.or(config.defaults.isolation).unwrap_or(usual))
}

fn limits(
    config: &ServingConfig,
    registration: &Registration,
    yaml: &ModelConfig,
    property: &ModelOverrides,
    automatic: usize,
) -> ModelLimits {
    let defaults = &config.defaults;
    let autoscale = registration.autoscale.or(yaml.autoscale).unwrap_or(false);
    let seconds = |value: Option<u32>| value.map(|value| Duration::from_secs(u64::from(value)));
    let millis = |value: Option<u32>| value.map(|value| Duration::from_millis(u64::from(value)));
    let count = |value: Option<u32>| value.map(|value| value as usize);

    let from_yaml = match (count(yaml.min_workers), count(yaml.max_workers)) {
        (Some(min), Some(max)) if (min > 0 || autoscale) && max >= min => Some((min, max)),
        (Some(min), None) if min > 0 || autoscale => Some((min, min)),
        _ => None,
    };
    let from_property = property.min_workers.or(property.max_workers).map(|one| {
        let min = property.min_workers.unwrap_or(one);
        (min, property.max_workers.unwrap_or(min).max(min))
    });
    let same = |workers: usize| (workers, workers);
    let (min_workers, max_workers) = if registration.at_startup {
        from_yaml
            .or(registration.initial_workers.map(same))
            .or(from_property)
            .or(defaults.workers.map(same))
            .unwrap_or(same(if autoscale { 1 } else { automatic }))
    } else {
        from_yaml
            .or(registration.initial_workers.map(same))
            .or(defaults.workers.map(same))
            .unwrap_or(same(0))
    };
    let max_workers = if autoscale {
        let given = count(yaml.max_workers).or(property.max_workers);
        given.unwrap_or(automatic).max(min_workers)
    } else {
        max_workers
    };
    ModelLimits {
        min_workers,
        max_workers,
        autoscale,
        scale_down_idle: seconds(yaml.scale_down_idle_seconds).unwrap_or(DEFAULT_SCALE_DOWN_IDLE),
        quarantine_after: yaml.quarantine_after.unwrap_or(defaults.quarantine_after),
        batch_size: registration
            .batch_size
            .or(count(yaml.batch_size))
            .or(property.batch_size)
            .unwrap_or(1)
            .max(1),
        max_batch_delay: registration
            .max_batch_delay
            .or(millis(yaml.max_batch_delay))
            .or(property.max_batch_delay)
            .unwrap_or(DEFAULT_BATCH_DELAY),
        response_timeout: registration
            .response_timeout
            .or(seconds(yaml.response_timeout))
            .or(property.response_timeout)
            .unwrap_or(defaults.response_timeout),
        startup_timeout: registration
            .startup_timeout
            .or(seconds(yaml.startup_timeout))
            .or(property.startup_timeout)
            .unwrap_or(defaults.startup_timeout),
        job_queue_size: count(yaml.job_queue_size)
            .filter(|size| *size > 0)
            .unwrap_or(defaults.job_queue_size),
        max_retry_timeout: seconds(yaml.max_retry_timeout_in_sec).unwrap_or(DEFAULT_RETRY_WINDOW),
        client_timeout: millis(yaml.client_timeout_in_mills).filter(|limit| !limit.is_zero()),
        hosts: HostLimits {
            memory_bytes: yaml.memory_limit_mb.map(|mib| u64::from(mib) << 20),
            cpu_millis: yaml.cpu_limit.map(|cores| (cores * 1000.0).round() as u32),
        },
    }
}

fn exchange(yaml: &ModelConfig) -> Result<Exchange, ServingError> {
    let on = |value: Option<bool>| value == Some(true);
    match (on(yaml.continuous_batching), on(yaml.async_communication)) {
        (false, false) => Ok(Exchange::Batches),
        (true, false) => Ok(Exchange::Continuous),
        (false, true) => Ok(Exchange::Asynchronous),
        (true, true) => Err(ServingError::BadRegistration(
            "`continuousBatching` and `asyncCommunication` in the model's configuration exclude \
             each other. Leave one of them out"
                .to_owned(),
        )),
    }
}

fn echo_behaviour(yaml: &ModelConfig) -> Result<EchoBehaviour, ServingError> {
    match yaml.other.get("echo") {
        None => Ok(EchoBehaviour::default()),
        Some(value) => serde_json::from_value(value.clone()).map_err(|error| {
            ServingError::BadRegistration(format!("`echo` in the model's configuration: {error}"))
        }),
    }
}

/// TorchServe's name for an archive that has none (*torchserve-contract* 1.6): the file name
/// without its last extension, every other character than letters, digits and `_` replaced.
fn name_from_file(url: &str) -> String {
    let file = url.trim_end_matches('/').rsplit('/').next().unwrap_or(url);
    let stem = file.strip_suffix(".mar").unwrap_or(file);
    let name = stem
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' });
    name.collect()
}

/// Settings of the archive that this server does not act on yet, for one warning each.
pub(crate) fn without_effect(artifact: &Artifact) -> Vec<&'static str> {
    let Some(yaml) = &artifact.config else {
        return Vec::new();
    };
    let on = |value: Option<bool>| value == Some(true);
    [
        ("useVenv", on(yaml.use_venv)),
        (
            "torchrun",
            yaml.torchrun.is_some() && !matches!(yaml.parallel_level, Some(1..)),
        ),
    ]
    .into_iter()
    .filter_map(|(key, set)| set.then_some(key))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::collections::HashMap;

    use crate::config::{HostConfig, ModelDefaults, ModelOverrides, SequenceHeaders, Trust};

    /// The limits of model `m`, version `1.0`, with each layer as given.
    fn limits_of(registration: &Registration, yaml: &str, property: ModelOverrides) -> ModelLimits {
        resolved(registration, yaml, property, vec![])
            .unwrap()
            .limits
    }

    /// The same model on a server with these devices.
    fn resolved(
        registration: &Registration,
        yaml: &str,
        property: ModelOverrides,
        devices: Vec<u32>,
    ) -> Result<ResolvedModel, ServingError> {
        let folder = tempfile::tempdir().unwrap();
        let manifest = folder.path().join("MAR-INF/MANIFEST.json");
        fs_err::create_dir_all(manifest.parent().unwrap()).unwrap();
        fs_err::write(
            manifest,
            r#"{"runtime": "python", "model": {"modelName": "m", "modelVersion": "1.0",
                "handler": "h.py", "configFile": "model-config.yaml"}}"#,
        )
        .unwrap();
        fs_err::write(folder.path().join("model-config.yaml"), yaml).unwrap();
        let artifact = ts_archive::unpack(
            folder.path(),
            folder.path(),
            &ts_archive::UnpackLimits::default(),
        )
        .unwrap();
        let name = ModelName::new("m").unwrap();
        let version = Version::new("1.0").unwrap();
        let config = ServingConfig {
            model_store: None,
            work_dir: folder.path().to_owned(),
            allowed_urls: regex::RegexSet::empty(),
            unpack_limits: ts_archive::UnpackLimits::default(),
            max_download_bytes: 0,
            download_limit: Duration::ZERO,
            defaults: ModelDefaults {
                workers: None,
                response_timeout: Duration::from_secs(50),
                startup_timeout: Duration::from_secs(60),
                unregister_timeout: Duration::from_secs(70),
                job_queue_size: 100,
                handler: None,
                isolation: None,
                gather: Gather::Auto,
                quarantine_after: 10,
            },
            per_model: HashMap::from([(name, HashMap::from([(version, property)]))]),
            hosts: HostConfig {
                executable: "/nowhere".into(),
                python: None,
                home: None,
                zygote: false,
                preload_modules: Vec::new(),
                cores: 4,
                devices,
                visible_devices: None,
                service_envelope: None,
                decode_input_request: true,
                limit_max_image_pixels: true,
                max_response_bytes: 1000,
                hidden_environment: None,
                secret_variables: Vec::new(),
                server_version: "0".to_owned(),
            },
            load_policy: LoadPolicy::Any,
            trust: Trust::default(),
            resources: Vec::new(),
            sequence_headers: SequenceHeaders::default(),
            metrics: ts_metrics::Metrics::new(ts_metrics::Mode::Prometheus, None, false),
            handler_metrics: crate::HandlerMetricsConfig {
                declared: Vec::new(),
                auto_detect: true,
            },
        };
        resolve(&config, registration, &artifact)
    }

    #[test]
    fn a_value_that_somebody_gave_beats_one_that_nobody_gave() {
        let property = || ModelOverrides {
            batch_size: Some(4),
            response_timeout: Some(Duration::from_secs(4)),
            ..ModelOverrides::default()
        };
        let call = || Registration {
            batch_size: Some(2),
            response_timeout: Some(Duration::from_secs(2)),
            ..Registration::default()
        };
        let none = ModelOverrides::default;
        let cases = [
            (
                call(),
                "batchSize: 3\nresponseTimeout: 3\n",
                property(),
                (2, 2),
            ),
            (
                Registration::default(),
                "batchSize: 3\nresponseTimeout: 3\n",
                property(),
                (3, 3),
            ),
            // The archive's file is there and silent.
            (Registration::default(), "other: 1\n", property(), (4, 4)),
            (call(), "other: 1\n", none(), (2, 2)),
            (Registration::default(), "other: 1\n", none(), (1, 50)),
        ];
        for (number, (registration, yaml, property, expected)) in cases.into_iter().enumerate() {
            let limits = limits_of(&registration, yaml, property);
            let found = (limits.batch_size, limits.response_timeout.as_secs());
            assert_eq!(found, expected, "case {number}");
        }
    }

    #[test]
    fn workers_come_from_the_archive_then_the_call_and_at_startup_from_the_property() {
        let workers = |at_startup, initial, yaml: &str, min| {
            let registration = Registration {
                initial_workers: initial,
                at_startup,
                ..Registration::default()
            };
            let property = ModelOverrides {
                min_workers: min,
                ..ModelOverrides::default()
            };
            let limits = limits_of(&registration, yaml, property);
            (limits.min_workers, limits.max_workers)
        };
        assert_eq!(
            workers(false, Some(2), "minWorkers: 1\nmaxWorkers: 3\n", None),
            (1, 3)
        );
        assert_eq!(workers(false, Some(2), "x: 1\n", Some(5)), (2, 2));
        assert_eq!(workers(false, None, "x: 1\n", Some(5)), (0, 0));
        assert_eq!(workers(true, None, "x: 1\n", Some(5)), (5, 5));
        assert_eq!(workers(true, None, "x: 1\n", None), (4, 4), "one a core");
        // A range that is none does not count.
        assert_eq!(
            workers(false, Some(2), "minWorkers: 3\nmaxWorkers: 1\n", None),
            (2, 2)
        );
    }

    #[test]
    fn a_pool_that_scales_by_itself_may_have_none_and_has_room() {
        let workers = |at_startup, autoscale, initial, yaml: &str| {
            let registration = Registration {
                initial_workers: initial,
                autoscale,
                at_startup,
                ..Registration::default()
            };
            let limits = limits_of(&registration, yaml, ModelOverrides::default());
            assert_eq!(limits.autoscale, autoscale != Some(false));
            (limits.min_workers, limits.max_workers)
        };
        let on = "autoscale: true\n";
        let yaml = |keys: &str| format!("{on}{keys}");
        assert_eq!(workers(false, None, None, on), (0, 4));
        assert_eq!(workers(true, None, None, on), (1, 4));
        assert_eq!(workers(false, Some(true), Some(2), "x: 1\n"), (2, 4));
        let zero = yaml("minWorkers: 0\nmaxWorkers: 2\n");
        assert_eq!(workers(true, None, None, &zero), (0, 2));
        assert_eq!(workers(false, None, None, &yaml("minWorkers: 6\n")), (6, 6));
        assert_eq!(
            workers(false, None, Some(1), &yaml("maxWorkers: 3\n")),
            (1, 3)
        );
        // The call has the last word.
        let range = yaml("minWorkers: 1\nmaxWorkers: 3\n");
        assert_eq!(workers(false, Some(false), None, &range), (1, 3));
        assert_eq!(workers(false, Some(false), None, on), (0, 0));
    }

    /// PF-04: the same in both places, or refused.
    #[test]
    fn devices_come_from_the_archive_or_the_property() {
        let place = |yaml: &str, property: ModelOverrides, devices: &[u32]| {
            resolved(&Registration::default(), yaml, property, devices.to_vec())
                .map(|resolved| resolved.placement)
                .map_err(|error| error.to_string())
        };
        let none = ModelOverrides::default;
        let listed = |ids: &[u32]| ModelOverrides {
            device_ids: Some(ids.to_vec()),
            ..none()
        };
        let both = Ok(Placement::Listed(vec![1, 0]));
        assert_eq!(place("deviceIds: [1, 0]\n", listed(&[0]), &[0, 1]), both);
        assert_eq!(place("x: 1\n", listed(&[1, 0]), &[0, 1]), both);
        let cpu = ModelOverrides {
            device_type: Some(DeviceType::Cpu),
            ..none()
        };
        assert_eq!(place("x: 1\n", cpu, &[0]), Ok(Placement::Cpu));
        assert_eq!(place("x: 1\n", none(), &[0]), Ok(Placement::Any));
        let error = place("x: 1\n", listed(&[0, 2]), &[0, 1]).unwrap_err();
        assert!(
            error.contains("`m` has 2") && error.contains("[0, 1]"),
            "{error}"
        );
        let error = place("deviceIds: [0]\n", none(), &[]).unwrap_err();
        assert!(error.contains("no device"), "{error}");
    }

    #[test]
    fn a_model_at_startup_gets_one_worker_for_each_of_its_devices() {
        let registration = Registration {
            at_startup: true,
            ..Registration::default()
        };
        for (yaml, workers) in [
            ("x: 1\n", 3),
            ("deviceIds: [2, 0]\n", 2),
            ("deviceType: cpu\n", 4),
        ] {
            let none = ModelOverrides::default();
            let resolved = resolved(&registration, yaml, none, vec![0, 1, 2]).unwrap();
            assert_eq!(resolved.limits.min_workers, workers, "{yaml}");
        }
    }

    #[test]
    fn a_model_has_the_workers_that_its_groups_of_devices_allow() {
        let registration = Registration {
            at_startup: true,
            ..Registration::default()
        };
        let workers = |yaml: &str, devices: u32| {
            let yaml = format!("parallelType: tp\nparallelLevel: 2\n{yaml}");
            let none = ModelOverrides::default();
            resolved(&registration, &yaml, none, (0..devices).collect()).map(|resolved| {
                assert_eq!(resolved.isolation, Isolation::Process);
                (resolved.limits.min_workers, resolved.limits.max_workers)
            })
        };
        assert_eq!(workers("", 5).ok(), Some((2, 2)));
        let four = "minWorkers: 1\nmaxWorkers: 4\n";
        assert_eq!(workers(four, 4).ok(), Some((1, 2)));
        assert_eq!(workers(four, 0).ok(), Some((1, 4)));
        assert_eq!(workers("", 0).ok(), Some((2, 2)), "cores of both processes");
        assert_eq!(workers("deviceIds: [3, 2]\n", 4).ok(), Some((1, 1)));
        for (yaml, devices) in [("", 1), ("deviceIds: [3]\n", 4)] {
            let told = workers(yaml, devices).err().unwrap().to_string();
            assert!(
                told.contains("has 2 devices") && told.contains("are 1"),
                "{told}"
            );
        }
    }

    /// CF-08.
    #[test]
    fn a_delay_that_outlasts_the_callers_is_refused_where_it_is_waited_for() {
        let refusal = |yaml: &str| {
            let none = ModelOverrides::default();
            let resolved = resolved(&Registration::default(), yaml, none, vec![]);
            resolved.err().map(|error| error.to_string())
        };
        let strict = "batchGather: strict\nclientTimeoutInMills: 200\n";
        let told = refusal(&format!("{strict}batchSize: 4\nmaxBatchDelay: 200\n"));
        assert!(told.unwrap().contains("`max_batch_delay` of 200 ms"));
        for fine in [
            format!("{strict}batchSize: 4\nmaxBatchDelay: 199\n"),
            format!("{strict}batchSize: 1\nmaxBatchDelay: 500\n"),
            "batchSize: 4\nmaxBatchDelay: 500\nclientTimeoutInMills: 200\n".to_owned(),
            "batchGather: strict\nbatchSize: 4\nmaxBatchDelay: 5000\nresponseTimeout: 2\n"
                .to_owned(),
        ] {
            assert_eq!(refusal(&fine), None, "{fine}");
        }
    }

    #[test]
    fn an_archive_without_a_name_gets_one_from_its_file() {
        assert_eq!(name_from_file("noop.mar"), "noop");
        assert_eq!(name_from_file("noop.tar.gz"), "noop_tar_gz");
        assert_eq!(name_from_file("/store/my-model/"), "my_model");
    }
}
