//! Every key of `config.properties`: name, type, unit, default and what it does. One table feeds
//! the parser, the example file, the reference page, `torchserve config` and the warnings.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::{SettingsError, log4j, models};
use crate::redact;

/// What the text of a value has to be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kind {
    /// Any text.
    Text,
    /// A file or folder.
    Path,
    /// `true` or `false`, in any case.
    Flag,
    /// A whole number within bounds.
    Whole {
        /// What it counts.
        unit: &'static str,
        /// Least value.
        min: u64,
        /// Greatest value.
        max: u64,
    },
    /// A number above zero.
    Real {
        /// What it counts.
        unit: &'static str,
    },
    /// `http://host[:port]`, `https://host[:port]` or `unix:/path`.
    Address,
    /// One of these texts.
    Choice(&'static [&'static str]),
    /// A regular expression.
    Pattern,
    /// Regular expressions between commas.
    Patterns,
    /// A JSON object.
    Json,
}

impl Kind {
    /// The kind in words, with its unit.
    pub(crate) fn describe(self) -> String {
        match self {
            Self::Text => "text".to_owned(),
            Self::Path => "path".to_owned(),
            Self::Flag => "`true` or `false`".to_owned(),
            Self::Whole { unit: "", min, max } => format!("{min} to {max}"),
            Self::Whole { unit, min, max } => format!("{unit}, {min} to {max}"),
            Self::Real { unit } => format!("{unit}, above 0"),
            Self::Address => {
                "`http://host[:port]`, `https://host[:port]` or `unix:/path`".to_owned()
            }
            Self::Choice(choices) => format!("`{}`", choices.join("`, `")),
            Self::Pattern => "regular expression".to_owned(),
            Self::Patterns => "regular expressions".to_owned(),
            Self::Json => "JSON".to_owned(),
        }
    }

    /// The key whose line was glued to this value, where no value of this kind has a `=`.
    fn glued_key(self, text: &str) -> Option<&'static str> {
        let plain = matches!(
            self,
            Self::Flag | Self::Whole { .. } | Self::Real { .. } | Self::Choice(_) | Self::Address
        );
        let (before, _) = text.split_once('=').filter(|_| plain)?;
        let before = before.trim_end();
        let names = KEYS.iter().map(|key| key.name);
        names
            .filter(|name| before.ends_with(name))
            .max_by_key(|name| name.len())
    }
}

/// Whether a key does anything.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Effect {
    /// It does what its description says.
    InForce,
    /// It is accepted and does nothing; why.
    None(&'static str),
}

/// One key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key {
    /// As written in the file.
    pub(crate) name: &'static str,
    /// Type of the value.
    pub(crate) kind: Kind,
    /// Default as it would be written; empty means unset.
    pub(crate) default: &'static str,
    /// What it does, in one or two sentences.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "read by the test that keeps the page")
    )]
    pub(crate) doc: &'static str,
    /// An environment variable may replace it.
    pub(crate) from_environment: bool,
    /// The option of the command line that sets it.
    pub(crate) option: Option<&'static str>,
    /// Whether it does anything.
    pub(crate) effect: Effect,
    /// The value is never shown.
    pub(crate) secret: bool,
    /// Not a key of TorchServe.
    pub(crate) ours: bool,
}

impl Key {
    const fn environment(mut self) -> Self {
        self.from_environment = true;
        self
    }

    const fn option(mut self, option: &'static str) -> Self {
        self.option = Some(option);
        self
    }

    const fn without_effect(mut self, why: &'static str) -> Self {
        self.effect = Effect::None(why);
        self
    }

    const fn secret(mut self) -> Self {
        self.secret = true;
        self
    }

    const fn ours(mut self) -> Self {
        self.ours = true;
        self
    }

