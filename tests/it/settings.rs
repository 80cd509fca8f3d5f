//! Settings that reach the server from each source and do what they say, `torchserve config`, and
//! what is said about bad ones.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::server;

/// What `torchserve config` says, as JSON, with more options.
fn shown(server: &ts_test::Server, options: &[&str]) -> Value {
    let mut arguments = vec!["config", "--json", "--ts-config", "config.properties"];
    arguments.extend(options);
    let ran = server.run(&arguments);
    let table: Value = serde_json::from_str(&ran.stdout).unwrap();
    let faults = table["faults"].as_array().unwrap();
    assert_eq!(ran.code, Some(i32::from(!faults.is_empty())), "{ran:?}");
    table
}

fn keys(table: &Value) -> &Vec<Value> {
    table["settings"].as_array().unwrap()
}

/// Made by openssl.
const TRUSTED_KEY: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../tests/fixtures/trusted_key.pem"
);

/// Variables that count though the file does not say so.
const ALWAYS: [&str; 5] = [
    "TS_MODEL_SERVER_HOME",
    "TS_OPEN_INFERENCE_PROTOCOL",
    "TS_TOKEN_FILE",
    "TS_INFERENCE_TOKEN",
    "TS_MANAGEMENT_TOKEN",
];

/// A value for a key that is right and, where there is a choice, not its default, by its type as the
/// table tells it.
fn sample(key: &Value, index: usize) -> String {
    let (name, kind) = (key["key"].as_str().unwrap(), key["type"].as_str().unwrap());
    let default = key["default"].as_str().unwrap();
    match (name, kind) {
        ("models" | "model_snapshot", _) => "{}".to_owned(),
        ("number_of_gpu" | "devices", _) => "0".to_owned(),
        ("rate_limit_resources", _) => "gpu:1".to_owned(),
        ("log_filter", _) => "debug".to_owned(),
        ("inference_token" | "management_token", _) => "long-enough".to_owned(),
        ("keystore_type", _) => "PKCS12".to_owned(),
        ("allowed_sha256", _) => "/dev/null".to_owned(),
        ("trusted_keys", _) => TRUSTED_KEY.to_owned(),
        ("trusted_proxies", _) => "10.0.0.0/8".to_owned(),
        (_, "`true` or `false`") => (default != "true").to_string(),
        (_, kind) if kind.starts_with("`http:") => format!("http://127.0.0.1:{}", 7100 + index),
        (_, kind) if kind.starts_with('`') => kind.rsplit('`').nth(1).unwrap().to_owned(),
        (_, "path") => "store".to_owned(),
        (_, "text" | "regular expression" | "regular expressions") => "x".to_owned(),
        _ => (default.parse::<u64>().unwrap() + 1).to_string(),
    }
}

