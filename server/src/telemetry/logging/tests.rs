use super::*;

fn sinks(format: Format, marked: MarkedLines) -> Arc<Sinks> {
    Arc::new(Sinks::new(Layout::new(format, marked)))
}

/// What is logged, as the console and each of the files have it.
fn logged(sinks: &Arc<Sinks>, log: impl FnOnce()) -> (String, [String; 5]) {
    let subscriber = tracing_subscriber::registry().with(Logs(Arc::clone(sinks)));
    tracing::subscriber::with_default(subscriber, log);
    sinks.console.close();
    sinks.files.close();
    let (mut console, mut files) = ([Lane::default()], <[Lane; 5]>::default());
    assert!(sinks.console.take(&mut console) && sinks.files.take(&mut files));
    let text = |lane: Lane| String::from_utf8(lane.bytes).unwrap();
    let [console] = console;
    (text(console), files.map(text))
}

fn assert_matches(pattern: &str, text: &str) {
    let date = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}";
    let pattern = format!("^{}$", pattern.replace("DATE", date));
    let matcher = regex::Regex::new(&pattern).unwrap();
    assert!(matcher.is_match(text), "{text:?} is not {pattern}");
}

fn access() {
    tracing::info!(
        target: "ACCESS_LOG",
        peer = %"/127.0.0.1:64003",
        method = %"POST",
        path = "/predictions/x?a=1",
        protocol = ?actix_web::http::Version::HTTP_11,
        status = 200_u16,
        ms = 118_u64,
        bytes = Some(3_u64),
    );
}

fn model(text: &str, ids: &str) {
    let worker = "W-9000-mnist_1.0";
    tracing::info!(target: "MODEL_LOG", worker, stream = "stdout", request_id = ids, "{text}");
}

#[test]
fn each_target_has_its_file_and_the_console_has_all_lg_02() {
    let sinks = sinks(Format::Plain, MarkedLines::Server);
    let (console, [access_log, model_log, ts_log, ts_metrics, model_metrics]) =
        logged(&sinks, || {
            access();
            model("hello\nworld", "a,b");
            tracing::warn!(worker = "W-1", count = 2, "of the server");
            tracing::info!(target: "TS_METRICS", "Requests2XX.Count:1.0|#Level:Host");
            tracing::info!(target: "MODEL_METRICS", "HandlerTime.ms:1.5|#Level:Model");
        });
    let line = r#"/127.0.0.1:64003 "POST /predictions/x\?a=1 HTTP/1.1" 200 118"#;
    assert_matches(&format!("DATE - {line}\n"), &access_log);
    let head = r"DATE \[INFO \] W-9000-mnist_1.0-stdout MODEL_LOG - ";
    assert_matches(&format!("{head}hello\n{head}world\n"), &model_log);
    assert_matches(
        r#"DATE \[WARN \] \S+ ts_server::\S+ - of the server worker="W-1" count=2"#,
        ts_log.trim_end(),
    );
    assert_matches(r"DATE - Requests2XX.Count:1.0\|#Level:Host\n", &ts_metrics);
    assert_matches(r"DATE - HandlerTime.ms:1.5\|#Level:Model\n", &model_metrics);
    assert_eq!(console.lines().count(), 6);
    for text in [
        line,
        "hello",
        "world",
        "of the server",
        "Requests2XX",
        "HandlerTime",
    ] {
        assert_eq!(
            regex::Regex::new(text).unwrap().find_iter(&console).count(),
            1,
            "{text}"
        );
    }
    let thread = std::thread::current();
    let thread = thread.name().unwrap();
    assert_matches(
        &format!(r"DATE \[INFO \] {thread} ACCESS_LOG - {line}"),
        console.lines().next().unwrap(),
    );
}

#[tokio::test]
async fn lines_of_a_request_end_with_its_id() {
    use crate::telemetry::RequestContext;
    let id = ts_types::RequestId::of_client("mine-1").unwrap();
    for (marked, of_server, of_model) in [
        (MarkedLines::None, false, false),
        (MarkedLines::Server, true, false),
        (MarkedLines::All, true, true),
    ] {
        let sinks = sinks(Format::Plain, marked);
        let context = RequestContext {
            id: id.clone(),
            trace_parent: None,
            course: None,
        };
        let work = async {
            logged(&sinks, || {
                access();
                tracing::warn!("of the server");
                tracing::warn!(request_id = "its-own", "of a worker");
                model("text", "mine-1");
                tracing::info!(target: "TS_METRICS", "a line with a form of its own");
            })
        };
        let (_, [access_log, model_log, ts_log, ts_metrics, _]) = context.scope(work).await;
        let ends = |text: &str| text.ends_with(" request_id=mine-1\n");
        assert_eq!(ends(&access_log), of_server, "{access_log}");
        assert_eq!(
            ts_log.contains("of the server request_id=mine-1\n"),
            of_server,
            "{ts_log}"
        );
        assert_eq!(
            ts_log.contains("of a worker request_id=its-own\n"),
            of_server,
            "{ts_log}"
        );
        assert_eq!(ends(&model_log), of_model, "{model_log}");
        assert!(!ends(&ts_metrics));
    }
}

