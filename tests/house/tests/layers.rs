//! Arrows only go down: which crate may depend on which, and who may know torch and Python.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use ts_house::{assert_none, files, read};

/// Each crate with all it may depend on: the layers below it, skipping allowed. The picture of it is
/// in docs/architecture.md.
const LAYERS: &[(&str, &[&str])] = &[
    ("ts-types", &[]),
    ("ts-metrics", &[]),
    ("ts-archive", &["ts-types"]),
    ("ts-wire", &["ts-types"]),
    ("ts-host", &["ts-types", "ts-wire"]),
    ("ts-plugin", &["ts-types", "ts-wire", "ts-host"]),
    (
        "ts-serving",
        &["ts-types", "ts-metrics", "ts-archive", "ts-wire", "ts-host"],
    ),
    (
        "ts-server",
        &[
            "ts-types",
            "ts-metrics",
            "ts-archive",
            "ts-wire",
            "ts-host",
            "ts-serving",
        ],
    ),
    ("ts-archiver", &["ts-types", "ts-archive"]),
    ("ts-test", &["ts-types", "ts-archive"]),
    ("ts-house", &[]),
    ("ts-bench", &[]),
    ("ts-fuzz", &["ts-archive", "ts-server"]),
];

/// The bindings to torch and Python, by the names of the crates that link them.
const TORCH_AND_PYTHON: &[&str] = &["tch", "torch-sys", "pyo3", "pyo3-ffi"];

#[derive(Deserialize)]
struct Manifest {
    package: Option<Package>,
    #[serde(default)]
    dependencies: toml::Table,
    #[serde(default, rename = "dev-dependencies")]
    dev_dependencies: toml::Table,
    #[serde(default, rename = "build-dependencies")]
    build_dependencies: toml::Table,
    #[serde(default)]
    target: BTreeMap<String, TargetTables>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
}

#[derive(Deserialize)]
struct TargetTables {
    #[serde(default)]
    dependencies: toml::Table,
    #[serde(default, rename = "dev-dependencies")]
    dev_dependencies: toml::Table,
    #[serde(default, rename = "build-dependencies")]
    build_dependencies: toml::Table,
}

/// A member of the workspace and the names of what it depends on.
struct Member {
    name: String,
    /// To build it, on any platform.
    linked: BTreeSet<String>,
    /// To test it only.
    tested_with: BTreeSet<String>,
}

/// The crate a dependency table's entry means, which `package = "…"` may rename.
fn crates(table: &toml::Table) -> impl Iterator<Item = String> + '_ {
    table.iter().map(|(key, value)| {
        value
            .get("package")
            .and_then(toml::Value::as_str)
            .unwrap_or(key)
            .to_owned()
    })
}

/// Every member, read from the manifests themselves: no network, no resolver, every platform.
fn members() -> Vec<Member> {
    let members: Vec<Member> = files(&["Cargo.toml"])
        .into_iter()
        .filter_map(|file| {
            let manifest: Manifest = toml::from_str(&file.text)
                .unwrap_or_else(|error| panic!("{} cannot be read: {error}", file.path));
            let name = manifest.package?.name;
            let mut linked: BTreeSet<String> = crates(&manifest.dependencies).collect();
            linked.extend(crates(&manifest.build_dependencies));
            let mut tested_with: BTreeSet<String> = crates(&manifest.dev_dependencies).collect();
            for tables in manifest.target.values() {
                linked.extend(crates(&tables.dependencies));
                linked.extend(crates(&tables.build_dependencies));
                tested_with.extend(crates(&tables.dev_dependencies));
            }
            Some(Member {
                name,
                linked,
                tested_with,
            })
        })
        .collect();
    assert!(
        members.len() >= LAYERS.len(),
        "only {} manifests were found",
        members.len()
    );
    members
}

/// What a crate may depend on, if it stands in the table at all.
fn below(name: &str) -> Option<&'static [&'static str]> {
    LAYERS
        .iter()
        .find(|(layer, _)| *layer == name)
        .map(|(_, below)| *below)
}

#[test]
fn every_crate_has_its_layer() {
    let breaches: Vec<String> = members()
        .iter()
        .filter(|member| below(&member.name).is_none())
        .map(|member| format!("`{}` is in no layer", member.name))
        .collect();
    assert_none(
        &breaches,
        "Add the crate to LAYERS in tests/house/tests/layers.rs, with the crates below it, and to \
         the picture in docs/architecture.md.",
    );
}

#[test]
fn crates_depend_only_on_those_below() {
    let mut breaches = Vec::new();
    for member in members() {
        let below = below(&member.name).unwrap_or_default();
        let ours = |name: &&String| name.starts_with("ts-");
        for upward in member.linked.iter().filter(ours) {
            if !below.contains(&upward.as_str()) {
                breaches.push(format!("`{}` depends on `{upward}`", member.name));
            }
        }
        for upward in member.tested_with.iter().filter(ours) {
            // The harness starts the real program, so any crate's tests may use it.
            if upward != "ts-test" && !below.contains(&upward.as_str()) {
                breaches.push(format!("`{}` is tested with `{upward}`", member.name));
            }
        }
    }
    assert_none(
        &breaches,
        "Arrows only go down. Move what both crates need to the lower one, or pass it as data from \
         the crate above; widen LAYERS in tests/house/tests/layers.rs only with the picture in \
         docs/architecture.md.",
    );
}

#[test]
fn nobody_links_the_plugin() {
    let breaches: Vec<String> = members()
        .iter()
        .filter(|member| {
            member.linked.contains("ts-plugin") || member.tested_with.contains("ts-plugin")
        })
        .map(|member| format!("`{}` links `ts-plugin`", member.name))
        .collect();
    assert_none(
        &breaches,
        "The plugin is loaded at run time through its one C function, so that everything else \
         builds without torch and Python. What it shares with others belongs in `ts-host`.",
    );
}

#[derive(Deserialize)]
struct Lock {
    package: Vec<LockedPackage>,
}

#[derive(Deserialize)]
struct LockedPackage {
    name: String,
    #[serde(default)]
    dependencies: Vec<String>,
}

#[test]
fn only_the_plugin_reaches_torch_and_python() {
    let lock: Lock = toml::from_str(&read("Cargo.lock")).expect("Cargo.lock is TOML");
    // By name only: versions of one name count as one crate, which can only find more.
    let mut edges: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in &lock.package {
        let names = package
            .dependencies
            .iter()
            .filter_map(|entry| entry.split(' ').next());
        edges.entry(&package.name).or_default().extend(names);
    }
    assert!(
        edges["ts-plugin"].contains("tch"),
        "Cargo.lock no longer shows what this rule is about"
    );

    let mut breaches = Vec::new();
    for (layer, _) in LAYERS.iter().filter(|(layer, _)| *layer != "ts-plugin") {
        let mut way: BTreeMap<&str, &str> = BTreeMap::new();
        let mut ahead = vec![*layer];
        while let Some(from) = ahead.pop() {
            for to in edges.get(from).into_iter().flatten().copied() {
                if to != *layer && !way.contains_key(to) {
                    way.insert(to, from);
                    ahead.push(to);
                }
            }
        }
        for reached in TORCH_AND_PYTHON
            .iter()
            .filter(|name| way.contains_key(**name))
        {
            breaches.push(format!(
                "`{layer}` reaches `{reached}` through `{}`",
                way[*reached]
            ));
        }
    }
    assert_none(
        &breaches,
        "Only `ts-plugin` knows torch and Python: the server must start, and its tests run, on a \
         machine with neither. Take the dependency out, or move the code that needs it to the plugin.",
    );
}
