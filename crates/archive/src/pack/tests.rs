use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::unpack::{UnpackLimits, create, unpack};

const FORMATS: [Format; 4] = [Format::Mar, Format::ZipStore, Format::Tgz, Format::Folder];

fn no_progress(_: Progress) {}

fn packing(folder: &Path, format: Format, entries: Entries) -> Packing {
    Packing {
        name: ModelName::new("m").unwrap(),
        manifest: Manifest::default(),
        entries,
        format,
        folder: folder.to_owned(),
        overwrite: false,
        created: Some(0),
    }
}

/// Writes `files` below `inputs` and lists them as entries of the same path.
fn entries(inputs: &Path, files: &BTreeMap<String, (Vec<u8>, bool)>) -> Entries {
    let mut entries = Entries::default();
    for (index, (path, (content, executable))) in files.iter().enumerate() {
        let source = inputs.join(index.to_string());
        std::io::Write::write_all(&mut create(&source, *executable).unwrap(), content).unwrap();
        entries
            .add(MemberPath::parse(path).unwrap(), source)
            .unwrap();
    }
    entries
}

fn files_below(folder: &Path) -> BTreeMap<String, (Vec<u8>, bool)> {
    walkdir::WalkDir::new(folder)
        .into_iter()
        .map(Result::unwrap)
        .filter(|entry| entry.file_type().is_file())
        .map(|entry| {
            let path = entry
                .path()
                .strip_prefix(folder)
                .unwrap()
                .to_str()
                .unwrap()
                .to_owned();
            (
                path,
                (
                    fs::read(entry.path()).unwrap(),
                    is_executable(&entry.metadata().unwrap()),
                ),
            )
        })
        .collect()
}

