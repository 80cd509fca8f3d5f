//! The composition root: the only place that knows all parts and wires them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::web;
use anyhow::Context as _;
use ts_metrics::Metrics;
use ts_serving::HandlerMetricsConfig;

use crate::auth::{GivenKeys, Guard, KEY_FILE, OwnKeys, Tokens};
use crate::budget::BodyMemory;
use crate::cli::Options;
use crate::doors::Doors;
use crate::listen::{Listeners, connection_limit};
use crate::rest::{Edge, Traffic, body};
use crate::settings::{Address, Connections, Environment, Settings, raw::Raw};
use crate::shutdown::{self, Signals};
use crate::snapshots::{Files, Restoring};
use crate::startup;
use crate::telemetry::{
    Declared, Gpus, Library, Log, LogFolders, MetricLog, ResponseCounts, Traces,
    collect_host_metrics,
};
use crate::tls::Tls;
use crate::transport;
use crate::work_dir::{self, WorkDir};

/// What the server is started with.
pub(crate) struct Plan<'p> {
    /// The command line.
    pub(crate) options: &'p Options,
    /// Where, as far as variables say.
    pub(crate) environment: &'p Environment,
    /// What was written, for the log.
    pub(crate) raw: &'p Raw,
    /// What it means.
    pub(crate) settings: Settings,
    /// Which models of an earlier server come back.
    pub(crate) restoring: Restoring,
    /// Where those of this one are kept, unless that is switched off.
    pub(crate) snapshots: Option<Files>,
    /// Where temporary files go.
    pub(crate) temp_dir: PathBuf,
    /// Where log files go.
    pub(crate) log_folders: LogFolders,
}

/// Serves until told to stop.
///
/// # Errors
/// The server cannot start.
pub(crate) fn run(plan: Plan<'_>) -> anyhow::Result<()> {
    let log = Log::start(&plan.settings.logs, &plan.log_folders)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("background")
        .enable_all()
        .build()
        .context("the runtime cannot be started")?;
    let served = runtime.block_on(serve(plan, &log));
    if let Err(error) = &served {
        tracing::error!("{}", ts_types::with_causes(error.as_ref()));
    }
    // A model that is still being unpacked or downloaded is not waited for.
    runtime.shutdown_timeout(Duration::from_millis(200));
    served
}

