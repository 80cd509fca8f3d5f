//! From text to types. Every fault is collected, so that an operator sees all of them at once.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use regex::{Regex, RegexSet, RegexSetBuilder};
use secrecy::SecretString;
use ts_archive::{Digest, TrustedKeys, UnpackLimits};
use ts_metrics::{Metrics, Mode};
use ts_serving::{
    HandlerMetricsConfig, HostConfig, ModelDefaults, SavedModels, SequenceHeaders, ServingConfig,
    Trust,
};
use ts_types::{Gather, Isolation, LoadPolicy, ModelName, ResourceDemand, Version};

use super::address::DefaultPorts;
use super::devices::{FoundDevice, VISIBLE, parse_ids, visible};
use super::models::{PerModel, parse_overrides};
use super::raw::{DEFAULT, KEYS, Key, Kind, Raw, Written, break_missing, find};
use super::{Address, SettingsError, StartupModels};
use crate::auth::{KeySources, TokenKind};
use crate::rest::Proxies;
use crate::snapshots;
use crate::telemetry::{Format, LogSettings, MarkedLines, checked_filter};
use crate::tls::{Source, TlsSettings};

/// What the HTTP edge is told.
#[derive(Debug, Clone)]
pub(crate) struct Http {
    /// Where the inference API listens.
    pub(crate) inference: Address,
    /// Where the management API listens.
    pub(crate) management: Address,
    /// Where the metrics API listens, unless it is switched off.
    pub(crate) metrics: Option<Address>,
    /// Threads.
    pub(crate) threads: usize,
    /// What connections may be.
    pub(crate) connections: Connections,
    /// What TLS is made of, where an address asks for it.
    pub(crate) tls: TlsSettings,
    /// Bytes of a request body at most.
    pub(crate) max_request_bytes: usize,
    /// Fields of a form at most.
    pub(crate) max_request_parts: usize,
    /// Bytes of all request bodies at one time; unset, a share of the memory there is.
    pub(crate) max_body_memory: Option<usize>,
    /// How long a body may pause, and how long it may take before its rate counts.
    pub(crate) body_limit: Duration,
    /// Bytes from which a response is compressed; 0 for never.
    pub(crate) min_compressed_bytes: usize,
    /// `Access-Control-*` headers of every response.
    pub(crate) cors: Vec<(&'static str, String)>,
}

impl Http {
    /// The addresses, in the order inference, management, metrics.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = &Address> {
        [
            Some(&self.inference),
            Some(&self.management),
            self.metrics.as_ref(),
        ]
        .into_iter()
        .flatten()
    }
}

/// What connections of clients may be, whatever they carry.
#[derive(Debug, Clone)]
pub(crate) struct Connections {
    /// Of all clients; unset, as many as files may be open for them.
    pub(crate) max: Option<usize>,
    /// From one address.
    pub(crate) max_per_client: Option<usize>,
    /// How long the head of a request may take to arrive.
    pub(crate) head: Duration,
    /// How long a client may take nothing of its answer.
    pub(crate) write: Duration,
    /// How long a connection without a request is kept.
    pub(crate) idle: Duration,
    /// How long setting up TLS may take.
    pub(crate) handshake: Duration,
}

/// Everything the operator settled.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    /// The HTTP edge.
    pub(crate) http: Http,
    /// Folder of archives, absolute.
    pub(crate) model_store: PathBuf,
    /// Models to load at start.
    pub(crate) startup_models: StartupModels,
    /// Models of an earlier server that stand in the file.
    pub(crate) saved_models: Option<SavedModels>,
    /// The models of the newest snapshot are restored although a file is named.
    pub(crate) restore_models: bool,
    /// Registering and unregistering over the API is allowed.
    pub(crate) enable_model_api: bool,
    /// Requests need tokens.
    pub(crate) token_authorization: bool,
    /// How long a token is good for.
    pub(crate) token_lifetime: Duration,
    /// Tokens that the operator chose instead of the server's own.
    pub(crate) tokens: KeySources,
    /// What is measured, and how.
    pub(crate) metrics: MetricSettings,
    /// `CUDA_VISIBLE_DEVICES` of this process.
    pub(crate) visible_devices: Option<String>,
    /// What is logged, and how.
    pub(crate) logs: LogSettings,
    /// Whose word on the address of a caller is believed.
    pub(crate) trusted_proxies: Proxies,
    /// How long requests in work may take to finish when the server stops.
    pub(crate) drain_timeout: Duration,
    /// How long it goes on serving before that.
    pub(crate) shutdown_grace: Duration,
    /// How long workers may take to end after that.
    pub(crate) worker_stop_timeout: Duration,
    /// `/ping` tells whether the server is ready.
    pub(crate) ping_requires_ready: bool,
    /// The start fails if a model of its does not come up.
    pub(crate) exit_on_model_failure: bool,
    /// Any URL may be fetched, since nobody said otherwise.
    pub(crate) any_url_allowed: bool,
    allowed_urls: RegexSet,
    load_policy: LoadPolicy,
    trust: Trust,
    unpack_limits: UnpackLimits,
    max_download_bytes: u64,
    download_limit: Duration,
    defaults: ModelDefaults,
    per_model: PerModel,
    /// How hosts are made.
    pub(crate) hosts: HostConfig,
    resources: Vec<ResourceDemand>,
    sequence_headers: SequenceHeaders,
}

