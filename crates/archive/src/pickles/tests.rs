use std::io::Write as _;

use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use zip::write::SimpleFileOptions;

use super::*;

proptest::proptest! {
    /// Also of bytes that begin like something.
    #[test]
    fn any_bytes_are_looked_at(
        start in 0..8_usize,
        rest in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300),
    ) {
        let starts: [&[u8]; 8] = [
            b"", b"PK\x03\x04", b"\x1f\x8b\x08", b"\x78\x9c", b"\x93NUMPY", b"(cos\n", b"\x80\x04", b"(lp0\n",
        ];
        let _found = found(&[starts[start], &rest].concat());
    }
}

/// `os.mkdir('x')` in each protocol, as CPython writes it.
const CALLS: &[&[u8]] = &[
    b"cposix\nmkdir\np0\n(Vx\np1\ntp2\nRp3\n.",
    b"(S'x'\niposix\nmkdir\n.",
    b"(cposix\nmkdir\nVx\no.",
    b"N0I01\n0cposix\nmkdir\n(S\"x\"\ntR",
    b"cposix\nmkdir\nq\0(X\x01\0\0\0xq\x01tq\x02Rq\x03.",
    b"\x80\x02cposix\nmkdir\nq\0X\x01\0\0\0xq\x01\x85q\x02Rq\x03.",
    b"\x80\x04\x95\x1c\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x05mkdir\x94\x93\x94\x8c\x01x\x94\x85\x94R\x94.",
    b"Vposix\nVmkdir\n\x93Vx\n\x85R.",
];

fn zip(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut writer = zip::ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content) in members {
        writer
            .start_file(*name, SimpleFileOptions::default())
            .unwrap();
        writer.write_all(content).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn found(bytes: &[u8]) -> Option<String> {
    look(&mut Cursor::new(bytes), 0).unwrap()
}

fn npy(description: &str) -> Vec<u8> {
    let header = format!("{{'descr': {description}, 'fortran_order': False, 'shape': (1,), }}\n");
    let mut bytes = b"\x93NUMPY\x01\0".to_vec();
    bytes.extend(u16::try_from(header.len()).unwrap().to_le_bytes());
    bytes.extend(header.as_bytes());
    bytes
}

#[test]
fn pickles_of_every_protocol_are_found_wherever_they_are_packed() {
    for call in CALLS {
        assert_eq!(found(call).as_deref(), Some("a pickle"), "{call:?}");
        let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
        zlib.write_all(call).unwrap();
        for packed in [
            gzip(call),
            zlib.finish().unwrap(),
            zip(&[("a/b", b"text"), ("a/c", call)]),
            zip(&[("a", &zip(&[("b", call)]))]),
            zip(&[("a", &gzip(call))]),
        ] {
            assert!(found(&packed).is_some(), "{call:?}");
        }
    }
    let saved = zip(&[("m/data.pkl", b"anything"), ("m/data/0", b"1234")]);
    assert!(found(&saved).unwrap().contains("`m/data.pkl`"));
    // A pickle that pretends to be a script has to be one for torch too.
    let pretends = zip(&[
        ("m/data.pkl", CALLS[5]),
        ("m/code/x.py", b""),
        ("n/constants.pkl", b""),
    ]);
    assert!(found(&pretends).is_some());
}

#[test]
fn text_tables_and_weights_are_none() {
    let safetensors = [
        &0x280_u64.to_le_bytes()[..],
        br#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
    ]
    .concat();
    let script = zip(&[
        ("m/data.pkl", CALLS[5]),
        ("m/code/__torch__.py", b"class M:"),
        ("m/constants.pkl", b"\x80\x02)."),
    ]);
    let plain: &[&[u8]] = &[
        b"",
        b".",
        b"N.",
        b"cat\ndog\nbird\nibex\n",
        b"import os\nclass A:\n    pass\n",
        b"class_a\nclass_b\nRed\nblue\n",
        b"(see below)\nNotes.",
        b"{\"0\": \"x\"}",
        b"0\n1\n2\n",
        b"VERSION\nauthor\n",
        b"\x08\x07\x12\x07pytorch",
        b"\x7fELF\x02\x01\x01",
        &safetensors,
        &script,
        &gzip(b"some words"),
        &zip(&[("archive_format", b"pt2"), ("data/a.json", b"{}")]),
        &npy("'<f4'"),
        &npy("[('Offset', '<i8'), ('o', '<f4')]"),
    ];
    for bytes in plain {
        assert_eq!(found(bytes), None, "{}", String::from_utf8_lossy(bytes));
    }
}

#[test]
fn what_cannot_be_looked_into_is_refused() {
    let mut tar = vec![0; 600];
    tar[257..262].copy_from_slice(b"ustar");
    let mut deep = zip(&[("a", b"x")]);
    for _ in 0..DEEPEST {
        deep = zip(&[("a", &deep)]);
    }
    for bytes in [
        b"BZh91AY&SY".to_vec(),
        b"\xfd7zXZ\0\0".to_vec(),
        tar,
        deep,
        b"PK\x03\x04 broken off".to_vec(),
        gzip(&gzip(b"x")),
        npy("'|O'"),
        npy("'O8'"),
        npy("\"object\""),
        npy("[('a', '<f4'), ('b', 'O')]"),
    ] {
        assert!(found(&bytes).is_some(), "{:?}", &bytes[..8]);
    }
}

#[test]
fn the_error_names_archive_and_member() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("deep")).unwrap();
    fs::write(folder.path().join("words.txt"), "cat\ndog\n").unwrap();
    refuse_pickles(folder.path(), Path::new("/store/m.mar")).unwrap();
    fs::write(folder.path().join("deep/words.txt"), CALLS[0]).unwrap();
    let error = refuse_pickles(folder.path(), Path::new("/store/m.mar"))
        .unwrap_err()
        .to_string();
    let begin = "member `deep/words.txt` of `m.mar` is a pickle, which `load_policy=strict`";
    assert!(error.starts_with(begin), "{error}");
}
