use super::*;

fn options(arguments: &[&str]) -> Options {
    use clap::Parser as _;
    Options::parse_from(["torchserve"].iter().chain(arguments))
}

fn loaded<const N: usize>(file: &str, arguments: &[&str], environment: [(&str, &str); N]) -> Raw {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.properties");
    fs_err::write(&path, file).unwrap();
    let mut arguments = arguments.to_vec();
    let path = path.display().to_string();
    arguments.extend(["--ts-config", &path]);
    load(&options(&arguments), &environment.into())
}

fn text(raw: &Raw, key: &str) -> String {
    raw.values[find(key).unwrap().name].text.clone()
}

fn origin(raw: &Raw, key: &str) -> String {
    raw.values[find(key).unwrap().name].origin.clone()
}

#[test]
fn the_command_line_beats_the_file() {
    let raw = loaded(
        "model_store=/file\nload_models=a.mar",
        &["--model-store", "/cli"],
        [],
    );
    assert_eq!(text(&raw, "model_store"), "/cli");
    assert_eq!(origin(&raw, "model_store"), "--model-store");
    assert_eq!(text(&raw, "load_models"), "a.mar");
    assert!(origin(&raw, "load_models").ends_with("config.properties line 2"));
}

#[test]
fn the_environment_counts_only_when_the_file_says_so() {
    let variables = [("TS_JOB_QUEUE_SIZE", "7"), ("TS_MODELS", "{}")];
    let off = loaded("job_queue_size=5", &[], variables);
    assert_eq!(text(&off, "job_queue_size"), "5");
    let on = loaded(
        "job_queue_size=5\nenable_envvars_config=true",
        &[],
        variables,
    );
    assert_eq!(text(&on, "job_queue_size"), "7");
    assert_eq!(origin(&on, "job_queue_size"), "TS_JOB_QUEUE_SIZE");
    assert_eq!(
        origin(&on, "models"),
        DEFAULT,
        "no variable replaces this key"
    );
}

#[test]
fn the_environment_beats_a_switch_of_the_command_line() {
    let variable = [("TS_DISABLE_TOKEN_AUTHORIZATION", "false")];
    let raw = loaded("enable_envvars_config=true", &["--dt"], variable);
    assert_eq!(text(&raw, "disable_token_authorization"), "false");
}

#[test]
fn the_allowed_urls_of_the_environment_need_a_second_switch() {
    let variable = [("TS_ALLOWED_URLS", "http://a/.*")];
    let raw = loaded("enable_envvars_config=true", &[], variable);
    assert_eq!(origin(&raw, "allowed_urls"), DEFAULT);
    let switches = "enable_envvars_config=true\nuse_env_allowed_urls=true";
    let raw = loaded(switches, &[], variable);
    assert_eq!(text(&raw, "allowed_urls"), "http://a/.*");
}

#[test]
fn unknown_keys_are_told_with_the_nearest_known_one() {
    let raw = loaded("jobs_queue_size=5\nmy_plugin.key=1\nio_ratio=60", &[], []);
    let warnings = raw.warnings();
    assert!(
        warnings[0].contains("Did you mean `job_queue_size`?"),
        "{warnings:?}"
    );
    assert!(warnings[1].ends_with("is ignored"), "{warnings:?}");
    assert!(warnings[2].contains("`io_ratio`") && warnings[2].contains("no effect"));
    assert_eq!(warnings.len(), 3);
}

#[test]
fn a_config_file_that_is_missing_is_told_with_what_named_it_cf_01() {
    let raw = load(&options(&["--ts-config", "/no/file"]), &[].into());
    assert_eq!(
        raw.faults[0].to_string(),
        "--ts-config file not found: /no/file"
    );
    let raw = load(&options(&[]), &[("TS_CONFIG_FILE", "/no/other")].into());
    assert_eq!(
        raw.faults[0].to_string(),
        "--ts-config file not found: /no/other (from TS_CONFIG_FILE)"
    );
}

#[test]
fn every_fault_of_a_file_is_told() {
    let text = "model_store=$$NO_A$$\nload_models=$$NO_B$$\na=\\uX\n";
    let raw = loaded(text, &[], []);
    let faults: Vec<_> = raw.faults.iter().map(ToString::to_string).collect();
    assert_eq!(faults.len(), 3, "{faults:?}");
    for (fault, told) in faults.iter().zip([
        "Invalid Environment Variable NO_A in `model_store`",
        "Invalid Environment Variable NO_B in `load_models`",
        "Malformed \\uxxxx encoding: not enough digits",
    ]) {
        assert!(fault.contains(told), "{fault}");
    }
    assert!(
        faults[2].ends_with("config.properties line 3)"),
        "{faults:?}"
    );
    // A value that cannot be read is not held against anything else.
    assert!(raw.unusable.contains("model_store"));
}

#[test]
fn of_a_key_that_is_there_twice_the_last_counts_and_a_warning_names_both_lines() {
    let raw = loaded("job_queue_size=5\nx=1\njob_queue_size=6", &[], []);
    assert_eq!(text(&raw, "job_queue_size"), "6");
    let warning = &raw.warnings()[0];
    assert!(
        warning.contains("line 1") && warning.contains("line 3"),
        "{warning}"
    );
}

