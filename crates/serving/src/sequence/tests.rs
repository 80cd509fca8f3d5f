use std::time::Duration;

use proptest::prelude::*;

use super::*;

const MS: Duration = Duration::from_millis(1);

fn policy(strategy: SequenceStrategy) -> SequencePolicy {
    SequencePolicy {
        strategy,
        max_idle: 100 * MS,
        timeout: None,
        max_sequences: 2,
        max_waiting_sequences: 1,
        max_queued: 2,
        continuous: false,
    }
}

fn id(name: &str) -> SequenceId {
    Arc::from(name)
}

fn names(ready: Vec<(Instant, SequenceId)>) -> Vec<String> {
    ready.into_iter().map(|(_, id)| id.to_string()).collect()
}

#[test]
fn one_request_of_a_sequence_runs_at_a_time_and_rows_are_fixed() {
    let mut all = Sequences::new(policy(SequenceStrategy::Direct));
    let now = Instant::now();
    all.push(&id("a"), false, (now, 1), now);
    all.push(&id("a"), false, (now + MS, 2), now);
    all.push(&id("b"), false, (now + MS, 3), now);
    assert_eq!(names(all.ready(7, 4)), ["a", "b"]);
    let seat = |row| Some(Seat { worker: 7, row });
    assert_eq!(all.take(&id("a"), 7), Some((1, seat(0))));
    assert_eq!(names(all.ready(7, 4)), ["b"]);
    assert_eq!(all.take(&id("b"), 7), Some((3, seat(1))));
    assert!(all.finished(&id("a"), false, now).is_empty());
    assert!(
        names(all.ready(8, 4)).is_empty(),
        "another worker lacks the state"
    );
    assert_eq!(all.take(&id("a"), 7), Some((2, seat(0))));
}

#[test]
fn a_worker_keeps_only_as_many_sequences_as_it_has_rows() {
    let mut all = Sequences::new(policy(SequenceStrategy::Direct));
    let now = Instant::now();
    all.push(&id("a"), false, (now, 1), now);
    all.push(&id("b"), false, (now + MS, 2), now);
    assert_eq!(names(all.ready(7, 1)), ["a"]);
    all.take(&id("a"), 7);
    assert!(names(all.ready(7, 1)).is_empty());
    assert_eq!(names(all.ready(8, 1)), ["b"]);
}

#[test]
fn the_oldest_strategy_lets_any_worker_take_the_next_request() {
    let mut all = Sequences::new(policy(SequenceStrategy::Oldest));
    let now = Instant::now();
    all.push(&id("a"), false, (now, 1), now);
    all.push(&id("a"), false, (now, 2), now);
    assert_eq!(all.take(&id("a"), 7), Some((1, None)));
    assert!(all.ready(8, 1).is_empty(), "one at a time");
    all.finished(&id("a"), false, now);
    assert_eq!(names(all.ready(8, 1)), ["a"]);
}

#[test]
fn limits_refuse_and_a_waiting_sequence_follows_the_first_that_ends() {
    let mut all = Sequences::new(policy(SequenceStrategy::Direct));
    let now = Instant::now();
    for (number, name) in ["a", "b", "c"].into_iter().enumerate() {
        assert_eq!(all.admits(name, false), Ok(()));
        all.push(&id(name), false, (now + number as u32 * MS, number), now);
    }
    assert_eq!(all.counts(), (2, 1));
    assert_eq!(all.admits("d", true), Err(SequenceRefusal::TooMany));
    all.push(&id("a"), false, (now, 9), now);
    assert_eq!(all.admits("a", false), Err(SequenceRefusal::QueueFull));
    assert_eq!(names(all.ready(7, 9)), ["a", "b"]);
    all.take(&id("b"), 7);
    assert!(all.finished(&id("b"), true, now).is_empty());
    assert_eq!(names(all.ready(7, 9)), ["a", "c"]);
}

#[test]
fn idle_sequences_and_those_that_last_too_long_end() {
    let mut all = Sequences::new(SequencePolicy {
        timeout: Some(300 * MS),
        ..policy(SequenceStrategy::Direct)
    });
    let now = Instant::now();
    all.push(&id("a"), false, (now, 1), now);
    all.take(&id("a"), 7);
    assert!(all.expire(now + 200 * MS, |_| false).is_empty());
    assert_eq!(all.counts(), (1, 0), "a running request is not idle");
    all.finished(&id("a"), false, now + 200 * MS);
    all.expire(now + 299 * MS, |_| false);
    assert_eq!(all.counts(), (1, 0));
    all.push(&id("a"), false, (now, 2), now + 299 * MS);
    assert_eq!(
        all.expire(now + 300 * MS, |_| false),
        [2],
        "its time is over"
    );
    assert_eq!(all.counts(), (0, 0));
}

#[test]
fn a_sequence_that_is_begun_again_has_its_whole_time_again() {
    let mut all = Sequences::new(SequencePolicy {
        timeout: Some(300 * MS),
        max_idle: Duration::from_secs(60),
        ..policy(SequenceStrategy::Direct)
    });
    let now = Instant::now();
    for (at, starts, left) in [
        (0, true, 1),
        (200, true, 1),
        (450, false, 1),
        (510, false, 0),
    ] {
        let now = now + at * MS;
        all.expire(now, |_| false);
        assert_eq!(all.counts().0, if at == 0 { 0 } else { left }, "at {at}");
        all.push(&id("a"), starts, (now, 1), now);
        all.take(&id("a"), 7);
        all.finished(&id("a"), false, now);
    }
}

