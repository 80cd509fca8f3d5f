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
fn many_callers_at_once_leave_the_registry_whole() {
    let server = server().start();
    for name in ["a", "b", "c"] {
        server.echo_model(name, "1.0", "");
    }
    std::thread::scope(|scope| {
        for caller in 0..8 {
            let server = &server;
            scope.spawn(move || {
                for turn in 0..25 {
                    let name = ["a", "b", "c"][(caller + turn) % 3];
                    let request = match (caller * 7 + turn * 3) % 4 {
                        0 => {
                            server.manage("POST", &format!("/models?url={name}&initial_workers=1"))
                        }
                        1 => server.manage("DELETE", &format!("/models/{name}")),
                        2 => {
                            let path = format!("/models/{name}?min_worker=2&synchronous=true");
                            server.manage("PUT", &path)
                        }
                        _ => server.manage("GET", &format!("/models/{name}")),
                    };
                    let answer = request.send();
                    let expected = matches!(answer.status, 200 | 206 | 404 | 409 | 500 | 503);
                    assert!(expected, "{}: {}", answer.status, answer.text());
                    if answer.status == 500 {
                        // A pool that was taken away while it was being scaled.
                        assert!(answer.text().contains("Failed to start workers"));
                    }
                }
            });
        }
    });
    let list = server.manage("GET", "/models").send().expect(200).json();
    for model in list["models"].as_array().unwrap() {
        let name = model["modelName"].as_str().unwrap();
        server
            .manage("DELETE", &format!("/models/{name}"))
            .send()
            .expect(200);
    }
    server.wait_without_hosts();
}

#[test]
fn swapping_versions_under_load_loses_no_request() {
    let server = serving("");
    for (folder, version) in [("x2", "2.0"), ("x3", "3.0"), ("x4", "4.0")] {
        server.echo_model(folder, version, "");
    }
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::SeqCst) {
                    server
                        .infer("POST", "/predictions/m")
                        .body("x")
                        .send()
                        .expect(200);
                }
            });
        }
        let mut old = "1.0";
        for (folder, version) in [("x2", "2.0"), ("x3", "3.0"), ("x4", "4.0")] {
            let path = format!("/models?url={folder}&model_name=m&initial_workers=1");
            server.manage("POST", &path).send().expect(200);
            server
                .manage("PUT", &format!("/models/m/{version}/set-default"))
                .send()
                .expect(200);
            server
                .manage("DELETE", &format!("/models/m/{old}"))
                .send()
                .expect(200);
            old = version;
        }
        done.store(true, std::sync::atomic::Ordering::SeqCst);
    });
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
