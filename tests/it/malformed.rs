//! Ten thousand bodies and a thousand archives that are wrong in some way: each is answered, none
//! with a status that blames the server, and afterwards the server has nothing of them.
//!
//! What is sent follows from a fixed seed, so a failure comes again.

mod archives;
mod bodies;
mod packed;

use std::collections::BTreeMap;
use std::path::Path;

use ts_test::Running;

/// An archive of a model with one more member of this name.
pub(crate) fn escaping(name: &str, ending: &str) -> Vec<u8> {
    let mut members = packed::model();
    members.push(packed::file(name, "x"));
    match ending {
        "mar" => packed::zip(&members, 0, 0),
        _ => packed::gzip(&packed::tar(&members)),
    }
}

/// Numbers that look random and are the same in every run (SplitMix64).
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Less than `end`, which is at least 1.
    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.roll() % end as u64).unwrap()
    }

    fn pick<'t, T: ?Sized>(&mut self, choices: &[&'t T]) -> &'t T {
        choices[self.below(choices.len())]
    }

    /// Breaks bytes in one to four places; `words` are what their format has a meaning for.
    fn break_up(&mut self, bytes: &mut Vec<u8>, words: &[&str]) {
        for _ in 0..=self.below(4) {
            if bytes.is_empty() {
                bytes.push(0);
            }
            let at = self.below(bytes.len());
            let to = at + self.below((bytes.len() - at).min(64)) + 1;
            match self.below(7) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = [0, 0xff, b'\r', b'\n', b'"', 0x80][self.below(6)],
                2 => drop(bytes.drain(at..to)),
                3 => bytes.extend_from_within(at..to),
                4 => bytes.truncate(at),
                5 => bytes[at..to].reverse(),
                _ => drop(bytes.splice(at..at, self.pick(words).bytes())),
            }
        }
    }
}

/// How often each status came, by what was sent.
#[derive(Default)]
struct Statuses(BTreeMap<(&'static str, u16), usize>);

impl Statuses {
    fn add(&mut self, kind: &'static str, status: u16) {
        *self.0.entry((kind, status)).or_default() += 1;
    }

    fn of(&self, status: u16) -> usize {
        let counts = self.0.iter().filter(|((_, of), _)| *of == status);
        counts.map(|(_, count)| count).sum()
    }
}

/// Clients at a time.
const CLIENTS: u64 = 4;

/// Lets all clients send at once; each has a number and dice of its own.
fn at_once(seed: u64, send: impl Fn(u64, Dice) -> Statuses + Sync) -> Statuses {
    let send = &send;
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..CLIENTS)
            .map(|client| scope.spawn(move || send(client, Dice(seed + client))))
            .collect();
        let mut all = Statuses::default();
        for client in clients {
            for (kind, count) in client.join().unwrap().0 {
                *all.0.entry(kind).or_default() += count;
            }
        }
        all
    })
}

/// What the server holds: it must be the same before and after, or less.
#[derive(Debug)]
struct Holdings {
    descriptors: usize,
    files: Vec<String>,
    models: serde_json::Value,
    workers: Vec<u32>,
}

impl Holdings {
    fn of(server: &Running) -> Self {
        let open = fs_err::read_dir(format!("/proc/{}/fd", server.pid()));
        Self {
            descriptors: open.unwrap().count(),
            files: crate::archives::files_below(&server.folder().join("tmp")),
            models: server.manage("GET", "/models").send().expect(200).json(),
            workers: server.worker_pids("m"),
        }
    }

    /// Waits until the server holds no more than this again: it closes what clients have left on its
    /// own time, and may have had such a connection when this was taken.
    #[track_caller]
    fn wait(&self, server: &Running) {
        server.wait_until(
            &format!("it holds {self:?}, not {:?}", Self::of(server)),
            || {
                let now = Self::of(server);
                now.descriptors <= self.descriptors
                    && (now.files, now.models, now.workers)
                        == (
                            self.files.clone(),
                            self.models.clone(),
                            self.workers.clone(),
                        )
            },
        );
    }
}

/// Mebibytes that the server has in memory.
fn resident(server: &Running) -> f64 {
    let status = fs_err::read_to_string(
        Path::new("/proc")
            .join(server.pid().to_string())
            .join("status"),
    );
    let status = status.unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    let kibibytes: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kibibytes / 1024.0
}

/// The server answers as it does when nothing has happened.
#[track_caller]
fn serves(server: &Running) {
    let answer = server.infer("POST", "/predictions/m").body("well").send();
    assert_eq!(answer.expect(200).text(), "well");
}
