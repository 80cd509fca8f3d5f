//! The command line (*torchserve-contract* 1.1 to 1.7): flags, exit codes, words, and a server in
//! the background with its pid file.

use crate::server;

/// A command that only ends where the start does; all its words.
fn fails(server: ts_test::Server, code: i32) -> String {
    let (status, output) = server.start_and_fail();
    assert_eq!(status.code(), Some(code), "{output}");
    output
}

#[test]
fn the_version_is_printed() {
    for flag in ["-v", "--version", "--vers"] {
        let ran = server().run(&[flag]);
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(ran.code, Some(0), "{ran:?}");
        assert_eq!(ran.stdout, format!("TorchServe Version is {version}\n"));
    }
}

#[test]
fn wrong_usage_ends_with_2_and_a_usage_text_on_standard_error() {
    for wrong in [
        &["--no-such-flag"][..],
        &["--start", "--stop"],
        &["--stop", "-v"],
        &["--model"],
        &["--models"],
        &["--model-store"],
        &["--start=yes"],
        &["stray"],
        &["config", "--stop"],
    ] {
        let ran = server().run(wrong);
        assert_eq!(ran.code, Some(2), "{wrong:?}: {ran:?}");
        assert!(
            ran.stderr.contains("Usage: torchserve"),
            "{wrong:?}: {ran:?}"
        );
        assert_eq!(ran.stdout, "", "{wrong:?}");
    }
}

#[test]
fn help_names_every_flag_of_torchserve() {
    let ran = server().run(&["--help"]);
    assert_eq!(ran.code, Some(0));
    for flag in [
        "-v, --version",
        "--start",
        "--stop",
        "--ts-config",
        "--model-store",
        "--workflow-store",
        "--models",
        "--log-config",
        "--cpp-log-config",
        "--foreground",
        "--no-config-snapshots",
        "--plugins-path",
        "--disable-token-auth",
        "--enable-model-api",
    ] {
        assert!(ran.stdout.contains(flag), "{flag}:\n{}", ran.stdout);
    }
}

#[test]
fn flags_are_taken_by_their_unambiguous_beginnings_and_other_names() {
    let shown = server().run(&["config", "--model-st=store", "--work", "tmp", "--mods=x"]);
    assert_eq!(shown.code, Some(2), "{shown:?}");
    let shown = server().run(&[
        "config",
        "--model-st=store",
        "--work",
        "tmp",
        "--fore",
        "--nc",
        "--dt",
        "--enable",
        "--pp",
        "jars",
        "--models",
        "a.mar",
        "b.mar",
        "--ts=",
    ]);
    assert_eq!(shown.code, Some(0), "{shown:?}");
    for (key, value) in [
        ("model_store", "store"),
        ("workflow_store", "tmp"),
        ("disable_token_authorization", "true"),
        ("enable_model_api", "true"),
        ("plugins_path", "jars"),
        ("load_models", "a.mar,b.mar"),
    ] {
        let line = shown.stdout.lines().find(|line| line.starts_with(key));
        assert_eq!(
            line.unwrap().split_whitespace().nth(1),
            Some(value),
            "{key}"
        );
    }
}

#[test]
fn what_is_not_there_is_told_in_the_known_words() {
    for (arguments, words) in [
        (
            &["--workflow-store", "/no/w"][..],
            "--workflow-store directory not found: /no/w\n",
        ),
        (
            &["--log-config", "/no/l"],
            "--log-config file not found: /no/l\n",
        ),
        (
            &["--cpp-log-config", "/no/c"],
            "--cpp-log-config file not found: /no/c\n",
        ),
        (
            &["--model-store", "/no/m"],
            "--model-store directory not found: /no/m\n",
        ),
        (
            &["--ts-config", "/no/t"],
            "--ts-config file not found: /no/t\n",
        ),
    ] {
        let output = fails(server().args(arguments), 1);
        assert!(output.contains(words), "{words}: {output}");
        assert!(!output.contains("Model server started."));
    }
    let ran = server().run(&["--start"]);
    assert_eq!(ran.code, Some(1));
    assert_eq!(ran.stdout, "Missing mandatory parameter --model-store\n");
    let output = fails(server().env("TEMP", "/no/temp"), 1);
    let words = "Invalid temp directory: /no/temp, please check TEMP environment variable.\n";
    assert!(output.contains(words), "{output}");
}

