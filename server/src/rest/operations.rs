//! What can be asked of the server, for people and programs: the table beside the one of routes
//! (`routes.rs`), from which both descriptions of the APIs are built. A test holds the two together.

use actix_web::http::Method;

use super::Surface;

/// The listener that serves an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Api {
    /// Inference.
    Inference,
    /// Management.
    Management,
    /// Metrics.
    Metrics,
    /// Both of these two.
    InferenceOrManagement,
    /// Each of them.
    Every,
}

impl Api {
    /// Whether a listener of this surface serves it.
    pub(crate) fn is_on(self, surface: Surface) -> bool {
        match self {
            Self::Inference => surface.inference,
            Self::Management => surface.management,
            Self::Metrics => surface.metrics,
            Self::InferenceOrManagement => surface.inference || surface.management,
            Self::Every => surface != Surface::NONE,
        }
    }

    /// What people call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Inference => "Inference",
            Self::Management => "Management",
            Self::Metrics => "Metrics",
            Self::InferenceOrManagement => "Health",
            Self::Every => "Descriptions",
        }
    }
}

/// The methods that an operation answers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Methods {
    /// This one.
    One(&'static str),
    /// Every one except `OPTIONS`; described as this one.
    Any(&'static str),
}

impl Methods {
    /// Whether this is one of them.
    fn has(self, method: &Method) -> bool {
        match self {
            Self::One(one) => method.as_str().eq_ignore_ascii_case(one),
            Self::Any(_) => *method != Method::OPTIONS,
        }
    }

    /// The one to describe it by, in lower case.
    pub(crate) fn described(self) -> &'static str {
        match self {
            Self::One(method) | Self::Any(method) => method,
        }
    }
}

/// What a value may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Any text.
    Text,
    /// A whole number.
    Whole,
    /// `true` or `false`.
    Flag,
    /// One of these.
    Choice(&'static [&'static str]),
    /// A list of texts.
    Texts,
}

/// A parameter of the query, or a header. Those of the path follow from the path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Parameter {
    /// Its name.
    pub(crate) name: &'static str,
    /// A header, rather than a parameter of the query.
    pub(crate) header: bool,
    /// Without it there is an error.
    pub(crate) required: bool,
    /// What it may be.
    pub(crate) kind: Kind,
    /// What it means.
    pub(crate) doc: &'static str,
}

const fn query(name: &'static str, kind: Kind, doc: &'static str) -> Parameter {
    Parameter {
        name,
        header: false,
        required: false,
        kind,
        doc,
    }
}

const fn header(name: &'static str, kind: Kind, doc: &'static str) -> Parameter {
    Parameter {
        header: true,
        ..query(name, kind, doc)
    }
}

const fn required(parameter: Parameter) -> Parameter {
    Parameter {
        required: true,
        ..parameter
    }
}

/// What the body of a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Body {
    /// None.
    None,
    /// The model's input, of any type.
    Input,
    /// The parameters of the query, as a JSON object, if they are not there.
    Parameters,
}

/// What the body of an answer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Content {
    /// What the model's handler makes of it.
    Output,
    /// JSON of this schema.
    Json(&'static str),
    /// Text of this type.
    Text(&'static str),
}

/// An answer that is no failure.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answer {
    /// The status.
    pub(crate) status: u16,
    /// What is in it.
    pub(crate) content: Content,
    /// What it means.
    pub(crate) doc: &'static str,
}

const fn answer(status: u16, content: Content, doc: &'static str) -> Answer {
    Answer {
        status,
        content,
        doc,
    }
}

/// How TorchServe's own document has an operation (*torchserve-contract* 4.8).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Documented {
    /// Its `operationId` there.
    pub(crate) id: &'static str,
    /// The statuses that are there.
    pub(crate) statuses: &'static [u16],
}