async fn serve(plan: Plan<'_>, log: &Log) -> anyhow::Result<()> {
    let started = Instant::now();
    let Plan {
        options,
        environment,
        raw,
        settings,
        restoring,
        snapshots,
        temp_dir,
        log_folders: _,
    } = plan;
    tell_settings(raw, &settings, &temp_dir);
    for notice in &restoring.notices {
        tracing::warn!("{notice}");
    }
    let mut signals = Signals::catch()?;
    let tls = load_tls(&settings)?;
    let mut listeners = Listeners::bind(&settings.http, tls.as_ref())?;
    let doors = Doors::of(&mut listeners).context("the listeners cannot be doubled")?;
    let declared = declared_metrics(&settings);
    let metrics = Metrics::new(
        settings.metrics.mode,
        declared.server,
        settings.metrics.for_triton,
    );
    metrics.install()?;
    let _metric_log = MetricLog::start(&metrics)?;
    let gpus = Arc::<Gpus>::default();
    let work_dir = WorkDir::create(&temp_dir).with_context(|| {
        let shown = temp_dir.display();
        format!("archives cannot be unpacked in `{shown}`; `TEMP` or `TMPDIR` names another folder")
    })?;
    let snapshots = snapshots.map(|files| Arc::new(files) as Arc<dyn ts_serving::SnapshotWriter>);
    let handler_metrics = HandlerMetricsConfig {
        declared: declared.handlers,
        auto_detect: settings.metrics.auto_detect,
    };
    let config = settings.serving(
        work_dir.path().to_owned(),
        Arc::clone(&metrics),
        handler_metrics,
    );
    let (inference, management) = ts_serving::start(config, snapshots)?;
    let traffic = Traffic::new(ResponseCounts::new(&metrics), &settings.http.cors);
    let memory = BodyMemory::new(settings.http.max_body_memory);
    let edge = web::Data::new(Edge {
        inference,
        management: Arc::clone(&management),
        guard: guard(&settings)?,
        intake: body::Intake {
            limits: body::Limits {
                bytes: settings.http.max_request_bytes.min(memory.limit()),
                parts: settings.http.max_request_parts,
            },
            memory,
            pause: settings.http.body_limit,
            draining: traffic.draining(),
        },
        min_compressed_bytes: settings.http.min_compressed_bytes,
        ping_requires_ready: settings.ping_requires_ready,
        traffic,
        metrics: Arc::clone(&metrics),
        gpus: Arc::clone(&gpus),
        traces: Traces::start(environment, &metrics),
        proxies: settings.trusted_proxies.clone(),
        log_filter: log.filter(),
    });
    let whereabouts = listeners.whereabouts();
    for listener in &listeners.all {
        tracing::info!("listening at {}", listener.url());
    }
    let connections = Connections {
        max: Some(connection_limit(settings.http.connections.max)),
        ..settings.http.connections.clone()
    };
    let (threads, drain) = (settings.http.threads, settings.drain_timeout);
    let server = transport::serve(&edge, threads, connections, drain, listeners.all)?;
    if let Some(tls) = tls {
        tokio::spawn(tls.follow());
    }
    let handle = server.handle();
    let serving = tokio::spawn(server);
    tracing::info!(
        "listening {} ms after the start",
        started.elapsed().as_millis()
    );
    collect_metrics(&settings, metrics, gpus)?;
    tokio::task::spawn_blocking(move || {
        let swept = work_dir::sweep(&temp_dir);
        if swept > 0 {
            tracing::info!("removed the temporary files of {swept} servers that did not end well");
        }
    });
    // Requests are answered from here on, so that probes see a living server however long an archive
    // takes; that it has started is said when its models are registered, as scripts expect. Their
    // workers may still be loading then.
    let defaults = settings.default_versions();
    let (models, store) = (settings.startup_models, settings.model_store);
    let strict = settings.exit_on_model_failure;
    let starting = async {
        match restoring.models {
            Some(saved) => management.restore(saved, strict).await,
            None => {
                let management = Arc::clone(&management);
                startup::load(management, models, store, defaults, strict).await;
            }
        }
        let unsaved = management.started().await;
        if strict {
            startup::all_serve(&management.readiness())?;
        }
        if let Some(reason) = unsaved {
            tracing::warn!(
                "no snapshot can be written, so changes of models will not survive a restart: \
                 {reason}. `LOG_LOCATION` names another folder, `--ncs` does without"
            );
        }
        if let Some(file) = &options.ready_file {
            whereabouts.tell(file)?;
        }
        log.announce("Model server started.");
        std::future::pending::<anyhow::Result<()>>().await
    };
    tokio::select! {
        failed = starting => {
            let _given_up = edge.management.shut_down(Duration::ZERO).await;
            failed
        }
        name = signals.next() => {
            tracing::info!("{name}: stopping");
            let limits = shutdown::Limits {
                grace: settings.shutdown_grace,
                drain: settings.drain_timeout,
                workers: settings.worker_stop_timeout,
            };
            shutdown::shut_down(&edge, &handle, doors, limits, &mut signals).await;
            Ok(())
        }
        ended = serving => {
            let _given_up = edge.management.shut_down(Duration::ZERO).await;
            ended.context("the HTTP server panicked")?.context("the HTTP server ended")
        }
    }
}

/// What `metrics_config` declares, or the default; what is wrong with it is told.
fn declared_metrics(settings: &Settings) -> Declared {
    if let Some(unknown) = &settings.metrics.unknown_mode {
        tracing::error!(
            "`metrics_mode` is `{unknown}`; known are log, prometheus and legacy. `log` is used"
        );
    }
    let declared = match &settings.metrics.config {
        Some(path) => Declared::read(path),
        None => Declared::by_default(),
    };
    for fault in &declared.faults {
        tracing::error!("{fault}");
    }
    declared
}

/// Starts what collects metrics of the host and its accelerators.
fn collect_metrics(
    settings: &Settings,
    metrics: Arc<Metrics>,
    gpus: Arc<Gpus>,
) -> std::io::Result<()> {
    let Some(interval) = settings.metrics.host_every else {
        return Ok(());
    };
    let devices = settings.devices().to_vec();
    if !devices.is_empty() {
        let visible = settings.visible_devices.clone();
        let open = move || Library::open(visible);
        gpus.collect(devices, interval, Arc::clone(&metrics), open)?;
    }
    collect_host_metrics(metrics, gpus, interval)
}

