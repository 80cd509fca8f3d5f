//! The metrics page and the lines that the log gets of it. That each page is well-formed is checked
//! wherever a test gets one (`ts_test::Page`).

use std::time::Duration;

use ts_test::{Page, Running, at_once};

use crate::{server, serving};

fn page(server: &Running) -> Page {
    server.metrics("/metrics").send().expect(200).page()
}

fn predict(server: &Running, path: &str) {
    let request = server.infer("POST", path);
    request.body("x").send().expect(200);
}

/// Responses by class: 2xx, 4xx, others.
fn responses(page: &Page) -> [f64; 3] {
    ["2XX", "4XX", "5XX"].map(|class| {
        let name = format!("Requests{class}");
        page.value(&name, &[("Level", "Host")]).unwrap()
    })
}

#[test]
fn each_request_is_counted_once_in_its_class_mt_06() {
    let model = "minWorkers: 1\nmaxWorkers: 1\njobQueueSize: 1\n";
    let late =
        "minWorkers: 1\nmaxWorkers: 1\nclientTimeoutInMills: 100\necho:\n  batchMicros: 1000000\n";
    let server = server()
        .echo_model("m", model)
        .echo_model("late", late)
        .config("max_request_size=1000")
        .args(&["--models", "m", "late"])
        .start();
    server.wait_ready("late");
    server.wait_ready("m");
    let before = responses(&page(&server));
    let infer = |path: &str| server.infer("POST", path);
    let fault = |fault: &str| {
        infer("/predictions/m")
            .header("x-echo-fault", fault)
            .body("x")
    };
    predict(&server, "/predictions/m");
    server.infer("GET", "/ping").send().expect(200);
    infer("/predictions/none").body("x").send().expect(404);
    infer("/predictions/m/9.0").body("x").send().expect(404);
    server.infer("GET", "/nowhere").send().expect(404);
    server.manage("PATCH", "/models").send().expect(405);
    infer("/predictions/m")
        .body("x".repeat(2000))
        .send()
        .expect(413);
    let form = infer("/predictions/m").header("content-type", "multipart/form-data; boundary=x");
    form.body("junk").send().expect(400);
    server.manage("POST", "/models").send().expect(400);
    let bad = server.manage("POST", "/models");
    let bad = bad.header("content-type", "application/json").body("{");
    bad.send().expect(400);
    fault("raise").send().expect(503);
    infer("/predictions/late").body("x").send().expect(504);
    // One runs, one waits, one finds no room; the first two leave.
    at_once([false, true], |second| {
        if second {
            // Whoever asks for pages meanwhile is in flight too, so the requests of the model are
            // looked at: the third of them has come, and waits no more.
            server.wait_until("the first one runs", || {
                let page = page(&server);
                let of_model = [("model_name", "m")];
                let of_default = [("model_name", "m"), ("model_version", "default")];
                page.value("ts_inference_requests_total", &of_default) == Some(3.0)
                    && page.value("ts_queue_length", &of_model) == Some(0.0)
            });
            let waits = infer("/predictions/m").body("x");
            assert!(waits.limit(Duration::from_secs(2)).try_send().is_err());
        } else {
            let runs = fault("delay=4000").limit(Duration::from_secs(3));
            let third = || {
                server.wait_until("the second one waits", || {
                    let labels = [("model_name", "m")];
                    page(&server).value("ts_queue_length", &labels) == Some(1.0)
                });
                infer("/predictions/m").body("x").send().expect(503);
            };
            std::thread::scope(|scope| {
                scope.spawn(third);
                assert!(runs.try_send().is_err());
            });
        }
    });
    // Scrapes are counted too, once they are answered.
    let scrapes = |page: &Page, others: f64| responses(page)[0] - before[0] - others;
    server.wait_until("those that have left are counted", || {
        responses(&page(&server))[1] - before[1] >= 10.0
    });
    let last = page(&server);
    assert_eq!(responses(&last)[1] - before[1], 10.0);
    assert_eq!(responses(&last)[2] - before[2], 3.0);
    assert!(scrapes(&last, 2.0) >= 1.0);
    let again = page(&server);
    let more: f64 = responses(&again).iter().sum::<f64>() - responses(&last).iter().sum::<f64>();
    assert_eq!(more, 1.0, "a scrape is one request");
    let arrived = again.value(
        "ts_inference_requests_total",
        &[("model_name", "m"), ("model_version", "default")],
    );
    assert_eq!(arrived, Some(5.0));
    // Whoever got a status alone finds the setting in the log.
    let told = "over the limit of 1000 bytes (`max_request_size`";
    server.wait_until("the limit is told", || server.output().contains(told));
}

