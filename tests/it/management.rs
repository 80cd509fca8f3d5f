//! Registration, scaling, listing, description and removal (*torchserve-contract* 5).

use serde_json::Value;

use crate::{server, serving};

#[test]
fn a_model_is_registered_described_scaled_and_removed() {
    let server = server().start();
    server.echo_model("m", "1.0", "");
    let registered = server
        .manage("POST", "/models?url=m")
        .send()
        .expect(200)
        .json();
    assert_eq!(
        registered["status"],
        "Model \"m\" Version: 1.0 registered with 0 initial workers. Use scale workers API to add \
         workers for the model."
    );
    let refused = server
        .infer("POST", "/predictions/m")
        .body("x")
        .send()
        .expect(503);
    assert_eq!(refused.header("x-refusal-reason"), Some("no-worker"));
    assert!(refused.header("retry-after").is_none(), "nobody knows");
    assert_eq!(
        refused.json()["message"],
        "Model \"m\" has no worker to serve inference request. Please use scale workers API to add \
         workers. If this is a sequence inference, please check if it is closed, or expired; or \
         exceeds maxSequenceJobQueueSize"
    );

    let scaled = server
        .manage("PUT", "/models/m?min_worker=2&synchronous=true")
        .send()
        .expect(200);
    assert_eq!(scaled.json()["status"], "Workers scaled to 2 for model: m");
    assert_eq!(
        server
            .infer("POST", "/predictions/m")
            .body("x")
            .send()
            .expect(200)
            .text(),
        "x"
    );

    let description = server.describe("m");
    let expected = [
        ("modelName", Value::from("m")),
        ("modelVersion", "1.0".into()),
        ("modelUrl", "m".into()),
        ("minWorkers", 2.into()),
        ("maxWorkers", 2.into()),
        ("batchSize", 1.into()),
        ("maxBatchDelay", 100.into()),
        ("responseTimeout", 120.into()),
        ("loadedAtStartup", false.into()),
    ];
    for (key, value) in expected {
        assert_eq!(description[key], value, "{key}");
    }
    let workers = description["workers"].as_array().unwrap();
    assert_eq!(workers.len(), 2);
    assert!(workers.iter().all(|worker| worker["status"] == "READY"));
    assert_eq!(workers[0]["id"], "9000");
    assert_eq!(description["jobQueueStatus"]["remainingCapacity"], 100);

    server
        .manage(
            "PUT",
            "/models/m?min_worker=0&max_worker=0&synchronous=true",
        )
        .send()
        .expect(200);
    assert_eq!(server.describe("m")["workers"].as_array().unwrap().len(), 0);

    let removed = server
        .manage("DELETE", "/models/m")
        .send()
        .expect(200)
        .json();
    assert_eq!(removed["status"], "Model \"m\" unregistered");
    server.manage("GET", "/models/m").send().expect(404);
    server.manage("DELETE", "/models/m").send().expect(404);
}

#[test]
fn versions_live_side_by_side_and_the_default_changes_only_when_asked() {
    let server = server().start();
    for (folder, version) in [("a", "1.0"), ("b", "2.0")] {
        server.echo_model(folder, version, "");
        let path = format!("/models?url={folder}&model_name=m&initial_workers=1");
        server.manage("POST", &path).send().expect(200);
    }
    assert_eq!(server.describe("m")["modelVersion"], "1.0");
    let all = server
        .manage("GET", "/models/m/all")
        .send()
        .expect(200)
        .json();
    assert_eq!(all.as_array().unwrap().len(), 2);
    server
        .infer("POST", "/predictions/m/2.0")
        .body("x")
        .send()
        .expect(200);

    let refused = server
        .manage("DELETE", "/models/m")
        .send()
        .expect(403)
        .json();
    assert_eq!(refused["type"], "InvalidModelVersionException");
    assert_eq!(
        refused["message"],
        "Cannot remove default version for model m"
    );

    let set = server
        .manage("PUT", "/models/m/2.0/set-default")
        .send()
        .expect(200)
        .json();
    assert_eq!(
        set["status"],
        "Default version successfully updated for model \"m\" to \"2.0\""
    );
    let unknown = server
        .manage("PUT", "/models/m/9/set-default")
        .send()
        .expect(404)
        .json();
    assert_eq!(
        unknown["message"],
        "Model version 9 does not exist for model m"
    );
    server
        .manage("PUT", "/models/other/1.0/set-default")
        .send()
        .expect(404);

    server.manage("DELETE", "/models/m/1.0").send().expect(200);
    server
        .infer("POST", "/predictions/m")
        .body("x")
        .send()
        .expect(200);
}