    /// The variable that replaces it (*torchserve-contract* 2.1).
    pub(crate) fn variable(&self) -> String {
        match self.name {
            "token_expiration_min" => "TS_TOKEN_EXPIRATION_TIME_MIN".to_owned(),
            name if name.starts_with("ts_") => name.to_ascii_uppercase(),
            name => format!("TS_{}", name.to_ascii_uppercase()),
        }
    }

    /// Whether its variable counts in any case, and not only where the file lets variables replace
    /// keys (*torchserve-contract* 1.7). Those of tokens are ours, and secrets come that way.
    pub(crate) fn variable_always_counts(&self) -> bool {
        matches!(
            self.name,
            "ts_open_inference_protocol"
                | "model_server_home"
                | "token_file"
                | "inference_token"
                | "management_token"
        )
    }
}

const fn key(name: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Key {
    Key {
        name,
        kind,
        default,
        doc,
        from_environment: false,
        option: None,
        effect: Effect::InForce,
        secret: false,
        ours: false,
    }
}

const fn count(min: u64, max: u64) -> Kind {
    Kind::Whole { unit: "", min, max }
}

const fn seconds(min: u64) -> Kind {
    Kind::Whole {
        unit: "seconds",
        min,
        max: 2_147_483,
    }
}

const fn bytes(min: u64) -> Kind {
    Kind::Whole {
        unit: "bytes",
        min,
        max: 1 << 50,
    }
}

const NO_GRPC: &str = "gRPC is not served yet";
const FOR_PEOPLE: &str = "it is for people who read snapshots";
/// Of everything that only Java would read; said once for all of it.
pub(crate) const NO_JVM: &str =
    "this server has no Java virtual machine (what is logged is set by `log_filter`)";
const OWN_COLLECTOR: &str = "host metrics are collected by the server itself";

/// Every key, in the order of the reference page.
pub(crate) const KEYS: &[Key] = &[
    // Addresses
    key("inference_address", Kind::Address, "http://127.0.0.1:8080", "Where the inference API listens: `http://host[:port]` (80 where no port is said), `https://host[:port]` for TLS (443), an IPv6 address in brackets, or `unix:/path`. The same place as `management_address` makes one listener of all APIs. Port 0 takes a free port.").environment(),
    key("management_address", Kind::Address, "http://127.0.0.1:8081", "Where the management API listens; port 8081 where none is said, 8444 with `https`.").environment(),
    key("metrics_address", Kind::Address, "http://127.0.0.1:8082", "Where the metrics API listens; port 8082 where none is said, 8445 with `https`. It has to differ from the other two.").environment(),
    key("grpc_inference_address", Kind::Text, "127.0.0.1", "Where the inference API listens for gRPC.").environment().without_effect(NO_GRPC),
    key("grpc_inference_port", count(0, 65_535), "7070", "Port of the inference API for gRPC.").environment().without_effect(NO_GRPC),
    key("grpc_management_address", Kind::Text, "127.0.0.1", "Where the management API listens for gRPC.").environment().without_effect(NO_GRPC),
    key("grpc_management_port", count(0, 65_535), "7071", "Port of the management API for gRPC.").environment().without_effect(NO_GRPC),
    key("grpc_inference_max_connection_age_ms", Kind::Text, "", "Age at which gRPC connections are closed.").environment().without_effect(NO_GRPC),
    key("grpc_inference_max_connection_age_grace_ms", Kind::Text, "", "Grace for running calls of such a connection.").environment().without_effect(NO_GRPC),
    key("grpc_management_max_connection_age_ms", Kind::Text, "", "Age at which gRPC connections are closed.").environment().without_effect(NO_GRPC),
    key("grpc_management_max_connection_age_grace_ms", Kind::Text, "", "Grace for running calls of such a connection.").environment().without_effect(NO_GRPC),
    key("enable_grpc_ssl", Kind::Flag, "false", "TLS on the gRPC ports.").environment().without_effect(NO_GRPC),
    key("number_of_netty_threads", count(0, 1024), "0", "Threads that serve HTTP; 0 means one for each core.").environment(),
    key("netty_client_threads", count(0, 1024), "0", "Threads that talk to workers.").environment().without_effect("every worker has a thread of its own"),
    // Models
    key("model_store", Kind::Path, "", "Folder that archives are looked up in. Needed, here or as `--model-store`.").environment().option("--model-store"),
    key("workflow_store", Kind::Path, "", "Folder that workflow archives are looked up in; the model store unless set.").environment().without_effect("workflows are not served yet").option("--workflow-store"),
    key("load_models", Kind::Text, "", "Models loaded at start: `ALL`, or names between commas, each `file.mar`, `name=file.mar`, a folder or a URL.").environment().option("--models"),
    key("models", Kind::Json, "", "Settings of single models: `{\"model\": {\"version\": {\"minWorkers\": 1, \"maxWorkers\": 2, \"batchSize\": 4, \"maxBatchDelay\": 100, \"responseTimeout\": 120, \"startupTimeout\": 120, \"deviceType\": \"gpu\", \"deviceIds\": [0, 1], \"defaultVersion\": true}}}`; delays in milliseconds, time-outs in seconds. `defaultVersion` counts for models loaded at start."),
    key("default_workers_per_model", count(0, 4096), "0", "Workers of a model that nothing else is said about. 0 means one for each device, or core where there is none, for models loaded at start, and none for models registered over the API.").environment(),
    key("default_response_timeout", seconds(1), "120", "How long one batch may run.").environment(),
    key("default_startup_timeout", seconds(1), "120", "How long a worker may take to load its model.").environment(),
    key("unregister_model_timeout", seconds(1), "120", "How long ending the workers of a model may take.").environment(),
    key("job_queue_size", count(1, 10_000_000), "100", "Requests that may wait for one model version.").environment(),
    key("default_service_handler", Kind::Text, "", "Handler of archives whose manifest names none.").environment(),
    key("service_envelope", Kind::Choice(&["body", "json", "kserve", "kservev2"]), "", "Envelope around every handler.").environment(),
    key("decode_input_request", Kind::Flag, "true", "Hand text and JSON bodies to handlers decoded.").environment(),
    key("limit_max_image_pixels", Kind::Flag, "true", "Keep Pillow's limit on the size of images.").environment(),
    key("allowed_urls", Kind::Patterns, "file://.*|http(s)?://.*", "URLs that models may be fetched from (`docs/model-sources.md`): regular expressions, full match, letter case ignored. Object stores (`s3://.*`) have to be listed. The environment variable needs `use_env_allowed_urls`.").environment(),
    key("install_py_dep_per_model", Kind::Flag, "false", "Install the packages that an archive asks for.").environment().without_effect("packages of an archive are not installed yet"),
    key("batch_gather", Kind::Choice(&["auto", "fixed", "strict"]), "auto", "When an idle worker waits for a fuller batch. `auto`: only where experience says that more requests come and are worth the wait, at most `maxBatchDelay`; `fixed`: for all of `maxBatchDelay` from the arrival of the oldest request; `strict`: for all of it from when the worker looks, as TorchServe.").environment().ours(),
    key("rate_limit_resources", Kind::Text, "", "Resources that models share, as `name:count` between commas. A model names what each of its batches needs in `rate_limiter`; a resource that is not listed has the size of the largest single demand.").environment().ours(),
    key("worker_isolation", Kind::Choice(&["process", "thread"]), "", "`process`: a host process for each worker; `thread`: the workers of a model version share one. Unset, the kind of model decides.").environment().ours(),
    key("number_of_gpu", Kind::Text, "", "Devices to use at most; 0 keeps all models on the processor. Unset, all that are found and visible (`CUDA_VISIBLE_DEVICES`).").environment(),
    key("devices", Kind::Text, "", "Ids of the devices to use, between commas, instead of those found: for devices that the server does not find itself.").environment().ours(),
    key("quarantine_after", count(1, 1_000_000), "10", "Workers of a model that may be lost in a row, with no batch answered in between, before no more are started. `quarantineAfter` in an archive replaces it.").environment().ours(),
    key("python", Kind::Path, "", "Python interpreter of the handlers; unset, one is looked for in the environment."),
    key("zygote", Kind::Flag, "true", "Fork the hosts of Python models from one process that has imported what they need, instead of starting each anew.").environment().ours(),
    key("preload_modules", Kind::Text, "torch,torchvision,numpy,PIL.Image", "Modules that the zygote imports when a model is started whose sources name them. They must not start threads when they are imported. Empty: none.").environment().ours(),
    key("blacklist_env_vars", Kind::Pattern, "", "Environment variables, by full match of the name, that workers do not see.").environment(),
    key("max_download_size", bytes(1), "68719476736", "Bytes that a downloaded archive may have.").environment().ours(),
    key("download_timeout", seconds(1), "3600", "How long the download of an archive may take in all. Besides, connecting may take 10 s, and the source may bring nothing for 60 s.").environment().ours(),
    key("max_unpacked_size", bytes(1), "68719476736", "Bytes that an archive may unpack to.").environment().ours(),
    key("max_unpacked_files", count(1, 100_000_000), "100000", "Files and folders that an archive may unpack to.").environment().ours(),
    // Requests
    key("max_request_size", bytes(1), "6553500", "Bytes that a request body may have.").environment(),
    key("max_response_size", bytes(1), "6553500", "Bytes that an answer of a worker may have.").environment(),
    key("max_request_parts", count(1, 1_000_000), "256", "Fields that a form may have.").environment().ours(),
    key("min_compressed_size", bytes(0), "1024", "Bytes from which a response body is compressed for clients that accept it; 0 switches compression off.").environment().ours(),
    key("max_body_memory", bytes(0), "0", "Bytes that all request bodies in the server may take at one time, while they arrive, are decompressed and wait; beyond that, requests get 503. 0: a quarter of the memory that the server may use.").environment().ours(),
    key("max_connections", count(0, 10_000_000), "0", "Connections of clients at one time; beyond that, new ones are refused. 0: as many as files may be open (`ulimit -n`), but for those that the server needs itself.").environment().ours(),
    key("max_connections_per_client", count(0, 10_000_000), "0", "Connections from one address at one time. 0: no limit. Behind a proxy all clients have one address.").environment().ours(),
    key("request_head_timeout", seconds(1), "10", "How long the head of a request may take to arrive.").environment().ours(),
    key("request_body_timeout", seconds(1), "60", "How long a request body may bring nothing, and how long it may take before it has to bring 1 KiB a second on average.").environment().ours(),
    key("response_write_timeout", seconds(1), "60", "How long a client may take nothing of its answer.").environment().ours(),
    key("idle_connection_timeout", seconds(1), "75", "How long a connection without a request is kept.").environment().ours(),
    key("tls_handshake_timeout", seconds(1), "10", "How long setting up TLS may take.").environment().ours(),
    key("cors_allowed_origin", Kind::Text, "", "`Access-Control-Allow-Origin` of every response: one origin or `*`. Of several between commas, the one that asks is answered.").environment(),
    key("cors_allowed_methods", Kind::Text, "", "`Access-Control-Allow-Methods` of every response.").environment(),
    key("cors_allowed_headers", Kind::Text, "", "`Access-Control-Allow-Headers` of every response.").environment(),
    key("trusted_proxies", Kind::Text, "", "Proxies whose word on the caller's address is believed, for the access log: addresses and networks between commas, such as `10.0.0.0/8,::1`, and `unix` for whoever comes through a unix socket. They have to set `X-Forwarded-For`, or `Forwarded` and take away the other.").environment().ours(),
    // Access
    key("enable_model_api", Kind::Flag, "false", "Allow registering and unregistering models over the API.").environment().option("--enable-model-api"),
    key("disable_token_authorization", Kind::Flag, "false", "Do not ask for tokens.").environment().option("--disable-token-auth"),
    key("token_expiration_min", Kind::Real { unit: "minutes" }, "60", "How long inference and management tokens are good for.").environment(),
    key("token_file", Kind::Path, "", "File with tokens that the operator chose, in the form of `key_file.json`; each kind may have a list of them. Read again when it changes, never written. Its variable always counts (`docs/security.md`).").environment().ours(),
    key("inference_token", Kind::Text, "", "Tokens for the inference API, between commas, instead of those that the server makes. Its variable always counts.").environment().secret().ours(),
    key("management_token", Kind::Text, "", "The same for the management API.").environment().secret().ours(),
    key("load_policy", Kind::Choice(&["any", "weights-only", "strict"]), "any", "What the files of a model may make the server build out of pickles. `any`: what the handler asks for; `weights-only`: tensors and plain data; `strict`: the same, and no file may be a pickle. A model may ask for less (`loadPolicy`), never for more (`docs/security.md`).").environment().ours(),
    key("require_sha256", Kind::Flag, "false", "Register an archive only where the registration says its SHA-256 (`sha256`, or `#sha256=` after the URL), also at start.").environment().ours(),
    key("allowed_sha256", Kind::Path, "", "File with the SHA-256 of every archive that may be registered, one a line, as `sha256sum` writes them.").environment().ours(),
    key("trusted_keys", Kind::Text, "", "Public keys of those whose signatures of archives count: files in PEM, or folders of files `*.pem` and `*.pub`, between commas. A signature that is there has to be good.").environment().ours(),
    key("require_signature", Kind::Flag, "false", "Register an archive or folder only with a signature by one of `trusted_keys`.").environment().ours(),
    key("keystore", Kind::Path, "", "A PKCS#12 file whose first entry with a key is used for TLS (`docs/tls.md`). Read before `private_key_file` and `certificate_file`.").environment(),
    key("keystore_pass", Kind::Text, "changeit", "Password of the key store.").environment().secret(),
    key("keystore_type", Kind::Text, "PKCS12", "Type of the key store: `PKCS12`. A file of Java's own type `JKS` has to be converted.").environment(),
    key("certificate_file", Kind::Path, "", "Certificates for TLS in PEM, the server's own first. Where neither this nor a key store is set, `https` addresses get a generated certificate.").environment(),
    key("private_key_file", Kind::Path, "", "Private key for TLS in PEM: PKCS#8, PKCS#1 or SEC1.").environment(),
    key("client_ca_file", Kind::Path, "", "Certificates of the authorities, in PEM, whose clients may connect to `https` addresses. Unset, clients need no certificate.").environment().ours(),
    // Metrics and logs
    key("enable_metrics_api", Kind::Flag, "true", "Serve the metrics API.").environment(),
    key("metrics_mode", Kind::Text, "log", "What the log gets of the metrics, beside the page that always has them all: `log`, everything; `prometheus`, nothing; `legacy`, all but the three counters of requests. Any other text means `log`.").environment(),
    key("metrics_config", Kind::Path, "", "YAML file with the metrics that there are, their units and dimensions (`docs/metrics.md`). Unset, all of the server and those that every handler has.").environment(),
    key("model_metrics_auto_detect", Kind::Flag, "", "Accept metrics of handlers that `metrics_config` does not declare. Unset, they are accepted where no `metrics_config` is named.").environment(),
    key("disable_system_metrics", Kind::Flag, "false", "Do not collect metrics of the host.").environment(),
    key("system_metrics_cmd", Kind::Text, "", "Command that collects metrics of the host.").without_effect(OWN_COLLECTOR),
    key("metric_time_interval", seconds(1), "60", "How often metrics of the host are collected."),
    key("triton_metrics", Kind::Flag, "false", "Show metrics under the names that Triton has too (`nv_inference_*`).").environment().ours(),
    key("log_filter", Kind::Text, "info", "What is logged: a level, or levels by target, such as `info,ACCESS_LOG=off,MODEL_LOG=debug`.").environment().ours(),
    key("log_format", Kind::Choice(&["plain", "json"]), "plain", "How log lines look: as TorchServe's, or a JSON object each (`docs/logging.md`).").environment().ours(),
    key("log_request_ids", Kind::Choice(&["none", "server", "all"]), "server", "Which plain log lines end with ` request_id=` and the ids of their requests: none, those of the server, or those of handlers as well. JSON always has them.").environment().ours(),
    key("log_file_size", bytes(4096), "104857600", "Bytes from which a log file is put aside and compressed, and the next one begun; a new day does so too.").environment().ours(),
    key("log_files_kept", count(0, 10_000), "5", "Old log files that are kept of each.").environment().ours(),
    key("async_logging", Kind::Flag, "false", "Write logs on a thread of their own.").environment().without_effect("logs are always written on a thread of their own"),
    key("cpp_log_config", Kind::Path, "", "Logging of the C++ backend.").environment().without_effect("there is no C++ backend").option("--cpp-log-config"),
    // Starting and stopping
    key("shutdown_grace", seconds(0), "0", "How long the server goes on serving once it is told to stop, with `/ping` unhealthy, so that balancers look elsewhere first.").environment().ours(),
    key("drain_timeout", seconds(0), "30", "How long requests in work may take to finish when the server stops.").environment().ours(),
    key("worker_stop_timeout", seconds(0), "10", "How long the workers may take to end after that, before they are killed.").environment().ours(),
    key("ping_requires_ready", Kind::Flag, "false", "Let `/ping` tell what `/v2/health/ready` tells: every model has its workers, and the server is to go on. Otherwise workers that load count as healthy, as in TorchServe.").environment().ours(),
    key("exit_on_model_failure", Kind::Flag, "false", "End the start with an error if a model that it is to load does not come up, and wait for the workers of each.").environment().ours(),
    key("enable_envvars_config", Kind::Flag, "false", "Let environment variables replace keys."),
    key("use_env_allowed_urls", Kind::Flag, "false", "Let `TS_ALLOWED_URLS` replace `allowed_urls`."),
    key("model_snapshot", Kind::Json, "", "Models to register at start instead of those of `load_models`. Snapshots have it; it may be written by hand."),
    key("restore_models", Kind::Flag, "false", "Restore the models of the newest snapshot although a configuration file is named. Without a named file they are restored anyway.").environment().ours(),
    // Accepted for existing files
    key("prefer_direct_buffer", Kind::Flag, "false", "Hint for Java's allocator.").environment().without_effect(NO_JVM),
    key("ts_open_inference_protocol", Kind::Flag, "false", "Serve the open inference protocol.").environment().without_effect("the open inference protocol is not served yet"),
    key("ts_header_key_sequence_id", Kind::Text, "ts_request_sequence_id", "Header with the sequence id.").environment(),
    key("ts_header_key_sequence_start", Kind::Text, "ts_request_sequence_start", "Header that starts a sequence.").environment(),
    key("ts_header_key_sequence_end", Kind::Text, "ts_request_sequence_end", "Header that ends a sequence.").environment(),
    key("initial_worker_port", count(0, 65_535), "9000", "Id of the first worker.").environment().without_effect("workers have no port; ids start at 9000"),
    key("initial_distribution_port", count(0, 65_535), "29500", "First port of parallel workers.").environment().without_effect("the processes of a worker meet on a port that is free"),
    key("ipex_enable", Kind::Flag, "false", "Intel's extension for PyTorch.").environment().without_effect("a handler imports the extension itself"),
    key("ipex_gpu_enable", Kind::Flag, "false", "The same on accelerators.").environment().without_effect("a handler imports the extension itself"),
    key("cpu_launcher_enable", Kind::Flag, "false", "Run workers through PyTorch's launcher.").environment().without_effect("the server divides the cores among its workers itself"),
    key("cpu_launcher_args", Kind::Text, "", "Arguments of the launcher.").environment().without_effect("the server divides the cores among its workers itself"),
    key("model_server_home", Kind::Path, "", "Folder that holds the `ts` package; by default it is looked for beside the server and beside the Python environment.").environment(),
    key("debug", Kind::Flag, "false", "Connect to workers started by hand.").environment().without_effect("workers are always started by the server"),
    key("use_native_io", Kind::Flag, "true", "Use the platform's own event loop.").without_effect(NO_JVM),
    key("io_ratio", count(0, 100), "50", "Share of time for input and output in an event loop.").without_effect(NO_JVM),
    key("vmargs", Kind::Text, "", "Options of the Java virtual machine. Of `-Dlog4j.configurationFile=` the levels of loggers are used, as of `--log-config`. Never shown, since passwords may be among them.").secret().without_effect(NO_JVM),
    key("plugins_path", Kind::Text, "", "Java plugins.").without_effect(NO_JVM).option("--plugins-path"),
    key("version", Kind::Text, "", "Version of TorchServe that wrote a snapshot.").without_effect(FOR_PEOPLE),
    key("tsConfigFile", Kind::Path, "", "The file that the settings of a snapshot were read from.").without_effect(FOR_PEOPLE),
];

/// The key of this name.
pub(crate) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// The known name most like `name`, if one is near enough to be meant.
pub(crate) fn nearest<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    known
        .map(|candidate| (strsim::damerau_levenshtein(name, candidate), candidate))
        .filter(|(distance, candidate)| *distance <= 1 + candidate.len() / 4)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// The question that ends a warning about an unknown name, if a known one is near enough.
pub(crate) fn did_you_mean<'n>(name: &str, known: impl Iterator<Item = &'n str>) -> String {
    match nearest(name, known) {
        Some(near) => format!(". Did you mean `{near}`?"),
        None => String::new(),
    }
}