impl Settings {
    /// Ids of the devices that workers may use.
    pub(crate) fn devices(&self) -> &[u32] {
        &self.hosts.devices
    }

    /// The versions that the `models` property marks as the default ones, sorted.
    pub(crate) fn default_versions(&self) -> Vec<(ModelName, Version)> {
        let marked = self.per_model.iter().flat_map(|(model, versions)| {
            let marked = versions.iter().filter(|(_, one)| one.default_version);
            marked.map(|(version, _)| (model.clone(), version.clone()))
        });
        let mut marked: Vec<_> = marked.collect();
        marked.sort_unstable();
        marked
    }

    /// What the core is told; `work_dir` is this server's own folder.
    pub(crate) fn serving(
        &self,
        work_dir: PathBuf,
        metrics: Arc<Metrics>,
        handler_metrics: HandlerMetricsConfig,
    ) -> ServingConfig {
        ServingConfig {
            model_store: Some(self.model_store.clone()),
            work_dir,
            allowed_urls: self.allowed_urls.clone(),
            load_policy: self.load_policy,
            trust: self.trust.clone(),
            unpack_limits: self.unpack_limits.clone(),
            max_download_bytes: self.max_download_bytes,
            download_limit: self.download_limit,
            defaults: self.defaults.clone(),
            per_model: self.per_model.clone(),
            hosts: self.hosts.clone(),
            resources: self.resources.clone(),
            sequence_headers: self.sequence_headers.clone(),
            metrics,
            handler_metrics,
        }
    }
}

/// What is measured, and how.
#[derive(Debug, Clone)]
pub(crate) struct MetricSettings {
    /// What the log gets of it.
    pub(crate) mode: Mode,
    /// What `metrics_mode` said, if that is none.
    pub(crate) unknown_mode: Option<String>,
    /// The file that declares metrics.
    pub(crate) config: Option<PathBuf>,
    /// Whether metrics of handlers that it does not declare are recorded.
    pub(crate) auto_detect: bool,
    /// Whether names that Triton has are there too.
    pub(crate) for_triton: bool,
    /// How often metrics of the host are collected, unless that is switched off.
    pub(crate) host_every: Option<Duration>,
}

/// Reads values of one [`Raw`] and keeps the faults.
struct Reader<'r> {
    raw: &'r Raw,
    faults: Vec<SettingsError>,
    #[cfg(test)]
    asked: std::collections::BTreeSet<&'static str>,
}