#[test]
fn nothing_from_outside_makes_a_line_of_its_own_lg_03() {
    let sinks = sinks(Format::Plain, MarkedLines::All);
    let forged =
        "x\r\n2026-01-01T00:00:00,000 [ERROR] main ts - forged\u{1b}[31m\u{85}\u{2028}\u{9b}";
    let (_, [_, model_log, ts_log, ..]) = logged(&sinks, || {
        tracing::warn!(header = forged, "of {forged}");
        tracing::warn!(header = %forged, "told");
        tracing::warn!(exception = forged, "failed");
        model("tab\tstays \u{1b}[31m \u{7f} é 北京", "");
    });
    assert_eq!(ts_log.lines().count(), 4, "{ts_log}");
    assert!(
        ts_log
            .lines()
            .all(|line| !line.starts_with("2026-01-01T00:00:00,000"))
    );
    let raw = |c: char| c.is_control() && c != '\n' && c != '\t' || c == '\u{2028}';
    assert!(
        !ts_log.contains(raw) && !model_log.contains(raw),
        "{ts_log}{model_log}"
    );
    assert!(ts_log.contains(r"of x\r\n2026-"), "{ts_log}");
    assert!(
        model_log.ends_with("tab\tstays \\u{1b}[31m \\u{7f} é 北京\n"),
        "{model_log}"
    );
}

#[test]
fn json_has_an_object_for_each_record() {
    let sinks = sinks(Format::Json, MarkedLines::None);
    let (console, [access_log, model_log, ts_log, ..]) = logged(&sinks, || {
        access();
        model("Traceback\n  File \"x\"", "a,b");
        let odd = "\"quoted\"\n";
        tracing::warn!(worker = "W-1", count = 2, part = 0.5, none = f64::NAN, odd, yes = true, error = %odd, "told");
        tracing::error!(exception = "its", "failed");
    });
    let objects = |text: &str| -> Vec<serde_json::Value> {
        text.lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect()
    };
    assert_eq!(objects(&console).len(), 4);
    let line = &objects(&access_log)[0];
    for (name, value) in [
        ("peer", serde_json::json!("/127.0.0.1:64003")),
        ("method", "POST".into()),
        ("path", "/predictions/x?a=1".into()),
        ("protocol", "HTTP/1.1".into()),
        ("status", 200.into()),
        ("ms", 118.into()),
        ("bytes", 3.into()),
        ("logger", "ACCESS_LOG".into()),
        ("level", "INFO".into()),
    ] {
        assert_eq!(line[name], value, "{line}");
    }
    let timestamp = line["timestamp"].as_str().unwrap();
    assert!(timestamp.parse::<Timestamp>().is_ok(), "{timestamp}");
    let line = &objects(&model_log)[0];
    assert_eq!(line["message"], "Traceback\n  File \"x\"");
    assert_eq!(
        (&line["request_id"], &line["worker"]),
        (&"a,b".into(), &"W-9000-mnist_1.0".into())
    );
    assert_eq!(line["thread"], "W-9000-mnist_1.0-stdout");
    let lines = objects(&ts_log);
    let told = &lines[0];
    assert_eq!(
        (&told["message"], &told["worker"]),
        (&"told".into(), &"W-1".into())
    );
    assert_eq!(
        (&told["count"], &told["part"], &told["yes"]),
        (&2.into(), &0.5.into(), &true.into())
    );
    assert_eq!(
        (&told["odd"], &told["error"]),
        (&"\"quoted\"\n".into(), &"\"quoted\"\n".into())
    );
    assert_eq!(told["none"], "NaN");
    assert_eq!(lines[1]["exception"], "its");
}

