use std::io::{Cursor, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use proptest::prelude::*;
use tar::EntryType;
use zip::write::SimpleFileOptions;

use super::*;
use crate::error::Limit;
use crate::manifest::MANIFEST_PATH;
use crate::member::MemberFault;
use crate::verify::verify;

const MANIFEST: &[u8] = br#"{"runtime":"echo","model":{"modelName":"m"}}"#;

/// A store with a canary beside it, to see whether anything escapes.
struct Store {
    folder: tempfile::TempDir,
}

impl Store {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn archive(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn parent(&self) -> PathBuf {
        self.folder.path().join("a/b/models")
    }

    fn unpack_with(
        &self,
        name: &str,
        bytes: &[u8],
        limits: &UnpackLimits,
    ) -> Result<Artifact, ArchiveError> {
        unpack(&self.archive(name, bytes), &self.parent(), limits)
    }

    fn unpack(&self, name: &str, bytes: &[u8]) -> Result<Artifact, ArchiveError> {
        self.unpack_with(name, bytes, &UnpackLimits::default())
    }

    /// Unpacking must fail and leave nothing, inside the store or outside of it.
    fn refused(&self, name: &str, bytes: &[u8], limits: &UnpackLimits) -> ArchiveError {
        let error = self.unpack_with(name, bytes, limits).unwrap_err();
        let left: Vec<_> = walkdir::WalkDir::new(self.folder.path())
            .into_iter()
            .map(|entry| entry.unwrap().into_path())
            .filter(|path| path.is_file() || path.parent() == Some(&self.parent()))
            .collect();
        assert_eq!(left, [self.folder.path().join(name)]);
        let problems = verify(&self.folder.path().join(name), limits).unwrap();
        assert!(
            problems
                .iter()
                .any(|problem| problem.message.starts_with(&error.to_string())),
            "verify found {problems:?}, unpack {error}"
        );
        error
    }
}

fn zip(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in members {
        if name.ends_with('/') {
            zip.add_directory(*name, SimpleFileOptions::default())
                .unwrap();
        } else {
            zip.start_file(*name, SimpleFileOptions::default()).unwrap();
            zip.write_all(content).unwrap();
        }
    }
    zip.finish().unwrap().into_inner()
}

/// A member of a hand-made tar: its name is written as it is, whatever the name.
fn tar_header(name: &[u8], kind: EntryType, size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(kind);
    header.set_size(size);
    header.set_mode(0o644);
    let fields = header.as_gnu_mut().unwrap();
    fields.name[..name.len()].copy_from_slice(name);
    fields.realsize = *b"00000000000\0";
    header.set_cksum();
    header
}

fn tar_gz(members: &[(&str, EntryType, &[u8])]) -> Vec<u8> {
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    for (name, kind, content) in members {
        let mut header = tar_header(name.as_bytes(), *kind, content.len() as u64);
        if matches!(kind, EntryType::Symlink | EntryType::Link) {
            header.set_link_name("/etc/passwd").unwrap();
            header.set_cksum();
        }
        tar.append(&header, *content).unwrap();
    }
    tar.into_inner().unwrap().finish().unwrap()
}

fn tar_of_files(members: &[(&str, &[u8])]) -> Vec<u8> {
    let members: Vec<_> = members
        .iter()
        .map(|(name, content)| (*name, EntryType::Regular, *content))
        .collect();
    tar_gz(&members)
}

fn small_limits() -> UnpackLimits {
    UnpackLimits {
        max_entries: 3,
        max_total_bytes: 5000,
        max_entry_bytes: Some(3000),
        max_ratio: 10,
        ratio_free_bytes: 1000,
    }
}

#[test]
fn a_zip_becomes_a_folder_that_goes_with_the_artifact() {
    let store = Store::new();
    let bytes = zip(&[
        (MANIFEST_PATH, MANIFEST),
        ("lib/", b""),
        ("lib/a.py", b"x = 1"),
    ]);
    let artifact = store.unpack("m.mar", &bytes).unwrap();
    assert_eq!(artifact.manifest.model.model_name.as_deref(), Some("m"));
    assert_eq!(fs::read(artifact.dir.join("lib/a.py")).unwrap(), b"x = 1");
    let name = artifact
        .dir
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned();
    assert!(
        name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit()),
        "{name}"
    );
    assert_eq!(fs::read_dir(store.parent()).unwrap().count(), 1);
    drop(artifact);
    assert_eq!(fs::read_dir(store.parent()).unwrap().count(), 0);
}

#[test]
fn modes_are_the_two_ordinary_ones() {
    use std::os::unix::fs::PermissionsExt;
    let store = Store::new();
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, mode) in [("plain", 0o600), ("run", 0o4711), ("open", 0o666)] {
        zip.start_file(name, SimpleFileOptions::default().unix_permissions(mode))
            .unwrap();
    }
    let artifact = store
        .unpack("m.mar", &zip.finish().unwrap().into_inner())
        .unwrap();
    let mode = |name: &str| {
        fs::metadata(artifact.dir.join(name))
            .unwrap()
            .permissions()
            .mode()
            & 0o7777
    };
    assert_eq!(mode("plain") & 0o7111, 0);
    assert_eq!(mode("run") & 0o7100, 0o100);
    assert_eq!(mode("open") & 0o022, 0);
}