/// CF-02, through the command: every key from every source that it has.
#[test]
fn torchserve_config_shows_every_key_with_where_it_came_from() {
    let plain = shown(&server(), &["--model-store", "store"]);
    assert_eq!(plain["faults"], Value::from(Vec::<Value>::new()));
    let all: Vec<(Value, String)> = keys(&plain)
        .iter()
        .enumerate()
        .map(|(index, key)| (key.clone(), sample(key, index)))
        .collect();
    assert!(all.len() >= 90, "{}", all.len());
    // Secrets, and what would fill pages.
    let secrets = [
        "keystore_pass",
        "inference_token",
        "management_token",
        "model_snapshot",
        "vmargs",
    ];
    let secret = |key: &Value| secrets.contains(&key["key"].as_str().unwrap());

    // The switches stay off here: the variables below must not count.
    let switches = ["enable_envvars_config", "use_env_allowed_urls"];
    let mut from_file = server();
    let mut from_environment = server()
        .config("enable_envvars_config=true")
        .config("use_env_allowed_urls=true");
    for (key, value) in &all {
        let name = key["key"].as_str().unwrap();
        if !switches.contains(&name) {
            from_file = from_file.config(&format!("{name} = {value}"));
        }
        if let Some(variable) = key["variable"].as_str() {
            from_environment = from_environment.env(variable, value);
            if !ALWAYS.contains(&variable) {
                from_file = from_file.env(variable, "from the environment");
            }
        }
    }

    let table = shown(&from_file, &[]);
    assert_eq!(table["faults"], Value::from(Vec::<Value>::new()));
    assert_eq!(table["file"], "config.properties");
    for (found, (key, value)) in keys(&table).iter().zip(&all) {
        if switches.contains(&key["key"].as_str().unwrap()) {
            continue;
        }
        let value = if secret(key) { "set" } else { value };
        assert_eq!(found["value"], value, "{key}");
        let origin = found["origin"].as_str().unwrap();
        assert!(
            origin.starts_with("config.properties line "),
            "{key}: {origin}"
        );
    }

    let table = shown(&from_environment, &["--model-store", "no such store"]);
    assert_eq!(table["faults"], Value::from(Vec::<Value>::new()));
    for (found, (key, value)) in keys(&table).iter().zip(&all) {
        match key["variable"].as_str() {
            Some(variable) => {
                let value = match (key["key"].as_str().unwrap(), secret(key)) {
                    ("ts_open_inference_protocol", _) => "false",
                    (_, true) => "set",
                    _ => value,
                };
                assert_eq!(
                    (&found["value"], &found["origin"]),
                    (&value.into(), &variable.into())
                );
            }
            None if switches.contains(&key["key"].as_str().unwrap()) => {}
            None => assert_eq!(found["origin"], "default", "{key}"),
        }
    }

    // The command line beats the file, and its name is the origin.
    let mut options = vec!["config", "--json", "--ts-config", "config.properties"];
    for (key, _) in &all {
        if let Some(option) = key["option"].as_str() {
            options.push(option);
            if key["type"] != "`true` or `false`" {
                options.push(if key["type"] == "path" {
                    "config.properties"
                } else {
                    "x"
                });
            }
        }
    }
    let ran = from_file.run(&options);
    let table: Value = serde_json::from_str(&ran.stdout).unwrap();
    // A file is no folder, which is told for both stores.
    assert_eq!(
        table["faults"].as_array().unwrap().len(),
        2,
        "{}",
        table["faults"]
    );
    let from_options = keys(&table).iter().filter(|key| key["option"].is_string());
    let mut count = 0;
    for key in from_options {
        assert_eq!(key["origin"], key["option"]);
        count += 1;
    }
    assert_eq!(count, 7);
}