/// What encrypts connections, if any listener wants that.
fn load_tls(settings: &Settings) -> anyhow::Result<Option<Arc<Tls>>> {
    let http = &settings.http;
    if !http.addresses().any(Address::is_encrypted) {
        return Ok(None);
    }
    let tls = Tls::load(http.tls.clone());
    Ok(Some(tls.context("TLS cannot be served")?))
}

fn guard(settings: &Settings) -> anyhow::Result<Guard> {
    let tokens = if !settings.token_authorization {
        None
    } else if settings.tokens.is_empty() {
        let file = std::env::current_dir()?.join(KEY_FILE);
        let shown = file.display().to_string();
        let keys = OwnKeys::create(file, settings.token_lifetime).with_context(|| {
            format!(
                "`{shown}` cannot be written; tokens are told in it. Start the server in another \
                 folder, choose the tokens yourself (`token_file`, `TS_INFERENCE_TOKEN` and \
                 `TS_MANAGEMENT_TOKEN`), or do without (--disable-token-auth)"
            )
        })?;
        tracing::info!(
            "TorchServe now enforces token authorization by default. The tokens are in {shown}; \
             --disable-token-auth switches them off."
        );
        Some(Tokens::Own(keys))
    } else {
        let keys = GivenKeys::read(settings.tokens.clone());
        let keys =
            keys.map_err(|reason| anyhow::anyhow!("`token_file` cannot be used: {reason}"))?;
        tracing::info!(
            "TorchServe now enforces token authorization by default. The tokens are those that were \
             given; --disable-token-auth switches them off."
        );
        Some(Tokens::Given(keys))
    };
    Ok(Guard::new(settings.enable_model_api, tokens))
}

/// The number that workers and threads are counted by, and why it is not another.
fn cores(usable: usize) -> String {
    let allowed = rustix::thread::sched_getaffinity(None).map_or(0, |cores| cores.count() as usize);
    if usable < allowed {
        format!("{usable}, by the quota of the control group, of {allowed} that may be used")
    } else {
        format!("{usable}, all that this process may use")
    }
}

/// What people look for first when something is not as they think it is.
fn tell_settings(raw: &Raw, settings: &Settings, temp_dir: &std::path::Path) {
    let current = std::env::current_dir().unwrap_or_default();
    tracing::info!("Torchserve version: {}", env!("CARGO_PKG_VERSION"));
    tracing::info!("Current directory: {}", current.display());
    tracing::info!("Temp directory: {}", temp_dir.display());
    let file = raw
        .file
        .as_ref()
        .map_or("none".into(), |file| file.path.to_string_lossy());
    tracing::info!("Config file: {file}");
    tracing::info!("Number of CPUs: {}", cores(settings.hosts.cores));
    tracing::info!("Number of GPUs: {}", settings.devices().len());
    let shown: Vec<_> = raw.shown().collect();
    // What people who know TorchServe look for by these words; whatever else was set follows.
    for (words, key) in [
        ("Inference address", "inference_address"),
        ("Management address", "management_address"),
        ("Metrics address", "metrics_address"),
        ("Model Store", "model_store"),
        ("Workflow Store", "workflow_store"),
        ("Initial Models", "load_models"),
        ("Default workers per model", "default_workers_per_model"),
        ("Allowed Urls", "allowed_urls"),
        ("Maximum Request Size", "max_request_size"),
        ("Maximum Response Size", "max_response_size"),
        ("Python executable", "python"),
    ] {
        let found = shown.iter().find(|(name, ..)| *name == key);
        let text = found.map_or("unset", |(_, text, _)| text.as_str());
        tracing::info!("{words}: {text}");
    }
    for (name, text, origin) in shown {
        if origin == crate::settings::raw::DEFAULT {
            tracing::debug!("setting {name} = {text} ({origin})");
        } else {
            tracing::info!("setting {name} = {text} ({origin})");
        }
    }
    tracing::info!("devices: {:?}", settings.devices());
    for warning in raw.warnings() {
        tracing::warn!("{warning}");
    }
    if settings.any_url_allowed {
        tracing::warn!(
            "Your torchserve instance can access any URL to load models. When deploying to \
             production, make sure to limit the set of allowed_urls in config.properties"
        );
    }
    for address in settings.http.addresses() {
        if address.is_wildcard() {
            tracing::warn!("{address} is open to every network that this machine is in");
        }
    }
}
