use std::collections::HashSet;

use super::*;

const ALL: Surface = Surface {
    inference: true,
    management: true,
    metrics: true,
};

fn paths(document: &Value) -> Vec<(String, Vec<String>)> {
    let paths = document["paths"].as_object().unwrap();
    paths
        .iter()
        .map(|(path, methods)| {
            let methods = methods.as_object().unwrap();
            (path.clone(), methods.keys().cloned().collect())
        })
        .collect()
}

/// Calls `look` with every value of a document.
fn each<'v>(value: &'v Value, look: &mut impl FnMut(&'v Value)) {
    look(value);
    match value {
        Value::Array(items) => items.iter().for_each(|item| each(item, look)),
        Value::Object(members) => members.values().for_each(|member| each(member, look)),
        _ => {}
    }
}

/// What OpenAPI asks of every document, as far as ours use it.
fn assert_valid(document: &Value) {
    for member in ["title", "version"] {
        assert!(document["info"][member].is_string());
    }
    for (path, methods) in document["paths"].as_object().unwrap() {
        assert!(path.starts_with('/'), "{path}");
        for (method, operation) in methods.as_object().unwrap() {
            let known = ["get", "post", "put", "delete", "options"];
            assert!(known.contains(&method.as_str()), "{method}");
            let shown = format!("{method} {path}");
            assert!(operation["operationId"].is_string(), "{shown}");
            let responses = operation["responses"].as_object().unwrap();
            assert!(!responses.is_empty(), "{shown}");
            for (status, response) in responses {
                let status: u16 = status.parse().unwrap();
                assert!((200..600).contains(&status), "{shown}");
                assert!(response["description"].is_string(), "{shown}");
            }
            let mut named = HashSet::new();
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                let place = parameter["in"].as_str().unwrap();
                assert!(["path", "query", "header"].contains(&place), "{shown}");
                let name = parameter["name"].as_str().unwrap();
                assert!(named.insert((place, name)), "{shown}: {name} twice");
                assert!(parameter["schema"].is_object(), "{shown}: {name}");
                if place == "path" {
                    assert_eq!(parameter["required"], true, "{shown}: {name}");
                    assert!(path.contains(&format!("{{{name}}}")), "{shown}: {name}");
                }
            }
            let in_path = named.iter().filter(|(place, _)| *place == "path").count();
            assert_eq!(in_path, path.matches('{').count(), "{shown}");
        }
    }
    each(document, &mut |value| {
        if let Some(target) = value.get("$ref") {
            let pointer = target.as_str().unwrap().strip_prefix('#').unwrap();
            assert!(
                document.pointer(pointer).is_some(),
                "{pointer} leads nowhere"
            );
        }
    });
}

#[test]
fn torchserves_documents_have_its_paths_ids_and_statuses() {
    let inference = Surface {
        inference: true,
        ..Surface::NONE
    };
    let document = of_listener(inference);
    assert_valid(&document);
    assert_eq!(document["openapi"], "3.0.1");
    assert_eq!(document["info"]["title"], "TorchServe APIs");
    let rows = [
        ("/", "options", "apiDescription", &[200, 500][..]),
        ("/api-description", "get", "api-description", &[200, 500]),
        ("/ping", "get", "ping", &[200, 500]),
        (
            "/predictions/{model_name}",
            "post",
            "predictions",
            &[200, 404, 500, 503],
        ),
        (
            "/predictions/{model_name}/{model_version}",
            "post",
            "version_predictions",
            &[200, 404, 500, 503],
        ),
        (
            "/v1/models/{model_name}:predict",
            "post",
            "predictions",
            &[200, 404, 500, 503],
        ),
        (
            "/v2/models/{model_name}/infer",
            "post",
            "predictions",
            &[200, 404, 500, 503],
        ),
        ("/metrics", "get", "metrics", &[200, 500]),
    ];
    assert_rows(&document, &rows);
    assert_eq!(
        document["paths"]["/api-description"]["get"]["deprecated"],
        true
    );

    let management = Surface {
        management: true,
        ..Surface::NONE
    };
    let scaled = &[200, 202, 210, 400, 404, 500][..];
    let removed = &[200, 202, 404, 408, 500][..];
    let described = &[200, 404, 500][..];
    let of_a_model = [
        ("/models/{model_name}", "get", "describeModel", described),
        ("/models/{model_name}", "put", "setAutoScale", scaled),
        ("/models/{model_name}", "delete", "unregisterModel", removed),
        (
            "/models/{model_name}/{model_version}",
            "get",
            "version_describeModel",
            described,
        ),
        (
            "/models/{model_name}/{model_version}",
            "put",
            "version_setAutoScale",
            scaled,
        ),
        (
            "/models/{model_name}/{model_version}",
            "delete",
            "version_unregisterModel",
            removed,
        ),
        (
            "/models/{model_name}/{model_version}/set-default",
            "put",
            "setDefault",
            described,
        ),
    ];
    let mut rows = vec![
        ("/", "options", "apiDescription", &[200, 500][..]),
        ("/api-description", "get", "api-description", &[200, 500]),
        ("/models", "get", "listModels", &[200, 500]),
        (
            "/models",
            "post",
            "registerModel",
            &[200, 202, 210, 400, 404, 409, 500],
        ),
        ("/metrics", "get", "metrics", &[200, 500]),
    ];
    rows.extend(of_a_model);
    let document = of_listener(management);
    assert_valid(&document);
    assert_rows(&document, &rows);

    let document = of_management("m");
    assert_valid(&document);
    assert_eq!(document["info"]["title"], "RESTful Management API for: m");
    assert_eq!(document["info"]["version"], VERSION);
    assert_rows(&document, &of_a_model);
}