impl Reader<'_> {
    fn written(&mut self, name: &'static str) -> Written {
        #[cfg(test)]
        self.asked.insert(name);
        let absent = || Written {
            text: String::new(),
            origin: DEFAULT.to_owned(),
        };
        self.raw.values.get(name).cloned().unwrap_or_else(absent)
    }

    fn fault(&mut self, name: &'static str, written: &Written, reason: impl Into<String>) {
        // What could not be read is a fault already.
        if self.raw.unusable.contains(name) {
            return;
        }
        let hint = find(name).map(|key| break_missing(key, &written.text));
        self.faults.push(SettingsError::Value {
            key: name,
            reason: reason.into(),
            origin: written.origin.clone(),
            hint: hint.unwrap_or_default(),
        });
    }

    /// The value that `read` makes of the text, or the fault and the type's own default, which
    /// nobody sees since a fault ends the start.
    fn value<T: Default>(
        &mut self,
        name: &'static str,
        read: impl FnOnce(&str) -> Result<T, String>,
    ) -> T {
        let written = self.written(name);
        match read(&written.text) {
            Ok(value) => value,
            Err(reason) => {
                self.fault(name, &written, reason);
                T::default()
            }
        }
    }

    fn text(&mut self, name: &'static str) -> Option<String> {
        Some(self.written(name).text).filter(|text| !text.trim().is_empty())
    }

    fn flag(&mut self, name: &'static str) -> bool {
        self.value(name, |text| match text.trim() {
            on if on.eq_ignore_ascii_case("true") => Ok(true),
            off if off.eq_ignore_ascii_case("false") => Ok(false),
            _ => Err(format!("`{text}` is neither `true` nor `false`")),
        })
    }

    fn whole(&mut self, name: &'static str) -> u64 {
        let Some(Kind::Whole { unit, min, max }) = find(name).map(|key| key.kind) else {
            let written = self.written(name);
            self.fault(
                name,
                &written,
                "it is not in the table of settings as a whole number",
            );
            return 0;
        };
        self.value(name, |text| {
            let of = if unit.is_empty() {
                String::new()
            } else {
                format!(" of {unit}")
            };
            let number = u64::from_str(text.trim()).ok();
            number
                .filter(|number| (min..=max).contains(number))
                .ok_or_else(|| format!("`{text}` is not a whole number{of} from {min} to {max}"))
        })
    }

    fn size(&mut self, name: &'static str) -> usize {
        // Where numbers are smaller than a setting may be, the greatest of them is as good.
        usize::try_from(self.whole(name)).unwrap_or(usize::MAX)
    }

    fn seconds(&mut self, name: &'static str) -> Duration {
        Duration::from_secs(self.whole(name))
    }

    fn minutes(&mut self, name: &'static str) -> Duration {
        self.value(name, |text| {
            let above_zero = f64::from_str(text.trim())
                .ok()
                .filter(|number| *number > 0.0);
            above_zero
                .and_then(|minutes| Duration::try_from_secs_f64(minutes * 60.0).ok())
                .ok_or_else(|| format!("`{text}` is not a number of minutes above zero"))
        })
    }

    fn choice(&mut self, name: &'static str, choices: &[&str]) -> Option<String> {
        self.value(name, |text| match text.trim() {
            "" => Ok(None),
            known if choices.contains(&known) => Ok(Some(known.to_owned())),
            other => Err(format!("`{other}` is none of `{}`", choices.join("`, `"))),
        })
    }

    /// The name of a header, in lower case as requests have it.
    fn header_name(&mut self, name: &'static str) -> String {
        self.value(name, |text| {
            let text = text.trim();
            let parsed = actix_web::http::header::HeaderName::from_str(text);
            parsed
                .map(|name| name.as_str().to_owned())
                .map_err(|_| format!("`{text}` is not the name of a header"))
        })
    }

    fn address(&mut self, name: &'static str, ports: DefaultPorts) -> Option<Address> {
        self.value(name, |text| Address::parse(text.trim(), ports).map(Some))
    }

    /// A number of which 0 means none.
    fn optional_size(&mut self, name: &'static str) -> Option<usize> {
        Some(self.size(name)).filter(|size| *size > 0)
    }

    /// Regular expressions between commas, each for the whole of a text in any letter case.
    fn patterns(&mut self, name: &'static str) -> RegexSet {
        self.value(name, |text| {
            let patterns = text.split(',').map(str::trim);
            let patterns = patterns.filter(|pattern| !pattern.is_empty());
            let whole: Vec<_> = patterns
                .map(|pattern| compiled(pattern).map(|regex| regex.as_str().to_owned()))
                .collect::<Result<_, _>>()?;
            RegexSetBuilder::new(whole)
                .case_insensitive(true)
                .build()
                .map_err(|error| error.to_string())
        })
    }

    fn pattern(&mut self, name: &'static str) -> Option<Regex> {
        self.value(name, |text| {
            let pattern = Some(text).filter(|text| !text.is_empty());
            pattern.map(compiled).transpose()
        })
    }

    fn store(&mut self, name: &'static str, option: &'static str) -> Option<PathBuf> {
        let written = self.written(name);
        if self.raw.unusable.contains(name) {
            return Some(PathBuf::new());
        }
        let text = Some(&written.text).filter(|text| !text.is_empty())?;
        let path = Path::new(text);
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        if !absolute.is_dir() {
            self.faults.push(SettingsError::Missing {
                option,
                what: "directory",
                path: text.clone(),
                origin: written.origin.clone(),
            });
        }
        Some(absolute)
    }
}

/// What is found rather than configured.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    /// Cores that this process may use.
    pub(crate) cores: usize,
    /// Its accelerators.
    pub(crate) devices: Vec<FoundDevice>,
    /// The variable that says which of them processes see, if it is set.
    pub(crate) visible_devices: Option<String>,
    /// The server's own executable, whose `worker` command is a host.
    pub(crate) executable: PathBuf,
}

/// Makes settings of what was written.
///
/// # Errors
/// Every fault: those of the sources, then those of values in the order of their use.
pub(crate) fn resolve(raw: &Raw, machine: &Machine) -> Result<Settings, Vec<SettingsError>> {
    let mut reader = Reader {
        raw,
        faults: raw.faults.clone(),
        #[cfg(test)]
        asked: std::collections::BTreeSet::new(),
    };
    let settings = read(&mut reader, machine);
    #[cfg(test)]
    tests::keys_in_force_are_the_keys_read(&reader.asked);
    match settings {
        Some(settings) if reader.faults.is_empty() => Ok(settings),
        _ => Err(reader.faults),
    }
}

