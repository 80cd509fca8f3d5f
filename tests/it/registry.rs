//! The registry under many hands and under `kill -9`, against a small model of it.
//!
//! `REGISTRY_SECONDS` makes the random test longer than the usual run has it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use ts_test::{Request, Running};

use crate::{server, serving};

const NAMES: [&str; 3] = ["a", "b", "c"];
const VERSIONS: [&str; 3] = ["1.0", "2.0", "3.0"];

/// Numbers that look random, the same in each run (an xorshift generator).
struct Dice(u64);

impl Dice {
    fn throw(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 11).unwrap() % sides
    }

    fn of<'t>(&mut self, texts: &[&'t str]) -> &'t str {
        texts[self.throw(texts.len())]
    }
}

/// The registry as a few lines: of each name its default version and its versions' bounds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Reference(BTreeMap<String, (String, Versions)>);

/// Workers at least and at most, by version.
type Versions = BTreeMap<String, (usize, usize)>;

#[derive(Debug, Clone)]
enum Call {
    Register(&'static str, &'static str, usize),
    Scale(&'static str, &'static str, usize, usize),
    SetDefault(&'static str, &'static str),
    Unregister(&'static str, &'static str),
}

impl Call {
    fn random(dice: &mut Dice) -> Self {
        let (name, version) = (dice.of(&NAMES), dice.of(&VERSIONS));
        match dice.throw(5) {
            0 | 1 => Self::Register(name, version, dice.throw(2)),
            2 => {
                let min = dice.throw(3);
                Self::Scale(name, version, min, min + dice.throw(2))
            }
            3 => Self::SetDefault(name, version),
            _ => Self::Unregister(name, version),
        }
    }

    fn request(&self, server: &Running, synchronous: bool) -> Request {
        let (method, path) = match self {
            Self::Register(name, version, workers) => (
                "POST",
                format!(
                    "/models?url=v{version}&model_name={name}&initial_workers={workers}&synchronous={synchronous}"
                ),
            ),
            Self::Scale(name, version, min, max) => (
                "PUT",
                format!(
                    "/models/{name}/{version}?min_worker={min}&max_worker={max}&synchronous={synchronous}"
                ),
            ),
            Self::SetDefault(name, version) => {
                ("PUT", format!("/models/{name}/{version}/set-default"))
            }
            Self::Unregister(name, version) => ("DELETE", format!("/models/{name}/{version}")),
        };
        server.manage(method, &path)
    }
}

impl Reference {
    /// Does what a serial server would, and returns the status it would answer.
    fn apply(&mut self, call: &Call) -> u16 {
        let text = |text: &&str| (*text).to_owned();
        match call {
            Call::Register(name, version, workers) => {
                let model = self.0.entry(text(name));
                let model = model.or_insert_with(|| (text(version), BTreeMap::new()));
                if model.1.contains_key(*version) {
                    return 409;
                }
                model.1.insert(text(version), (*workers, *workers));
            }
            Call::Scale(name, version, min, max) => {
                let versions = self.0.get_mut(*name).map(|model| &mut model.1);
                match versions.and_then(|versions| versions.get_mut(*version)) {
                    Some(bounds) => *bounds = (*min, *max),
                    None => return 404,
                }
            }
            Call::SetDefault(name, version) => match self.0.get_mut(*name) {
                Some(model) if model.1.contains_key(*version) => model.0 = text(version),
                _ => return 404,
            },
            Call::Unregister(name, version) => {
                let Some(model) = self.0.get_mut(*name) else {
                    return 404;
                };
                if !model.1.contains_key(*version) {
                    return 404;
                }
                if model.0 == *version && model.1.len() > 1 {
                    return 403;
                }
                model.1.remove(*version);
                if model.1.is_empty() {
                    self.0.remove(*name);
                }
            }
        }
        200
    }

    /// What the server has.
    fn of(server: &Running) -> Self {
        let list = server.manage("GET", "/models").send().expect(200).json();
        let names = list["models"].as_array().unwrap().iter();
        let models = names.map(|model| {
            let name = model["modelName"].as_str().unwrap().to_owned();
            let default = server.describe(&name)["modelVersion"]
                .as_str()
                .unwrap()
                .to_owned();
            let path = format!("/models/{name}/all");
            let all = server.manage("GET", &path).send().expect(200).json();
            let bounds = all.as_array().unwrap().iter().map(|version| {
                let number =
                    |member: &str| usize::try_from(version[member].as_u64().unwrap()).unwrap();
                let version = version["modelVersion"].as_str().unwrap().to_owned();
                (version, (number("minWorkers"), number("maxWorkers")))
            });
            (name, (default, bounds.collect()))
        });
        Self(models.collect())
    }

