//! Descriptions of the APIs, built from the table of operations: TorchServe's own documents
//! (OpenAPI 3.0.1, *torchserve-contract* 4.8), and ours (OpenAPI 3.1) of what a listener serves.

use serde_json::{Map, Value, json};

use super::Surface;
use super::operations::{Answer, Api, Body, Content, Kind, OPERATIONS, Operation, Parameter};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// TorchServe's document of a listener.
pub(crate) fn of_listener(surface: Surface) -> Value {
    // Metrics are always in it, wherever they are served.
    let there =
        |operation: &&Operation| operation.api.is_on(surface) || operation.api == Api::Metrics;
    let description = "APIs of a server for PyTorch models: inference, management and metrics, each \
                       on its own listener.";
    torchserve(
        "TorchServe APIs",
        description,
        OPERATIONS.iter().filter(there),
    )
}

/// TorchServe's document of the management of one model.
pub(crate) fn of_management(model: &str) -> Value {
    let of_the_model = |operation: &&Operation| operation.path.starts_with("/models/{model_name}");
    torchserve(
        &format!("RESTful Management API for: {model}"),
        "Looks at one model, scales it, chooses its default version and removes it.",
        OPERATIONS.iter().filter(of_the_model),
    )
}

/// TorchServe's document of predictions with one model. Its first path is not one of the server's,
/// and is what TorchServe writes.
pub(crate) fn of_predictions(model: &str) -> Value {
    let path = || {
        json!({
            "post": {
                "operationId": model,
                "requestBody": input(),
                "responses": {
                    "200": { "description": "OK" },
                    "500": { "description": "Internal Server Error", "content": failure_3_0() },
                },
            },
        })
    };
    json!({
        "openapi": "3.0.1",
        "info": {
            "title": format!("RESTful API for: {model}"),
            "version": "1.0.0",
        },
        "paths": {
            format!("/prediction/{model}"): path(),
            "/v1/models/{model_name}:predict": path(),
            "/v2/models/{model_name}/infer": path(),
        },
    })
}

fn torchserve<'o>(
    title: &str,
    description: &str,
    operations: impl Iterator<Item = &'o Operation>,
) -> Value {
    let mut paths = Map::new();
    for operation in operations {
        let Some(documented) = operation.torchserve else {
            continue;
        };
        let mut responses = Map::new();
        for status in documented.statuses {
            let phrase = phrase(*status);
            let mut response = json!({ "description": phrase });
            if *status >= 400 {
                response["content"] = failure_3_0();
            }
            responses.insert(status.to_string(), response);
        }
        let mut described = json!({
            "summary": operation.summary,
            "operationId": documented.id,
        });
        add_request(&mut described, operation);
        described["responses"] = Value::Object(responses);
        add(&mut paths, operation, described);
    }
    json!({
        "openapi": "3.0.1",
        "info": { "title": title, "description": description, "version": VERSION },
        "paths": paths,
    })
}

/// Our document of what a listener serves. `tokens` says for which operations a token is needed.
pub(crate) fn of_what_is_served(surface: Surface, tokens: impl Fn(&Operation) -> bool) -> Value {
    let mut paths = Map::new();
    let mut any_token = false;
    for operation in OPERATIONS.iter().filter(|one| one.api.is_on(surface)) {
        let mut responses = Map::new();
        for answer in operation.answers {
            responses.insert(answer.status.to_string(), answered(operation, answer));
        }
        let mut failures = operation.failures.to_vec();
        let token = tokens(operation);
        any_token |= token;
        // A name in the path may be none.
        if (token || operation.path.contains('{')) && !failures.contains(&400) {
            failures.push(400);
            failures.sort_unstable();
        }
        for status in failures {
            responses.insert(status.to_string(), failed(operation, status));
        }
        let mut described = json!({
            "operationId": operation.id,
            "summary": operation.summary,
            "tags": [operation.api.name()],
        });
        if !operation.doc.is_empty() {
            described["description"] = operation.doc.into();
        }
        add_request(&mut described, operation);
        described["responses"] = Value::Object(responses);
        if token {
            described["security"] = json!([{ "token": [] }]);
        }
        add(&mut paths, operation, described);
    }
    let mut components = json!({ "schemas": schemas(), "headers": headers() });
    if any_token {
        components["securitySchemes"] = json!({
            "token": {
                "type": "http",
                "scheme": "bearer",
                "description": "A token of the key file that the server writes at its start.",
            },
        });
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Flambeau",
            "summary": "A server for PyTorch models",
            "version": VERSION,
        },
        "servers": [{ "url": "/" }],
        "paths": paths,
        "components": components,
    })
}