fn read(reader: &mut Reader<'_>, machine: &Machine) -> Option<Settings> {
    // These two are obeyed where the layers are made.
    let _obeyed = (
        reader.flag("enable_envvars_config"),
        reader.flag("use_env_allowed_urls"),
    );
    let model_store = reader.store("model_store", "model-store");
    reader.store("workflow_store", "workflow-store");
    // Where the file cannot be read it may well name a store.
    if model_store.is_none() && !reader.raw.file_is_lost() {
        reader.faults.push(SettingsError::NoModelStore);
    }
    let http = read_http(reader, machine.cores);
    let allowed_urls = reader.patterns("allowed_urls");
    let any_url_allowed = reader.written("allowed_urls").origin == DEFAULT;
    let load_policy = reader
        .choice("load_policy", &["any", "weights-only", "strict"])
        .and_then(|name| LoadPolicy::from_str(&name).ok())
        .unwrap_or(LoadPolicy::Any);
    let trust = read_trust(reader);
    let unpack_limits = UnpackLimits {
        max_entries: reader.whole("max_unpacked_files"),
        max_total_bytes: reader.whole("max_unpacked_size"),
        ..UnpackLimits::default()
    };
    let max_download_bytes = reader.whole("max_download_size");
    let download_limit = reader.seconds("download_timeout");
    let defaults = ModelDefaults {
        workers: Some(reader.size("default_workers_per_model")).filter(|workers| *workers > 0),
        response_timeout: reader.seconds("default_response_timeout"),
        startup_timeout: reader.seconds("default_startup_timeout"),
        unregister_timeout: reader.seconds("unregister_model_timeout"),
        job_queue_size: reader.size("job_queue_size"),
        handler: reader.text("default_service_handler"),
        isolation: reader
            .choice("worker_isolation", &["process", "thread"])
            .and_then(|name| Isolation::from_str(&name).ok()),
        gather: reader
            .choice("batch_gather", &["auto", "fixed", "strict"])
            .and_then(|name| Gather::from_str(&name).ok())
            .unwrap_or(Gather::Auto),
        quarantine_after: u32::try_from(reader.whole("quarantine_after")).unwrap_or(u32::MAX),
    };
    let resources = reader.value("rate_limit_resources", parse_resources);
    let sequence_headers = SequenceHeaders {
        id: reader.header_name("ts_header_key_sequence_id"),
        start: reader.header_name("ts_header_key_sequence_start"),
        end: reader.header_name("ts_header_key_sequence_end"),
    };
    let written = reader.written("models");
    let per_model = parse_overrides(&written.text).unwrap_or_else(|reasons| {
        for reason in reasons {
            reader.fault("models", &written, reason);
        }
        PerModel::new()
    });
    let saved_models = reader.value("model_snapshot", snapshots::parse_saved);
    let hidden_environment = reader.pattern("blacklist_env_vars");
    let hosts = HostConfig {
        executable: machine.executable.clone(),
        python: reader.text("python").map(PathBuf::from),
        home: reader.text("model_server_home").map(PathBuf::from),
        zygote: reader.flag("zygote"),
        preload_modules: reader.value("preload_modules", module_names),
        cores: machine.cores,
        devices: read_devices(reader, machine, hidden_environment.as_ref()),
        visible_devices: visible_to_hosts(machine, hidden_environment.as_ref()).map(str::to_owned),
        service_envelope: reader
            .choice("service_envelope", &["body", "json", "kserve", "kservev2"]),
        decode_input_request: reader.flag("decode_input_request"),
        limit_max_image_pixels: reader.flag("limit_max_image_pixels"),
        max_response_bytes: reader.whole("max_response_size"),
        hidden_environment,
        secret_variables: KEYS
            .iter()
            .filter(|key| key.secret)
            .map(Key::variable)
            .collect(),
        server_version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let startup_models = StartupModels::parse(&reader.written("load_models").text);
    let enable_model_api = reader.flag("enable_model_api");
    let restore_models = reader.flag("restore_models");
    let token_authorization = !reader.flag("disable_token_authorization");
    let token_lifetime = reader.minutes("token_expiration_min");
    let tokens = read_tokens(reader);
    let metrics = read_metrics(reader);
    let logs = read_logs(reader);
    let trusted_proxies = reader.value("trusted_proxies", Proxies::parse);
    let drain_timeout = reader.seconds("drain_timeout");
    let shutdown_grace = reader.seconds("shutdown_grace");
    let worker_stop_timeout = reader.seconds("worker_stop_timeout");
    let ping_requires_ready = reader.flag("ping_requires_ready");
    let exit_on_model_failure = reader.flag("exit_on_model_failure");
    Some(Settings {
        http: http?,
        model_store: model_store?,
        startup_models,
        enable_model_api,
        restore_models,
        saved_models,
        token_authorization,
        token_lifetime,
        tokens,
        metrics,
        visible_devices: machine.visible_devices.clone(),
        logs,
        trusted_proxies,
        drain_timeout,
        shutdown_grace,
        worker_stop_timeout,
        ping_requires_ready,
        exit_on_model_failure,
        any_url_allowed,
        allowed_urls,
        load_policy,
        trust,
        unpack_limits,
        max_download_bytes,
        download_limit,
        defaults,
        per_model,
        hosts,
        resources,
        sequence_headers,
    })
}

/// Which archives are taken.
fn read_trust(reader: &mut Reader<'_>) -> Trust {
    let keys = reader.value("trusted_keys", |text| {
        let paths = text.split(',').map(str::trim);
        TrustedKeys::read(paths.filter(|path| !path.is_empty()).map(Path::new))
    });
    let require_signature = reader.flag("require_signature");
    if require_signature && keys.is_empty() {
        let written = reader.written("require_signature");
        let reason = "nobody's signature would count: `trusted_keys` names no key";
        reader.fault("require_signature", &written, reason);
    }
    Trust {
        require_sha256: reader.flag("require_sha256"),
        allowed: reader.value("allowed_sha256", read_digests),
        keys,
        require_signature,
    }
}

/// The digests of a file as `sha256sum` writes it; `None` without a file.
fn read_digests(path: &str) -> Result<Option<BTreeSet<Digest>>, String> {
    if path.trim().is_empty() {
        return Ok(None);
    }
    let text = fs_err::read_to_string(path).map_err(|error| error.to_string())?;
    let lines = text
        .lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line.trim()));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let digests = lines.map(|(number, line)| {
        let digest = line.split_whitespace().next().unwrap_or_default();
        let digest = digest.parse::<Digest>();
        digest.map_err(|reason| format!("line {number} of `{path}`: {reason}"))
    });
    digests.collect::<Result<_, _>>().map(Some)
}