/// One thing that can be asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operation {
    /// Where.
    pub(crate) api: Api,
    /// How.
    pub(crate) methods: Methods,
    /// The path; a name in braces stands for one segment, `{url_path}` for all that follow.
    pub(crate) path: &'static str,
    /// Its own name.
    pub(crate) id: &'static str,
    /// What it does, in a few words.
    pub(crate) summary: &'static str,
    /// What else there is to know.
    pub(crate) doc: &'static str,
    /// What may be said besides the path.
    pub(crate) parameters: &'static [Parameter],
    /// What is sent.
    pub(crate) body: Body,
    /// What may come back.
    pub(crate) answers: &'static [Answer],
    /// Statuses of failures.
    pub(crate) failures: &'static [u16],
    /// There is a better way.
    pub(crate) deprecated: bool,
    /// Its place in TorchServe's own document.
    pub(crate) torchserve: Option<Documented>,
}

const fn documented(id: &'static str, statuses: &'static [u16]) -> Option<Documented> {
    Some(Documented { id, statuses })
}

const PREDICTED: &[u16] = &[200, 404, 500, 503];
const MODEL_FAILURES: &[u16] = &[400, 404, 413, 415, 500, 503, 504, 507];
const OUTPUT: &[Answer] = &[answer(
    200,
    Content::Output,
    "The handler's answer. It chooses status, type and headers. A reply in parts is chunked, or an \
     event stream for clients that accept `text/event-stream`.",
)];
const STATUS: Content = Content::Json("Status");

const INFERENCE_HEADERS: &[Parameter] = &[
    header(
        "x-request-id",
        Kind::Text,
        "Name of the request: 1 to 128 letters, digits and `-._:~+=@`, no point first.",
    ),
    header(
        "traceparent",
        Kind::Text,
        "Place in a trace (W3C Trace Context).",
    ),
    header(
        "x-priority",
        Kind::Whole,
        "Level of the model's queue; 1 is the most urgent.",
    ),
    header(
        "x-request-timeout-ms",
        Kind::Whole,
        "How long the caller waits, in milliseconds.",
    ),
];

/// Of `GET /models`.
pub(crate) const LISTING: &[Parameter] = &[
    query("limit", Kind::Whole, "Models at most; 100 unless given."),
    query(
        "next_page_token",
        Kind::Whole,
        "Where the page before ended.",
    ),
];

/// Of `POST /models`.
pub(crate) const REGISTRATION: &[Parameter] = &[
    required(query(
        "url",
        Kind::Text,
        "An archive or folder of the model store, or a URL.",
    )),
    query(
        "model_name",
        Kind::Text,
        "Its name, unless it is the archive's own.",
    ),
    query(
        "handler",
        Kind::Text,
        "Its handler, unless it is the archive's own.",
    ),
    query(
        "runtime",
        Kind::Choice(&["python", "python3"]),
        "Its runtime, unless it is the archive's own.",
    ),
    query(
        "batch_size",
        Kind::Whole,
        "Requests in a batch at most; 1 unless given.",
    ),
    query(
        "max_batch_delay",
        Kind::Whole,
        "Milliseconds that a batch may wait for company; 100 unless given.",
    ),
    query(
        "response_timeout",
        Kind::Whole,
        "Seconds that a batch may run; 120 unless given.",
    ),
    query(
        "startup_timeout",
        Kind::Whole,
        "Seconds that loading may take; 120 unless given.",
    ),
    query(
        "initial_workers",
        Kind::Whole,
        "Workers to start; none unless given.",
    ),
    query(
        "autoscale",
        Kind::Flag,
        "Let the load move the number of workers.",
    ),
    query(
        "worker_isolation",
        Kind::Choice(&["process", "thread"]),
        "Whether workers share a process.",
    ),
    query(
        "synchronous",
        Kind::Flag,
        "Answer when the workers are ready; true unless given.",
    ),
    query(
        "sha256",
        Kind::Text,
        "What the archive's SHA-256 has to be, in hexadecimal digits.",
    ),
    query(
        "s3_sse_kms",
        Kind::Flag,
        "The archive is encrypted by S3; false unless given.",
    ),
];

