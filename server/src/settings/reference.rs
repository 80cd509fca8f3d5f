//! Keeps `config.properties.example` and `docs/reference/configuration.md` in step with the table
//! of settings. Run the tests with `UPDATE_REFERENCE=1` to write both anew.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::raw::{Effect, KEYS, Key};
use super::{Environment, Machine, load, resolve};
use crate::cli::Options;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

fn sections() -> [(&'static str, Vec<&'static Key>, &'static str); 3] {
    let in_force = |key: &&Key| key.effect == Effect::InForce;
    let of = |pick: &dyn Fn(&&'static Key) -> bool| KEYS.iter().filter(|key| pick(key)).collect();
    [
        (
            "Settings",
            of(&|key| in_force(key) && !key.ours),
            "Known from TorchServe.",
        ),
        (
            "Settings of this server",
            of(&|key| in_force(key) && key.ours),
            "TorchServe does not have these.",
        ),
        (
            "Accepted without effect",
            of(&|key| !in_force(key)),
            "Existing files may hold these; the server warns once for each that is set.",
        ),
    ]
}

fn example() -> String {
    let mut text = String::from(
        "# Every setting with its default. Copy to config.properties and take the `#` away from what\n\
         # you change. What each does in full: docs/reference/configuration.md\n",
    );
    for (title, keys, _) in sections().into_iter().take(2) {
        let _infallible = write!(text, "\n# --- {title}\n");
        for key in keys {
            let default = key.default.replace('\\', "\\\\");
            let _infallible = write!(
                text,
                "\n# {} ({})\n#{}={default}\n",
                key.doc,
                key.kind.describe(),
                key.name
            );
        }
    }
    text
}

fn page() -> String {
    let mut text = String::from(
        "# Settings\n\n\
         Generated from the table in `server/src/settings/raw.rs`; a test keeps it in step.\n\n\
         A setting is read from, in rising order of precedence: its default, `config.properties`, the\n\
         command line, and, if the file has `enable_envvars_config=true`, the environment. The file is\n\
         the one that `TS_CONFIG_FILE` names, else `--ts-config`, else the newest\n\
         [snapshot](../management.md#snapshots), else `./config.properties`; it has the syntax of Java properties, in UTF-8, and `$$NAME$$` in a value stands for an environment\n\
         variable. `torchserve config`, with the options that the server is started with, shows each value\n\
         in force and where it came from, and starts nothing; the log tells those that are not the\n\
         default ones at start. Two variables count in any case: `TS_MODEL_SERVER_HOME` and\n\
         `TS_OPEN_INFERENCE_PROTOCOL`, whose value is `oip` for `true`.\n",
    );
    for (title, keys, intro) in sections() {
        let _infallible = write!(text, "\n## {title}\n\n{intro}\n\n");
        text.push_str(
            "| key | type | default | environment | option | effect |\n|---|---|---|---|---|---|\n",
        );
        for key in keys {
            let cell = |cell: &str| cell.replace('|', "\\|");
            let default = match key.default {
                "" => "unset".to_owned(),
                default => format!("`{}`", cell(default)),
            };
            let variable = if key.from_environment {
                format!("`{}`", key.variable())
            } else {
                "no".to_owned()
            };
            let option = match key.option {
                Some(option) => format!("`{option}`"),
                None => "no".to_owned(),
            };
            let effect = match key.effect {
                Effect::InForce => cell(key.doc),
                Effect::None(why) => format!("{} None: {why}.", cell(key.doc)),
            };
            let kind = cell(&key.kind.describe());
            let _infallible = writeln!(
                text,
                "| `{}` | {kind} | {default} | {variable} | {option} | {effect} |",
                key.name
            );
        }
    }
    text
}

fn in_step(path: &str, expected: &str) {
    let path = root().join(path);
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(&path, expected).unwrap();
    }
    let found = fs_err::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        found,
        expected,
        "{} is out of step; run `UPDATE_REFERENCE=1 cargo test -p ts-server reference`",
        path.display()
    );
}

#[test]
fn the_reference_page_is_in_step() {
    in_step("docs/reference/configuration.md", &page());
}

#[test]
fn the_example_file_is_in_step() {
    in_step("config.properties.example", &example());
}

#[test]
fn the_example_file_says_what_holds_without_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.properties");
    // What a line says after its `#` is the default, so taking all `#` away changes nothing.
    let bare: String = example()
        .lines()
        .filter_map(|line| line.strip_prefix('#').filter(|line| !line.starts_with(' ')))
        .map(|line| format!("{line}\n"))
        .collect();
    fs_err::write(&path, bare).unwrap();
    let options = Options {
        ts_config: Some(path),
        model_store: Some(folder.path().to_owned()),
        ..Options::default()
    };
    let raw = load(&options, &Environment::default());
    assert_eq!((&raw.unknown[..], &raw.faults[..]), (&[][..], &[][..]));
    for key in KEYS.iter().filter(|key| key.name != "model_store") {
        assert_eq!(raw.values[key.name].text, key.default, "{}", key.name);
    }
    let machine = Machine {
        cores: 1,
        devices: Vec::new(),
        visible_devices: None,
        executable: PathBuf::from("/torchserve"),
    };
    resolve(&raw, &machine).unwrap();
}