#[test]
fn what_nobody_reads_is_dropped_counted_and_told() {
    let sinks = sinks(Format::Plain, MarkedLines::Server);
    let line = vec![b'x'; queue::MOST_WAITING - 1];
    sinks.console.add(0, &line);
    sinks.console.add(0, b"\n");
    sinks.console.add(0, b"lost\nlost\n");
    // The other writer's lines have room of their own.
    sinks.files.add(0, b"kept\n");
    sinks.console.close();
    let mut written = Vec::new();
    write_console(&sinks, &mut written);
    let end = String::from_utf8(written.split_off(queue::MOST_WAITING)).unwrap();
    assert_matches(
        r"DATE \[WARN \] \S+ \S+ - 2 log lines are missing here: nobody read \S+ console in time\n",
        &end,
    );
    sinks.console.ended(Instant::now());
}

#[test]
fn everything_logged_before_the_end_is_in_its_file_and_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let sinks = sinks(Format::Plain, MarkedLines::Server);
    let settings = LogSettings {
        max_file_bytes: 1 << 20,
        ..LogSettings::default()
    };
    let folders = LogFolders {
        logs: folder.path().join("a"),
        metrics: folder.path().join("b"),
    };
    let files = open_files(&sinks, &settings, &folders);
    for name in [
        "a/access_log",
        "a/model_log",
        "a/ts_log",
        "b/ts_metrics",
        "b/model_metrics",
    ] {
        assert!(folder.path().join(format!("{name}.log")).exists(), "{name}");
    }
    let (ask, _asked) = std::sync::mpsc::sync_channel(1);
    for number in 0..100 {
        sinks
            .files
            .add(Book::Server as usize, format!("{number}\n").as_bytes());
    }
    sinks.files.close();
    write_files(&sinks, files, &ask);
    let expected: String = (0..100).map(|number| format!("{number}\n")).collect();
    assert_eq!(
        fs_err::read_to_string(folder.path().join("a/ts_log.log")).unwrap(),
        expected
    );
}

#[test]
fn a_folder_that_cannot_be_is_told_once_with_its_setting() {
    let folder = tempfile::tempdir().unwrap();
    fs_err::write(folder.path().join("taken"), "").unwrap();
    let sinks = sinks(Format::Plain, MarkedLines::Server);
    let folders = LogFolders {
        logs: folder.path().join("taken/logs"),
        metrics: folder.path().join("metrics"),
    };
    open_files(&sinks, &LogSettings::default(), &folders);
    let (console, _) = logged(&sinks, || {});
    assert_eq!(console.lines().count(), 1, "{console}");
    assert!(
        console.contains("`LOG_LOCATION` names another folder"),
        "{console}"
    );
}

#[test]
fn a_filter_with_a_slip_in_it_is_refused() {
    for good in [
        "info",
        "INFO,ACCESS_LOG=off",
        "warn,ts_serving::pool=debug",
        "off",
    ] {
        assert_eq!(checked_filter(good).as_deref(), Ok(good));
    }
    for wrong in [
        "inof",
        "info,ACCESS_LOG",
        "==",
        "a=loud",
        &"a=info,".repeat(1000),
    ] {
        assert!(checked_filter(wrong).is_err(), "{wrong}");
    }
}

#[tokio::test]
async fn a_task_of_its_own_has_the_id_from_its_span_and_json_the_trace_too() {
    use crate::telemetry::RequestContext;
    let plain = sinks(Format::Plain, MarkedLines::Server);
    let (_, [_, _, ts_log, ts_metrics, _]) = logged(&plain, || {
        let _entered = tracing::error_span!("call", request_id = "mine-1").entered();
        tracing::warn!("of a task");
        tracing::warn!(request_id = "its-own", "of a worker");
        tracing::info!(target: "TS_METRICS", "a metric");
    });
    assert!(ts_log.contains("of a task request_id=mine-1\n"), "{ts_log}");
    assert!(
        ts_log.contains("of a worker request_id=its-own\n"),
        "{ts_log}"
    );
    assert!(ts_metrics.ends_with("a metric\n"), "{ts_metrics}");
    let json = sinks(Format::Json, MarkedLines::None);
    let trace = "0af7651916cd43dd8448eb211c80319c";
    let context = RequestContext {
        id: ts_types::RequestId::of_client("mine-2").unwrap(),
        trace_parent: Some(format!("00-{trace}-b7ad6b7169203331-01").into()),
        course: None,
    };
    let work = async { logged(&json, || tracing::warn!("told")) };
    let (console, _) = context.scope(work).await;
    let line: serde_json::Value = serde_json::from_str(&console).unwrap();
    assert_eq!(
        (&line["request_id"], &line["trace_id"]),
        (&"mine-2".into(), &trace.into())
    );
}
