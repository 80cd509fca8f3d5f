//! Registering, scaling, describing and removing models (*torchserve-contract* 5.1–5.7).

use std::time::Duration;

use actix_web::http::StatusCode;
use actix_web::{HttpRequest, HttpResponse, web};
use bytes::Bytes;
use serde::Serialize;
use ts_serving::{
    Change, Description, LiveLimits, RankDescription, Registration, Scaled, Scaling, ServingError,
    Which, WorkerDescription,
};
use ts_types::{Classify as _, ErrorClass, InferRequest, ModelName, Part, RequestId, RequestKind};
use ts_types::{Isolation, Runtime, Urgency, Version};

use crate::auth::{Action, TokenKind};
use crate::rest::query::{self, Origin, Parameters};
use crate::rest::{Edge, RestError, body, operations, respond};
use crate::telemetry::Gpus;

/// Entries of a page, at most and unless asked otherwise.
const PAGE: i64 = 100;

/// Bounds of limits that a call changes: those of the settings of the same names.
const MOST_REQUESTS: u64 = 10_000_000;
const MOST_MILLIS: u64 = 2_147_483_000;

/// Answered while a pool is being changed.
const UPDATING: &str = "Processing worker updates...";

/// Answered when a pool has the workers it should have, but not all of them are up.
const IN_PROGRESS: &str = "Workers scaling in progress...";

/// Answers a call and tells its caller, also of one that failed, what else there is to know.
pub(super) async fn told(
    parameters: Parameters,
    id: &RequestId,
    answer: impl AsyncFnOnce(&Parameters) -> Result<HttpResponse, RestError>,
) -> HttpResponse {
    // In a box: predictions, which take the same way, would be copied with room for it.
    let answered = Box::pin(answer(&parameters)).await;
    let mut response = answered.unwrap_or_else(|error| respond::failure(&error, id));
    parameters.warnings().tell(&mut response);
    response
}

/// The outcome of a change, and a warning if it does not outlive the server.
fn outcome<T>(change: Change<T>, parameters: &Parameters) -> T {
    if change.unsaved.is_some() {
        // Why is in the log: it names files of the server.
        parameters.warn("the change could not be saved and will not survive a restart".to_owned());
    }
    change.outcome
}

/// GET `/models`.
pub(super) fn list(edge: &Edge, query: &Parameters) -> HttpResponse {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Entry {
        model_name: ModelName,
        model_url: String,
    }
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Page {
        #[serde(skip_serializing_if = "Option::is_none")]
        next_page_token: Option<String>,
        models: Vec<Entry>,
    }
    query.warn_unknown(operations::LISTING);
    let in_range = |limit: &i64| {
        let fits = (0..=PAGE).contains(limit);
        if !fits {
            query.warn(format!("`limit` is not from 0 to {PAGE}; it is {PAGE}"));
        }
        fits
    };
    let limit = query.number("limit").filter(in_range).unwrap_or(PAGE);
    let start = query.number("next_page_token").unwrap_or(0).max(0);
    let size = |number| usize::try_from(number).unwrap_or(usize::MAX);
    let page = edge.management.list(size(start), size(limit));
    let entry = |(model_name, model_url)| Entry {
        model_name,
        model_url,
    };
    let page = Page {
        next_page_token: page.next.map(|next| next.to_string()),
        models: page.models.into_iter().map(entry).collect(),
    };
    respond::json(StatusCode::OK, &page)
}

/// The parameters of POST `/models`: of a JSON body if there is one, else of the query.
///
/// # Errors
/// A body that does not arrive or is none.
pub(super) async fn parameters(
    edge: &Edge,
    request: &HttpRequest,
    payload: web::Payload,
) -> Result<Parameters, RestError> {
    let content_type = body::content_type(request)
        .split(';')
        .next()
        .unwrap_or_default()
        .trim();
    if content_type.eq_ignore_ascii_case("application/json") {
        let body = body::collect(request, payload, &edge.intake).await?;
        Parameters::of_json(&body.bytes)
    } else {
        Ok(Parameters::of_query(request.query_string()))
    }
}