#[test]
fn escaping_names_are_refused_in_zip_and_tar() {
    let limits = UnpackLimits::default();
    for (name, fault) in [
        ("../../x", MemberFault::Upwards),
        ("a/../../x", MemberFault::Upwards),
        ("..\\..\\x", MemberFault::Upwards),
        ("/tmp/flambeau-canary", MemberFault::Absolute),
        ("\\x", MemberFault::Absolute),
        ("C:\\x", MemberFault::Drive),
        ("a\nb", MemberFault::Control),
    ] {
        for (file, bytes) in [
            ("m.mar", zip(&[(MANIFEST_PATH, MANIFEST), (name, b"x")])),
            (
                "m.tar.gz",
                tar_of_files(&[(MANIFEST_PATH, MANIFEST), (name, b"x")]),
            ),
        ] {
            let error = Store::new().refused(file, &bytes, &limits);
            assert!(
                matches!(&error, ArchiveError::UnsafeMember { fault: found, .. } if *found == fault),
                "{name:?} in {file}: {error}"
            );
        }
    }
    assert!(!Path::new("/tmp/flambeau-canary").exists());
}

#[test]
fn a_nul_in_a_name_is_refused() {
    let store = Store::new();
    let mut bytes = zip(&[("aXb", b"x")]);
    while let Some(at) = bytes.windows(3).position(|window| window == b"aXb") {
        bytes[at + 1] = 0;
    }
    let error = store
        .refused("m.mar", &bytes, &UnpackLimits::default())
        .to_string();
    assert!(
        error.contains("`a\\u{0}b`") && error.contains("control character"),
        "{error}"
    );
}

#[test]
fn links_and_devices_are_refused_by_name() {
    let limits = UnpackLimits::default();
    for (kind, text) in [
        (EntryType::Symlink, "a symbolic link"),
        (EntryType::Link, "a hard link"),
        (EntryType::Fifo, "a device"),
        (EntryType::Char, "a device"),
        (EntryType::GNUSparse, "sparse"),
    ] {
        let bytes = tar_gz(&[("m/evil", kind, b"")]);
        let error = Store::new()
            .refused("m.tar.gz", &bytes, &limits)
            .to_string();
        assert!(
            error.contains("`m/evil`") && error.contains(text),
            "{error}"
        );
    }
    let mut zip = zip::ZipWriter::new(Cursor::new(Vec::new()));
    zip.add_symlink("evil", "/etc/passwd", SimpleFileOptions::default())
        .unwrap();
    let bytes = zip.finish().unwrap().into_inner();
    let error = Store::new().refused("m.mar", &bytes, &limits).to_string();
    assert!(
        error.contains("`evil`") && error.contains("a symbolic link"),
        "{error}"
    );
}

#[test]
fn colliding_members_are_refused_by_name() {
    let limits = UnpackLimits::default();
    let mut twice = zip(&[("same1", b"x"), ("same2", b"y")]);
    while let Some(at) = twice.windows(5).position(|window| window == b"same2") {
        twice[at + 4] = b'1';
    }
    for (file, bytes, named) in [
        ("m.mar", twice, "`same1`"),
        ("m.mar", zip(&[("a", b"x"), ("./a", b"y")]), "`a`"),
        ("m.mar", zip(&[("d/a", b"x"), ("d\\a", b"y")]), "`d/a`"),
        ("m.mar", zip(&[("d", b"x"), ("d/a", b"y")]), "`d/a`"),
        (
            "m.tar.gz",
            tar_of_files(&[("d/a", b"x"), ("d", b"y")]),
            "`d`",
        ),
        ("m.tar.gz", tar_of_files(&[("a", b"x"), ("a", b"y")]), "`a`"),
    ] {
        let error = Store::new().refused(file, &bytes, &limits);
        assert!(
            matches!(error, ArchiveError::MembersCollide { .. }),
            "{error}"
        );
        assert!(error.to_string().contains(named), "{error}");
    }
}