/// Where the operator's tokens are.
fn read_tokens(reader: &mut Reader<'_>) -> KeySources {
    let mut tokens = KeySources {
        file: reader.text("token_file").map(PathBuf::from),
        ..KeySources::default()
    };
    for (kind, key) in [
        (TokenKind::Inference, "inference_token"),
        (TokenKind::Management, "management_token"),
    ] {
        reader.value(key, |text| tokens.add(kind, text));
    }
    tokens
}

fn read_logs(reader: &mut Reader<'_>) -> LogSettings {
    LogSettings {
        filter: reader.value("log_filter", checked_filter),
        format: match reader.choice("log_format", &["plain", "json"]).as_deref() {
            Some("json") => Format::Json,
            _ => Format::Plain,
        },
        marked: match reader
            .choice("log_request_ids", &["none", "server", "all"])
            .as_deref()
        {
            Some("none") => MarkedLines::None,
            Some("all") => MarkedLines::All,
            _ => MarkedLines::Server,
        },
        max_file_bytes: reader.whole("log_file_size"),
        files_kept: reader.size("log_files_kept"),
    }
}

/// The expression, for the whole of a text.
fn compiled(pattern: &str) -> Result<Regex, String> {
    Regex::new(&format!("^(?:{pattern})$")).map_err(|error| {
        // The words come last, below a drawing.
        let words = error.to_string();
        let words = words.rsplit("error: ").next().unwrap_or_default();
        format!("`{pattern}` is not a regular expression: {}", words.trim())
    })
}

/// `name:count` between commas.
fn parse_resources(text: &str) -> Result<Vec<ResourceDemand>, String> {
    let entries = text
        .split(',')
        .map(str::trim)
        .filter(|entry| !entry.is_empty());
    entries
        .map(|entry| {
            let (name, count) = entry.rsplit_once(':').unwrap_or((entry, ""));
            let count = count.trim().parse().ok().filter(|count| *count > 0);
            match (name.trim(), count) {
                (name, Some(count)) if !name.is_empty() => Ok(ResourceDemand {
                    name: name.to_owned(),
                    count,
                }),
                _ => Err(format!(
                    "`{entry}` is not a name and a count above zero, as `gpu_memory:2`"
                )),
            }
        })
        .collect()
}

/// The devices that workers may use: those named, else those found and visible.
fn read_devices(reader: &mut Reader<'_>, machine: &Machine, hidden: Option<&Regex>) -> Vec<u32> {
    let named = reader.value("devices", parse_ids);
    let limit = reader.value("number_of_gpu", |text| match text.trim() {
        "" => Ok(None),
        number => match usize::from_str(number) {
            Ok(limit) => Ok(Some(limit)),
            Err(_) => Err(format!("`{number}` is not a number of devices")),
        },
    });
    let mut devices = named.unwrap_or_else(|| {
        let count = visible(&machine.devices, visible_to_hosts(machine, hidden));
        (0..u32::try_from(count).unwrap_or(u32::MAX)).collect()
    });
    devices.truncate(limit.unwrap_or(usize::MAX));
    devices
}

/// What counts of [`VISIBLE`]: what hosts see, not what this process sees.
fn visible_to_hosts<'m>(machine: &'m Machine, hidden: Option<&Regex>) -> Option<&'m str> {
    let hidden = hidden.is_some_and(|hidden| hidden.is_match(VISIBLE));
    machine.visible_devices.as_deref().filter(|_| !hidden)
}

fn read_metrics(reader: &mut Reader<'_>) -> MetricSettings {
    let written = reader.written("metrics_mode").text.trim().to_owned();
    let mode = Mode::named(&written.to_ascii_lowercase());
    let config = reader.text("metrics_config").map(PathBuf::from);
    let auto_detect = reader.value("model_metrics_auto_detect", |text| match text.trim() {
        "" => Ok(None),
        on if on.eq_ignore_ascii_case("true") => Ok(Some(true)),
        off if off.eq_ignore_ascii_case("false") => Ok(Some(false)),
        _ => Err(format!("`{text}` is neither `true` nor `false`")),
    });
    let on = !reader.flag("disable_system_metrics");
    let interval = reader.seconds("metric_time_interval");
    MetricSettings {
        mode: mode.unwrap_or(Mode::Log),
        unknown_mode: mode.is_none().then_some(written),
        // An explicit list stays a list; without one, nobody loses a metric.
        auto_detect: auto_detect.unwrap_or(config.is_none()),
        config,
        for_triton: reader.flag("triton_metrics"),
        host_every: on.then_some(interval),
    }
}