#[test]
fn the_table_is_for_people_too_and_starts_nothing() {
    let server = server()
        .config("keystore_pass=hunter2")
        .config("job_que_size=3")
        .config("max_request_size=5 MB")
        .config("job_queue_size=7");
    let ran = server.run(&[
        "config",
        "--ts-config",
        "config.properties",
        "--model-store",
        "store",
    ]);
    assert_eq!(ran.code, Some(1), "{ran:?}");
    for told in [
        "configuration file: config.properties\n",
        "config.properties line 7",
        "warning: unknown setting `job_que_size` (config.properties line 5) is ignored. Did you mean \
         `job_queue_size`?",
        "fault: Invalid configuration: max_request_size: `5 MB` is not a whole number of bytes",
    ] {
        assert!(ran.stdout.contains(told), "{told}:\n{}", ran.stdout);
    }
    assert!(!ran.stdout.contains("hunter2"));
    let left: Vec<_> = fs_err::read_dir(server.folder().join("tmp"))
        .unwrap()
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

/// K8.
#[test]
fn five_faults_in_sixty_keys_are_told_in_one_run_each_with_its_line() {
    let plain = shown(&server(), &["--model-store", "store"]);
    let mut config = vec!["# sixty keys, five of them wrong".to_owned()];
    for (index, key) in keys(&plain)
        .iter()
        .filter(|key| key["in_force"] == true)
        .enumerate()
    {
        let name = key["key"].as_str().unwrap();
        if name != "model_store" {
            config.push(format!("{name}={}", sample(key, index)));
        }
    }
    for key in keys(&plain).iter().filter(|key| key["in_force"] == false) {
        config.push(format!(
            "{}={}",
            key["key"].as_str().unwrap(),
            sample(key, 0)
        ));
    }
    let wrong = [
        ("inference_address", "127.0.0.1:8080"),
        ("job_queue_size", "1e3"),
        ("models", "{\"noop\": {\"1.0\": {\"batchSize\": -1}}}"),
        ("disable_system_metrics", "yes"),
        ("allowed_urls", "http://(.*"),
    ];
    let mut surplus = config.len() - 61;
    config.retain(|line| {
        let stays = surplus == 0
            || line.starts_with('#')
            || wrong
                .iter()
                .any(|(key, _)| line.starts_with(&format!("{key}=")));
        surplus -= usize::from(!stays);
        stays
    });
    for (key, value) in wrong {
        let line = config
            .iter_mut()
            .find(|line| line.starts_with(&format!("{key}=")));
        *line.unwrap() = format!("{key}={value}");
    }
    let server = server();
    fs_err::write(server.folder().join("sixty.properties"), config.join("\n")).unwrap();
    let started = Instant::now();
    let ran = server.run(&[
        "--start",
        "--ts-config",
        "sixty.properties",
        "--model-store",
        "store",
    ]);
    let took = started.elapsed();
    assert_eq!(ran.code, Some(1), "{ran:?}");
    assert_eq!(
        ran.stdout.matches("Invalid configuration: ").count(),
        5,
        "{}",
        ran.stdout
    );
    for (key, _) in wrong {
        let line = 1 + config
            .iter()
            .position(|one| one.starts_with(&format!("{key}=")))
            .unwrap();
        let place = format!("(sixty.properties line {line})");
        let told = ran.stdout.lines().filter(|fault| {
            fault.starts_with(&format!("Invalid configuration: {key}: ")) && fault.ends_with(&place)
        });
        assert_eq!(told.count(), 1, "{key} {place}:\n{}", ran.stdout);
    }
    assert!(took < Duration::from_secs(5), "{took:?}");
}

#[test]
fn the_variable_that_names_the_file_comes_before_the_option_cf_01() {
    let named = server().env("TS_CONFIG_FILE", "other.properties");
    fs_err::write(named.folder().join("other.properties"), "job_queue_size=3").unwrap();
    let options = ["--model-store", "store"];
    let table = shown(&named, &options);
    assert_eq!(table["file"], "other.properties");
    let missing = server().env("TS_CONFIG_FILE", "store");
    let table = shown(&missing, &options);
    assert_eq!(
        table["faults"][0],
        "--ts-config file not found: store (from TS_CONFIG_FILE)"
    );
}

// --- what keys do --------------------------------------------------------------------------------

/// Starts a server with one setting from the file, then with the same from the environment, and
/// with its default there, and has each one looked at.
fn from_each_source(key: &str, value: &str, yaml: &str, look: impl Fn(&ts_test::Running) + Sync) {
    let variable = match key {
        "token_expiration_min" => "TS_TOKEN_EXPIRATION_TIME_MIN".to_owned(),
        _ if key.starts_with("ts_") => key.to_uppercase(),
        _ => format!("TS_{}", key.to_uppercase()),
    };
    let yaml = format!("minWorkers: 1\nmaxWorkers: 1\n{yaml}");
    let prepared = || server().echo_model("m", &yaml).args(&["--models", "m"]);
    let servers = [
        prepared().config(&format!("{key}={value}")),
        prepared()
            .config("enable_envvars_config=true")
            .env(&variable, value),
    ];
    ts_test::at_once(servers, |server| {
        let server = server.start();
        server.wait_ready("m");
        look(&server);
    });
}

#[test]
fn limits_on_requests_and_answers_are_in_force() {
    let predict = |server: &ts_test::Running, body: usize| {
        let request = server.infer("POST", "/predictions/m");
        request.body(vec![b'x'; body]).send().status
    };
    from_each_source("max_request_size", "1000", "", |server| {
        assert_eq!((predict(server, 1000), predict(server, 1001)), (200, 413));
    });
    from_each_source("max_response_size", "1000", "", |server| {
        assert_eq!((predict(server, 500), predict(server, 2000)), (200, 507));
    });
    from_each_source("max_request_parts", "2", "", |server| {
        let form = |fields: usize| {
            let field = |index| {
                format!("--b\r\ncontent-disposition: form-data; name=\"f{index}\"\r\n\r\nx\r\n")
            };
            let body = (0..fields).map(field).collect::<String>() + "--b--\r\n";
            let request = server.infer("POST", "/predictions/m").body(body);
            request
                .header("content-type", "multipart/form-data; boundary=b")
                .send()
                .status
        };
        assert_eq!((form(2), form(3)), (200, 400));
    });
}

#[test]
fn headers_that_are_configured_are_sent_and_looked_for() {
    for (key, value, header) in [
        (
            "cors_allowed_origin",
            "https://a",
            "access-control-allow-origin",
        ),
        (
            "cors_allowed_methods",
            "a, b",
            "access-control-allow-methods",
        ),
        (
            "cors_allowed_headers",
            "a, b",
            "access-control-allow-headers",
        ),
    ] {
        from_each_source(key, value, "", |server| {
            let answer = server.infer("GET", "/ping").send().expect(200);
            assert_eq!(answer.header(header), Some(value));
        });
    }
}

#[test]
fn apis_are_on_or_off_as_configured() {
    from_each_source("enable_metrics_api", "false", "", |server| {
        assert_eq!(server.metrics, "");
        server.manage("GET", "/metrics").send().expect(404);
    });
    let register = |server: ts_test::Server| {
        let server = server.echo_model("m", "").start();
        server.manage("POST", "/models?url=m").send().status
    };
    let safe = || server().with_default_safety().args(&["--dt"]);
    let environment = || safe().config("enable_envvars_config=true");
    assert_eq!(register(safe()), 405);
    assert_eq!(register(safe().args(&["--enable-model-api"])), 200);
    assert_eq!(register(safe().config("enable_model_api=TRUE")), 200);
    assert_eq!(
        register(environment().env("TS_ENABLE_MODEL_API", "true")),
        200
    );
    // The environment beats the command line; a switch only switches on.
    let off = environment().env("TS_ENABLE_MODEL_API", "false");
    assert_eq!(register(off.args(&["--enable-model-api"])), 405);
    let on = safe().config("enable_model_api=false");
    assert_eq!(register(on.args(&["--enable-model-api"])), 200);
}

#[test]
fn tokens_are_asked_for_unless_switched_off() {
    let status = |server: ts_test::Server| {
        let server = server.start();
        server.manage("GET", "/models").send().status
    };
    let safe = || server().with_default_safety();
    assert_eq!(status(safe()), 400);
    assert_eq!(status(safe().args(&["--disable-token-auth"])), 200);
    assert_eq!(
        status(safe().config("disable_token_authorization=true")),
        200
    );
    let environment = |value| {
        let server = safe().config("enable_envvars_config=true");
        server.env("TS_DISABLE_TOKEN_AUTHORIZATION", value)
    };
    assert_eq!(status(environment("true")), 200);
    assert_eq!(status(environment("false").args(&["--dt"])), 400);
}

#[test]
fn a_token_lives_as_many_minutes_as_configured() {
    // Three thousandths of a minute, in whatever unit they are read, and it must be minutes.
    let server = server()
        .with_default_safety()
        .config("token_expiration_min=0.02")
        .start();
    let keys: Value =
        serde_json::from_slice(&fs_err::read(server.folder().join("key_file.json")).unwrap())
            .unwrap();
    let bearer = format!("Bearer {}", keys["management"]["key"].as_str().unwrap());
    let list = || {
        let request = server
            .manage("GET", "/models")
            .header("authorization", &bearer);
        request.send().status
    };
    let started = Instant::now();
    assert_eq!(list(), 200);
    server.wait_until("the token is no good any more", || list() == 400);
    let took = started.elapsed().as_secs_f64();
    assert!((0.7..5.0).contains(&took), "0.02 minutes took {took} s");
}

#[test]
fn workers_and_queues_have_the_configured_size() {
    from_each_source("default_workers_per_model", "2", "", |server| {
        server.echo_model("n", "1.0", "");
        server.manage("POST", "/models?url=n").send().expect(200);
        assert_eq!(server.describe("n")["minWorkers"], 2);
        assert_eq!(
            server.describe("m")["minWorkers"],
            1,
            "an archive's own number counts"
        );
    });
    from_each_source("number_of_netty_threads", "3", "", |server| {
        let tasks = fs_err::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
        let names =
            tasks.map(|task| fs_err::read_to_string(task.unwrap().path().join("comm")).unwrap());
        let http = names
            .filter(|name| name.starts_with("actix-server wo"))
            .count();
        assert_eq!(http, 3);
    });
}

/// CF-05: each of them is in seconds.
#[test]
fn time_outs_are_in_seconds() {
    let seconds = |run: &dyn Fn() -> u16| {
        let started = Instant::now();
        let status = run();
        (status, started.elapsed().as_secs_f64())
    };
    let slow = "echo:\n  batchMicros: 30000000\n";
    from_each_source("default_response_timeout", "1", slow, |server| {
        assert_eq!(server.describe("m")["responseTimeout"], 1);
        let (status, took) = seconds(&|| {
            server
                .infer("POST", "/predictions/m")
                .body("x")
                .send()
                .status
        });
        assert_eq!(status, 500);
        assert!((1.0..5.0).contains(&took), "{took}");
    });
    from_each_source("default_startup_timeout", "1", "", |server| {
        assert_eq!(server.describe("m")["startupTimeout"], 1);
        server.echo_model("slow", "1.0", "echo:\n  loadMicros: 30000000\n");
        let path = "/models?url=slow&initial_workers=1&synchronous=true";
        let (status, took) = seconds(&|| server.manage("POST", path).send().status);
        assert_eq!(status, 500);
        assert!((1.0..5.0).contains(&took), "{took}");
    });
    from_each_source("unregister_model_timeout", "1", slow, |server| {
        for _ in 0..2 {
            let request = server.infer("POST", "/predictions/m").body("x");
            std::thread::Builder::new()
                .spawn(move || request.try_send())
                .unwrap();
        }
        server.wait_until("one is in work and one waits", || {
            server.describe("m")["jobQueueStatus"]["pendingRequests"] == 1
        });
        let (_, took) = seconds(&|| server.manage("DELETE", "/models/m").send().status);
        assert!((1.0..5.0).contains(&took), "{took}");
    });
}

/// CF-08: the delay of a batch is no part of any time-out, and says nothing where there is no batch.
#[test]
fn a_batch_delay_delays_batches_and_nothing_else() {
    let timed = |yaml: &str, gather: &str| {
        let yaml = format!("minWorkers: 1\nmaxWorkers: 1\nresponseTimeout: 1\n{yaml}");
        let server = server()
            .config(&format!("batch_gather={gather}"))
            .echo_model("m", &yaml);
        let server = server.args(&["--models", "m"]).start();
        server.wait_ready("m");
        let started = Instant::now();
        server
            .infer("POST", "/predictions/m")
            .body("x")
            .send()
            .expect(200);
        started.elapsed()
    };
    let work = "echo:\n  batchMicros: 300000\n";
    for delay in [0, 50, 60_000] {
        let took = timed(
            &format!("batchSize: 1\nmaxBatchDelay: {delay}\n{work}"),
            "strict",
        );
        assert!(took < Duration::from_millis(1500), "{delay}: {took:?}");
    }
    // Longer than the response time-out, which begins when a worker has the batch.
    let took = timed(
        &format!("batchSize: 2\nmaxBatchDelay: 1500\n{work}"),
        "strict",
    );
    assert!(took > Duration::from_millis(1500), "{took:?}");
}

#[test]
fn what_is_logged_is_what_the_filter_lets_through() {
    from_each_source("log_filter", "warn", "", |server| {
        server.infer("GET", "/ping").send().expect(200);
        server.wait_until("the start is said", || {
            server.output().contains("Model server started.")
        });
        assert!(!server.output().contains("[INFO ]"), "{}", server.output());
    });
}

#[test]
fn metrics_of_the_host_come_as_often_as_configured_or_not_at_all() {
    let has_host_metrics = |server: &ts_test::Running| {
        server
            .metrics("/metrics")
            .send()
            .text()
            .contains("MemoryUsed")
    };
    let often = server().config("metric_time_interval=1").start();
    often.wait_until("metrics of the host", || has_host_metrics(&often));
    from_each_source("disable_system_metrics", "true", "", |server| {
        assert!(!has_host_metrics(server));
    });
}

#[test]
fn models_come_only_from_urls_that_are_allowed() {
    let register = |server: ts_test::Server| {
        let server = server.start();
        server
            .manage("POST", "/models?url=file:///nowhere/x.mar")
            .send()
            .status
    };
    assert_eq!(register(server()), 400);
    assert_eq!(
        register(server().config("allowed_urls=http://only/.*")),
        404
    );
    let environment = |switches: &str| {
        let server = server().env("TS_ALLOWED_URLS", "http://only/.*");
        server.config(switches)
    };
    assert_eq!(register(environment("enable_envvars_config=true")), 400);
    let both = "enable_envvars_config=true\nuse_env_allowed_urls=true";
    assert_eq!(register(environment(both)), 404);
}

#[test]
fn a_variable_in_a_value_is_put_in_and_a_missing_one_is_told() {
    let table = shown(
        &server()
            .config("load_models=$$MODELS$$.mar")
            .env("MODELS", "a"),
        &["--model-store", "store"],
    );
    let load = keys(&table)
        .iter()
        .find(|key| key["key"] == "load_models")
        .unwrap();
    assert_eq!(load["value"], "a.mar");
    let (status, output) = server()
        .config("load_models=$$NOT_THERE$$")
        .start_and_fail();
    assert_eq!(status.code(), Some(1));
    assert!(
        output.contains(
            "Invalid configuration: Invalid Environment Variable NOT_THERE in `load_models`"
        ),
        "{output}"
    );
}

#[test]
fn a_key_given_twice_counts_as_given_last_and_a_glued_one_stops_nothing() {
    let server = server()
        .config("job_queue_size=3")
        .config("async_logging=trueservice_envelope=kserve")
        .config("job_queue_size=4")
        .echo_model("m", "minWorkers: 1\nmaxWorkers: 1")
        .args(&["--models", "m"])
        .start();
    server.wait_ready("m");
    assert_eq!(
        server.describe("m")["jobQueueStatus"]["remainingCapacity"],
        4
    );
    server.wait_until("both are told", || {
        let output = server.output();
        let told = |words: &str| {
            output
                .lines()
                .any(|line| line.contains("WARN") && line.contains(words))
        };
        told("`job_queue_size`") && told("Is a line break missing before `service_envelope`?")
    });
}

#[test]
fn a_queue_size_from_the_file_and_one_from_the_environment_take_effect() {
    let shown = |server: ts_test::Server| {
        let server = server.echo_model("m", "minWorkers: 1\nmaxWorkers: 1");
        let server = server.args(&["--models", "m"]).start();
        server.wait_ready("m");
        server.describe("m")["jobQueueStatus"]["remainingCapacity"].clone()
    };
    assert_eq!(shown(server()), 100);
    assert_eq!(shown(server().config("job_queue_size = 7")), 7);
    let environment = |server: ts_test::Server| server.env("TS_JOB_QUEUE_SIZE", "9");
    // Only where the file allows it.
    assert_eq!(shown(environment(server().config("job_queue_size=7"))), 7);
    assert_eq!(
        shown(environment(
            server().config("job_queue_size=7\nenable_envvars_config=true")
        )),
        9
    );
}

#[test]
fn all_faults_are_told_at_once_and_nothing_starts() {
    let (status, output) = server()
        .config("job_queue_size=many")
        .config("default_response_timeout=-x")
        .config("inference_address=ftp://127.0.0.1")
        .start_and_fail();
    assert_eq!(status.code(), Some(1), "{output}");
    for key in [
        "job_queue_size",
        "default_response_timeout",
        "inference_address",
    ] {
        assert!(output.contains(key), "{key} is not told:\n{output}");
    }
}

#[test]
fn an_unknown_key_is_warned_about_with_the_nearest_known_name() {
    let server = server().config("job_que_size=7").start();
    server.wait_until("the warning", || {
        let output = server.output();
        output.contains("job_que_size") && output.contains("job_queue_size")
    });
}

#[test]
fn usage_errors_end_with_status_two_and_missing_folders_with_one() {
    let (status, output) = server().args(&["--no-such-flag"]).start_and_fail();
    assert_eq!(status.code(), Some(2), "{output}");
    let (status, output) = server()
        .args(&["--workflow-store", "/does/not/exist"])
        .start_and_fail();
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(
        output.contains("--workflow-store directory not found: /does/not/exist"),
        "{output}"
    );
}

#[test]
fn an_address_in_use_is_named() {
    let first = server().start();
    let taken = first.inference.clone();
    let (status, output) = server()
        .config(&format!("inference_address={taken}"))
        .start_and_fail();
    assert_eq!(status.code(), Some(1), "{output}");
    let address = taken.trim_start_matches("http://");
    assert!(
        output.contains("Failed to bind to address") && output.contains(address),
        "{output}"
    );
}

/// CF-10.
#[test]
fn paths_with_blanks_and_odd_letters_work() {
    let outer = tempfile::tempdir().unwrap();
    let odd = outer.path().join("a b/ü#%");
    let folder = |name: &str| {
        let folder = odd.join(name);
        fs_err::create_dir_all(&folder).unwrap();
        folder.to_str().unwrap().to_owned()
    };
    let (store, temp, logs, config) = (
        folder("st ore"),
        folder("tm p"),
        folder("lo gs"),
        folder("conf"),
    );
    let config = format!("{config}/my config.properties");
    fs_err::write(
        &config,
        format!(
            "model_store={store}\nload_models=my model,named=my model\n\
             inference_address=http://127.0.0.1:0\nmanagement_address=http://127.0.0.1:0\n\
             metrics_address=unix:{temp}/me trics"
        ),
    )
    .unwrap();
    let model = std::path::Path::new(&store).join("my model/MAR-INF");
    fs_err::create_dir_all(&model).unwrap();
    let manifest = r#"{"runtime": "echo", "model": {"modelName": "m", "modelVersion": "1.0"}}"#;
    fs_err::write(model.join("MANIFEST.json"), manifest).unwrap();
    let server = server()
        .args(&["--ts-config", &config, "--model-store", &store])
        .env("TEMP", &temp)
        .env("LOG_LOCATION", &logs)
        .env("TS_CONFIG_FILE", &config)
        .start();
    for name in ["m", "named"] {
        server.wait_ready(name);
        let answer = server
            .infer("POST", &format!("/predictions/{name}"))
            .body("x")
            .send();
        assert_eq!(answer.expect(200).text(), "x");
    }
    let unpacked = fs_err::read_dir(&temp).unwrap();
    let names: Vec<_> = unpacked
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(
        names.iter().any(|name| name.starts_with("models-")),
        "{names:?}"
    );
    assert!(server.metrics.ends_with("/me trics"), "{}", server.metrics);
}
