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
    load(&options(&arguments), &environment.into()).unwrap()
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
fn a_config_file_that_is_missing_is_told_with_what_named_it() {
    let faults = load(&options(&["--ts-config", "/no/file"]), &[].into()).unwrap_err();
    assert_eq!(
        faults[0].to_string(),
        "--ts-config file not found: /no/file"
    );
    let faults = load(&options(&[]), &[("TS_CONFIG_FILE", "/no/other")].into()).unwrap_err();
    assert_eq!(
        faults[0].to_string(),
        "--ts-config file not found: /no/other (from TS_CONFIG_FILE)"
    );
}

#[test]
fn every_fault_of_a_file_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a b.properties");
    fs_err::write(&path, "model_store=$$NO_A$$\nload_models=$$NO_B$$\n").unwrap();
    let path = path.display().to_string();
    let faults = load(&options(&["--ts-config", &path]), &[].into()).unwrap_err();
    assert_eq!(faults.len(), 2);
    assert!(
        faults[1]
            .to_string()
            .contains("Invalid Environment Variable NO_B")
    );
}