fn read_http(reader: &mut Reader<'_>, cores: usize) -> Option<Http> {
    let ports = |http, https| DefaultPorts { http, https };
    let inference = reader.address("inference_address", ports(80, 443));
    let management = reader.address("management_address", ports(8081, 8444));
    let metrics = reader.address("metrics_address", ports(8082, 8445));
    let metrics_on = reader.flag("enable_metrics_api");
    let threads = match reader.size("number_of_netty_threads") {
        0 => cores,
        threads => threads,
    };
    let max_request_bytes = reader.size("max_request_size");
    let max_request_parts = reader.size("max_request_parts");
    let max_body_memory = reader.optional_size("max_body_memory");
    let body_limit = reader.seconds("request_body_timeout");
    let connections = Connections {
        max: reader.optional_size("max_connections"),
        max_per_client: reader.optional_size("max_connections_per_client"),
        head: reader.seconds("request_head_timeout"),
        write: reader.seconds("response_write_timeout"),
        idle: reader.seconds("idle_connection_timeout"),
        handshake: reader.seconds("tls_handshake_timeout"),
    };
    let min_compressed_bytes = reader.size("min_compressed_size");
    let cors = [
        ("access-control-allow-origin", "cors_allowed_origin"),
        ("access-control-allow-methods", "cors_allowed_methods"),
        ("access-control-allow-headers", "cors_allowed_headers"),
    ];
    let mut cors_headers = Vec::new();
    for (header, key) in cors {
        let text = reader.value(key, |text| {
            let sendable = text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
            let sendable = sendable.then(|| text.trim().to_owned());
            sendable.ok_or_else(|| format!("`{text}` cannot stand in a header"))
        });
        if !text.is_empty() {
            cors_headers.push((header, text));
        }
    }
    let source = read_key_source(reader);
    let client_ca = reader.text("client_ca_file").map(PathBuf::from);
    let (inference, management) = (inference?, management?);
    let metrics = if metrics_on { Some(metrics?) } else { None };
    if inference.is_place_of(&management) && inference != management {
        let written = reader.written("management_address");
        let reason =
            format!("`{management}` is where `{inference}` is. Write both with the same scheme");
        reader.fault("management_address", &written, reason);
    }
    if let Some(metrics) = &metrics
        && (metrics.is_place_of(&inference) || metrics.is_place_of(&management))
    {
        let written = reader.written("metrics_address");
        let reason = format!("`{metrics}` is taken by another API of this server");
        reader.fault("metrics_address", &written, reason);
    }
    let source = source.unwrap_or_else(|| Source::Generated {
        names: generated_names([&inference, &management].into_iter().chain(&metrics)),
    });
    Some(Http {
        inference,
        management,
        metrics,
        threads,
        connections,
        tls: TlsSettings { source, client_ca },
        max_request_bytes,
        max_request_parts,
        max_body_memory,
        body_limit,
        min_compressed_bytes,
        cors: cors_headers,
    })
}

/// Where the key of TLS is from: a key store, else two files, else nowhere.
fn read_key_source(reader: &mut Reader<'_>) -> Option<Source> {
    let kind = reader.written("keystore_type");
    let kinds = ["PKCS12", "P12", "PFX", "JKS"];
    if !kinds
        .iter()
        .any(|known| kind.text.trim().eq_ignore_ascii_case(known))
    {
        let reason = format!(
            "`{}` is not a type of key store that is read. Use `PKCS12`",
            kind.text
        );
        reader.fault("keystore_type", &kind, reason);
    }
    let keystore = reader.text("keystore").map(PathBuf::from);
    let password = SecretString::from(reader.written("keystore_pass").text);
    let key = reader.text("private_key_file").map(PathBuf::from);
    let chain = reader.text("certificate_file").map(PathBuf::from);
    match (keystore, key, chain) {
        (Some(file), ..) => Some(Source::Keystore { file, password }),
        (None, Some(key), Some(chain)) => Some(Source::Pem { key, chain }),
        (None, None, None) => None,
        (None, key, _) => {
            let (set, unset) = match key {
                Some(_) => ("private_key_file", "certificate_file"),
                None => ("certificate_file", "private_key_file"),
            };
            let written = reader.written(set);
            reader.fault(set, &written, format!("`{unset}` is needed as well"));
            None
        }
    }
}