/// Of `PUT /models/{model_name}/{model_version}`.
pub(crate) const SCALING: &[Parameter] = &[
    query(
        "min_worker",
        Kind::Whole,
        "Workers at least; 1 unless given.",
    ),
    query(
        "max_worker",
        Kind::Whole,
        "Workers at most; as many as at least unless given.",
    ),
    query(
        "autoscale",
        Kind::Flag,
        "Let the load move the number of workers.",
    ),
    query(
        "synchronous",
        Kind::Flag,
        "Answer when the workers are ready; false unless given.",
    ),
    query(
        "timeout",
        Kind::Whole,
        "Seconds that what waits may still be answered in; below zero without a limit.",
    ),
    query(
        "batch_size",
        Kind::Whole,
        "Requests in a batch at most, from the next batch on.",
    ),
    query(
        "max_batch_delay",
        Kind::Whole,
        "Milliseconds that a batch may wait for company, from the next batch on.",
    ),
    query(
        "response_timeout",
        Kind::Whole,
        "Seconds that a batch may run, from the next batch on.",
    ),
    query(
        "job_queue_size",
        Kind::Whole,
        "Requests that may wait, from now on.",
    ),
    query(
        "number_gpu",
        Kind::Whole,
        "Without effect, as in TorchServe.",
    ),
];

/// The same for `PUT /models/{model_name}`, where nothing else names the version.
pub(crate) const SCALING_BY_NAME: &[Parameter] = &{
    let mut all = [query(
        "model_version",
        Kind::Text,
        "The version; the default one unless given.",
    ); SCALING.len() + 1];
    let mut at = 0;
    while at < SCALING.len() {
        all[at] = SCALING[at];
        at += 1;
    }
    all
};

const SCALED: &[Answer] = &[
    answer(200, STATUS, "Scaled."),
    answer(202, STATUS, "Scaling has begun."),
    answer(206, STATUS, "Another call scales the model."),
];

const DESCRIBED: &[Answer] = &[answer(
    200,
    Content::Json("ModelDescriptions"),
    "The version or versions that were asked for.",
)];

/// Of `GET /models/{model_name}`.
pub(crate) const CUSTOMIZED: &[Parameter] = &[query(
    "customized",
    Kind::Flag,
    "Ask the model's handler for what it says of itself.",
)];

/// Of `DELETE /models/{model_name}`.
pub(crate) const UNREGISTRATION: &[Parameter] = &[
    query(
        "synchronous",
        Kind::Flag,
        "Without effect, as in TorchServe.",
    ),
    query("timeout", Kind::Whole, "Without effect, as in TorchServe."),
];

/// Of `GET /token`.
pub(crate) const TOKEN: &[Parameter] = &[required(query(
    "type",
    Kind::Choice(&["inference", "management"]),
    "Which one.",
))];

/// Of `PUT /logging`.
pub(crate) const LOGGING: &[Parameter] = &[required(query(
    "filter",
    Kind::Text,
    "A level, or levels by target, such as `info,ACCESS_LOG=off,MODEL_LOG=debug`.",
))];

const UNREGISTERED: &[Answer] = &[answer(200, STATUS, "Removed.")];

const DESCRIPTION: &[Answer] = &[answer(
    200,
    Content::Json("Document"),
    "An OpenAPI 3.0.1 document.",
)];

/// What most operations have.
const PLAIN: Operation = Operation {
    api: Api::Every,
    methods: Methods::One("get"),
    path: "",
    id: "",
    summary: "",
    doc: "",
    parameters: &[],
    body: Body::None,
    answers: &[],
    failures: &[],
    deprecated: false,
    torchserve: None,
};

/// What runs a model.
const MODEL_CALL: Operation = Operation {
    api: Api::Inference,
    methods: Methods::Any("post"),
    parameters: INFERENCE_HEADERS,
    body: Body::Input,
    answers: OUTPUT,
    failures: MODEL_FAILURES,
    ..PLAIN
};