/// Adds an operation under its path and method.
fn add(paths: &mut Map<String, Value>, operation: &Operation, described: Value) {
    let mut described = described;
    if operation.deprecated {
        described["deprecated"] = true.into();
    }
    let path = paths
        .entry(operation.path)
        .or_insert_with(|| Value::Object(Map::new()));
    path[operation.methods.described()] = described;
}

/// Parameters and body.
fn add_request(described: &mut Value, operation: &Operation) {
    let in_path = operation.path.split('{').skip(1);
    let in_path = in_path.filter_map(|rest| Some(rest.split_once('}')?.0));
    let mut parameters: Vec<Value> = in_path
        .map(|name| {
            let doc = match name {
                "model_name" => "The model.",
                "model_version" => "The version.",
                _ => "Any further segments.",
            };
            json!({
                "in": "path",
                "name": name,
                "required": true,
                "description": doc,
                "schema": { "type": "string" },
            })
        })
        .collect();
    parameters.extend(operation.parameters.iter().map(|parameter| {
        json!({
            "in": if parameter.header { "header" } else { "query" },
            "name": parameter.name,
            // What is in the body need not be in the query.
            "required": parameter.required && operation.body != Body::Parameters,
            "description": parameter.doc,
            "schema": schema_of(parameter.kind),
        })
    }));
    if !parameters.is_empty() {
        described["parameters"] = parameters.into();
    }
    match operation.body {
        Body::None => {}
        Body::Input => described["requestBody"] = input(),
        Body::Parameters => {
            described["requestBody"] = json!({
                "description": "The parameters of the query; with this type they are not looked for \
                                there.",
                "content": { "application/json": { "schema": object_of(operation.parameters) } },
            });
        }
    }
}

fn input() -> Value {
    json!({
        "description": "The model's input. May be compressed (`Content-Encoding`: gzip, deflate, br \
                        or zstd).",
        "content": {
            "*/*": { "schema": { "type": "string", "format": "binary" } },
            "application/json": { "schema": {} },
            "multipart/form-data": { "schema": { "type": "object" } },
            "application/x-www-form-urlencoded": { "schema": { "type": "object" } },
        },
    })
}

fn schema_of(kind: Kind) -> Value {
    match kind {
        Kind::Text => json!({ "type": "string" }),
        Kind::Whole => json!({ "type": "integer" }),
        Kind::Flag => json!({ "type": "boolean" }),
        Kind::Choice(values) => json!({ "type": "string", "enum": values }),
        Kind::Texts => json!({ "type": "array", "items": { "type": "string" } }),
    }
}

fn object_of(parameters: &[Parameter]) -> Value {
    let properties: Map<String, Value> = parameters
        .iter()
        .map(|parameter| {
            let mut schema = schema_of(parameter.kind);
            schema["description"] = parameter.doc.into();
            (parameter.name.to_owned(), schema)
        })
        .collect();
    let required = parameters.iter().filter(|parameter| parameter.required);
    let required: Vec<_> = required.map(|parameter| parameter.name).collect();
    json!({ "type": "object", "properties": properties, "required": required })
}

fn reference(kind: &str, name: &str) -> Value {
    json!({ "$ref": format!("#/components/{kind}/{name}") })
}

fn answered(operation: &Operation, answer: &Answer) -> Value {
    let mut headers = json!({ "x-request-id": reference("headers", "x-request-id") });
    let content = match answer.content {
        Content::Output => {
            headers["server-timing"] = reference("headers", "server-timing");
            json!({
                "*/*": { "schema": { "type": "string", "format": "binary" } },
                "text/event-stream": { "schema": { "type": "string" } },
            })
        }
        Content::Json(schema) => {
            json!({ "application/json": { "schema": reference("schemas", schema) } })
        }
        Content::Text(kind) => json!({ kind: { "schema": { "type": "string" } } }),
    };
    add_warning(&mut headers, operation);
    json!({ "description": answer.doc, "headers": headers, "content": content })
}

