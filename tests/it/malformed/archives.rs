//! Archives: broken by chance, and each lie that a format allows.

use std::time::Instant;

use ts_test::Running;

use super::packed::{Member, file, gzip, model, tar, zip};
use super::{CLIENTS, Dice, Holdings, Statuses, at_once, resident, serves};

const ARCHIVES: usize = 1000;

/// What an archive may unpack to in this test; bombs are beyond it.
const MOST_FILES: usize = 40;
const MOST_BYTES: usize = 128 << 10;

/// Names that lead out of the folder, or that no file can have.
const NAMES: &[&[u8]] = &[
    b"../x",
    b"a/../../x",
    b"/etc/x",
    b"//x",
    b"..\\x",
    b"C:\\x",
    b"C:x",
    b"a\0b",
    b"",
    b".",
    b"..",
    b"./..",
    b"\xff\xfe",
    b"a/",
    b"a//b",
    b"a/./../..",
    b"con\n",
    b"MAR-INF",
    b"MAR-INF/MANIFEST.json/",
    b"MAR-INF/MANIFEST.json/x",
    b"weights.bin/x",
    b"WEIGHTS.BIN",
    b"weights.bin",
];

/// A member that should not be there.
fn lying(dice: &mut Dice) -> Member {
    let mut member = file("x", "content");
    match dice.below(9) {
        0 | 1 => member.name = dice.pick(NAMES).to_vec(),
        2 => member.name = vec![b'n'; 200 + dice.below(70_000)],
        3 => member.name = "d/".repeat(1 + dice.below(2000)).into_bytes(),
        4 => {
            let kinds = [
                0o120_777, 0o020_666, 0o060_666, 0o010_644, 0o140_755, 0o170_000,
            ];
            member.mode = kinds[dice.below(6)];
            member.kind = b"1234567LKSVxg\0z"[dice.below(15)];
            member.data = dice
                .pick(&[
                    "/etc/passwd",
                    "../x",
                    "30 path=../../etc/x\n",
                    "12 size=-1\n",
                    "",
                ])
                .into();
        }
        5 => {
            let sizes = [0, 1, 8, 4096, 0xffff_fffe, 0xffff_ffff, u64::MAX];
            member.claimed = Some(sizes[dice.below(7)]);
        }
        6 => {
            // Sizes beyond four bytes stand in an extra field, here with more than any file has.
            member.claimed = Some(u64::from(u32::MAX));
            let sizes = [u64::MAX, 1 << 62, 0, 7];
            member.extra = [1_u16.to_le_bytes(), [16, 0]].concat();
            member.extra.extend(sizes[dice.below(4)].to_le_bytes());
            member.extra.extend(sizes[dice.below(4)].to_le_bytes());
            member.extra.truncate(4 + dice.below(17));
        }
        7 => {
            member.flags = [1, 8, 0x40, 0x800, 0x2000, 0xffff][dice.below(6)];
            member.method = [0, 1, 8, 9, 12, 14, 93, 99, 0xffff][dice.below(9)];
        }
        _ => {
            member.name = b"MAR-INF/MANIFEST.json".to_vec();
            let texts = [
                "",
                "{",
                "null",
                "[]",
                r#"{"runtime":"echo","model":{"modelName":"../x"}}"#,
            ];
            member.data = dice.pick(&texts).into();
        }
    }
    member
}

/// An archive whose name is to end in `ending`.
fn archive(dice: &mut Dice, ending: &str) -> Vec<u8> {
    let mut members = model();
    let (mut more, mut off) = (0, 0);
    match dice.below(8) {
        0 => {}
        1 => {
            // A bomb: one member, or many that are each within the limit.
            let pieces = 1 + dice.below(8);
            members.extend((0..pieces).map(|at| Member {
                method: 8,
                ..file(format!("zeros{at}"), vec![0; 2 * MOST_BYTES / pieces])
            }));
        }
        2 => {
            let many = MOST_FILES + dice.below(400);
            members.extend((0..many).map(|at| file(format!("d{at}/f{at}"), "")));
        }
        3 => more = [1, 100, 0xfff0][dice.below(3)],
        4 => off = [1, 46, 100_000, u32::MAX][dice.below(4)],
        _ => {
            let lie = lying(dice);
            // In the place of the manifest, which comes first, or beside it.
            if lie.name == members[0].name && dice.below(2) == 0 {
                members[0] = lie;
            } else {
                members.insert(dice.below(members.len() + 1), lie);
            }
        }
    }
    let words = [
        "PK\x01\x02",
        "PK\x03\x04",
        "PK\x05\x06",
        "PK\x06\x06",
        "PK\x06\x07",
        "../",
        "\0",
    ];
    let broken = dice.below(2) == 0;
    let mut bytes = if ending == "mar" {
        zip(&members, more, off)
    } else {
        tar(&members)
    };
    if broken {
        dice.break_up(&mut bytes, &words);
    }
    if ending == "tar.gz" {
        bytes = gzip(&bytes);
        if dice.below(4) == 0 {
            dice.break_up(&mut bytes, &words);
        }
    }
    bytes
}

/// Registers archives by their names in the store, and takes out those that load.
fn register(server: &Running, client: u64, mut dice: Dice, archives: usize) -> Statuses {
    let store = server.folder().join("store");
    let mut statuses = Statuses::default();
    for _ in 0..archives {
        let ending = dice.pick(&["mar", "tar.gz"]);
        let name = format!("odd{client}.{ending}");
        fs_err::write(store.join(&name), archive(&mut dice, ending)).unwrap();
        let path = format!("/models?url={name}&model_name=odd{client}");
        let answer = server.manage("POST", &path).send();
        let (status, text) = (answer.status, answer.text());
        assert!((200..500).contains(&status), "{name}: {status} {text}");
        statuses.add(if ending == "mar" { "zip" } else { "tar" }, status);
        if status == 200 {
            let model = format!("/models/odd{client}");
            server.manage("DELETE", &model).send().expect(200);
        }
        fs_err::remove_file(store.join(&name)).unwrap();
    }
    statuses
}

#[test]
fn a_thousand_malformed_archives_leave_nothing_se_01() {
    let server = crate::server()
        .config(&format!("max_unpacked_files={MOST_FILES}"))
        .config(&format!("max_unpacked_size={MOST_BYTES}"))
        .echo_model("m", "minWorkers: 1\nmaxWorkers: 1")
        .args(&["--models", "m"])
        .start();
    server.wait_ready("m");
    serves(&server);
    let before = Holdings::of(&server);
    let started = Instant::now();
    let half = ARCHIVES / 2 / CLIENTS as usize;
    let first = at_once(1, |client, dice| register(&server, client, dice, half));
    let warm = resident(&server);
    let second = at_once(1000, |client, dice| register(&server, client, dice, half));
    let (took, grown) = (started.elapsed(), resident(&server) - warm);
    println!(
        "{ARCHIVES} archives in {took:.1?}; the second half cost {grown:.1} MiB, at {warm:.0} MiB"
    );
    println!("first half: {:?}", first.0);
    assert!(grown < 8.0, "the second half cost {grown:.1} MiB");
    // The test sends what it says: lies, bombs, and some that are whole.
    for (status, share) in [(400, 3), (413, 20), (200, 20)] {
        let count = first.of(status) + second.of(status);
        assert!(count > ARCHIVES / share, "{status} came {count} times");
    }
    before.wait(&server);
    serves(&server);
    let outside = ["x", "etc", "target", "store/x"].map(|name| server.folder().join(name));
    assert!(outside.iter().all(|path| !path.exists()), "{outside:?}");
}
