//! The composition root: the only place that knows all parts and wires them.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::{App, HttpServer, web};
use anyhow::Context as _;

use crate::auth::{Guard, KEY_FILE, Tokens};
use crate::cli::Options;
use crate::listen::{Listeners, Socket, connection_limit};
use crate::rest::{self, Edge, Traffic, body};
use crate::settings::{Settings, raw::Raw};
use crate::shutdown::{self, Signals};
use crate::snapshots::{Files, Restoring};
use crate::startup;
use crate::telemetry::{Exporter, Log, LogFolders, ResponseCounts, collect_host_metrics};
use crate::work_dir::{self, WorkDir};

/// Connections that one thread serves at most.
const MAX_CONNECTIONS: usize = 25_600;

/// How long an idle connection is kept.
const KEEP_ALIVE: Duration = Duration::from_secs(75);

/// How long a request's head may take to arrive.
const HEAD_LIMIT: Duration = Duration::from_secs(10);

/// What the server is started with.
pub(crate) struct Plan<'p> {
    /// The command line.
    pub(crate) options: &'p Options,
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
    let mut listeners = Listeners::bind(&settings.http)?;
    // They go when this function ends, however it ends.
    let _socket_files = std::mem::take(&mut listeners.files);
    let exporter = Exporter::install()?;
    let work_dir = WorkDir::create(&temp_dir).with_context(|| {
        let shown = temp_dir.display();
        format!("archives cannot be unpacked in `{shown}`; `TEMP` or `TMPDIR` names another folder")
    })?;
    let snapshots = snapshots.map(|files| Arc::new(files) as Arc<dyn ts_serving::SnapshotWriter>);
    let config = settings.serving(work_dir.path().to_owned());
    let (inference, management) = ts_serving::start(config, snapshots)?;
    let edge = web::Data::new(Edge {
        inference,
        management: Arc::clone(&management),
        guard: guard(&settings)?,
        surfaces: listeners.surfaces(),
        limits: body::Limits {
            bytes: settings.http.max_request_bytes,
            parts: settings.http.max_request_parts,
        },
        min_compressed_bytes: settings.http.min_compressed_bytes,
        traffic: Traffic::new(ResponseCounts::new(), &settings.http.cors),
        exporter: exporter.clone(),
        proxies: settings.trusted_proxies.clone(),
        log_filter: log.filter(),
    });
    let whereabouts = listeners.whereabouts();
    let server = http_server(&edge, &settings, listeners)?;
    let handle = server.handle();
    let serving = tokio::spawn(server);
    tracing::info!(
        "listening {} ms after the start",
        started.elapsed().as_millis()
    );
    collect_host_metrics(exporter, settings.host_metrics_every)?;
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
    let starting = async {
        match restoring.models {
            Some(saved) => management.restore(saved).await,
            None => {
                let management = Arc::clone(&management);
                startup::load(management, models, store, defaults).await;
            }
        }
        if let Some(reason) = management.started().await {
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
        failed = starting => failed,
        name = signals.next() => {
            tracing::info!("{name}: stopping");
            let limits = shutdown::Limits {
                grace: settings.shutdown_grace,
                drain: settings.drain_timeout,
            };
            shutdown::shut_down(&edge, &handle, limits, &mut signals).await;
            Ok(())
        }
        ended = serving => {
            let _given_up = edge.management.shut_down(Duration::ZERO).await;
            ended.context("the HTTP server panicked")?.context("the HTTP server ended")
        }
    }
}

/// One set of threads for all listeners; which APIs a request may use depends on where it came in.
fn http_server(
    edge: &web::Data<Edge>,
    settings: &Settings,
    listeners: Listeners,
) -> anyhow::Result<actix_web::dev::Server> {
    let edge = edge.clone();
    let surfaces = listeners.surfaces();
    let connections = connection_limit() / settings.http.threads;
    let mut server = HttpServer::new(move || {
        App::new()
            .app_data(edge.clone())
            .default_service(web::to(rest::serve))
    })
    .workers(settings.http.threads)
    .max_connections(connections.clamp(1, MAX_CONNECTIONS))
    .keep_alive(KEEP_ALIVE)
    .client_request_timeout(HEAD_LIMIT)
    // A client that closes has given its request up. (Allowing half-closed connections would mean
    // running requests for clients that are gone.)
    .h1_allow_half_closed(false)
    .shutdown_timeout(settings.drain_timeout.as_secs())
    .on_connect(move |connection, marks| surfaces.mark(connection, marks))
    .disable_signals();
    for listener in listeners.all {
        let address = listener.address();
        let served = match listener.socket {
            Socket::Tcp(socket, _) => server.listen(socket),
            Socket::Unix(socket, _) => server.listen_uds(socket),
        };
        server = served.with_context(|| format!("`{address}` cannot be served"))?;
    }
    Ok(server.run())
}

fn guard(settings: &Settings) -> anyhow::Result<Guard> {
    let tokens = if settings.token_authorization {
        let file = std::env::current_dir()?.join(KEY_FILE);
        let shown = file.display().to_string();
        let tokens = Tokens::create(file, settings.token_lifetime).with_context(|| {
            format!("`{shown}` cannot be written; tokens are told in it (--disable-token-auth)")
        })?;
        tracing::info!(
            "TorchServe now enforces token authorization by default. The tokens are in {shown}; \
             --disable-token-auth switches them off."
        );
        Some(Arc::new(tokens))
    } else {
        None
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
    let http = &settings.http;
    for address in [
        Some(&http.inference),
        Some(&http.management),
        http.metrics.as_ref(),
    ] {
        if let Some(address) = address.filter(|address| address.is_wildcard()) {
            tracing::warn!("{address} is open to every network that this machine is in");
        }
    }
}