/// What probes ask.
const PROBE: Operation = Operation {
    api: Api::InferenceOrManagement,
    ..PLAIN
};

const MODEL_PROBED: &[Answer] = &[
    answer(200, Content::Json("Readiness"), "It can."),
    answer(400, Content::Json("Readiness"), "It cannot."),
];

/// Calls of the management API.
const MANAGEMENT_CALL: Operation = Operation {
    api: Api::Management,
    ..PLAIN
};

/// Every operation.
pub(crate) const OPERATIONS: &[Operation] = &[
    Operation {
        methods: Methods::One("options"),
        path: "/",
        id: "apiDescription",
        summary: "Description of this listener's API, as TorchServe writes it",
        answers: DESCRIPTION,
        torchserve: documented("apiDescription", &[200, 500]),
        ..PLAIN
    },
    Operation {
        methods: Methods::Any("get"),
        path: "/api-description",
        id: "api-description",
        summary: "The same under its old path",
        answers: DESCRIPTION,
        deprecated: true,
        torchserve: documented("api-description", &[200, 500]),
        ..PLAIN
    },
    Operation {
        path: "/openapi.json",
        id: "openApi",
        summary: "Description of what this listener serves",
        doc: "OpenAPI 3.1, with parameters, bodies, answers and headers.",
        answers: &[answer(
            200,
            Content::Json("Document"),
            "An OpenAPI 3.1.0 document.",
        )],
        ..PLAIN
    },
    Operation {
        path: "/docs",
        id: "docs",
        summary: "The same as a page to read",
        answers: &[answer(
            200,
            Content::Text("text/html"),
            "A page that needs nothing else.",
        )],
        ..PLAIN
    },
    Operation {
        api: Api::Inference,
        methods: Methods::Any("get"),
        path: "/ping",
        id: "ping",
        summary: "Is the server healthy?",
        answers: &[answer(200, STATUS, "`Healthy`.")],
        failures: &[500],
        torchserve: documented("ping", &[200, 500]),
        ..PLAIN
    },
    Operation {
        path: "/v2/health/live",
        id: "v2_live",
        summary: "Is the server alive?",
        answers: &[answer(200, Content::Json("Liveness"), "It is.")],
        ..PROBE
    },
    Operation {
        path: "/v2/health/ready",
        id: "v2_ready",
        summary: "Can the server be sent requests?",
        doc: "Whoever may list the models is told why not.",
        answers: &[
            answer(200, Content::Json("ServerReadiness"), "It can."),
            answer(400, Content::Json("ServerReadiness"), "It cannot."),
        ],
        ..PROBE
    },
    Operation {
        path: "/v2/models/{model_name}/ready",
        id: "v2_model_ready",
        summary: "Can the default version of a model take a request?",
        answers: MODEL_PROBED,
        failures: &[404],
        ..PROBE
    },
    Operation {
        path: "/v2/models/{model_name}/versions/{model_version}/ready",
        id: "v2_version_ready",
        summary: "Can a version of a model take a request?",
        answers: MODEL_PROBED,
        failures: &[404],
        ..PROBE
    },
    Operation {
        path: "/predictions/{model_name}",
        id: "predictions",
        summary: "Predict with the default version of a model",
        doc: "A form becomes one field for each of its own; any other body is the field `body`.",
        torchserve: documented("predictions", PREDICTED),
        ..MODEL_CALL
    },
    Operation {
        path: "/predictions/{model_name}/{model_version}",
        id: "version_predictions",
        summary: "Predict with a version of a model",
        torchserve: documented("version_predictions", PREDICTED),
        ..MODEL_CALL
    },
    Operation {
        path: "/predictions/{model_name}/{model_version}/{url_path}",
        id: "path_predictions",
        summary: "The same; the handler gets the rest of the path as `url_path`",
        ..MODEL_CALL
    },
    Operation {
        api: Api::Inference,
        methods: Methods::One("options"),
        path: "/predictions/{model_name}",
        id: "describePredictions",
        summary: "Description of a model's API, as TorchServe writes it",
        answers: DESCRIPTION,
        failures: &[404],
        ..PLAIN
    },
    Operation {
        api: Api::Inference,
        methods: Methods::One("options"),
        path: "/predictions/{model_name}/{model_version}",
        id: "version_describePredictions",
        summary: "The same for a version",
        answers: DESCRIPTION,
        failures: &[404],
        ..PLAIN
    },
    Operation {
        path: "/explanations/{model_name}",
        id: "explanations",
        summary: "Explain a prediction of the default version of a model",
        ..MODEL_CALL
    },
    Operation {
        path: "/explanations/{model_name}/{model_version}",
        id: "version_explanations",
        summary: "Explain a prediction of a version of a model",
        ..MODEL_CALL
    },
    Operation {
        path: "/explanations/{model_name}/{model_version}/{url_path}",
        id: "path_explanations",
        summary: "The same; the handler gets the rest of the path as `url_path`",
        ..MODEL_CALL
    },
    Operation {
        path: "/invocations",
        id: "invocations",
        summary: "Predict, as SageMaker asks",
        doc: "The model is named by `model_name` in the query, else it is the only one that was \
              loaded at start, else it is named by the form's field `model_name`. Parameters of the \
              query reach the handler as fields.",
        parameters: &[
            query("model_name", Kind::Text, "The model."),
            INFERENCE_HEADERS[0],
            INFERENCE_HEADERS[1],
            INFERENCE_HEADERS[2],
            INFERENCE_HEADERS[3],
        ],
        ..MODEL_CALL
    },
    Operation {
        path: "/models/{model_name}/invoke",
        id: "invoke",
        summary: "Predict, as SageMaker asks an endpoint of several models",
        doc: "Parameters of the query reach the handler as fields.",
        ..MODEL_CALL
    },
    Operation {
        path: "/v1/models/{model_name}:predict",
        id: "v1_predict",
        summary: "Predict, as KServe asks",
        torchserve: documented("predictions", PREDICTED),
        ..MODEL_CALL
    },
    Operation {
        path: "/v1/models/{model_name}:explain",
        id: "v1_explain",
        summary: "Explain, as KServe asks",
        ..MODEL_CALL
    },
    Operation {
        path: "/v2/models/{model_name}/infer",
        id: "v2_infer",
        summary: "Predict, as the second version of KServe's protocol asks",
        torchserve: documented("predictions", PREDICTED),
        ..MODEL_CALL
    },
    Operation {
        path: "/v2/models/{model_name}/explain",
        id: "v2_explain",
        summary: "Explain, as the second version of KServe's protocol asks",
        ..MODEL_CALL
    },
    Operation {
        path: "/{model_name}/predict",
        id: "legacy_predict",
        summary: "Predict, as Multi Model Server had it",
        doc: "Parameters of the query reach the handler as fields.",
        deprecated: true,
        ..MODEL_CALL
    },
    Operation {
        path: "/{model_name}/{model_version}/predict",
        id: "legacy_version_predict",
        summary: "The same with a version of a model",
        deprecated: true,
        ..MODEL_CALL
    },
    Operation {
        path: "/models",
        id: "listModels",
        summary: "List models",
        parameters: LISTING,
        answers: &[answer(200, Content::Json("ModelList"), "One page of them.")],
        torchserve: documented("listModels", &[200, 500]),
        ..MANAGEMENT_CALL
    },
    Operation {
        methods: Methods::One("post"),
        path: "/models",
        id: "registerModel",
        summary: "Register a model",
        doc: "Needs `enable_model_api`.",
        parameters: REGISTRATION,
        body: Body::Parameters,
        answers: &[
            answer(200, STATUS, "Registered."),
            answer(202, STATUS, "Registered; its workers are starting."),
        ],
        failures: &[400, 404, 405, 409, 413, 415, 500, 507],
        torchserve: documented("registerModel", &[200, 202, 210, 400, 404, 409, 500]),
        ..MANAGEMENT_CALL
    },
    Operation {
        path: "/models/{model_name}",
        id: "describeModel",
        summary: "Describe the default version of a model",
        parameters: CUSTOMIZED,
        answers: DESCRIBED,
        failures: &[404, 500, 503, 504, 507],
        torchserve: documented("describeModel", &[200, 404, 500]),
        ..MANAGEMENT_CALL
    },
    Operation {
        methods: Methods::One("put"),
        path: "/models/{model_name}",
        id: "setAutoScale",
        summary: "Change the number of workers of a model",
        parameters: SCALING_BY_NAME,
        answers: SCALED,
        failures: &[400, 404, 408, 500, 507],
        torchserve: documented("setAutoScale", &[200, 202, 210, 400, 404, 500]),
        ..MANAGEMENT_CALL
    },
    Operation {
        methods: Methods::One("delete"),
        path: "/models/{model_name}",
        id: "unregisterModel",
        summary: "Remove the default version of a model",
        doc: "Needs `enable_model_api`.",
        parameters: UNREGISTRATION,
        answers: UNREGISTERED,
        failures: &[404, 405, 408, 500],
        torchserve: documented("unregisterModel", &[200, 202, 404, 408, 500]),
        ..MANAGEMENT_CALL
    },
    Operation {
        methods: Methods::One("options"),
        path: "/models/{model_name}",
        id: "describeManagement",
        summary: "Description of a model's management API, as TorchServe writes it",
        answers: DESCRIPTION,
        failures: &[404],
        ..MANAGEMENT_CALL
    },
    Operation {
        path: "/models/{model_name}/{model_version}",
        id: "version_describeModel",
        summary: "Describe a version of a model, or `all` of them",
        parameters: CUSTOMIZED,
        answers: DESCRIBED,
        failures: &[404, 500, 503, 504, 507],
        torchserve: documented("version_describeModel", &[200, 404, 500]),
        ..MANAGEMENT_CALL
    },
    Operation {
        methods: Methods::One("put"),
        path: "/models/{model_name}/{model_version}",
        id: "version_setAutoScale",
        summary: "Change the number of workers of a version",
        parameters: SCALING,
        answers: SCALED,
        failures: &[400, 404, 408, 500, 507],
        torchserve: documented("version_setAutoScale", &[200, 202, 210, 400, 404, 500]),
        ..MANAGEMENT_CALL
    },
    Operation {
        methods: Methods::One("delete"),
        path: "/models/{model_name}/{model_version}",
        id: "version_unregisterModel",
        summary: "Remove a version of a model",
        doc: "Needs `enable_model_api`.",
        parameters: UNREGISTRATION,
        answers: UNREGISTERED,
        failures: &[404, 405, 408, 500],
        torchserve: documented("version_unregisterModel", &[200, 202, 404, 408, 500]),
        ..MANAGEMENT_CALL
    },
    Operation {
        methods: Methods::One("options"),
        path: "/models/{model_name}/{model_version}",
        id: "version_describeManagement",
        summary: "The same for a version",
        answers: DESCRIPTION,
        failures: &[404],
        ..MANAGEMENT_CALL
    },
    Operation {
        methods: Methods::One("put"),
        path: "/models/{model_name}/{model_version}/set-default",
        id: "setDefault",
        summary: "Make a version the default one",
        answers: &[answer(200, STATUS, "Done.")],
        failures: &[404, 500],
        torchserve: documented("setDefault", &[200, 404, 500]),
        ..MANAGEMENT_CALL
    },
    Operation {
        path: "/models/{model_name}/batching",
        id: "batching",
        summary: "How the batches of a model come about",
        answers: &[answer(
            200,
            Content::Json("Document"),
            "Settings and recent batches.",
        )],
        failures: &[404],
        ..MANAGEMENT_CALL
    },
    Operation {
        path: "/models/{model_name}/{model_version}/batching",
        id: "version_batching",
        summary: "How the batches of a version come about",
        answers: &[answer(
            200,
            Content::Json("Document"),
            "Settings and recent batches.",
        )],
        failures: &[404],
        ..MANAGEMENT_CALL
    },
    Operation {
        path: "/v1/models/{model_name}",
        id: "v1_ready",
        summary: "Can a model take a request?",
        answers: &[answer(200, Content::Json("Readiness"), "Whether it can.")],
        failures: &[404],
        ..MANAGEMENT_CALL
    },
    Operation {
        path: "/token",
        id: "renewToken",
        summary: "Replace a token",
        doc: "The new one is in the key file. Needs the API token.",
        parameters: TOKEN,
        answers: &[answer(200, Content::Text("text/plain"), "Replaced.")],
        failures: &[400, 404, 500],
        ..MANAGEMENT_CALL
    },
    Operation {
        path: "/logging",
        id: "logging",
        summary: "What is logged",
        answers: &[answer(200, Content::Json("Logging"), "The filter.")],
        ..MANAGEMENT_CALL
    },
    Operation {
        methods: Methods::One("put"),
        path: "/logging",
        id: "changeLogging",
        summary: "Log something else",
        doc: "Until the server ends; `log_filter` is what it starts with.",
        parameters: LOGGING,
        body: Body::Parameters,
        answers: &[answer(200, Content::Json("Logging"), "The filter now.")],
        failures: &[400],
        ..MANAGEMENT_CALL
    },
    Operation {
        api: Api::Metrics,
        methods: Methods::Any("get"),
        path: "/metrics",
        id: "metrics",
        summary: "Metrics of the server and its models",
        parameters: &[query(
            "name[]",
            Kind::Texts,
            "Names of the metrics wanted; all unless given.",
        )],
        answers: &[answer(
            200,
            Content::Text("text/plain"),
            "In the format of Prometheus.",
        )],
        torchserve: documented("metrics", &[200, 500]),
        ..PLAIN
    },
];