/// A value as written, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Written {
    /// The text.
    pub(crate) text: String,
    /// A file and line, an option, a variable, or `default`.
    pub(crate) origin: String,
}

/// The layered values of all known keys, what was written besides them, and what could not be read.
#[derive(Debug, Default)]
pub(crate) struct Raw {
    /// By name of a known key.
    pub(crate) values: BTreeMap<&'static str, Written>,
    /// Keys that nothing knows, with where they stand.
    pub(crate) unknown: Vec<(String, String)>,
    /// Keys that the file has more than once: the name, where it is overruled, where by.
    pub(crate) repeated: Vec<(String, String, String)>,
    /// Variables of keys that are not read, with the key that would have them read.
    pub(crate) unread_variables: Vec<(String, &'static str)>,
    /// Variables that look like those of keys.
    pub(crate) unknown_variables: Vec<String>,
    /// What is wrong with the sources themselves.
    pub(crate) faults: Vec<SettingsError>,
    /// Keys whose value could not be read, which is among the faults.
    pub(crate) unusable: BTreeSet<&'static str>,
    /// The file that was read.
    pub(crate) file: Option<ConfigFile>,
    /// What is to be said about the choice of the file.
    pub(crate) notices: Vec<String>,
}

/// The file that settings were read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConfigFile {
    /// Where it is.
    pub(crate) path: PathBuf,
    /// The operator named it; otherwise it was found.
    pub(crate) is_named: bool,
}