/// The names that a generated certificate is for: those that clients on this machine use, and those
/// of the addresses.
fn generated_names<'a>(addresses: impl Iterator<Item = &'a Address>) -> Vec<String> {
    let mut names = vec![
        "localhost".to_owned(),
        "127.0.0.1".to_owned(),
        "::1".to_owned(),
    ];
    for address in addresses {
        if let Address::Tcp { host, .. } = address
            && !address.is_wildcard()
            && !host.contains('%')
            && !names.contains(host)
        {
            names.push(host.clone());
        }
    }
    names
}

/// Dotted names between commas.
fn module_names(text: &str) -> Result<Vec<String>, String> {
    let names = text.split(',').map(str::trim);
    let names = names.filter(|name| !name.is_empty()).map(|name| {
        let is_word = |word: &str| {
            !word.is_empty()
                && !word.starts_with(|c: char| c.is_ascii_digit())
                && word.chars().all(|c| c.is_alphanumeric() || c == '_')
        };
        if name.split('.').all(is_word) {
            Ok(name.to_owned())
        } else {
            Err(format!("`{name}` is not the name of a module"))
        }
    });
    names.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::raw::{Effect, KEYS};
    use super::*;

    /// Called by every test that resolves anything.
    pub(super) fn keys_in_force_are_the_keys_read(asked: &BTreeSet<&'static str>) {
        let mut in_force: BTreeSet<_> = KEYS
            .iter()
            .filter(|key| key.effect == Effect::InForce)
            .map(|key| key.name)
            .collect();
        // Checked to exist although workflows are not served yet.
        in_force.insert("workflow_store");
        assert_eq!(*asked, in_force);
    }

    fn resolved(pairs: &[(&str, &str)]) -> Result<Settings, Vec<SettingsError>> {
        resolve(
            &raw(pairs),
            &Machine {
                cores: 3,
                devices: vec![FoundDevice::default(); 4],
                visible_devices: Some("0,1,2".to_owned()),
                executable: PathBuf::from("/torchserve"),
            },
        )
    }

    fn raw(pairs: &[(&str, &str)]) -> Raw {
        let mut raw = Raw::default();
        for key in KEYS {
            let written = Written {
                text: key.default.to_owned(),
                origin: DEFAULT.to_owned(),
            };
            raw.values.insert(key.name, written);
        }
        raw.values.insert(
            "model_store",
            Written {
                text: "/".to_owned(),
                origin: "test".to_owned(),
            },
        );
        for (name, text) in pairs {
            let written = Written {
                text: (*text).to_owned(),
                origin: "test".to_owned(),
            };
            raw.values.insert(find(name).unwrap().name, written);
        }
        raw
    }

    #[test]
    fn the_defaults_are_those_documented() {
        let settings = resolved(&[]).unwrap();
        assert_eq!(settings.http.inference.to_string(), "http://127.0.0.1:8080");
        assert_eq!(settings.http.threads, 3);
        assert_eq!(settings.http.max_request_bytes, 6_553_500);
        assert_eq!(settings.defaults.job_queue_size, 100);
        assert_eq!(settings.defaults.workers, None);
        assert!(settings.token_authorization && !settings.enable_model_api);
        assert!(settings.allowed_urls.is_match("HTTPS://host/x.mar"));
        assert!(!settings.allowed_urls.is_match("x.mar"));
    }

    #[test]
    fn all_faults_are_told_at_once_with_their_origin() {
        let faults = resolved(&[
            ("model_store", "/no such folder"),
            ("job_queue_size", "0"),
            ("max_request_size", "6e6"),
            ("allowed_urls", "("),
            ("enable_model_api", "yes"),
            ("management_address", "ftp://h"),
            ("worker_isolation", "fork"),
            ("preload_modules", "torch, a b"),
            ("models", "{"),
            ("log_filter", "=="),
            ("token_expiration_min", "-1"),
        ])
        .unwrap_err();
        assert_eq!(faults.len(), 11, "{faults:#?}");
        let text = faults
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("\n");
        assert!(
            text.contains("--model-store directory not found: /no such folder"),
            "{text}"
        );
        assert!(
            text.contains("`0` is not a whole number from 1 to 10000000 (test)"),
            "{text}"
        );
    }

    /// A valid value that is not the default.
    /// Made by openssl.
    const TRUSTED_KEY: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/trusted_key.pem"
    );

    fn sample(key: &super::super::raw::Key) -> String {
        let named = match key.name {
            "load_models" => "a.mar",
            "preload_modules" => "os",
            "rate_limit_resources" => "gpu:1",
            "number_of_gpu" => "1",
            "devices" => "0",
            "log_filter" => "debug",
            "model_metrics_auto_detect" => "false",
            "log_request_ids" => "all",
            "trusted_proxies" => "10.0.0.0/8",
            "models" => r#"{"m": {"1": {"minWorkers": 1}}}"#,
            "model_store" => "/tmp",
            "model_snapshot" => r#"{"modelCount": 0, "models": {}}"#,
            "inference_token" | "management_token" => "long-enough",
            "allowed_sha256" => "/dev/null",
            "trusted_keys" => TRUSTED_KEY,
            "keystore_type" => "jks",
            _ => "",
        };
        if !named.is_empty() {
            return named.to_owned();
        }
        match key.kind {
            Kind::Flag => (key.default != "true").to_string(),
            Kind::Whole { .. } => (key.default.parse::<u64>().unwrap() + 1).to_string(),
            Kind::Real { .. } => "7".to_owned(),
            Kind::Address => "http://127.0.0.1:7007".to_owned(),
            Kind::Choice(choices) => (*choices.last().unwrap()).to_owned(),
            Kind::Text | Kind::Path | Kind::Json => "x".to_owned(),
            Kind::Pattern | Kind::Patterns => "x.*".to_owned(),
        }
    }

    #[test]
    fn every_key_in_force_changes_what_is_resolved() {
        let shown = |pairs: &[(&str, &str)]| format!("{:?}", resolved(pairs).unwrap());
        for key in KEYS.iter().filter(|key| key.effect == Effect::InForce) {
            // Obeyed where the layers are made; tested there.
            if ["enable_envvars_config", "use_env_allowed_urls"].contains(&key.name) {
                continue;
            }
            // Nothing without a key store, and never shown; tests/it/tls.rs opens one with them.
            if ["keystore_pass", "keystore_type"].contains(&key.name) {
                continue;
            }
            let sample = sample(key);
            let mut pairs = match key.name {
                // Without a key it is a fault.
                "require_signature" => vec![("trusted_keys", TRUSTED_KEY)],
                // One is not enough.
                "certificate_file" => vec![("private_key_file", "x")],
                "private_key_file" => vec![("certificate_file", "x")],
                _ => Vec::new(),
            };
            let before = match key.name {
                "require_signature" => shown(&pairs),
                _ => shown(&[]),
            };
            pairs.push((key.name, &sample));
            assert!(shown(&pairs) != before, "`{}` changes nothing", key.name);
        }
    }

    #[test]
    fn what_was_glued_together_is_asked_about() {
        let faults = resolved(&[("job_queue_size", "5max_request_size=7")]).unwrap_err();
        let fault = faults[0].to_string();
        assert!(
            fault.ends_with("(test). Is a line break missing before `max_request_size`?"),
            "{fault}"
        );
    }

    #[test]
    fn a_wrong_address_hides_no_other_fault() {
        let faults = resolved(&[
            ("metrics_address", "nowhere"),
            ("inference_address", "unix:x"),
            ("max_request_size", "-1"),
            ("cors_allowed_origin", "\u{e4}"),
        ]);
        assert_eq!(faults.unwrap_err().len(), 4);
    }

    #[test]
    fn a_store_in_quotes_is_shown_as_it_was_taken_cf_03() {
        let faults = resolved(&[("model_store", "\"/tmp\"")]).unwrap_err();
        assert_eq!(
            faults[0].to_string(),
            "--model-store directory not found: \"/tmp\" (test). Quotes and blanks around it \
             belong to it: [\"/tmp\"]"
        );
    }

    #[test]
    fn a_missing_store_is_told_in_the_known_words() {
        let faults = resolved(&[("model_store", "")]).unwrap_err();
        assert_eq!(faults, [SettingsError::NoModelStore]);
    }

    #[test]
    fn the_metrics_api_needs_an_address_of_its_own() {
        let clash = [("metrics_address", "http://127.0.0.1:8081")];
        let faults = resolved(&clash).unwrap_err();
        assert!(
            faults[0].to_string().contains("metrics_address"),
            "{faults:?}"
        );
        assert!(resolved(&[clash[0], ("enable_metrics_api", "false")]).is_ok());
    }

    #[test]
    fn devices_are_those_named_or_those_seen_up_to_the_number_asked_for() {
        let devices = |pairs: &[(&str, &str)]| resolved(pairs).unwrap().devices().to_vec();
        assert_eq!(devices(&[]), [0, 1, 2]);
        assert_eq!(devices(&[("number_of_gpu", "2")]), [0, 1]);
        assert_eq!(devices(&[("number_of_gpu", "9")]), [0, 1, 2]);
        assert_eq!(devices(&[("number_of_gpu", "0")]), [0; 0]);
        assert_eq!(devices(&[("devices", "7,5")]), [7, 5]);
        assert_eq!(devices(&[("devices", "7,5"), ("number_of_gpu", "1")]), [7]);
        assert_eq!(
            devices(&[("blacklist_env_vars", "CUDA_.*")]),
            [0, 1, 2, 3],
            "workers do not see the variable"
        );
        for (key, text) in [
            ("number_of_gpu", "all"),
            ("number_of_gpu", "-1"),
            ("devices", "0,0"),
        ] {
            assert_eq!(resolved(&[(key, text)]).unwrap_err().len(), 1, "{text}");
        }
    }

    #[test]
    fn a_secret_is_never_shown() {
        let raw = raw(&[("keystore_pass", "hunter2")]);
        let shown: Vec<_> = raw.shown().collect();
        assert!(shown.contains(&("keystore_pass", "set".to_owned(), "test")));
        assert!(!raw.warnings().join("\n").contains("hunter2"));
    }
}