/// POST `/models`.
pub(super) async fn register(
    edge: &Edge,
    parameters: &Parameters,
) -> Result<HttpResponse, RestError> {
    let registration = registration(parameters)?;
    let done = outcome(edge.management.register(registration).await?, parameters);
    let (model, version, workers) = (&done.model, &done.version, done.workers);
    Ok(match (workers, done.ready) {
        (0, _) => respond::status_line(
            StatusCode::OK,
            &format!(
                "Model \"{model}\" Version: {version} registered with 0 initial workers. Use scale \
                 workers API to add workers for the model."
            ),
        ),
        (_, true) => respond::status_line(
            StatusCode::OK,
            &format!(
                "Model \"{model}\" Version: {version} registered with {workers} initial workers"
            ),
        ),
        (_, false) => respond::status_line(StatusCode::ACCEPTED, UPDATING),
    })
}

pub(crate) fn registration(parameters: &Parameters) -> Result<Registration, RestError> {
    parameters.warn_unknown(operations::REGISTRATION);
    let url = parameters
        .get("url")
        .ok_or(RestError::MissingParameter { name: "url" })?;
    if url.is_empty() {
        return Err(ServingError::EmptyUrl.into());
    }
    let text = |name| {
        parameters
            .get(name)
            .filter(|text| !text.is_empty())
            .map(str::to_owned)
    };
    let runtime = parameters.get("runtime").map(|name| {
        name.parse::<Runtime>().map_err(|_| RestError::BadRuntime {
            value: name.to_owned(),
        })
    });
    let isolation = parameters
        .get("worker_isolation")
        .map(|name| name.parse::<Isolation>())
        .transpose()?;
    // Below zero means the default: TorchServe uses -1 for it.
    let unsigned = |name| {
        parameters
            .number(name)
            .and_then(|number| u64::try_from(number).ok())
    };
    let size = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    if parameters.number("batch_size").is_some_and(|size| size < 1) {
        parameters.warn("`batch_size` is below 1; it is left out".to_owned());
    }
    Ok(Registration {
        url: url.to_owned(),
        sha256: parameters.get("sha256").map(str::to_owned),
        s3_sse_kms: parameters.flag("s3_sse_kms", false),
        stray_parameters: stray(parameters, url),
        model_name: text("model_name"),
        handler: text("handler"),
        runtime: runtime.transpose()?,
        batch_size: unsigned("batch_size").filter(|size| *size > 0).map(size),
        max_batch_delay: unsigned("max_batch_delay").map(Duration::from_millis),
        response_timeout: unsigned("response_timeout").map(Duration::from_secs),
        startup_timeout: unsigned("startup_timeout").map(Duration::from_secs),
        isolation,
        autoscale: switch(parameters)?,
        initial_workers: parameters
            .number("initial_workers")
            .map(|workers| usize::try_from(workers).unwrap_or(0)),
        synchronous: parameters.flag("synchronous", true),
        ..Registration::default()
    })
}

/// The parameters that nobody knows, if the URL has parameters of its own: it was then perhaps not
/// percent-encoded, and these are the rest of it.
fn stray(parameters: &Parameters, url: &str) -> Vec<String> {
    if parameters.origin() == Origin::Body || !(url.contains("://") && url.contains('?')) {
        return Vec::new();
    }
    let unknown = parameters.unknown(operations::REGISTRATION);
    unknown.map(query::shown).collect()
}