#[test]
fn registrations_that_cannot_work_leave_nothing() {
    let server = serving("");
    let cases = [
        ("/models", 400, "BadRequestException"),
        ("/models?url=", 404, "ModelNotFoundException"),
        ("/models?url=nothing.mar", 404, "ModelNotFoundException"),
        ("/models?url=..%2Fm", 404, "ModelNotFoundException"),
        ("/models?url=.&model_name=x", 404, "ModelNotFoundException"),
        ("/models?url=/&model_name=x", 404, "ModelNotFoundException"),
        ("/models?url=m", 409, "ConflictStatusException"),
        ("/models?url=m&model_name=a%2Fb", 400, "BadRequestException"),
        (
            "/models?url=m&model_name=x&runtime=python4",
            400,
            "BadRequestException",
        ),
        ("/models?url=ftp://host/key.mar", 400, "BadRequestException"),
    ];
    for (path, status, kind) in cases {
        let error = server.manage("POST", path).send().expect(status).json();
        assert_eq!(error["type"], kind, "{path}: {error}");
    }
    let list = server.manage("GET", "/models").send().expect(200).json();
    assert_eq!(list["models"].as_array().unwrap().len(), 1, "{list}");
}

#[test]
fn a_worker_that_cannot_start_takes_its_registration_with_it() {
    let server = server().start();
    server.echo_model("bad", "1.0", "echo:\n  loadError: no weights today\n");
    let path = "/models?url=bad&initial_workers=2";
    let error = server.manage("POST", path).send().expect(500).json();
    let message = error["message"].as_str().unwrap();
    assert!(
        message.starts_with("Failed to start workers for model bad version: 1.0"),
        "{message}"
    );
    assert!(message.contains("no weights today"), "{message}");
    server.manage("GET", "/models/bad").send().expect(404);
    // Asynchronously it stays, and says why it does not come up.
    let path = "/models?url=bad&initial_workers=1&synchronous=false";
    server.manage("POST", path).send().expect(202);
    server.wait_until("the failure is shown", || {
        server.describe("bad")["workers"][0]["lastFailure"] == "no weights today"
    });
    server.manage("DELETE", "/models/bad").send().expect(200);
}

#[test]
fn the_list_is_paged_as_torchserve_pages_it() {
    let server = server().start();
    for name in ["a", "b", "c"] {
        server.echo_model(name, "1.0", "");
        server
            .manage("POST", &format!("/models?url={name}"))
            .send()
            .expect(200);
    }
    let names = |path: &str| {
        let list = server.manage("GET", path).send().expect(200).json();
        let models = list["models"].as_array().unwrap().iter();
        let names: Vec<String> = models
            .map(|model| model["modelName"].as_str().unwrap().to_owned())
            .collect();
        (
            names.concat(),
            list["nextPageToken"].as_str().map(str::to_owned),
        )
    };
    assert_eq!(names("/models"), ("abc".to_owned(), None));
    assert_eq!(names("/models/"), ("abc".to_owned(), None));
    assert_eq!(
        names("/models?limit=2"),
        ("ab".to_owned(), Some("2".to_owned()))
    );
    assert_eq!(
        names("/models?limit=2&next_page_token=2"),
        ("c".to_owned(), None)
    );
    assert_eq!(
        names("/models?limit=3"),
        ("abc".to_owned(), Some("3".to_owned()))
    );
    assert_eq!(names("/models?next_page_token=12"), (String::new(), None));
    assert_eq!(
        names("/models?limit=&next_page_token="),
        ("abc".to_owned(), None)
    );
    assert_eq!(
        names("/models?limit=-1&next_page_token=-1"),
        ("abc".to_owned(), None)
    );
}