#[test]
fn limits_hold_whatever_the_headers_say() {
    let limits = small_limits();
    let noise: Vec<u8> = (0..2500_u32)
        .flat_map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes())
        .collect();
    let many: Vec<_> = ["a", "b", "c", "d"].map(|name| (name, &b"x"[..])).to_vec();
    let deep = [("a/b/c/d", &b"x"[..])];
    let large = [("a", &noise[..3001])];
    let total = [("a", &noise[..2600]), ("b", &noise[2600..5200])];
    let zeros = vec![0; 2900];
    let flat = [("a", zeros.as_slice())];
    for (members, limit) in [
        (many.as_slice(), Limit::Entries(3)),
        (&deep, Limit::Entries(3)),
        (
            &large,
            Limit::EntryBytes {
                member: "a".to_owned(),
                bytes: 3000,
            },
        ),
        (&total, Limit::TotalBytes(5000)),
        (&flat, Limit::Ratio(10)),
    ] {
        for (file, bytes) in [("m.mar", zip(members)), ("m.tar.gz", tar_of_files(members))] {
            let error = Store::new().refused(file, &bytes, &limits);
            assert!(
                matches!(&error, ArchiveError::OverLimit { limit: found, .. } if *found == limit),
                "{file}: {error}"
            );
        }
    }
    // A zip that claims to hold ten bytes is still counted by what comes out.
    let mut lying = zip(&[("a", &zeros)]);
    while let Some(at) = lying
        .windows(4)
        .position(|window| window == 2900_u32.to_le_bytes())
    {
        lying[at..at + 4].copy_from_slice(&10_u32.to_le_bytes());
    }
    assert!(Store::new().unpack_with("m.mar", &lying, &limits).is_err());
}

#[test]
fn a_tar_cannot_fill_memory_with_a_name() {
    let name = vec![b'x'; 4 << 20];
    let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::default()));
    tar.append(
        &tar_header(b"long", EntryType::GNULongName, name.len() as u64),
        &name[..],
    )
    .unwrap();
    tar.append(&tar_header(b"a", EntryType::Regular, 1), &b"x"[..])
        .unwrap();
    let bytes = tar.into_inner().unwrap().finish().unwrap();
    let error = Store::new().refused("m.tar.gz", &bytes, &UnpackLimits::default());
    assert!(matches!(error, ArchiveError::Damaged { .. }), "{error}");
}

#[test]
fn broken_files_are_refused_with_their_name() {
    let limits = UnpackLimits::default();
    let noise: Vec<u8> = (0..9000_u32)
        .flat_map(|at| at.wrapping_mul(2_654_435_761).to_be_bytes())
        .collect();
    let members: [(&str, &[u8]); 2] = [(MANIFEST_PATH, MANIFEST), ("model.pt", &noise)];
    let (zipped, tarred) = (zip(&members), tar_of_files(&members));
    let mut flipped = zipped.clone();
    flipped[20_000] ^= 1;
    let mut flipped_tar = tarred.clone();
    flipped_tar[20_000] ^= 1;
    for (file, bytes, text) in [
        ("m.mar", &b""[..], "is empty"),
        ("m.tar.gz", b"", "is empty"),
        ("m.mar", b"this is text", "does not begin like one"),
        ("m.tar.gz", b"this is text", "does not begin like one"),
        ("m.model", b"<html>", "does not begin like one"),
        ("m.mar", &tarred, "name it `.tar.gz`"),
        ("m.tar.gz", &zipped, "name it `.mar`"),
        ("m.mar", &zipped[..zipped.len() / 2], "is damaged"),
        ("m.mar", &zipped[..zipped.len() - 10], "is damaged"),
        ("m.tar.gz", &tarred[..tarred.len() / 2], "is damaged"),
        ("m.tar.gz", &tarred[..tarred.len() - 4], "is damaged"),
        ("m.mar", &flipped, "is damaged at member `model.pt`"),
        ("m.tar.gz", &flipped_tar, "is damaged"),
        ("m.mar", &zip(&[]), "holds no members"),
        ("m.tar.gz", &tar_of_files(&[]), "holds no members"),
    ] {
        let error = Store::new().refused(file, bytes, &limits).to_string();
        assert!(
            error.contains(text) && error.contains(&format!("`{file}`")),
            "{error}"
        );
    }
    let store = Store::new();
    let error = unpack(Path::new("/no/such.mar"), &store.parent(), &limits).unwrap_err();
    assert!(matches!(error, ArchiveError::NotFound { .. }), "{error}");
}

