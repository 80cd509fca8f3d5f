//! Sources that break off, change and lie, without a network.

use std::collections::VecDeque;

use futures_util::stream;
use parking_lot::Mutex;

use super::*;

/// Answers one try after another as a script says, and keeps what it was asked for.
struct Script {
    answers: Mutex<VecDeque<Result<Opened, Failure>>>,
    asked: Mutex<Vec<Option<Resume>>>,
}

impl Script {
    fn new(answers: impl IntoIterator<Item = Result<Opened, Failure>>) -> Self {
        Self {
            answers: Mutex::new(answers.into_iter().collect()),
            asked: Mutex::default(),
        }
    }

    /// Where each try was to go on.
    fn asked(&self) -> Vec<u64> {
        let asked = self.asked.lock();
        asked
            .iter()
            .map(|asked| asked.as_ref().map_or(0, |resume| resume.from))
            .collect()
    }
}

impl Remote for Script {
    async fn open(&self, resume: Option<&Resume>) -> Result<Opened, Failure> {
        self.asked.lock().push(resume.cloned());
        let next = self.answers.lock().pop_front();
        next.unwrap_or_else(|| Err(Failure::lasting("asked too often")))
    }
}

/// Bytes `start..start + chunk.len()` of `total`, then the end or a break.
fn part(start: u64, chunk: &'static str, total: u64, version: &str, breaks: bool) -> Opened {
    let end = breaks.then(|| Err("reset".to_owned()));
    let items = [Ok(Bytes::from_static(chunk.as_bytes()))]
        .into_iter()
        .chain(end);
    Opened {
        start,
        total: Some(total),
        version: (!version.is_empty()).then(|| version.to_owned()),
        body: stream::iter(items).boxed(),
    }
}

fn passing() -> Result<Opened, Failure> {
    Err(Failure {
        reason: "the server answered 503".to_owned(),
        passing: true,
    })
}