    /// When all is quiet there are as many workers as each version keeps at least; or more, up to its
    /// maximum, where a call only lowered the minimum.
    fn wait_for_workers(&self, server: &Running, lowered: bool) {
        for (name, (_, versions)) in &self.0 {
            for (version, (min, max)) in versions {
                let most = if lowered { max } else { min };
                let path = format!("/models/{name}/{version}");
                server.wait_until(
                    &format!("{name} {version}: {min} to {most} workers"),
                    || {
                        let described = server.manage("GET", &path).send().expect(200).json();
                        let workers = described[0]["workers"].as_array().unwrap().clone();
                        (min..=most).contains(&&workers.len())
                            && workers.iter().all(|worker| worker["status"] == "READY")
                    },
                );
            }
        }
    }
}

fn seconds(usual: u64) -> Duration {
    let variable = std::env::vars().find(|(name, _)| name == "REGISTRY_SECONDS");
    let given = variable.and_then(|(_, value)| value.parse().ok());
    Duration::from_secs(given.unwrap_or(usual))
}

fn with_versions() -> Running {
    let server = server().snapshots().start();
    for version in VERSIONS {
        server.echo_model(&format!("v{version}"), version, "");
    }
    server
}

/// RG-10: whatever many callers do at once, only documented answers come, nothing is lost and
/// nothing is left; the serial model holds when it is quiet; and a `kill -9` changes none of it.
#[test]
fn many_callers_at_once_and_a_kill_leave_what_a_serial_server_would_have() {
    let until = Instant::now() + seconds(8);
    let mut server = with_versions();
    let mut round = 0;
    while round == 0 || Instant::now() < until {
        round += 1;
        all_at_once(&server, round);
        let mut reference = Reference::of(&server);
        reference.wait_for_workers(&server, true);
        let mut dice = Dice(0x5eed + round);
        for _ in 0..30 {
            let call = Call::random(&mut dice);
            let expected = reference.apply(&call);
            let answer = call.request(&server, true).send();
            assert_eq!(answer.status, expected, "{call:?}: {}", answer.text());
        }
        assert_eq!(Reference::of(&server), reference, "round {round}");
        server = server.kill().start();
        assert_eq!(
            Reference::of(&server),
            reference,
            "round {round}, restarted"
        );
        reference.wait_for_workers(&server, false);
    }
    println!("{round} rounds");
    for (name, (default, versions)) in Reference::of(&server).0 {
        let others = versions.keys().filter(|version| **version != default);
        for version in others.chain([&default]) {
            let path = format!("/models/{name}/{version}");
            server.manage("DELETE", &path).send().expect(200);
        }
    }
    server.wait_without_hosts();
}

/// Sixteen callers. Who was first is not known, but of each version as many registrations as removals
/// succeeded, or one more; and then it is there.
fn all_at_once(server: &Running, round: u64) {
    let before = Reference::of(server);
    let balance: Mutex<BTreeMap<(&str, &str), i32>> = Mutex::default();
    for name in NAMES {
        for version in VERSIONS {
            let there = before
                .0
                .get(name)
                .is_some_and(|model| model.1.contains_key(version));
            balance
                .lock()
                .unwrap()
                .insert((name, version), i32::from(there));
        }
    }
    std::thread::scope(|scope| {
        for caller in 0..16_u64 {
            let balance = &balance;
            scope.spawn(move || {
                let mut dice = Dice(round * 1_000 + caller + 1);
                for _ in 0..25 {
                    let name = dice.of(&NAMES);
                    if dice.throw(4) == 0 {
                        let answer = server
                            .infer("POST", &format!("/predictions/{name}"))
                            .body("x")
                            .send();
                        let known = matches!(answer.status, 200 | 404 | 503);
                        assert!(known, "{}: {}", answer.status, answer.text());
                        continue;
                    }
                    let call = Call::random(&mut dice);
                    let answer = call.request(server, dice.throw(2) == 0).send();
                    let known = matches!(answer.status, 200 | 202 | 206 | 403 | 404 | 409 | 503);
                    assert!(known, "{call:?}: {} {}", answer.status, answer.text());
                    let change = match &call {
                        Call::Register(..) => 1,
                        Call::Unregister(..) => -1,
                        Call::Scale(..) | Call::SetDefault(..) => 0,
                    };
                    let (Call::Register(name, version, _)
                    | Call::Scale(name, version, ..)
                    | Call::SetDefault(name, version)
                    | Call::Unregister(name, version)) = &call;
                    if answer.status < 300 {
                        *balance.lock().unwrap().get_mut(&(*name, *version)).unwrap() += change;
                    }
                }
            });
        }
    });
    let after = Reference::of(server);
    for ((name, version), balance) in balance.into_inner().unwrap() {
        let there = after
            .0
            .get(name)
            .is_some_and(|model| model.1.contains_key(version));
        assert_eq!(balance, i32::from(there), "{name} {version}");
    }
    for (name, (default, versions)) in &after.0 {
        assert!(versions.contains_key(default), "{name} has no default");
    }
}