#[test]
fn a_models_requests_and_times_are_on_the_page() {
    let server = serving("");
    for _ in 0..4 {
        predict(&server, "/predictions/m");
    }
    predict(&server, "/predictions/m/1.0");
    let answer = server.metrics("/metrics").send().expect(200);
    let kind = answer.header("content-type");
    assert_eq!(kind, Some("text/plain; version=0.0.4; charset=utf-8"));
    let found = answer.page();
    let of = |version| [("model_name", "m"), ("model_version", version)];
    let requests = "ts_inference_requests_total";
    assert_eq!(found.value(requests, &of("default")), Some(4.0));
    assert_eq!(found.value(requests, &of("1.0")), Some(1.0));
    for name in ["request", "queue", "batch", "handler"] {
        let name = format!("ts_{name}_duration_seconds_count");
        assert_eq!(found.value(&name, &of("1.0")), Some(5.0), "{name}");
    }
    server.wait_until("all batches are counted", || {
        page(&server).value("ts_batch_size_sum", &of("1.0")) == Some(5.0)
    });
    let workers = |state| found.value("ts_workers", &[("model_name", "m"), ("state", state)]);
    assert_eq!(
        (workers("ready"), workers("starting")),
        (Some(1.0), Some(0.0))
    );
    assert_eq!(found.value("ts_requests_in_flight", &[]), Some(1.0));
    assert!(!found.types.keys().any(|name| name.starts_with("nv_")));
    // The first figures of the system come from a thread that the start does not wait for.
    server.wait_until("every metric is on the page", || {
        let found = page(&server);
        [
            "WorkerThreadTime",
            "WorkerLoadTime",
            "MemoryUsed",
            "DiskUsage",
        ]
        .iter()
        .all(|name| found.value(name, &[("Level", "Host")]).is_some())
    });
    let text = server.metrics("/metrics").send().text();
    let host = format!(
        "Hostname=\"{}\"",
        rustix::system::uname().nodename().to_str().unwrap()
    );
    for line in [
        format!("\nRequests2XX{{Level=\"Host\",{host},}} "),
        format!("\nWorkerLoadTime{{WorkerName=\"W-9000-m_1.0\",Level=\"Host\",{host},}} "),
        "\n# HELP QueueTime Torchserve prometheus gauge metric with unit: Milliseconds\n"
            .to_owned(),
    ] {
        assert!(text.contains(&line), "{line} is not in {text}");
    }
}

#[test]
fn the_page_can_be_filtered_mt_01() {
    let server = serving("");
    predict(&server, "/predictions/m");
    let of = |query: &str| {
        let answer = server.metrics(&format!("/metrics?{query}")).send();
        answer.expect(200).page().types
    };
    let names = |query: &str| of(query).into_keys().collect::<Vec<_>>();
    assert_eq!(names("name[]=QueueTime"), ["QueueTime"]);
    let several = "name[]=QueueTime&name[]=none&name%5B%5D=ts_batch_size_sum";
    assert_eq!(names(several), ["QueueTime", "ts_batch_size"]);
    assert_eq!(names("name[]=nothing"), Vec::<String>::new());
    assert!(names("name=nothing").len() > 10);
}