#[test]
fn odd_values_are_taken_as_torchserve_takes_them() {
    let server = server().start();
    server.echo_model("m", "1.0", "");
    let path = "/models?url=m&batch_size=dd&max_batch_delay=junk&initial_workers=-1&synchronous=-1";
    server.manage("POST", path).send().expect(200);
    let description = server.describe("m");
    assert_eq!(
        (&description["batchSize"], &description["maxBatchDelay"]),
        (&1.into(), &100.into())
    );
    for (query, status) in [
        ("min_worker=nan", 202),
        ("number_gpu=10", 202),
        ("", 202),
        ("min_worker=2&max_worker=1", 400),
        ("max_worker=0", 400),
        ("max_worker=-1", 400),
        ("min_worker=-1", 500),
        ("min_worker=0", 202),
    ] {
        server
            .manage("PUT", &format!("/models/m?{query}"))
            .send()
            .expect(status);
    }
    server
        .manage("PUT", "/models/other?min_worker=1")
        .send()
        .expect(404);
    server
        .manage("PUT", "/models/m/9?min_worker=1")
        .send()
        .expect(404);
    server
        .manage("DELETE", "/models/m/?synchronous=nan&timeout=true")
        .send()
        .expect(200);
}

/// CF-04: a number that nobody means must not take every thread of the machine.
#[test]
fn more_workers_than_a_version_may_have_are_refused_and_end_nothing() {
    let server = serving("");
    server.echo_model("n", "1.0", "");
    server.echo_model("many", "1.0", "minWorkers: 2000000000\n");
    for (method, path) in [
        ("POST", "/models?url=n&initial_workers=1000000"),
        ("POST", "/models?url=n&initial_workers=9223372036854775807"),
        ("POST", "/models?url=many"),
        ("PUT", "/models/m?min_worker=4097"),
        (
            "PUT",
            "/models/m?min_worker=1&max_worker=5000&autoscale=true",
        ),
    ] {
        let error = server.manage(method, path).send().expect(400);
        assert!(error.text().contains("4096"), "{path}: {}", error.text());
    }
    server.manage("GET", "/models/n").send().expect(404);
    let described = server.describe("m");
    assert_eq!(
        (&described["minWorkers"], &described["maxWorkers"]),
        (&1.into(), &1.into())
    );
    // A bound that nothing grows to is taken, as clients give it for "as many as you like".
    server
        .manage("PUT", "/models/m?min_worker=1&max_worker=100000")
        .send()
        .expect(202);
}

#[test]
fn a_json_body_registers_too() {
    let server = server().start();
    server.echo_model("m", "1.0", "");
    let body = "{'url': 'm', 'model_name': 'n', 'initial_workers': '1', 'synchronous': 'true'}";
    let request = server
        .manage("POST", "/models")
        .header("content-type", "application/json");
    request.body(body).send().expect(200);
    server
        .infer("POST", "/predictions/n")
        .body("x")
        .send()
        .expect(200);
}

#[test]
fn the_model_api_is_off_unless_it_is_switched_on() {
    let server = server()
        .with_default_safety()
        .args(&["--disable-token-auth"])
        .start();
    server.echo_model("m", "1.0", "");
    for method in ["POST", "DELETE"] {
        let path = if method == "POST" {
            "/models?url=m"
        } else {
            "/models/m"
        };
        let error = server.manage(method, path).send().expect(405).json();
        assert_eq!(error["code"], 405);
        assert_eq!(error["type"], "MethodNotAllowedException");
        assert_eq!(
            error["message"],
            "Requested method is not allowed, please refer to API document."
        );
    }
    server.manage("GET", "/models").send().expect(200);
}

#[test]
fn a_registration_that_nests_without_end_does_not_end_the_server() {
    let server = serving("");
    for body in [
        "[".repeat(60_000),
        "{a:".repeat(20_000),
        "[".repeat(200_000),
    ] {
        let request = server
            .manage("POST", "/models")
            .header("content-type", "application/json");
        request.body(body).send().expect(400);
    }
    server
        .infer("POST", "/predictions/m")
        .body("x")
        .send()
        .expect(200);
}