#[test]
fn a_lost_worker_takes_its_sequences_along_and_no_other() {
    let mut all = Sequences::new(policy(SequenceStrategy::Direct));
    let now = Instant::now();
    for (name, worker) in [("a", 7), ("b", 8)] {
        all.push(&id(name), false, (now, 1), now);
        all.take(&id(name), worker);
        all.finished(&id(name), false, now);
        all.push(&id(name), false, (now, 2), now);
    }
    assert_eq!(all.worker_lost(7), [2]);
    assert_eq!(all.counts(), (1, 0));
    assert_eq!(names(all.ready(8, 1)), ["b"]);
}

#[test]
fn a_last_request_ends_its_sequence_unless_more_came_meanwhile() {
    let mut all = Sequences::new(policy(SequenceStrategy::Direct));
    let now = Instant::now();
    all.push(&id("a"), false, (now, 1), now);
    all.take(&id("a"), 7);
    all.push(&id("a"), false, (now, 2), now);
    assert!(all.finished(&id("a"), true, now).is_empty());
    assert_eq!(
        all.counts(),
        (1, 0),
        "a new start came before the end was answered"
    );
    all.take(&id("a"), 7);
    all.finished(&id("a"), true, now);
    assert_eq!(all.counts(), (0, 0));
}

#[test]
fn with_continuous_batching_a_second_request_joins_the_first_and_none_begins_unasked() {
    let mut all = Sequences::new(SequencePolicy {
        continuous: true,
        ..policy(SequenceStrategy::Direct)
    });
    let now = Instant::now();
    assert_eq!(all.admits("a", false), Err(SequenceRefusal::Unknown));
    assert_eq!(all.admits("a", true), Ok(()));
    all.push(&id("a"), false, (now, 1), now);
    all.take(&id("a"), 7);
    assert_eq!(all.admits("a", false), Ok(()));
    all.push(&id("a"), false, (now, 2), now);
    assert_eq!(names(all.ready(7, 1)), ["a"]);
    all.take(&id("a"), 7);
    assert!(all.end("a").is_empty());
    all.finished(&id("a"), false, now);
    assert_eq!(all.counts(), (1, 0), "a request of it still runs");
    all.finished(&id("a"), false, now);
    assert_eq!(all.counts(), (0, 0));
    assert_eq!(all.admits("a", false), Err(SequenceRefusal::Unknown));
}

#[derive(Debug, Clone)]
enum Step {
    Push(u8),
    Run(u32),
    Finish(usize, bool),
    Expire(u64),
    Lose(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0_u8..6).prop_map(Step::Push),
        4 => (0_u32..3).prop_map(Step::Run),
        3 => (0_usize..8, any::<bool>()).prop_map(|(which, ended)| Step::Finish(which, ended)),
        1 => (0_u64..200).prop_map(Step::Expire),
        1 => (0_u32..3).prop_map(Step::Lose),
    ]
}

proptest! {
    #[test]
    fn every_job_comes_out_once_in_order_and_no_row_is_shared(
        steps in prop::collection::vec(step(), 1..200),
        direct in any::<bool>(),
    ) {
        let strategy = if direct { SequenceStrategy::Direct } else { SequenceStrategy::Oldest };
        let mut all = Sequences::new(policy(strategy));
        let mut now = Instant::now();
        let mut pushed: u64 = 0;
        let mut out = std::collections::BTreeSet::new();
        let mut last: HashMap<SequenceId, u64> = HashMap::new();
        let mut running: Vec<(SequenceId, Option<Seat>)> = Vec::new();
        for step in steps {
            now += MS;
            match step {
                Step::Push(name) => {
                    let name = id(&name.to_string());
                    if all.admits(&name, false).is_ok() {
                        all.push(&name, false, (now, pushed), now);
                        pushed += 1;
                    }
                }
                Step::Run(worker) => {
                    if let Some((_, name)) = all.ready(worker, 2).into_iter().next() {
                        let (job, seat) = all.take(&name, worker).unwrap();
                        prop_assert!(out.insert(job), "twice");
                        prop_assert!(last.insert(Arc::clone(&name), job).is_none_or(|before| before < job));
                        prop_assert!(running.iter().all(|(other, _)| *other != name));
                        prop_assert!(seat.is_none() || running.iter().all(|(_, other)| *other != seat));
                        prop_assert_eq!(seat.is_some(), direct);
                        running.push((name, seat));
                    }
                }
                Step::Finish(which, ended) if !running.is_empty() => {
                    let (name, _) = running.swap_remove(which % running.len());
                    for job in all.finished(&name, ended, now) {
                        prop_assert!(out.insert(job));
                    }
                }
                Step::Finish(..) => {}
                Step::Expire(millis) => {
                    now += millis as u32 * MS;
                    for job in all.expire(now, |_| false) {
                        prop_assert!(out.insert(job));
                    }
                }
                Step::Lose(worker) => {
                    let (gone, kept) = running
                        .into_iter()
                        .partition(|(_, seat)| seat.is_some_and(|seat| seat.worker == worker));
                    running = kept;
                    let gone: Vec<(SequenceId, Option<Seat>)> = gone;
                    for (name, _) in gone {
                        for job in all.finished(&name, false, now) {
                            prop_assert!(out.insert(job));
                        }
                    }
                    for job in all.worker_lost(worker) {
                        prop_assert!(out.insert(job));
                    }
                }
            }
            let (active, waiting) = all.counts();
            prop_assert!(active <= 2 && waiting <= 1);
        }
        for job in all.drain() {
            prop_assert!(out.insert(job));
        }
        prop_assert_eq!(out.len() as u64, pushed);
        prop_assert_eq!(all.jobs(), 0);
    }
}