#[test]
fn a_missing_file_a_missing_store_and_wrong_values_are_told_in_one_run() {
    let output = fails(
        server()
            .config("job_queue_size=0")
            .config("models={\"noop\": {\"1.0\": {\"batchSize\": \"many\"}}}")
            .args(&["--model-store", "/no/m", "--log-config", "/no/l"]),
        1,
    );
    for told in [
        "--log-config file not found: /no/l",
        "--model-store directory not found: /no/m",
        "job_queue_size: `0` is not a whole number from 1",
        "models: noop/1.0/batchSize: `\"many\"` is not a whole number",
        "config.properties line 5)",
    ] {
        assert!(output.contains(told), "{told}: {output}");
    }
}

#[test]
fn models_are_named_in_every_form() {
    for forms in [
        &["--models", "a", "b"][..],
        &["--models", "a,b"],
        &["--mode", "x"],
        &["--models=a,,b,"],
        &["--models", "all"],
    ] {
        if forms[0] == "--mode" {
            // `--model-store` and `--models` begin like this.
            assert_eq!(server().run(forms).code, Some(2));
            continue;
        }
        let server = server().echo_model("a", "").echo_model("b", "");
        let server = server.args(forms).start();
        let listed = server.manage("GET", "/models").send().expect(200).json();
        let names: Vec<_> = listed["models"]
            .as_array()
            .unwrap()
            .iter()
            .map(|model| model["modelName"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(names, ["a", "b"], "{forms:?}");
    }
}

/// RG-05.
#[test]
fn two_versions_of_one_name_are_both_listed_and_the_first_named_is_the_default() {
    for (order, default) in [(["m=one", "m=two"], "1.0"), (["m=two", "m=one"], "2.0")] {
        let server = server()
            .echo_folder("one", "x", "1.0")
            .echo_folder("two", "x", "2.0")
            .args(&["--models", order[0], order[1]])
            .start();
        assert_eq!(versions(&server, "m"), ["1.0", "2.0"]);
        assert_eq!(server.describe("m")["modelVersion"], default);
    }
}

/// RG-06.
#[test]
fn of_all_models_the_marked_version_is_the_default_whatever_the_order_of_the_files() {
    let mark = r#"models={"x": {"1.0": {"defaultVersion": true}}}"#;
    for round in 0..10 {
        let folders = match round % 2 {
            0 => [("a", "1.0"), ("b", "2.0"), ("c", "3.0")],
            _ => [("c", "1.0"), ("b", "2.0"), ("a", "3.0")],
        };
        let store = |mut server: ts_test::Server| {
            for (folder, version) in folders {
                server = server.echo_folder(folder, "x", version);
            }
            server.config("load_models=all")
        };
        let marked = store(server()).config(mark).start();
        assert_eq!(marked.describe("x")["modelVersion"], "1.0");
        assert_eq!(versions(&marked, "x").len(), 3);
        if round < 2 {
            // Without a mark it is the first in the order of the names of the files.
            let plain = store(server()).start();
            let expected = ["1.0", "3.0"][round];
            assert_eq!(plain.describe("x")["modelVersion"], expected);
        }
    }
}

#[test]
fn a_marked_version_that_was_not_loaded_is_told() {
    let server = server()
        .echo_folder("a", "x", "1.0")
        .config(r#"models={"x": {"9.0": {"defaultVersion": true}}, "y": {"1": {"defaultVersion": true}}}"#)
        .args(&["--models", "a"])
        .start();
    server.wait_until("it is told", || {
        let output = server.output();
        output.contains("marks version 9.0 of x as the default one") && !output.contains(" of y ")
    });
    assert_eq!(server.describe("x")["modelVersion"], "1.0");
}

fn versions(server: &ts_test::Running, model: &str) -> Vec<String> {
    let path = format!("/models/{model}/all");
    let all = server.manage("GET", &path).send().expect(200).json();
    let mut versions: Vec<_> = all
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["modelVersion"].as_str().unwrap().to_owned())
        .collect();
    versions.sort();
    versions
}

#[test]
fn what_only_java_reads_is_accepted_with_one_warning() {
    let log_config = server();
    let file = log_config.folder().join("log4j2.xml");
    fs_err::write(&file, "<Configuration/>").unwrap();
    let server = log_config
        .config("vmargs=-Xmx1g -Dx=y")
        .config("plugins_path=/some/jars")
        .config("prefer_direct_buffer=true")
        .args(&["--ppath", "/other", "--log-config", file.to_str().unwrap()])
        .env("JAVA_HOME", "/no/java")
        .start();
    server.infer("GET", "/ping").send().expect(200);
    let about_java = |text: &str| {
        let lines = text
            .lines()
            .filter(|line| line.contains("Java virtual machine"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    server.wait_until("the warning", || !about_java(&server.output()).is_empty());
    let told = about_java(&server.output());
    assert_eq!(told.len(), 1, "{told:?}");
    for one in ["vmargs", "--plugins-path", "prefer_direct_buffer"] {
        assert!(told[0].contains(one), "{one}: {told:?}");
    }
}

// --- in the background ---------------------------------------------------------------------------

fn pid_file(server: &ts_test::Server) -> std::path::PathBuf {
    server.folder().join("tmp/.model_server.pid")
}

#[test]
fn the_command_ends_and_the_server_keeps_its_pipes() {
    let server = server();
    let running = server.start_in_background();
    assert_eq!(running.code, Some(0));
    // It is there as soon as the command has ended.
    let pid = fs_err::read_to_string(pid_file(&server)).unwrap();
    running.wait_for("Model server started.\n");
    assert!(pid.bytes().all(|byte| byte.is_ascii_digit()), "{pid}");

    let again = server.run(&["--start", "--model-store", "store"]);
    assert_eq!(again.code, Some(1));
    assert_eq!(
        again.stdout,
        "TorchServe is already running, please use torchserve --stop to stop TorchServe.\n"
    );

    // What it logs later comes out of the same pipe.
    let stopped = server.run(&["--stop", "--foreground"]);
    assert_eq!((stopped.code, stopped.stdout.as_str()), (Some(0), ""));
    assert!(running.wait_for_end().contains("SIGTERM: stopping"));
    assert!(!pid_file(&server).exists());

    let none = server.run(&["--stop"]);
    assert_eq!(none.code, Some(0));
    assert_eq!(none.stdout, "TorchServe is not currently running.\n");
    // CF-11: it says where it looked.
    let place = pid_file(&server);
    assert!(none.stderr.contains(place.to_str().unwrap()), "{none:?}");
}

#[test]
fn stop_does_not_wait_without_foreground() {
    let server = server();
    let running = server.start_in_background();
    running.wait_for("Model server started.\n");
    let key_file = server.folder().join("key_file.json");
    fs_err::write(&key_file, "{}").unwrap();
    let stopped = server.run(&["--stop"]);
    assert_eq!(stopped.code, Some(0));
    assert_eq!(stopped.stdout, "TorchServe has stopped.\n");
    assert!(!key_file.exists() && !pid_file(&server).exists());
    running.wait_for_end();
}

#[test]
fn a_server_that_cannot_start_ends_its_output_and_leaves_no_pid_file() {
    let taken = server().start();
    let server = server().config(&format!("management_address={}", taken.management));
    let failed = server.start_in_background();
    let output = failed.wait_for_end();
    assert!(output.contains("Failed to bind to address"), "{output}");
    assert!(!output.contains("Model server started."));
    assert!(!pid_file(&server).exists());

    // What is wrong with the configuration is known before that.
    let server = crate::server().config("job_queue_size=x");
    let failed = server.start_in_background();
    assert_eq!(failed.code, Some(1));
    assert!(failed.wait_for_end().contains("Invalid configuration: "));
}

#[test]
fn a_pid_file_that_names_no_server_is_no_hindrance() {
    let mut stranger = std::process::Command::new("sleep")
        .arg("600")
        .spawn()
        .unwrap();
    for (content, orphan) in [
        ("999999999".to_owned(), true),
        ("rubbish".to_owned(), true),
        (String::new(), true),
        (stranger.id().to_string(), false),
    ] {
        let server = server();
        fs_err::write(pid_file(&server), &content).unwrap();
        let none = server.run(&["--stop"]);
        assert_eq!(none.stdout, "TorchServe is not currently running.\n");
        let running = server.start_in_background();
        assert_eq!(running.code, Some(0), "{content}: {}", running.output());
        running.wait_for("Model server started.\n");
        let told = running.output().contains("Removing orphan pid file.\n");
        assert_eq!(told, orphan, "{content}");
        assert_eq!(server.run(&["--stop", "--foreground"]).code, Some(0));
        running.wait_for_end();
    }
    assert!(stranger.try_wait().unwrap().is_none(), "it was left alone");
    stranger.kill().unwrap();
    stranger.wait().unwrap();
}

/// CF-11.
#[test]
fn two_servers_with_their_own_folders_for_temporary_files_are_independent() {
    let servers = [server(), server()];
    let running = servers.each_ref().map(ts_test::Server::start_in_background);
    for one in &running {
        one.wait_for("Model server started.\n");
    }
    let pid_of = |index: usize| fs_err::read_to_string(pid_file(&servers[index])).unwrap();
    assert_ne!(pid_of(0), pid_of(1));
    assert_eq!(servers[1].run(&["--stop", "--foreground"]).code, Some(0));
    running[1].wait_for_end();
    assert!(fs_err::metadata(format!("/proc/{}", pid_of(0))).is_ok());
    // Killed, it leaves its file, and the next start goes on.
    let pid = rustix::process::Pid::from_raw(pid_of(0).parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    running[0].wait_for_end();
    let next = servers[0].start_in_background();
    next.wait_for("Model server started.\n");
    assert_eq!(servers[0].run(&["--stop", "--foreground"]).code, Some(0));
    next.wait_for_end();
}

/// CF-11: nobody is left without the file that stops it.
#[test]
fn of_servers_started_at_once_with_one_folder_for_temporary_files_one_runs() {
    for leftover in [false, true] {
        let server = server();
        if leftover {
            fs_err::write(pid_file(&server), "999999999").unwrap();
        }
        let started: Vec<_> = std::thread::scope(|scope| {
            let starting = [(); 6].map(|()| scope.spawn(|| server.start_in_background()));
            starting.map(|one| one.join().unwrap()).into()
        });
        let (running, refused): (Vec<_>, Vec<_>) =
            started.into_iter().partition(|one| one.code == Some(0));
        assert_eq!(running.len(), 1);
        running[0].wait_for("Model server started.\n");
        for one in refused {
            let output = one.wait_for_end();
            assert!(
                output.contains("already running") || output.contains("at the same time"),
                "{output}"
            );
        }
        assert_eq!(server.run(&["--stop", "--foreground"]).code, Some(0));
        running[0].wait_for_end();
    }
}

#[test]
fn the_foreground_server_writes_the_pid_file_and_stop_ends_it() {
    let server = server();
    let folder = server.folder().join("tmp/.model_server.pid");
    let mut running = server.start();
    assert_eq!(
        fs_err::read_to_string(&folder).unwrap(),
        running.pid().to_string()
    );
    assert!(running.stop().success());
    assert!(!folder.exists());
}