#[test]
fn tars_with_and_without_a_top_folder_are_the_same_model() {
    for prefix in ["", "./", "m/", "./m/"] {
        let names =
            [MANIFEST_PATH, "first/second.py", "h.py"].map(|name| format!("{prefix}{name}"));
        let mut members: Vec<_> = names
            .iter()
            .map(|name| (name.as_str(), EntryType::Regular, MANIFEST))
            .collect();
        members.insert(0, ("./", EntryType::Directory, b""));
        let store = Store::new();
        let artifact = store.unpack("m.tar.gz", &tar_gz(&members)).unwrap();
        assert!(artifact.dir.join(MANIFEST_PATH).is_file(), "{prefix:?}");
        assert!(artifact.dir.join("first/second.py").is_file(), "{prefix:?}");
        assert_eq!(artifact.manifest.model.model_name.as_deref(), Some("m"));
        assert_eq!(fs::read_dir(store.parent()).unwrap().count(), 1);
    }
    // No manifest: an only folder is the model's, as in TorchServe; one of several is not.
    let store = Store::new();
    let only = store
        .unpack("m.tar.gz", &tar_of_files(&[("m/a/b", b"x")]))
        .unwrap();
    assert!(only.dir.join("a/b").is_file());
    let several = store
        .unpack("m.tar.gz", &tar_of_files(&[("m/a", b"x"), ("c", b"y")]))
        .unwrap();
    assert!(several.dir.join("m/a").is_file());
}

#[test]
fn a_good_zip_without_a_manifest_gets_the_default_one() {
    let artifact = Store::new()
        .unpack("m.mar", &zip(&[("h.py", b"class A: pass")]))
        .unwrap();
    assert_eq!(artifact.manifest, Manifest::default());
    assert!(artifact.config.is_none());
}

#[test]
fn windows_spelling_is_understood() {
    let manifest = "\u{feff}{\r\n\"runtime\": \"python\",\r\n\"model\": {\"handler\": \"h.py\"}}";
    let bytes = zip(&[
        ("mar-inf\\Manifest.json", manifest.as_bytes()),
        ("lib\\mod.py", b"x"),
        ("h.py", b"class A: pass"),
    ]);
    let store = Store::new();
    let artifact = store.unpack("M.MAR", &bytes).unwrap();
    assert_eq!(artifact.manifest.model.handler.as_deref(), Some("h.py"));
    assert!(artifact.dir.join("lib/mod.py").is_file());
}

#[test]
fn a_folder_is_used_in_place_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("outer/inner");
    fs::create_dir_all(model.join("MAR-INF")).unwrap();
    fs::write(model.join(MANIFEST_PATH), MANIFEST).unwrap();
    let parent = folder.path().join("parent");
    for source in ["outer", "outer/", "outer/inner"] {
        let artifact = unpack(
            &folder.path().join(source),
            &parent,
            &UnpackLimits::default(),
        )
        .unwrap();
        assert_eq!(artifact.dir.path(), model);
        assert!(!artifact.dir.is_owned());
    }
    assert!(model.join(MANIFEST_PATH).is_file());
    assert!(!parent.exists());
}

#[test]
fn a_bad_manifest_or_configuration_leaves_nothing() {
    let limits = UnpackLimits::default();
    let with_config = br#"{"runtime":"python","model":{"configFile":"c.yaml"}}"#;
    let nameless = zip(&[(
        MANIFEST_PATH,
        br#"{"runtime":"python","model":{"modelName":""}}"#,
    )]);
    let error = Store::new()
        .refused("bad.mar", &nameless, &limits)
        .to_string();
    assert!(error.starts_with("Model name is not defined.") && error.contains("`bad.mar`"));
    let bad = zip(&[(MANIFEST_PATH, with_config), ("c.yaml", b"a: 1\na: 2\n")]);
    let error = Store::new().refused("bad.mar", &bad, &limits).to_string();
    assert!(error.contains("`c.yaml` line 2"), "{error}");
    let missing = zip(&[(MANIFEST_PATH, with_config)]);
    let error = Store::new()
        .refused("bad.mar", &missing, &limits)
        .to_string();
    assert!(error.contains("model.configFile"), "{error}");
    let good = zip(&[(MANIFEST_PATH, with_config), ("c.yaml", b"batchSize: 3\n")]);
    let artifact = Store::new().unpack("good.mar", &good).unwrap();
    assert_eq!(artifact.config.as_ref().unwrap().batch_size, Some(3));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn damage_anywhere_is_an_error_or_harmless(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        is_tar in any::<bool>(),
    ) {
        let members: [(&str, &[u8]); 3] =
            [(MANIFEST_PATH, MANIFEST), ("lib/a.py", b"x = 1"), ("z", &[7; 700])];
        let (name, mut bytes) = if is_tar {
            ("m.tar.gz", tar_of_files(&members))
        } else {
            ("m.mar", zip(&members))
        };
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let store = Store::new();
        // Whatever comes of it, it stays in its folder and goes with the artifact.
        drop(store.unpack_with(name, &bytes, &small_limits()));
        let left: Vec<_> = walkdir::WalkDir::new(store.folder.path())
            .into_iter()
            .map(|entry| entry.unwrap().into_path())
            .filter(|path| path.is_file())
            .collect();
        prop_assert_eq!(left, [store.folder.path().join(name)]);
    }
}