/// Fetches, and returns the store's one file, or the error when the store is empty.
async fn fetched(script: &Script, bytes: u64, expected: Option<Digest>) -> Result<String, String> {
    let store = tempfile::tempdir().unwrap();
    let target = store.path().join("m.mar");
    let order = Order {
        url: "http://h/m.mar?sig=1",
        stray_parameters: &[],
        shown: "http://h/m.mar".to_owned(),
        target: &target,
        bounds: Bounds {
            bytes,
            time: Duration::from_secs(600),
        },
        expected,
    };
    let result = fetch(&order, script).await;
    let left = fs_err::read_dir(store.path()).unwrap().count();
    match result {
        Ok(()) => {
            assert_eq!(left, 1);
            Ok(fs_err::read_to_string(&target).unwrap())
        }
        Err(error) => {
            assert_eq!(left, 0, "{error}");
            Err(error.to_string())
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_break_is_gone_on_from() {
    let script = Script::new([
        Ok(part(0, "abc", 9, "v", true)),
        passing(),
        Ok(part(3, "def", 9, "v", true)),
        Ok(part(6, "ghi", 9, "v", false)),
    ]);
    assert_eq!(fetched(&script, 9, None).await.unwrap(), "abcdefghi");
    assert_eq!(script.asked(), [0, 3, 3, 6]);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_gone_on_from_begins_anew() {
    // No version to ask for; then a server that knows no ranges.
    for version in ["", "v"] {
        let script = Script::new([
            Ok(part(0, "old", 6, version, true)),
            Ok(part(0, "newnew", 6, version, false)),
        ]);
        assert_eq!(fetched(&script, 9, None).await.unwrap(), "newnew");
    }
}

#[tokio::test(start_paused = true)]
async fn two_versions_are_never_mixed() {
    for second in [
        part(3, "xyz", 6, "w", false),
        part(3, "wxyz", 7, "v", false),
        part(2, "wxyz", 6, "v", false),
    ] {
        let script = Script::new([
            Ok(part(0, "abc", 6, "v", true)),
            Ok(second),
            Ok(part(0, "uvwxyz", 6, "w", false)),
        ]);
        assert_eq!(fetched(&script, 9, None).await.unwrap(), "uvwxyz");
        assert_eq!(script.asked(), [0, 3, 0]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_of_another_length_is_no_archive() {
    let short = |_| Ok(part(0, "abc", 4, "", false));
    let error = fetched(&Script::new((0..6).map(short)), 9, None)
        .await
        .unwrap_err();
    assert!(
        error.contains("it ended after 3 of 4 bytes; given up after 5 more tries"),
        "{error}"
    );
    let long = |_| Ok(part(0, "abcde", 4, "", false));
    let error = fetched(&Script::new((0..6).map(long)), 9, None)
        .await
        .unwrap_err();
    assert!(error.contains("it ended after 5 of 4 bytes"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_source_that_does_not_answer_at_first_is_not_asked_again() {
    let script = Script::new([passing()]);
    let error = fetched(&script, 9, None).await.unwrap_err();
    assert_eq!(
        error,
        "Failed to download archive from: http://h/m.mar?sig=1: the server answered 503"
    );
    assert_eq!(script.asked(), [0]);
}

#[tokio::test(start_paused = true)]
async fn breaks_without_progress_are_counted_and_progress_starts_the_count_anew() {
    let broken = |_| Ok(part(0, "abc", 6, "", true));
    let script = Script::new((0..9).map(broken));
    let error = fetched(&script, 9, None).await.unwrap_err();
    assert!(
        error.contains("reset; given up after 5 more tries, at 3 bytes"),
        "{error}"
    );
    assert_eq!(script.asked().len(), 6);

    let chunk: &'static str = Box::leak("x".repeat(1 << 20).into_boxed_str());
    let (total, size) = (12 << 20, 1 << 20);
    let steps = (0..12).map(|step| Ok(part(step * size, chunk, total, "v", step < 11)));
    let script = Script::new(steps);
    assert_eq!(fetched(&script, total, None).await.unwrap().len(), 12 << 20);
}

#[tokio::test(start_paused = true)]
async fn limits_hold_before_and_while_reading() {
    let announced = Script::new([Ok(part(0, "", 10, "", false))]);
    let mut silent = part(0, "0123456789", 10, "", false);
    silent.total = None;
    for script in [announced, Script::new([Ok(silent)])] {
        let error = fetched(&script, 9, None).await.unwrap_err();
        assert!(
            error.contains("limit of 9 bytes. Raise `max_download_size`"),
            "{error}"
        );
    }
    let endless = |_| {
        let mut endless = part(0, "", 10, "", false);
        endless.body = stream::pending().boxed();
        Ok(endless)
    };
    let error = fetched(&Script::new((0..6).map(endless)), 10, None)
        .await
        .unwrap_err();
    assert!(error.contains("nothing came for 60 s"), "{error}");
    let dripping = Opened {
        body: stream::unfold((), async |()| {
            tokio::time::sleep(Duration::from_secs(50)).await;
            Some((Ok(Bytes::from_static(b"x")), ()))
        })
        .boxed(),
        ..part(0, "", 100, "", false)
    };
    let error = fetched(&Script::new([Ok(dripping)]), 100, None)
        .await
        .unwrap_err();
    assert!(
        error.contains("within the limit of 600 s. Raise `download_timeout`"),
        "{error}"
    );
}

#[tokio::test(start_paused = true)]
async fn the_digest_is_that_of_the_whole() {
    let digest: Digest = "19cc02f26df43cc571bc9ed7b0c4d29224a3ec229529221725ef76d021c8326f"
        .parse()
        .unwrap();
    let script = || {
        Script::new([
            Ok(part(0, "abc", 9, "v", true)),
            Ok(part(0, "abcde", 9, "v", true)),
            Ok(part(5, "fghi", 9, "v", false)),
        ])
    };
    assert_eq!(
        fetched(&script(), 9, Some(digest)).await.unwrap(),
        "abcdefghi"
    );
    let other: Digest = "0".repeat(64).parse().unwrap();
    let error = fetched(&script(), 9, Some(other)).await.unwrap_err();
    assert!(error.contains(&digest.to_string()), "{error}");
    assert!(error.contains(&other.to_string()), "{error}");
}

#[tokio::test]
async fn a_full_disk_is_told_with_its_place() {
    let store = tempfile::tempdir().unwrap();
    let target = store.path().join("m.mar");
    let order = Order {
        url: "http://h/m.mar",
        stray_parameters: &[],
        shown: String::new(),
        target: &target,
        bounds: Bounds {
            bytes: 9,
            time: Duration::from_secs(9),
        },
        expected: None,
    };
    let full = fs_err::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let place = store.path().join("place");
    fs_err::write(&place, "").unwrap();
    let partial = Partial::onto(place, full);
    let script = Script::new([Ok(part(0, "abc", 3, "", false))]);
    let error = fetch_into(partial, &order, &script)
        .await
        .unwrap_err()
        .to_string();
    let shown = store.path().display().to_string();
    assert!(
        error.contains(&shown) && error.contains("No space left"),
        "{error}"
    );
    assert_eq!(fs_err::read_dir(store.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_url_that_lost_its_parameters_is_told_so() {
    let stray = ["b".to_owned(), "sig".to_owned()];
    let order = Order {
        url: "http://h/m.mar?a=1",
        stray_parameters: &stray,
        shown: String::new(),
        target: Path::new("/m.mar"),
        bounds: Bounds {
            bytes: 9,
            time: Duration::from_secs(9),
        },
        expected: None,
    };
    let error = order.failed("the server answered 403").to_string();
    assert!(error.contains("`b`, `sig` did not reach it"), "{error}");
    assert!(error.contains("percent-encode the url"), "{error}");
}
