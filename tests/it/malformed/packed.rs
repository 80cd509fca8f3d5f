//! Writers of zip and tar archives that say whatever they are told to.

use std::io::Write;

use flate2::write::{DeflateEncoder, GzEncoder};
use flate2::{Compression, Crc};

pub(super) const MANIFEST: &str =
    r#"{"runtime": "echo", "model": {"modelName": "odd", "modelVersion": "1.0"}}"#;

/// A member and what its archive claims of it.
pub(super) struct Member {
    pub(super) name: Vec<u8>,
    pub(super) data: Vec<u8>,
    /// As the system has it: what it is, and who may do what with it. Zip only.
    pub(super) mode: u32,
    /// The kind of a tar member: `0` a file, `5` a folder, `2` a link, and others.
    pub(super) kind: u8,
    /// Its size if that is not true.
    pub(super) claimed: Option<u64>,
    /// Flags and method of a zip member; 8 is deflated.
    pub(super) flags: u16,
    pub(super) method: u16,
    /// Extra field of a zip member.
    pub(super) extra: Vec<u8>,
}

/// A file that is what it says.
pub(super) fn file(name: impl Into<Vec<u8>>, data: impl Into<Vec<u8>>) -> Member {
    Member {
        name: name.into(),
        data: data.into(),
        mode: 0o100_644,
        kind: b'0',
        claimed: None,
        flags: 0,
        method: 0,
        extra: Vec::new(),
    }
}

/// A model that loads.
pub(super) fn model() -> Vec<Member> {
    vec![
        file("MAR-INF/MANIFEST.json", MANIFEST),
        file("weights.bin", vec![7; 300]),
        file("sub/folder/notes.txt", "some words\n".repeat(20)),
    ]
}

/// A zip archive of these members. The end of it counts `more` members than there are, and finds
/// their directory `off` bytes from where it is.
pub(super) fn zip(members: &[Member], more: u16, off: u32) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for member in members {
        let mut crc = Crc::new();
        crc.update(&member.data);
        let packed = if member.method == 8 {
            deflated(&member.data)
        } else {
            member.data.clone()
        };
        let size = member.claimed.unwrap_or(member.data.len() as u64);
        let common = [
            &member.flags.to_le_bytes()[..],
            &member.method.to_le_bytes(),
            &[0, 0, 0x21, 0x58],
            &crc.sum().to_le_bytes(),
            &number(packed.len() as u64),
            &number(size),
            &short(member.name.len()),
            &short(member.extra.len()),
        ]
        .concat();
        let offset = number(out.len() as u64);
        out.extend(
            [
                b"PK\x03\x04\x14\x00",
                &common[..],
                &member.name,
                &member.extra,
                &packed,
            ]
            .concat(),
        );
        directory.extend([b"PK\x01\x02\x14\x03\x14\x00", &common[..], &[0; 6]].concat());
        directory.extend((member.mode << 16).to_le_bytes());
        directory.extend([&offset[..], &member.name, &member.extra].concat());
    }
    let at = number(out.len() as u64 + u64::from(off));
    let count = short(members.len() + usize::from(more));
    let size = number(directory.len() as u64);
    out.extend(directory);
    out.extend(
        [
            b"PK\x05\x06\0\0\0\0",
            &count[..],
            &count,
            &size,
            &at,
            &[0, 0],
        ]
        .concat(),
    );
    out
}

/// What a field of four bytes can say of a number.
fn number(value: u64) -> [u8; 4] {
    u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes()
}

fn short(value: usize) -> [u8; 2] {
    u16::try_from(value).unwrap_or(u16::MAX).to_le_bytes()
}

fn deflated(data: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

/// A tar archive of these members, not compressed.
pub(super) fn tar(members: &[Member]) -> Vec<u8> {
    let mut out = Vec::new();
    for member in members {
        let mut header = [0_u8; 512];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &member.name[..member.name.len().min(100)]);
        put(100, b"0000644\x000000000\x000000000\0");
        let size = member.claimed.unwrap_or(member.data.len() as u64);
        put(124, format!("{:011o}", size & 0o77_777_777_777).as_bytes());
        put(136, b"14000000000");
        put(148, b"        ");
        put(156, &[member.kind]);
        put(157, b"../../target");
        put(257, b"ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        out.extend(header);
        out.extend(&member.data);
        out.resize(out.len().next_multiple_of(512), 0);
    }
    out.resize(out.len() + 1024, 0);
    out
}

pub(super) fn gzip(data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}