/// The path of the operation that a request asks for, with names for what differs: the one that
/// says most of it, if there are several.
pub(crate) fn template(surface: Surface, method: &Method, path: &str) -> Option<&'static str> {
    let path = match path.trim_end_matches('/') {
        "" => "/",
        path => path,
    };
    let method = if *method == Method::HEAD {
        &Method::GET
    } else {
        method
    };
    let asked = OPERATIONS.iter().filter(|operation| {
        operation.api.is_on(surface)
            && operation.methods.has(method)
            && matches(operation.path, path)
    });
    let paths = asked.map(|operation| operation.path);
    paths.min_by_key(|path| path.matches('{').count())
}

/// Whether a path is one of this template's.
fn matches(template: &str, path: &str) -> bool {
    let (mut template, mut path) = (template.split('/'), path.split('/'));
    loop {
        match (template.next(), path.next()) {
            (None, None) => return true,
            (Some("{url_path}"), Some(_)) => return true,
            (Some(segment), Some(given)) => {
                let (start, rest) = segment.split_once('{').unwrap_or((segment, ""));
                let end = rest.split_once('}').map_or("", |(_, end)| end);
                let exact = !segment.contains('{') && given != segment;
                if exact || !given.starts_with(start) || !given.ends_with(end) {
                    return false;
                }
            }
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::rest::routes::{self, Route};

    const METHODS: [Method; 6] = [
        Method::GET,
        Method::POST,
        Method::PUT,
        Method::PATCH,
        Method::DELETE,
        Method::OPTIONS,
    ];

    /// One listener of each kind, and one of all.
    fn surfaces() -> [Surface; 4] {
        let none = Surface::NONE;
        [
            Surface {
                inference: true,
                ..none
            },
            Surface {
                management: true,
                ..none
            },
            Surface {
                metrics: true,
                ..none
            },
            Surface {
                inference: true,
                management: true,
                metrics: true,
            },
        ]
    }

    #[test]
    fn requests_are_named_by_the_operation_that_says_most() {
        let all = surfaces()[3];
        let post = |path| template(all, &Method::POST, path);
        let get = |path| template(all, &Method::GET, path);
        assert_eq!(post("/predictions/m/"), Some("/predictions/{model_name}"));
        assert_eq!(
            post("/predictions/m/1.0/a/b"),
            Some("/predictions/{model_name}/{model_version}/{url_path}")
        );
        assert_eq!(
            post("/v1/models/m:predict"),
            Some("/v1/models/{model_name}:predict")
        );
        assert_eq!(
            get("/models/m/batching"),
            Some("/models/{model_name}/batching")
        );
        assert_eq!(
            get("/models/m/2"),
            Some("/models/{model_name}/{model_version}")
        );
        assert_eq!(
            template(all, &Method::HEAD, "/v2/health/live"),
            Some("/v2/health/live")
        );
        assert_eq!(get("/nothing/there"), None);
    }

    fn serves(operation: &Operation, method: &Method) -> bool {
        match operation.methods {
            Methods::One(one) => method.as_str().eq_ignore_ascii_case(one),
            Methods::Any(_) => *method != Method::OPTIONS || operation.id == "api-description",
        }
    }

    #[test]
    fn every_path_that_the_router_takes_is_described() {
        let anywhere = [
            "predictions",
            "explanations",
            "models",
            "m",
            "1.0",
            "invoke",
            "v1",
            "v2",
            "m:predict",
            "m:explain",
            "infer",
            "explain",
            "predict",
            "set-default",
            "batching",
            "ready",
        ];
        // Of paths with four segments there are too many to put these everywhere too.
        let in_short_ones = [
            "ping",
            "invocations",
            "all",
            "token",
            "logging",
            "metrics",
            "api-description",
            "openapi.json",
            "docs",
            "health",
            "live",
        ];
        let mut paths: Vec<String> = vec![String::new()];
        let mut all = ["/", "/v2/models/m/versions/1.0/ready"]
            .map(str::to_owned)
            .to_vec();
        for segments in 1..=4 {
            let more: &[&str] = if segments < 4 { &in_short_ones } else { &[] };
            let longer = |path: &String| {
                let words = anywhere.iter().chain(more);
                words
                    .map(|word| format!("{path}/{word}"))
                    .collect::<Vec<_>>()
            };
            paths = paths.iter().flat_map(longer).collect();
            all.extend(paths.iter().cloned());
        }
        let mut seen = HashSet::new();
        for path in &all {
            for method in &METHODS {
                for surface in surfaces() {
                    let Ok(route) = routes::find(surface, method, path) else {
                        continue;
                    };
                    // That a path is there is all that this says.
                    if matches!(route, Route::Options) {
                        continue;
                    }
                    // Whatever follows is left aside.
                    let is_metrics = matches!(route, Route::Metrics);
                    let path = if is_metrics { "/metrics" } else { path };
                    let described = OPERATIONS.iter().filter(|operation| {
                        operation.api.is_on(surface)
                            && serves(operation, method)
                            && matches(operation.path, path)
                    });
                    let described: Vec<_> = described.map(|operation| operation.id).collect();
                    assert!(!described.is_empty(), "{method} {path} is not described");
                    seen.extend(described);
                }
            }
        }
        assert_eq!(seen.len(), OPERATIONS.len(), "not all are served: {seen:?}");
    }

    #[test]
    fn every_described_operation_has_a_route() {
        for operation in OPERATIONS {
            let path = operation
                .path
                .replace("{model_name}", "m")
                .replace("{model_version}", "1.0")
                .replace("{url_path}", "a/b");
            for surface in surfaces()
                .into_iter()
                .filter(|surface| operation.api.is_on(*surface))
            {
                for method in METHODS.iter().filter(|method| serves(operation, method)) {
                    let found = routes::find(surface, method, &path);
                    assert!(found.is_ok(), "{method} {path}");
                }
            }
        }
    }

    #[test]
    fn names_are_used_once() {
        let ids: HashSet<_> = OPERATIONS.iter().map(|operation| operation.id).collect();
        assert_eq!(ids.len(), OPERATIONS.len());
    }
}