impl Raw {
    /// What `config.properties`, the command line or the environment say that does nothing, and
    /// what they may have meant.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let names = || KEYS.iter().map(|key| key.name);
        let mut found = Vec::new();
        for (name, overruled, by) in &self.repeated {
            found.push(format!(
                "setting `{name}` ({overruled}) is overruled by the same key further down ({by})"
            ));
        }
        for (name, origin) in &self.unknown {
            let meant = did_you_mean(name, names());
            found.push(format!(
                "unknown setting `{name}` ({origin}) is ignored{meant}"
            ));
        }
        for (variable, switch) in &self.unread_variables {
            found.push(format!(
                "variable `{variable}` is ignored: `{switch}` is not on in the configuration file"
            ));
        }
        let replaceable = KEYS.iter().filter(|key| key.from_environment);
        let variables: Vec<_> = replaceable.map(Key::variable).collect();
        for variable in &self.unknown_variables {
            let known = variables.iter().map(String::as_str);
            let meant = did_you_mean(variable, known);
            found.push(format!("unknown variable `{variable}` is ignored{meant}"));
        }
        found.extend(self.without_effect());
        if let Some(written) = self.values.get("models") {
            let origin = &written.origin;
            let unknown = models::unknown_keys(&written.text);
            found.extend(unknown.map(|told| format!("models: {told} ({origin})")));
        }
        found
    }

    /// One warning for all that has no effect for the same reason, and one for each such value that
    /// may hide another line.
    fn without_effect(&self) -> Vec<String> {
        let mut by_reason: Vec<(&str, Vec<String>)> = Vec::new();
        let mut add = |why: &'static str, what: String| match by_reason
            .iter_mut()
            .find(|(reason, _)| *reason == why)
        {
            Some((_, all)) => all.push(what),
            None => by_reason.push((why, vec![what])),
        };
        let mut hiding = Vec::new();
        for key in KEYS {
            if let (Effect::None(why), Some(written)) = (key.effect, self.values.get(key.name))
                && why != FOR_PEOPLE
                && !(key.name == "vmargs" && log4j::is_all_of(&written.text))
                && written.origin != DEFAULT
                && written.text != key.default
            {
                let (name, origin) = (key.name, &written.origin);
                add(why, format!("`{name}` ({origin})"));
                let hint = break_missing(key, &written.text);
                if !hint.is_empty() {
                    let text = &written.text;
                    hiding.push(format!("setting `{name}` ({origin}) is `{text}`{hint}"));
                }
            }
        }
        let told = by_reason.into_iter().map(|(why, all)| {
            let (settings, have) = match all.len() {
                1 => ("setting", "has"),
                _ => ("settings", "have"),
            };
            format!("{settings} {} {have} no effect: {why}", all.join(", "))
        });
        told.chain(hiding).collect()
    }

    /// Whether a file was named that cannot be read.
    pub(crate) fn file_is_lost(&self) -> bool {
        let lost = |fault: &SettingsError| {
            matches!(
                fault,
                SettingsError::NoConfigFile { .. } | SettingsError::Unreadable { .. }
            )
        };
        self.faults.iter().any(lost)
    }

    /// Every key's value with its origin, fit to be shown, in the order of [`KEYS`].
    pub(crate) fn shown(&self) -> impl Iterator<Item = (&'static str, String, &str)> {
        KEYS.iter().map(|key| {
            let (text, origin) = match self.values.get(key.name) {
                _ if self.unusable.contains(key.name) => ("", "unreadable"),
                Some(written) => (written.text.as_str(), written.origin.as_str()),
                None => ("", DEFAULT),
            };
            // Saved models fill pages, and the log tells of each anyway.
            let hidden = key.secret || key.name == "model_snapshot";
            let text = match (hidden, text.is_empty()) {
                (_, true) => "unset".to_owned(),
                (true, false) => "set".to_owned(),
                (false, false) if key.name == "load_models" => without_secrets(text),
                (false, false) => text.to_owned(),
            };
            (key.name, text, origin)
        })
    }
}

/// A list of models without the signatures of their URLs.
fn without_secrets(text: &str) -> String {
    let items = text.split(',').map(redact::url);
    items.collect::<Vec<_>>().join(",")
}

/// The question to ask about a value that the next line of the file was glued to, or nothing.
pub(crate) fn break_missing(key: &Key, text: &str) -> String {
    match key.kind.glued_key(text) {
        Some(other) => format!(". Is a line break missing before `{other}`?"),
        None => String::new(),
    }
}

/// The origin of a value that nobody wrote.
pub(crate) const DEFAULT: &str = "default";