#[test]
fn series_go_with_their_models_and_workers_mt_04_mt_10() {
    let server = server()
        .echo_model("m", "minWorkers: 1\nmaxWorkers: 1\n")
        .args(&["--models", "m"])
        .start();
    server.wait_ready("m");
    predict(&server, "/predictions/m");
    server.echo_model("other", "1.0", "");
    server.echo_model("other2", "2.0", "");
    server.wait_until("the metrics of the host are there", || {
        page(&server).types.contains_key("DiskUtilization")
    });
    let before = page(&server).samples.len();
    let register = |url: &str| {
        let path = format!("/models?url={url}&model_name=gone&initial_workers=1");
        server.manage("POST", &path).send().expect(200);
    };
    for _ in 0..200 {
        register("other");
        predict(&server, "/predictions/gone");
        assert!(page(&server).labelled("model_name", "gone") > 10);
        server.manage("DELETE", "/models/gone").send().expect(200);
        assert_eq!(page(&server).labelled("model_name", "gone"), 0);
    }
    assert_eq!(page(&server).samples.len(), before);
    let of = |model, version| [("model_name", model), ("model_version", version)];
    let requests = "ts_inference_requests_total";
    register("other");
    let page_now = page(&server);
    assert_eq!(page_now.value(requests, &of("gone", "default")), Some(0.0));
    assert_eq!(page_now.value(requests, &of("m", "default")), Some(1.0));
    // The default version's name is that of both; it stays with the one that stays.
    predict(&server, "/predictions/gone");
    register("other2");
    server
        .manage("PUT", "/models/gone/2.0/set-default")
        .send()
        .expect(200);
    server
        .manage("DELETE", "/models/gone/1.0")
        .send()
        .expect(200);
    let page_now = page(&server);
    assert_eq!(page_now.value(requests, &of("gone", "default")), Some(1.0));
    assert_eq!(page_now.value(requests, &of("gone", "1.0")), None);
    let is_back = || {
        let of_m = [("model_name", "m"), ("state", "ready")];
        page(&server).value("ts_workers", &of_m) == Some(1.0)
    };
    for _ in 0..100 {
        let request = server.infer("POST", "/predictions/m");
        let request = request.header("x-echo-fault", "abort").body("x");
        request.send().expect(500);
        server.wait_until("the worker is back", is_back);
        // One that has served is started again at once.
        predict(&server, "/predictions/m");
    }
    let loaded = page(&server);
    let loads = loaded.samples.keys().filter(|(name, labels)| {
        name == "WorkerLoadTime" && labels["WorkerName"].ends_with("-m_1.0")
    });
    assert_eq!(loads.count(), 1);
}

/// Lines of a log, which the console has too.
fn lines(server: &Running, log: &str) -> Vec<String> {
    let mark = format!(" {log} - ");
    let output = server.output();
    let lines = output.lines().filter_map(|line| line.split_once(&mark));
    lines.map(|(_, message)| message.to_owned()).collect()
}

#[test]
fn the_mode_decides_what_the_log_has_and_not_what_the_page_has() {
    const LEGACY: [&str; 3] = [
        "ts_inference_requests_total",
        "ts_inference_latency_microseconds",
        "ts_queue_latency_microseconds",
    ];
    at_once(["", "log", "Prometheus", "legacy", "nonsense"], |mode| {
        let mut told = server().echo_model("m", "minWorkers: 1\nmaxWorkers: 1\n");
        if !mode.is_empty() {
            told = told.config(&format!("metrics_mode={mode}"));
        }
        let server = told.args(&["--models", "m"]).start();
        server.wait_ready("m");
        for _ in 0..3 {
            predict(&server, "/predictions/m");
        }
        let request = server.infer("POST", "/predictions/m/1.0");
        request.body("x").send().expect(200);
        let all = [
            "Requests2XX",
            "QueueTime",
            "WorkerThreadTime",
            "WorkerLoadTime",
        ];
        server.wait_until("all is on the page", || {
            let found = page(&server);
            all.iter()
                .chain(&LEGACY)
                .all(|name| found.types.contains_key(*name))
        });
        let has = |name: &str| {
            let start = format!("{name}.");
            lines(&server, "TS_METRICS")
                .iter()
                .any(|line| line.starts_with(&start))
        };
        if mode == "Prometheus" {
            drop(server.infer("GET", "/ping").send());
            assert!(lines(&server, "TS_METRICS").is_empty());
            return;
        }
        server.wait_until("all is in the log", || all.iter().all(|name| has(name)));
        for name in LEGACY {
            if mode == "legacy" {
                assert!(!has(name), "{name}");
            } else {
                server.wait_until("the counters are too", || has(name));
            }
        }
        assert_eq!(
            server.output().contains("`metrics_mode` is `nonsense`"),
            mode == "nonsense"
        );
    });
}