#[track_caller]
fn assert_rows(document: &Value, rows: &[(&str, &str, &str, &[u16])]) {
    for (path, method, id, statuses) in rows {
        let operation = &document["paths"][path][method];
        assert_eq!(operation["operationId"], *id, "{method} {path}");
        let there: Vec<u16> = operation["responses"]
            .as_object()
            .unwrap()
            .keys()
            .map(|status| status.parse().unwrap())
            .collect();
        assert_eq!(there, *statuses, "{method} {path}");
    }
    let all: usize = paths(document)
        .iter()
        .map(|(_, methods)| methods.len())
        .sum();
    assert_eq!(all, rows.len());
}

#[test]
fn the_document_of_one_models_predictions_is_torchserves() {
    let document = of_predictions("m");
    assert_eq!(document["info"]["title"], "RESTful API for: m");
    assert_eq!(document["info"]["version"], "1.0.0");
    for path in [
        "/prediction/m",
        "/v1/models/{model_name}:predict",
        "/v2/models/{model_name}/infer",
    ] {
        let operation = &document["paths"][path]["post"];
        assert_eq!(operation["operationId"], "m");
        let statuses: Vec<_> = operation["responses"].as_object().unwrap().keys().collect();
        assert_eq!(statuses, ["200", "500"]);
    }
    assert_eq!(paths(&document).len(), 3);
}

#[test]
fn our_document_is_valid_and_has_all_that_a_listener_serves() {
    let document = of_what_is_served(ALL, |_| false);
    assert_valid(&document);
    assert_eq!(document["openapi"], "3.1.0");
    let operations: usize = paths(&document)
        .iter()
        .map(|(_, methods)| methods.len())
        .sum();
    assert_eq!(operations, OPERATIONS.len());
    let mut ids = HashSet::new();
    each(&document["paths"], &mut |value| {
        if let Some(id) = value.get("operationId") {
            assert!(ids.insert(id.as_str().unwrap()), "{id} twice");
        }
    });
    assert!(document["components"].get("securitySchemes").is_none());

    let metrics = Surface {
        metrics: true,
        ..Surface::NONE
    };
    let document = of_what_is_served(metrics, |_| false);
    let served: Vec<_> = paths(&document).into_iter().map(|(path, _)| path).collect();
    assert_eq!(
        served,
        [
            "/",
            "/api-description",
            "/openapi.json",
            "/docs",
            "/metrics"
        ]
    );
}

#[test]
fn what_needs_a_token_says_so() {
    let document = of_what_is_served(ALL, |operation| operation.id == "predictions");
    assert_valid(&document);
    let security = |path: &str, method: &str| document["paths"][path][method]["security"].clone();
    assert_eq!(
        security("/predictions/{model_name}", "post"),
        json!([{ "token": [] }])
    );
    assert_eq!(security("/metrics", "get"), Value::Null);
    assert_eq!(
        document["components"]["securitySchemes"]["token"]["scheme"],
        "bearer"
    );
}