#[test]
fn what_only_java_would_read_gets_one_warning() {
    let file = "vmargs=-Xmx1g\nplugins_path=/p\nio_ratio=60\ngrpc_inference_port=1";
    let raw = loaded(file, &["--ppath", "/q"], []);
    let warnings = raw.warnings();
    let about_java: Vec<_> = warnings.iter().filter(|one| one.contains("Java")).collect();
    assert_eq!(about_java.len(), 1, "{warnings:?}");
    for told in [
        "`vmargs` (",
        "`plugins_path` (--plugins-path)",
        "`io_ratio` (",
    ] {
        assert!(about_java[0].contains(told), "{told}: {warnings:?}");
    }
    assert_eq!(warnings.len(), 2, "{warnings:?}");
}

#[test]
fn a_line_glued_to_one_without_effect_is_told_and_stops_nothing() {
    let raw = loaded("async_logging=trueservice_envelope=kserve", &[], []);
    assert_eq!(raw.faults, []);
    let warnings = raw.warnings().join("\n");
    assert!(
        warnings.contains("Is a line break missing before `service_envelope`?"),
        "{warnings}"
    );
}

#[test]
fn some_variables_count_without_the_switch() {
    let always = [
        ("TS_OPEN_INFERENCE_PROTOCOL", "oip"),
        ("TS_MODEL_SERVER_HOME", "/h"),
        ("TS_TOKEN_FILE", "/t"),
        ("TS_INFERENCE_TOKEN", "i"),
        ("TS_MANAGEMENT_TOKEN", "m"),
    ];
    let raw = loaded("", &[], always);
    assert_eq!(text(&raw, "token_file"), "/t");
    assert_eq!(text(&raw, "inference_token"), "i");
    assert_eq!(text(&raw, "management_token"), "m");
    assert_eq!(text(&raw, "ts_open_inference_protocol"), "true");
    assert_eq!(text(&raw, "model_server_home"), "/h");
    // Once it is there it decides alone.
    let other = [("TS_OPEN_INFERENCE_PROTOCOL", "true")];
    let raw = loaded("ts_open_inference_protocol=true", &[], other);
    assert_eq!(text(&raw, "ts_open_inference_protocol"), "false");
}

/// CF-02: nobody is left wondering why a variable does nothing.
#[test]
fn variables_that_are_not_read_are_told_with_what_would_have_them_read() {
    let variables = [
        ("TS_JOB_QUEUE_SIZE", "7"),
        ("TS_ALLOWED_URLS", "x"),
        ("TS_JOB_QUE_SIZE", "7"),
        ("TS_BENCHMARK", "1"),
    ];
    let warnings = loaded("", &[], variables).warnings();
    assert_eq!(
        warnings,
        [
            "variable `TS_JOB_QUEUE_SIZE` is ignored: `enable_envvars_config` is not on in the \
             configuration file",
            "variable `TS_ALLOWED_URLS` is ignored: `enable_envvars_config` is not on in the \
             configuration file",
        ]
    );
    let warnings = loaded("enable_envvars_config=true", &[], variables).warnings();
    assert_eq!(
        warnings,
        [
            "variable `TS_ALLOWED_URLS` is ignored: `use_env_allowed_urls` is not on in the \
             configuration file",
            "unknown variable `TS_JOB_QUE_SIZE` is ignored. Did you mean `TS_JOB_QUEUE_SIZE`?",
        ]
    );
}

/// The rules of Java's format, on the key that people got wrong.
#[test]
fn a_store_may_be_written_in_every_way_of_the_format_cf_03() {
    for (file, value) in [
        ("model_store=/a b\r\n", "/a b"),
        ("model_store : /a b", "/a b"),
        ("! model_store=/x\nmodel_store /a", "/a"),
        ("model_store=/a\\\n    /b", "/a/b"),
        ("model_store=/a  ", "/a  "),
        ("model_store=\"/a b\"", "\"/a b\""),
        ("model_store=\\u002fa", "/a"),
    ] {
        assert_eq!(
            text(&loaded(file, &[], []), "model_store"),
            value,
            "{file:?}"
        );
    }
}

/// CF-02: each key from each of its sources, with where it came from.
#[test]
fn every_key_is_taken_from_every_source_it_has() {
    for key in KEYS {
        let file = format!("{}=from file", key.name);
        let raw = loaded(&file, &[], []);
        let file_origin = origin(&raw, key.name);
        assert_eq!(text(&raw, key.name), "from file");
        assert!(
            file_origin.ends_with("config.properties line 1"),
            "{file_origin}"
        );

        let variable = key.variable();
        let environment = [(variable.as_str(), "from environment")];
        let switches = ["enable_envvars_config", "use_env_allowed_urls"];
        // The switches themselves are in the file in any case.
        if !switches.contains(&key.name) {
            let on = switches.map(|switch| format!("{switch}=true")).join("\n");
            let raw = loaded(&format!("{file}\n{on}"), &[], environment);
            let (value, from_variable) = match (key.from_environment, key.name) {
                (false, _) => ("from file", false),
                (true, "ts_open_inference_protocol") => ("false", true),
                (true, _) => ("from environment", true),
            };
            assert_eq!(text(&raw, key.name), value, "{}", key.name);
            assert_eq!(origin(&raw, key.name) == variable, from_variable);
        }
        if !key.variable_always_counts() {
            assert_eq!(
                text(&loaded(&file, &[], environment), key.name),
                "from file"
            );
        }

        let Some(option) = key.option else { continue };
        let switch = key.kind == super::super::raw::Kind::Flag;
        let (arguments, value) = match switch {
            true => (vec![option], "true"),
            false => (vec![option, "from option"], "from option"),
        };
        let raw = loaded(&file, &arguments, []);
        assert_eq!(text(&raw, key.name), value);
        assert_eq!(origin(&raw, key.name), option);
    }
}