fn add_warning(headers: &mut Value, operation: &Operation) {
    if operation.api == Api::Management {
        headers["x-warning"] = reference("headers", "x-warning");
    }
}

fn failed(operation: &Operation, status: u16) -> Value {
    let mut headers = json!({ "x-request-id": reference("headers", "x-request-id") });
    add_warning(&mut headers, operation);
    if status == 503 {
        for name in ["retry-after", "x-refusal-reason"] {
            headers[name] = reference("headers", name);
        }
    }
    let mut failed = json!({ "description": phrase(status), "headers": headers });
    // A body that is too large is answered without one.
    if status != 413 {
        let schema = reference("schemas", "Error");
        failed["content"] = json!({ "application/json": { "schema": schema } });
    }
    failed
}

fn failure_3_0() -> Value {
    json!({ "application/json": { "schema": error() } })
}

fn phrase(status: u16) -> &'static str {
    match status {
        // Of TorchServe's document; no server sends it.
        210 => "Partial Success",
        status => actix_web::http::StatusCode::from_u16(status)
            .ok()
            .and_then(|status| status.canonical_reason())
            .unwrap_or("Failure"),
    }
}

fn error() -> Value {
    json!({
        "type": "object",
        "required": ["code", "type", "message"],
        "properties": {
            "code": { "type": "integer", "description": "The status." },
            "type": { "type": "string", "description": "The class of the failure." },
            "message": { "type": "string", "description": "What is wrong, and what helps." },
        },
    })
}

fn schemas() -> Value {
    let text = || json!({ "type": "string" });
    let whole = || json!({ "type": "integer" });
    json!({
        "Error": error(),
        "Status": {
            "type": "object",
            "required": ["status"],
            "properties": { "status": text() },
        },
        "Readiness": {
            "type": "object",
            "required": ["name", "ready"],
            "properties": { "name": text(), "ready": { "type": "boolean" } },
        },
        "Liveness": {
            "type": "object",
            "required": ["live"],
            "properties": { "live": { "type": "boolean" } },
        },
        "ServerReadiness": {
            "type": "object",
            "required": ["ready"],
            "properties": {
                "ready": { "type": "boolean" },
                "starting": { "type": "boolean" },
                "stopping": { "type": "boolean" },
                "models": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["name", "reason"],
                        "properties": { "name": text(), "version": text(), "reason": text() },
                    },
                },
                "more": { "type": "integer" },
            },
        },
        "ModelList": {
            "type": "object",
            "required": ["models"],
            "properties": {
                "nextPageToken": text(),
                "models": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["modelName", "modelUrl"],
                        "properties": { "modelName": text(), "modelUrl": text() },
                    },
                },
            },
        },
        "ModelDescriptions": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["modelName", "modelVersion", "workers"],
                "properties": {
                    "modelName": text(),
                    "modelVersion": text(),
                    "modelUrl": text(),
                    "minWorkers": whole(),
                    "maxWorkers": whole(),
                    "batchSize": whole(),
                    "maxBatchDelay": whole(),
                    "responseTimeout": whole(),
                    "startupTimeout": whole(),
                    "workers": { "type": "array", "items": { "type": "object" } },
                    "jobQueueStatus": { "type": "object" },
                },
            },
        },
        "Logging": {
            "type": "object",
            "required": ["filter"],
            "properties": { "filter": text() },
        },
        "Document": { "type": "object" },
    })
}

fn headers() -> Value {
    let header = |doc: &str| json!({ "description": doc, "schema": { "type": "string" } });
    json!({
        "x-request-id": header("The request's id: the client's, if it sent a usable one."),
        "server-timing": header(
            "Where the time went, in milliseconds: `queue` until a batch was cut, `handler` in the \
             model, `batch` the rest until the worker had answered.",
        ),
        "x-refusal-reason": header("Why a request was not taken."),
        "x-warning": header("What was ignored in the request."),
        "retry-after": { "description": "Seconds to wait.", "schema": { "type": "integer" } },
    })
}

#[cfg(test)]
mod tests;