/// K3: at whatever moment the server is killed, the next one has every change that was answered, and
/// of the one under way all or nothing.
#[test]
fn a_kill_at_any_moment_leaves_the_last_answered_state_or_the_next() {
    let until = Instant::now() + seconds(8);
    let mut server = with_versions();
    let mut acknowledged = Reference::default();
    let mut dice = Dice(0xdead);
    let mut kills = 0;
    while kills < 3 || Instant::now() < until {
        kills += 1;
        let delay = Duration::from_micros(dice.throw(60_000) as u64);
        let mut under_way = acknowledged.clone();
        let broken = std::thread::scope(|scope| {
            let pid = rustix::process::Pid::from_raw(i32::try_from(server.pid()).unwrap());
            scope.spawn(move || {
                std::thread::sleep(delay);
                rustix::process::kill_process(pid.unwrap(), Signal::KILL).unwrap();
            });
            loop {
                let call = Call::random(&mut dice);
                under_way.apply(&call);
                let request = call.request(&server, dice.throw(2) == 0);
                match request.try_send().map(|answer| answer.status) {
                    Ok(200..300 | 403 | 404 | 409) => acknowledged = under_way.clone(),
                    Ok(status) => break Some(status),
                    Err(_killed) => break None,
                }
            }
        });
        assert_eq!(broken, None, "kill {kills}");
        server = server.kill().start();
        let found = Reference::of(&server);
        assert!(
            found == acknowledged || found == under_way,
            "kill {kills}: {found:?}, after {acknowledged:?}, during {under_way:?}"
        );
        acknowledged = found;
    }
    println!("{kills} kills");
}

/// RG-11: versions change places under load, and no request fails or meets a version that was not,
/// or was about to be, the default.
#[test]
fn versions_are_swapped_under_load_without_a_failed_request() {
    let server = serving("");
    let served = AtomicUsize::new(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !done.load(Ordering::SeqCst) {
                    let request = server.infer("POST", "/predictions/m").body("x");
                    request.send().expect(200);
                    served.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let mut old = "1.0".to_owned();
        for number in 2..22 {
            let version = format!("{number}.0");
            let folder = format!("x{number}");
            server.echo_model(&folder, &version, "");
            let path = format!("/models?url={folder}&model_name=m&initial_workers=1");
            server.manage("POST", &path).send().expect(200);
            // RG-08: the new one serves only those who name it.
            assert_eq!(server.describe("m")["modelVersion"], *old);
            server.manage("DELETE", "/models/m").send().expect(403);
            let path = format!("/models/m/{version}/set-default");
            server.manage("PUT", &path).send().expect(200);
            server
                .manage("DELETE", &format!("/models/m/{old}"))
                .send()
                .expect(200);
            old = version;
        }
        done.store(true, Ordering::SeqCst);
    });
    assert!(served.load(Ordering::SeqCst) > 100);
    assert_eq!(server.describe("m")["modelVersion"], "21.0");
}

/// A hundred models: how long they take to register and to come back, what they cost, and that the
/// list stays quick.
#[test]
fn a_hundred_models_are_listed_at_once() {
    let server = server().snapshots().echo_model("m", "").start();
    let resident = |server: &Running| {
        let text = fs_err::read_to_string(format!("/proc/{}/statm", server.pid())).unwrap();
        let pages: usize = text.split(' ').nth(1).unwrap().parse().unwrap();
        pages * rustix::param::page_size() / 1024
    };
    let before = resident(&server);
    let began = Instant::now();
    for number in 0..100 {
        let path = format!("/models?url=m&model_name=m{number}&initial_workers=1");
        server.manage("POST", &path).send().expect(200);
    }
    let registered = began.elapsed();
    let listed = |server: &Running| {
        let quickest = (0..10).map(|_| {
            let began = Instant::now();
            let list = server.manage("GET", "/models?limit=100").send().expect(200);
            let took = began.elapsed();
            let list = list.json();
            let names = list["models"].as_array().unwrap().iter();
            let names: BTreeSet<_> = names.map(|model| model["modelName"].to_string()).collect();
            assert_eq!(names.len(), 100);
            took
        });
        quickest.min().unwrap()
    };
    let list = listed(&server);
    let grown = resident(&server) - before;
    let again = server.kill();
    let began = Instant::now();
    let server = again.start();
    let restored = began.elapsed();
    listed(&server);
    println!(
        "100 models with a worker each: {registered:?} to register, {grown} KiB of the server's \
         memory, {list:?} to list, {restored:?} from the start to `started` with all of them"
    );
    assert!(list < Duration::from_millis(50), "{list:?}");
}