fn listing(folder: &Path) -> Vec<String> {
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// Trees whose folders (`d0`…) and files (`f0`…) cannot collide.
fn trees() -> impl Strategy<Value = BTreeMap<String, (Vec<u8>, bool)>> {
    let path = (
        prop::collection::vec("d[0-3]|Ü [a-c]", 0..3),
        "f[0-9]\\.(py|pt|x{120})",
    )
        .prop_map(|(folders, file)| {
            folders
                .iter()
                .chain([&file])
                .cloned()
                .collect::<Vec<_>>()
                .join("/")
        });
    let content = (prop::collection::vec(any::<u8>(), 0..300), 1_usize..400)
        .prop_map(|(seed, times)| seed.repeat(times));
    prop::collection::btree_map(path, (content, any::<bool>()), 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn every_format_gives_back_the_tree_that_was_packed(tree in trees()) {
        for format in FORMATS {
            let folder = tempfile::tempdir().unwrap();
            let (inputs, out, store) =
                (folder.path().join("in"), folder.path().join("out"), folder.path().join("store"));
            fs::create_dir(&inputs).unwrap();
            fs::create_dir(&out).unwrap();
            let packed = pack(&packing(&out, format, entries(&inputs, &tree)), &mut no_progress);
            let artifact = unpack(&packed.unwrap(), &store, &UnpackLimits::default()).unwrap();
            let mut found = files_below(artifact.dir.path());
            prop_assert!(found.remove(MANIFEST_PATH).is_some());
            prop_assert_eq!(&found, &tree);
            prop_assert_eq!(artifact.dir.is_owned(), format != Format::Folder);
            drop(artifact);
            prop_assert!(!store.exists() || listing(&store).is_empty());
        }
    }
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let tree = BTreeMap::from([
        ("b/x.py".to_owned(), (b"x".repeat(9000), true)),
        ("a.py".to_owned(), (b"y".to_vec(), false)),
    ]);
    let inputs = folder.path().join("in");
    fs::create_dir(&inputs).unwrap();
    let entries = entries(&inputs, &tree);
    for format in [Format::Mar, Format::ZipStore, Format::Tgz] {
        let bytes = |out: &str| {
            let out = folder.path().join(out);
            fs::create_dir_all(&out).unwrap();
            let mut packing = packing(&out, format, entries.clone());
            packing.overwrite = true;
            packing.created = None;
            fs::read(pack(&packing, &mut no_progress).unwrap()).unwrap()
        };
        assert!(bytes("one") == bytes("two"), "{format:?}");
    }
}

#[test]
fn progress_ends_at_the_total() {
    let folder = tempfile::tempdir().unwrap();
    let tree = BTreeMap::from([("a".to_owned(), (vec![7; 600_000], false))]);
    let inputs = folder.path().join("in");
    fs::create_dir(&inputs).unwrap();
    let mut steps = Vec::new();
    let packing = packing(folder.path(), Format::ZipStore, entries(&inputs, &tree));
    pack(&packing, &mut |progress| steps.push(progress)).unwrap();
    assert!(steps.len() > 3);
    assert!(steps.is_sorted_by_key(|progress| progress.done));
    let last = steps.last().unwrap();
    assert_eq!(last.done, last.total);
}

#[test]
fn nothing_is_written_when_an_input_is_missing_or_changes() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("growing");
    fs::write(&source, vec![1; 300_000]).unwrap();
    for format in FORMATS {
        let out = folder.path().join(format!("{format:?}"));
        fs::create_dir(&out).unwrap();
        let mut entries = Entries::default();
        entries
            .add(
                MemberPath::parse("gone").unwrap(),
                folder.path().join("gone"),
            )
            .unwrap();
        let error = pack(&packing(&out, format, entries), &mut no_progress).unwrap_err();
        assert!(matches!(error, ArchiveError::NotFound { .. }), "{error}");

        let mut entries = Entries::default();
        entries
            .add(MemberPath::parse("growing").unwrap(), source.clone())
            .unwrap();
        let error = pack(&packing(&out, format, entries), &mut |_| {
            let mut file = fs::OpenOptions::new().append(true).open(&source).unwrap();
            std::io::Write::write_all(&mut file, b"more").unwrap();
        })
        .unwrap_err();
        assert!(
            matches!(error, ArchiveError::SourceChanged { .. }),
            "{error}"
        );
        assert_eq!(listing(&out), Vec::<String>::new());
    }
}

#[test]
fn a_folder_that_is_no_model_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let precious = folder.path().join("m/src.py");
    fs::create_dir(folder.path().join("m")).unwrap();
    fs::write(&precious, "x").unwrap();
    let mut packing = packing(folder.path(), Format::Folder, Entries::default());
    packing.overwrite = true;
    let error = pack(&packing, &mut no_progress).unwrap_err();
    assert!(matches!(error, ArchiveError::OutputKind { .. }), "{error}");
    assert!(precious.exists());
}

#[test]
fn entries_name_both_sources_of_a_collision() {
    let mut entries = Entries::default();
    let path = |text| MemberPath::parse(text).unwrap();
    entries
        .add(path("config.json"), "cfg/config.json".into())
        .unwrap();
    entries.add(path("d/x"), "d/x".into()).unwrap();
    for (at, source, first) in [
        ("config.json", "pool/config.json", "`cfg/config.json`"),
        ("d", "other/d", "`d/x`"),
    ] {
        let error = entries
            .add(path(at), source.into())
            .unwrap_err()
            .to_string();
        assert!(error.contains(first) && error.contains(source), "{error}");
    }
    let error = entries
        .add(path("MAR-INF/x"), "x".into())
        .unwrap_err()
        .to_string();
    assert!(error.contains("`MAR-INF`"), "{error}");
}

#[test]
fn the_same_file_named_twice_is_no_collision() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a.py");
    fs::write(&file, "").unwrap();
    let mut entries = Entries::default();
    entries
        .add(MemberPath::parse("a.py").unwrap(), file)
        .unwrap();
    entries
        .add(
            MemberPath::parse("a.py").unwrap(),
            folder.path().join("./a.py"),
        )
        .unwrap();
}