/// CF-04: what is not taken as it was written is told in the log and in a header.
#[test]
fn misspelt_and_odd_parameters_are_told_to_the_caller() {
    let server = server().start();
    server.echo_model("m", "1.0", "");
    let told = |method, path: &str| {
        let answer = server.manage(method, path).send();
        assert!(answer.status < 300, "{path}: {}", answer.text());
        answer.header("x-warning").map(str::to_owned)
    };
    let warning = told("POST", "/models?url=m&batchsize=4&initial_worker=1").unwrap();
    assert!(
        warning.contains("`batchsize` is ignored. Did you mean `batch_size`?")
            && warning.contains("Did you mean `initial_workers`?"),
        "{warning}"
    );
    let warning = told("PUT", "/models/m?min_workers=3").unwrap();
    assert_eq!(
        warning,
        "unknown query parameter `min_workers` is ignored. Did you mean `min_worker`?"
    );
    server.wait_until("the log has it too", || server.output().contains(&warning));
    for (method, path, what) in [
        ("PUT", "/models/m?min_worker=two", "`min_worker` is `two`"),
        ("PUT", "/models/m?synchronous=yes", "taken for `false`"),
        ("GET", "/models?limit=900", "`limit`"),
        ("GET", "/models?limits=9", "`limit`"),
        ("GET", "/models/m?customised=true", "`customized`"),
        ("PUT", "/models/m/1.0/set-default?force=1", "`force`"),
        ("DELETE", "/models/m?a%0d%0ab=1", "`a\\r\\nb`"),
    ] {
        let warning = told(method, path).unwrap();
        assert!(warning.contains(what), "{path}: {warning}");
    }
    // A misspelt name is often why a call fails.
    for (method, path, status, what) in [
        ("POST", "/models?uri=m", 400, "Did you mean `url`?"),
        (
            "POST",
            "/models?url=gone.mar&modelname=m",
            404,
            "`modelname`",
        ),
        ("PUT", "/models/gone?min_workers=1", 404, "`min_workers`"),
        (
            "PUT",
            "/models/m?batch_size=0&min_workers=1",
            400,
            "`min_workers`",
        ),
        ("GET", "/models/gone?customised=true", 404, "`customized`"),
        ("DELETE", "/models/gone?force=true", 404, "`force`"),
    ] {
        let answer = server.manage(method, path).send().expect(status);
        let warning = answer.header("x-warning").unwrap_or_default();
        assert!(warning.contains(what), "{path}: {warning}");
    }
    let body = r#"{"url": "m", "batch_size": "many", "colour": "red"}"#;
    let request = server
        .manage("POST", "/models")
        .header("content-type", "application/json");
    let answer = request.body(body).send().expect(200);
    let warning = answer.header("x-warning").unwrap();
    assert!(
        warning.contains("`batch_size` is `many`") && warning.contains("`colour`"),
        "{warning}"
    );
    for (method, path) in [
        ("GET", "/models?limit=&next_page_token="),
        ("GET", "/models/m?customized=false"),
        (
            "PUT",
            "/models/m?min_worker=0&synchronous=true&number_gpu=1&timeout=3",
        ),
        ("DELETE", "/models/m?synchronous=true&timeout=3"),
    ] {
        assert_eq!(told(method, path), None, "{path}");
    }
}