/// MT-12, and the grammar of contract 6.5.
#[test]
fn every_line_of_the_log_can_be_parsed_mt_12() {
    let server = serving("");
    predict(&server, "/predictions/m");
    server.infer("GET", "/nowhere").send().expect(404);
    server.wait_until("the lines are written", || {
        let all = lines(&server, "TS_METRICS");
        ["Requests4XX", "ts_inference_latency", "MemoryUsed"]
            .iter()
            .all(|name| all.iter().any(|line| line.starts_with(name)))
    });
    let host = rustix::system::uname()
        .nodename()
        .to_str()
        .unwrap()
        .to_owned();
    for line in lines(&server, "TS_METRICS") {
        let parts: Vec<&str> = line.split('|').collect();
        let [measured, dimensions, end] = parts[..] else {
            panic!("{line}")
        };
        let (name, value) = measured.split_once(':').unwrap();
        let (name, unit) = name.split_once('.').unwrap();
        assert!(
            !name.is_empty() && unit.chars().all(char::is_alphabetic),
            "{line}"
        );
        assert!(
            value.contains('.') && value.parse::<f64>().is_ok(),
            "{line}"
        );
        let dimensions = dimensions.strip_prefix('#').unwrap();
        assert!(
            dimensions.split(',').all(|pair| pair.contains(':')),
            "{line}"
        );
        assert!(!dimensions.to_lowercase().contains("hostname"), "{line}");
        let seconds = end.strip_prefix(&format!("#hostname:{host},timestamp:"));
        assert!(
            seconds.unwrap().parse::<u64>().unwrap() > 1_700_000_000,
            "{line}"
        );
    }
    let line = lines(&server, "TS_METRICS");
    let requests = line
        .iter()
        .find(|line| line.starts_with("ts_inference_requests_total"));
    let start =
        "ts_inference_requests_total.Count:1.0|#model_name:m,model_version:default|#hostname:";
    assert!(requests.unwrap().starts_with(start), "{requests:?}");
}

#[test]
fn a_configuration_file_decides_which_metrics_there_are() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("metrics.yaml");
    let started = |yaml: &str| {
        fs_err::write(&file, yaml).unwrap();
        let server = server().echo_model("m", "minWorkers: 1\nmaxWorkers: 1\n");
        let server = server.config(&format!("metrics_config={}", file.display()));
        let server = server.args(&["--models", "m"]).start();
        server.wait_ready("m");
        predict(&server, "/predictions/m");
        server
    };
    let some = "ts_metrics:\n  counter:\n    - name: ts_inference_requests_total\n      unit: Count\n      \
                dimensions: [hostname, model_name, other]\n";
    let server = started(some);
    let text = server.metrics("/metrics").send().text();
    assert!(text.contains(",model_name=\"m\",other=\""), "{text}");
    let types = page(&server).types;
    let of_torchserve = ["Requests2XX", "QueueTime", "MemoryUsed", "WorkerLoadTime"];
    assert!(!of_torchserve.iter().any(|name| types.contains_key(*name)));
    assert!(types.contains_key("ts_request_duration_seconds"));
    drop(server);
    for (yaml, told) in [
        ("ts_metrics: [", "line 1"),
        (
            "ts_metrics:\n  gauge:\n    - name: ''\n      unit: ms\n",
            "line 3: the name of a metric is empty",
        ),
    ] {
        let server = started(yaml);
        assert!(server.output().contains(told), "{}", server.output());
        assert!(
            server.output().contains("metrics.yaml`, "),
            "{}",
            server.output()
        );
        assert!(!page(&server).types.contains_key("Requests2XX"));
    }
}

#[test]
fn tritons_names_are_there_if_asked_for() {
    let model = "minWorkers: 1\nmaxWorkers: 1\n";
    let server = server()
        .echo_model("m", model)
        .config("triton_metrics=true")
        .args(&["--models", "m"])
        .start();
    server.wait_ready("m");
    for _ in 0..3 {
        predict(&server, "/predictions/m");
    }
    let failing = server.infer("POST", "/predictions/m");
    failing
        .header("x-echo-fault", "raise")
        .body("x")
        .send()
        .expect(503);
    let labels = [("model", "m"), ("version", "1.0")];
    server.wait_until("four batches are counted", || {
        page(&server).value("nv_inference_exec_count", &labels) == Some(4.0)
    });
    let found = page(&server);
    let value = |name: &str| {
        found
            .value(&format!("nv_inference_{name}"), &labels)
            .unwrap()
    };
    assert_eq!(
        (value("request_success"), value("request_failure")),
        (3.0, 1.0)
    );
    assert_eq!((value("count"), value("pending_request_count")), (4.0, 0.0));
    let whole = value("request_duration_us");
    let parts = ["queue", "compute_input", "compute_infer", "compute_output"]
        .map(|part| value(&format!("{part}_duration_us")));
    assert!(
        whole > 0.0 && parts.iter().sum::<f64>() <= whole,
        "{whole} {parts:?}"
    );
}