/// The parameter `autoscale`. It is ours, so nobody relies on odd values of it.
fn switch(parameters: &Parameters) -> Result<Option<bool>, RestError> {
    let text = parameters.get("autoscale").map(str::to_ascii_lowercase);
    match text.as_deref() {
        None => Ok(None),
        Some("true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        Some(_) => Err(RestError::BadSwitch { name: "autoscale" }),
    }
}

/// PUT `/models/{m}[/{v}]`.
pub(super) async fn scale(
    edge: &Edge,
    query: &Parameters,
    model: &str,
    version: Option<&str>,
) -> Result<HttpResponse, RestError> {
    query.warn_unknown(operations::SCALING_BY_NAME);
    let model = ModelName::new(model)?;
    let version = version
        .or_else(|| query.get("model_version"))
        .map(Version::new)
        .transpose()?;
    let scaling = scaling(query)?;
    let change = edge.management.scale(&model, version.as_ref(), scaling);
    let scaled = outcome(change.await?, query);
    let of = version
        .map(|version| format!(", version: {version}"))
        .unwrap_or_default();
    Ok(match scaled {
        Scaled::Updating => respond::status_line(StatusCode::ACCEPTED, UPDATING),
        Scaled::InProgress => respond::status_line(StatusCode::PARTIAL_CONTENT, IN_PROGRESS),
        Scaled::Limited => {
            let text = format!("Limits changed for model: {model}{of}");
            respond::status_line(StatusCode::OK, &text)
        }
        Scaled::Done { min_workers } => {
            let text = format!("Workers scaled to {min_workers} for model: {model}{of}");
            respond::status_line(StatusCode::OK, &text)
        }
    })
}

pub(crate) fn scaling(query: &Parameters) -> Result<Scaling, RestError> {
    let limits = live_limits(query)?;
    let (min, max) = (query.number("min_worker"), query.number("max_worker"));
    let autoscale = switch(query)?;
    // With what is there now only the core can compare.
    let least = min.or((autoscale != Some(true)).then_some(1));
    if let (Some(min), Some(max)) = (least, max)
        && max < min
    {
        return Err(ServingError::WorkerRange.into());
    }
    let size = |value| usize::try_from(value).map_err(|_| RestError::NegativeWorkers { value });
    // Without any parameter, or with such as TorchServe knows, it is a call to scale.
    let names_workers = ["min_worker", "max_worker", "autoscale"]
        .iter()
        .any(|name| query.get(name).is_some());
    Ok(Scaling {
        resizes: names_workers || limits == LiveLimits::default(),
        limits,
        min_workers: min.map(size).transpose()?,
        max_workers: max.map(size).transpose()?,
        autoscale,
        // Below zero means without a limit.
        drain: query
            .number("timeout")
            .map(|seconds| u64::try_from(seconds).map_or(Duration::MAX, Duration::from_secs)),
        synchronous: query.flag("synchronous", false),
    })
}

/// Limits that change while the model is served. The parameters are ours, so nobody relies on odd
/// values of them.
fn live_limits(query: &Parameters) -> Result<LiveLimits, RestError> {
    let within = |name, least: u64, most: u64| {
        let Some(text) = query.get(name) else {
            return Ok(None);
        };
        match text.trim().parse() {
            Ok(number) if (least..=most).contains(&number) => Ok(Some(number)),
            _ => Err(RestError::BadLimit { name, least, most }),
        }
    };
    let count = |name| {
        let number = within(name, 1, MOST_REQUESTS)?;
        // Checked: it fits any address.
        Ok::<_, RestError>(number.and_then(|number| usize::try_from(number).ok()))
    };
    Ok(LiveLimits {
        batch_size: count("batch_size")?,
        max_batch_delay: within("max_batch_delay", 0, MOST_MILLIS)?.map(Duration::from_millis),
        response_timeout: within("response_timeout", 1, MOST_MILLIS / 1000)?
            .map(Duration::from_secs),
        job_queue_size: count("job_queue_size")?,
    })
}

/// PUT `/models/{m}/{v}/set-default`.
pub(super) async fn set_default(
    edge: &Edge,
    query: &Parameters,
    model: &str,
    version: &str,
) -> Result<HttpResponse, RestError> {
    query.warn_unknown(&[]);
    let (model, version) = (ModelName::new(model)?, Version::new(version)?);
    let change = edge.management.set_default(&model, &version).await?;
    outcome(change, query);
    let text =
        format!("Default version successfully updated for model \"{model}\" to \"{version}\"");
    Ok(respond::status_line(StatusCode::OK, &text))
}

/// DELETE `/models/{m}[/{v}]`.
pub(super) async fn unregister(
    edge: &Edge,
    query: &Parameters,
    model: &str,
    version: Option<&str>,
) -> Result<HttpResponse, RestError> {
    query.warn_unknown(operations::UNREGISTRATION);
    let model = ModelName::new(model)?;
    let version = version.map(Version::new).transpose()?;
    let change = edge.management.unregister(&model, version.as_ref()).await?;
    outcome(change, query);
    let text = format!("Model \"{model}\" unregistered");
    Ok(respond::status_line(StatusCode::OK, &text))
}

/// GET `/token`.
pub(super) fn renew_token(edge: &Edge, query: &Parameters) -> Result<HttpResponse, RestError> {
    query.warn_unknown(operations::TOKEN);
    let kind = match query.get("type") {
        Some("inference") => TokenKind::Inference,
        Some("management") => TokenKind::Management,
        // Where there are no tokens there is none to replace, whatever the type.
        _ if !edge.guard.needs_token(Action::RenewToken) => return Err(RestError::NoSuchRoute),
        _ => return Err(RestError::RenewalUnauthorized),
    };
    edge.guard.renew(kind)?;
    Ok(HttpResponse::Ok().body("\n"))
}

/// GET `/models/{m}[/{v}]`.
pub(super) async fn describe(
    edge: &Edge,
    query: &Parameters,
    id: &RequestId,
    model: &str,
    version: Option<&str>,
) -> Result<HttpResponse, RestError> {
    query.warn_unknown(operations::CUSTOMIZED);
    let model = ModelName::new(model)?;
    let which = match version {
        None => Which::Default,
        Some("all") => Which::All,
        Some(version) => Which::One(Version::new(version)?),
    };
    let described = edge.management.describe(&model, &which)?;
    let mut described: Vec<Described> = described
        .iter()
        .map(|version| Described::of(version, &edge.gpus))
        .collect();
    if !query.flag("customized", false) || which == Which::All {
        return Ok(respond::json(StatusCode::OK, &described));
    }
    let version = match which {
        Which::One(version) => Some(version),
        Which::Default | Which::All => None,
    };
    let reply = own_description(edge, id, model, version).await?;
    if let Some(described) = described.first_mut()
        && !reply.body.is_empty()
    {
        let object: Option<serde_json::Map<_, _>> = serde_json::from_slice(&reply.body).ok();
        described.customized_metadata = Some(object.unwrap_or_default());
    }
    // Status and headers are the handler's; the body is ours.
    let body = respond::json(StatusCode::OK, &described).into_body();
    let mut response = respond::reply(reply)?;
    let json = actix_web::http::header::HeaderValue::from_static("application/json");
    response
        .headers_mut()
        .insert(actix_web::http::header::CONTENT_TYPE, json);
    Ok(response.set_body(body))
}

/// What the model's handler says about it.
async fn own_description(
    edge: &Edge,
    id: &RequestId,
    model: ModelName,
    version: Option<Version>,
) -> Result<ts_types::Reply, RestError> {
    let empty = Part {
        name: "body".to_owned(),
        content_type: String::new(),
        value: Bytes::new(),
    };
    let request = InferRequest {
        id: id.clone(),
        model: model.clone(),
        version,
        kind: RequestKind::Describe,
        parts: vec![empty],
        headers: vec![("describe".to_owned(), "True".to_owned())],
        urgency: Urgency::default(),
    };
    edge.inference
        .infer(request, None)
        .await
        // A description in parts is its first one.
        .map(|answer| answer.reply)
        .map_err(|error| match error {
            ServingError::Refused { .. } => ServingError::NoWorkerToDescribe { model }.into(),
            lost if lost.class() == ErrorClass::WorkerLost => RestError::NotDescribed(lost),
            other => other.into(),
        })
}

/// A model version in the order of members that TorchServe has. What this server does not have is
/// told as switched off.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Described {
    model_name: ModelName,
    model_version: Version,
    model_url: String,
    runtime: Runtime,
    min_workers: usize,
    max_workers: usize,
    batch_size: usize,
    max_batch_delay: u128,
    response_timeout: u64,
    startup_timeout: u64,
    max_retry_timeout_in_sec: u64,
    client_timeout_in_mills: u128,
    parallel_type: &'static str,
    parallel_level: u32,
    device_type: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    device_ids: Option<Vec<u32>>,
    continuous_batching: bool,
    use_job_ticket: bool,
    use_venv: bool,
    stateful: bool,
    #[serde(rename = "sequenceMaxIdleMSec")]
    sequence_max_idle_msec: u128,
    #[serde(rename = "sequenceTimeoutMSec")]
    sequence_timeout_msec: u128,
    max_num_sequence: usize,
    max_sequence_job_queue_size: usize,
    loaded_at_startup: bool,
    worker_isolation: Isolation,
    async_communication: bool,
    autoscale: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    quarantined: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_failure: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_limit_mb: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_limit: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limits_enforced_by: Option<&'static str>,
    workers: Vec<DescribedWorker>,
    job_queue_status: QueueStatus,
    #[serde(skip_serializing_if = "Option::is_none")]
    customized_metadata: Option<serde_json::Map<String, serde_json::Value>>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DescribedWorker {
    id: String,
    start_time: String,
    status: &'static str,
    memory_usage: u64,
    pid: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ranks: Vec<DescribedRank>,
    gpu: bool,
    gpu_usage: String,
    isolation: Isolation,
    device: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<u32>,
    generation: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_failure: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DescribedRank {
    rank: u32,
    pid: u32,
    memory_usage: u64,
    device: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct QueueStatus {
    remaining_capacity: usize,
    pending_requests: usize,
}

impl Described {
    fn of(version: &Description, gpus: &Gpus) -> Self {
        let limits = &version.limits;
        let scheduling = &version.scheduling;
        let sequences = scheduling.sequences.as_ref();
        let millis = |limit: Option<Duration>| limit.unwrap_or_default().as_millis();
        Self {
            model_name: version.model.clone(),
            model_version: version.version.clone(),
            model_url: version.url.clone(),
            runtime: version.runtime,
            min_workers: limits.min_workers,
            max_workers: limits.max_workers,
            batch_size: limits.batch_size,
            max_batch_delay: limits.max_batch_delay.as_millis(),
            response_timeout: limits.response_timeout.as_secs(),
            startup_timeout: limits.startup_timeout.as_secs(),
            max_retry_timeout_in_sec: limits.max_retry_timeout.as_secs(),
            client_timeout_in_mills: limits.client_timeout.unwrap_or_default().as_millis(),
            parallel_type: version.parallel.map_or("", |(kind, _)| kind),
            parallel_level: version.parallel.map_or(0, |(_, level)| level),
            device_type: version
                .device_type
                .map(ts_types::DeviceType::as_str)
                .unwrap_or_default(),
            device_ids: version.device_ids.clone(),
            continuous_batching: version.continuous_batching,
            use_job_ticket: scheduling.job_ticket,
            use_venv: false,
            stateful: sequences.is_some(),
            sequence_max_idle_msec: millis(sequences.map(|policy| policy.max_idle)),
            sequence_timeout_msec: millis(sequences.and_then(|policy| policy.timeout)),
            max_num_sequence: sequences.map_or(0, |policy| policy.max_sequences),
            max_sequence_job_queue_size: sequences.map_or(0, |policy| policy.max_queued),
            loaded_at_startup: version.loaded_at_startup,
            worker_isolation: version.isolation,
            async_communication: version.async_communication,
            autoscale: limits.autoscale,
            quarantined: version.quarantined.clone(),
            last_failure: version.last_failure.clone(),
            memory_limit_mb: limits.hosts.memory_bytes.map(|bytes| bytes >> 20),
            cpu_limit: limits
                .hosts
                .cpu_millis
                .map(|millis| f64::from(millis) / 1000.0),
            limits_enforced_by: version.host_limits_by,
            workers: version
                .workers
                .iter()
                .map(|worker| DescribedWorker::of(worker, gpus))
                .collect(),
            job_queue_status: QueueStatus {
                remaining_capacity: version.remaining_capacity,
                pending_requests: version.pending_requests,
            },
            customized_metadata: None,
        }
    }
}

impl DescribedWorker {
    fn of(worker: &WorkerDescription, gpus: &Gpus) -> Self {
        let started = jiff::Timestamp::try_from(worker.started).unwrap_or_default();
        let gpu = |id: &u32| format!("gpu:{id}");
        let or = |none: &str, some: &mut dyn Iterator<Item = String>| {
            let some: Vec<String> = some.collect();
            if some.is_empty() {
                none.to_owned()
            } else {
                some.join(", ")
            }
        };
        let rank = |rank: &RankDescription| DescribedRank {
            rank: rank.rank,
            pid: rank.pid,
            memory_usage: rank.memory_bytes,
            device: worker
                .devices
                .get(rank.rank as usize)
                .map_or_else(|| "cpu".to_owned(), gpu),
        };
        Self {
            id: worker.id.to_string(),
            start_time: started.strftime("%Y-%m-%dT%H:%M:%S.%3fZ").to_string(),
            status: if worker.ready { "READY" } else { "UNLOADING" },
            memory_usage: worker.memory_bytes,
            pid: worker.pid.unwrap_or_default(),
            ranks: worker.ranks.iter().map(rank).collect(),
            gpu: !worker.devices.is_empty(),
            gpu_usage: or("N/A", &mut worker.devices.iter().map(|id| gpus.tell(*id))),
            isolation: worker.isolation,
            device: or("cpu", &mut worker.devices.iter().map(gpu)),
            threads: worker.threads,
            generation: worker.generation,
            last_failure: worker.last_failure.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_parameters_of_a_registration_fall_back() {
        let query = "url=x.mar&batch_size=dd&max_batch_delay=junk&initial_workers=-1\
             &synchronous=-1&response_timeout=-1&startup_timeout=0&model_name=";
        let read = registration(&Parameters::of_query(query)).unwrap();
        assert_eq!((read.batch_size, read.max_batch_delay), (None, None));
        assert_eq!((read.initial_workers, read.synchronous), (Some(0), false));
        assert_eq!(
            (read.response_timeout, read.startup_timeout),
            (None, Some(Duration::ZERO))
        );
        assert_eq!(read.model_name, None);
        let read = registration(&Parameters::of_query("url=x.mar")).unwrap();
        assert_eq!((read.initial_workers, read.synchronous), (None, true));
    }

    #[test]
    fn a_registration_needs_a_url_and_a_known_runtime() {
        let refused = |query| registration(&Parameters::of_query(query)).unwrap_err();
        assert_eq!(refused("").to_string(), "Parameter url is required.");
        assert_eq!(refused("url=").to_string(), "empty url");
        let text = refused("url=x&runtime=Python").to_string();
        assert_eq!(text, "Invalid RuntimeType value: Python");
    }

    #[test]
    fn bounds_of_a_scaling_are_read_as_the_contract_says() {
        let read = |query| scaling(&Parameters::of_query(query));
        let bounds = |query| read(query).map(|s| (s.min_workers, s.max_workers)).unwrap();
        assert_eq!(bounds(""), (None, None));
        assert_eq!(bounds("min_worker=nan&max_worker=3"), (None, Some(3)));
        assert_eq!(bounds("min_worker=0"), (Some(0), None));
        assert_eq!(
            read("autoscale=TRUE&max_worker=0").unwrap().autoscale,
            Some(true)
        );
        assert!(matches!(
            read("autoscale=1"),
            Err(RestError::BadSwitch { .. })
        ));
        for range in ["max_worker=0", "max_worker=-1", "min_worker=2&max_worker=1"] {
            let error = read(range).unwrap_err();
            assert_eq!(
                error.to_string(),
                "max_worker cannot be less than min_worker."
            );
        }
        assert!(matches!(
            read("min_worker=-1"),
            Err(RestError::NegativeWorkers { value: -1 })
        ));
    }

    #[test]
    fn limits_alone_leave_the_workers_as_they_are() {
        let read = |query: &str| scaling(&Parameters::of_query(query));
        let limits = LiveLimits {
            batch_size: Some(4),
            max_batch_delay: Some(Duration::ZERO),
            response_timeout: Some(Duration::from_secs(9)),
            job_queue_size: Some(7),
        };
        let query = "batch_size=4&max_batch_delay=0&response_timeout=9&job_queue_size=7";
        let scaling = read(query).unwrap();
        assert_eq!((scaling.resizes, scaling.limits), (false, limits));
        assert!(!read("batch_size=4&synchronous=true").unwrap().resizes);
        for also in [
            "",
            "x=1",
            "batch_size=4&min_worker=2",
            "batch_size=4&max_worker=nan",
        ] {
            assert!(read(also).unwrap().resizes, "{also}");
        }
        for odd in ["0", "-1", "two", "", "1.5", "99999999999999999999999"] {
            for name in ["batch_size", "response_timeout", "job_queue_size"] {
                let text = read(&format!("{name}={odd}")).unwrap_err().to_string();
                assert!(text.contains(&format!("`{name}`")), "{text}");
            }
        }
        assert!(read("max_batch_delay=-1").is_err());
    }

    #[test]
    fn a_worker_is_told_as_clients_read_it() {
        let worker = WorkerDescription {
            id: 9000,
            started: std::time::UNIX_EPOCH + Duration::from_millis(1_500),
            ready: true,
            pid: Some(7),
            memory_bytes: 5,
            ranks: Vec::new(),
            isolation: Isolation::Process,
            devices: vec![2],
            threads: Some(4),
            generation: 1,
            last_failure: None,
        };
        let json = serde_json::to_string(&DescribedWorker::of(&worker, &Gpus::default())).unwrap();
        let expected = r#"{"id":"9000","startTime":"1970-01-01T00:00:01.500Z","status":"READY","memoryUsage":5,"pid":7,"gpu":true,"gpuUsage":"gpuId::2","isolation":"process","device":"gpu:2","threads":4,"generation":1}"#;
        assert_eq!(json, expected);
        let rank = |rank, pid, memory_bytes| RankDescription {
            rank,
            pid,
            memory_bytes,
        };
        let group = WorkerDescription {
            ranks: vec![rank(0, 7, 3), rank(1, 8, 2)],
            devices: vec![2, 3],
            ..worker
        };
        let json = serde_json::to_value(DescribedWorker::of(&group, &Gpus::default())).unwrap();
        assert_eq!(
            (&json["device"], &json["memoryUsage"]),
            (&"gpu:2, gpu:3".into(), &5.into())
        );
        let second = serde_json::json!({"rank": 1, "pid": 8, "memoryUsage": 2, "device": "gpu:3"});
        assert_eq!(json["ranks"][1], second);
    }
}