/// The calls of TorchServe's own management suite that concern one model, in its order, with the
/// statuses that it checks.
#[test]
fn the_calls_of_torchserves_own_suite_have_its_statuses() {
    let server = server().start();
    server.echo_model("m", "1.0", "");
    server.echo_model("bad", "1.0", "echo:\n  loadError: no such handler\n");
    let calls = [
        ("POST", "/models?url=m&model_name=x", 200),
        ("POST", "/models?url=m&model_name=x", 409),
        ("POST", "/models?model_name=x", 400),
        ("POST", "/models?url=&model_name=x", 404),
        ("POST", "/models?url=m&model_name=y&runtime=python4", 400),
        ("POST", "/models?url=bad&handler=invalidHandler", 200),
        ("PUT", "/models/bad?min_worker=1&synchronous=true", 500),
        ("DELETE", "/models/bad", 200),
        (
            "POST",
            "/models?url=m&model_name=s&startup_timeout=0&initial_workers=3",
            500,
        ),
        ("GET", "/models/s", 404),
        ("POST", "/models?url=m&model_name=s&startup_timeout=0", 200),
        ("DELETE", "/models/s", 200),
        ("POST", "/models?url=m&model_name=s&synchronous=false", 200),
        (
            "POST",
            "/models?url=m&model_name=t&synchronous=false&initial_workers=1",
            202,
        ),
        (
            "POST",
            "/models?url=m&model_name=u&synchronous=nan&initial_workers=1",
            202,
        ),
        ("GET", "/models?limit=-1&next_page_token=-1", 200),
        ("GET", "/models?limit=0", 200),
        ("GET", "/models?limit=200", 200),
        ("PUT", "/models/x?number_gpu=1", 202),
        ("PUT", "/models/x?number_gpu=-1", 202),
        ("PUT", "/models/x?timeout=0", 202),
        ("PUT", "/models/x?timeout=-1", 202),
        ("PUT", "/models/x?timeout=true", 202),
        ("PUT", "/models/x?min_worker=1&synchronous=true", 200),
        ("PUT", "/models/x/1.0?min_worker=1&synchronous=true", 200),
        (
            "PUT",
            "/models/x?min_worker=1&model_version=1.0&synchronous=true",
            200,
        ),
        ("PUT", "/models/x?min_worker=1&model_version=9", 404),
        ("PUT", "/models/x/1?min_worker=1", 404),
        ("PUT", "/models/x/1.0/set-default", 200),
        ("PUT", "/models/x/1.0/set-default/", 200),
        ("PUT", "/models/x/v1.0/set-default", 404),
        ("PUT", "/models/none/1.0/set-default", 404),
        ("PUT", "/models/x/1.0/set-default/more", 404),
        ("PUT", "/x/y/z/set-default", 404),
        ("PUT", "/models/x/1.0/other", 404),
        ("GET", "/models/x/1.0", 200),
        ("GET", "/models/x/all", 200),
        ("GET", "/models/x/all?customized=true", 200),
        ("GET", "/models/x/9", 404),
        ("GET", "/models/none/all", 404),
        ("PATCH", "/models/x", 405),
        ("POST", "/models/x", 405),
        ("PUT", "/v1/models/x", 405),
        ("GET", "/v1/models/x/", 200),
        ("DELETE", "/models/x/9", 404),
        ("DELETE", "/models/x/1.0/?synchronous=true&timeout=-1", 200),
        ("DELETE", "/models/x", 404),
    ];
    for (method, path, status) in calls {
        let answer = server.manage(method, path).send();
        assert_eq!(answer.status, status, "{method} {path}: {}", answer.text());
    }
    let scaled = "/models/t?min_worker=1&model_version=1.0&synchronous=true";
    let text = server.manage("PUT", scaled).send().expect(200).json()["status"].clone();
    assert_eq!(text, "Workers scaled to 1 for model: t, version: 1.0");
}

/// RG-03: nothing but an archive or a model's folder is registered.
#[test]
fn places_that_are_no_model_are_refused() {
    let server = server().start();
    let store = server.folder().join("store");
    let store = store.to_str().unwrap();
    let around = server.folder().to_str().unwrap();
    for url in [
        "",
        "%20",
        "%20%20",
        ".",
        "/",
        "./",
        store,
        &format!("{store}/"),
        around,
        "%00",
    ] {
        let path = format!("/models?url={url}&model_name=x");
        let answer = server.manage("POST", &path).send();
        assert!(
            matches!(answer.status, 400 | 404),
            "`{url}`: {}",
            answer.text()
        );
    }
    // RG-09: schemes that nobody fetches, with those that somebody does.
    for url in [
        "s3://b/k.mar",
        "gs://b/k.mar",
        "ftp://h/k.mar",
        "C:%5Cmodels%5Ck.mar",
    ] {
        let path = format!("/models?url={url}");
        let answer = server.manage("POST", &path).send();
        assert!(
            matches!(answer.status, 400 | 404),
            "`{url}`: {}",
            answer.text()
        );
        let told = match url.split_once("://") {
            // Served, and not on the list unless the operator puts it there.
            Some(("s3" | "gs", _)) => "does not match any allowed URL(s)",
            Some(_) => "`https`",
            None => "is a path of another system",
        };
        assert!(answer.text().contains(told), "{}", answer.text());
    }
    let list = server.manage("GET", "/models").send().expect(200).json();
    assert_eq!(list["models"], Value::Array(vec![]));
}

/// RG-07: a default that does not exist is refused, and the one that does stays.
#[test]
fn a_default_that_does_not_exist_changes_nothing() {
    let server = serving("");
    for (path, message) in [
        ("m/9.9", "Model version 9.9 does not exist for model m"),
        ("m/v1.0", "Model version v1.0 does not exist for model m"),
        ("m/1", "Model version 1 does not exist for model m"),
        ("none/1.0", "Model not found: none"),
    ] {
        let path = format!("/models/{path}/set-default");
        let error = server.manage("PUT", &path).send().expect(404).json();
        assert_eq!(error["message"], message);
    }
    assert_eq!(server.describe("m")["modelVersion"], "1.0");
}
