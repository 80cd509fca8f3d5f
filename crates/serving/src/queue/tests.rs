use proptest::prelude::*;
use ts_types::{
    Gather, InferRequest, ModelName, RequestId, RequestKind, SequenceStrategy, TimeoutAction,
    Urgency,
};

use super::worker::SEQUENCE_ROW;
use super::*;
use crate::job::{Answered, Demand, InSequence};

const MS: Duration = Duration::from_millis(1);

fn rules(size: usize, capacity: usize) -> QueueRules {
    QueueRules {
        batch: BatchPolicy {
            size,
            delay: Duration::ZERO,
            gather: Gather::Fixed,
            preferred: Vec::new(),
        },
        capacity,
        levels: vec![LevelPolicy::default()],
        job_ticket: false,
        latency_goal: None,
        sequences: None,
        resources: Vec::new(),
    }
}

fn queue_of(rules: QueueRules) -> Arc<Queue> {
    Arc::new(Queue::new(rules, Arc::default()))
}

fn queue(size: usize, capacity: usize) -> Arc<Queue> {
    queue_of(rules(size, capacity))
}

/// A caller as the service is one: whoever leaves tells the queue.
struct Caller {
    queue: Arc<Queue>,
    place: Place,
    /// Held: dropping it gives the job up.
    answered: Answered,
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.queue.leave(&self.place);
    }
}

fn job(kind: RequestKind, demand: Demand) -> (Job, Answered) {
    let request = InferRequest {
        id: RequestId::random(),
        model: ModelName::new("m").unwrap(),
        version: None,
        kind,
        parts: vec![],
        headers: vec![],
        urgency: Urgency::default(),
    };
    let (mut job, answered) = Job::new(request, Instant::now());
    job.demand = demand;
    (job, answered)
}

fn push(queue: &Arc<Queue>, kind: RequestKind, demand: Demand) -> Result<Caller, NotQueued> {
    let (job, answered) = job(kind, demand);
    let place = job.place();
    queue.push(job, Instant::now())?;
    Ok(Caller {
        queue: Arc::clone(queue),
        place,
        answered,
    })
}

fn predict(queue: &Arc<Queue>) -> Result<Caller, NotQueued> {
    push(queue, RequestKind::Predict, Demand::default())
}

fn refusal(result: &Result<Caller, NotQueued>) -> Option<Refusal> {
    match result {
        Err(NotQueued::Refused(_, refusal, _)) => Some(*refusal),
        _ => None,
    }
}

/// What a worker takes now; `None` where it would wait.
fn take_as(queue: &Arc<Queue>, worker: u32) -> Option<Batch> {
    let now = Instant::now();
    match queue.take(worker, || false, || Some(now)) {
        Taken::Batch(batch) => Some(batch),
        Taken::Idle | Taken::Stopped => None,
    }
}

fn take(queue: &Arc<Queue>) -> Option<Batch> {
    take_as(queue, 9000)
}

fn at(level: usize) -> Demand {
    Demand {
        level,
        ..Demand::default()
    }
}

#[test]
fn a_full_queue_refuses_until_a_caller_leaves() {
    let queue = queue(1, 2);
    let _kept = predict(&queue).unwrap();
    let leaver = predict(&queue).unwrap();
    assert_eq!(refusal(&predict(&queue)), Some(Refusal::QueueFull));
    drop(leaver);
    assert_eq!(queue.occupancy(), (1, 1));
    let _kept = predict(&queue).unwrap();
    assert_eq!(refusal(&predict(&queue)), Some(Refusal::QueueFull));
}

#[test]
fn abandoned_jobs_are_never_handed_out_and_hold_no_memory_for_long() {
    let queue = queue(8, 100);
    let mut kept = Vec::new();
    for number in 0..6 {
        let caller = predict(&queue).unwrap();
        if number % 2 == 0 {
            kept.push(caller);
        }
    }
    assert_eq!(take(&queue).unwrap().jobs.len(), 3);
    for _ in 0..10_000 {
        drop(predict(&queue).unwrap());
    }
    assert!(queue.state.lock().groups.jobs() <= 200);
    assert_eq!(queue.occupancy(), (0, 100));
    assert!(take(&queue).is_none());
    assert_eq!(queue.left.load(Ordering::Relaxed), 0);
}

#[test]
fn kinds_and_groups_do_not_share_a_batch_and_the_oldest_goes_first() {
    use RequestKind::{Describe, Explain, Predict};
    let queue = queue(8, 100);
    let group = |label: &str| Demand {
        group: Some(label.into()),
        ..Demand::default()
    };
    let pushed = [
        (Explain, Demand::default()),
        (Predict, group("a")),
        (Describe, Demand::default()),
        (Predict, group("b")),
        (Describe, Demand::default()),
        (Predict, group("a")),
        (Explain, Demand::default()),
    ];
    let _kept: Vec<_> = pushed
        .into_iter()
        .map(|(kind, demand)| push(&queue, kind, demand).unwrap())
        .collect();
    let batches: Vec<Vec<(RequestKind, Option<Box<str>>)>> = std::iter::from_fn(|| take(&queue))
        .map(|batch| {
            let jobs = batch.jobs.iter();
            jobs.map(|job| (job.request.kind, job.demand.group.clone()))
                .collect()
        })
        .collect();
    let named = |label: &str| Some(Box::from(label));
    assert_eq!(
        batches,
        [
            vec![(Explain, None), (Explain, None)],
            vec![(Predict, named("a")), (Predict, named("a"))],
            vec![(Describe, None)],
            vec![(Predict, named("b"))],
            vec![(Describe, None)],
        ]
    );
}

#[test]
fn mixed_shapes_fill_batches_of_their_own() {
    let queue = queue(8, 1000);
    let group = |number: usize| Demand {
        group: Some(Box::from(if number.is_multiple_of(2) { "a" } else { "b" })),
        ..Demand::default()
    };
    let _kept: Vec<_> = (0..160)
        .map(|number| push(&queue, RequestKind::Predict, group(number)).unwrap())
        .collect();
    let sizes: Vec<usize> = std::iter::from_fn(|| take(&queue))
        .map(|batch| batch.jobs.len())
        .collect();
    assert_eq!(sizes, [8; 20]);
}

#[test]
fn an_urgent_request_overtakes_a_thousand_and_fills_up_with_them() {
    let queue = queue_of(QueueRules {
        levels: vec![LevelPolicy::default(); 2],
        ..rules(4, 10_000)
    });
    let _many: Vec<_> = (0..1000)
        .map(|_| push(&queue, RequestKind::Predict, at(1)).unwrap())
        .collect();
    let _urgent = push(&queue, RequestKind::Predict, at(0)).unwrap();
    let levels: Vec<usize> = take(&queue)
        .unwrap()
        .jobs
        .iter()
        .map(|job| job.demand.level)
        .collect();
    assert_eq!(levels, [0, 1, 1, 1]);
}

#[test]
fn a_level_has_a_limit_of_its_own() {
    let limited = LevelPolicy {
        capacity: Some(1),
        ..LevelPolicy::default()
    };
    let queue = queue_of(QueueRules {
        levels: vec![limited, LevelPolicy::default()],
        ..rules(1, 3)
    });
    let _kept = push(&queue, RequestKind::Predict, at(0)).unwrap();
    let full = push(&queue, RequestKind::Predict, at(0));
    assert_eq!(refusal(&full), Some(Refusal::QueueFull));
    let _others = [(); 2].map(|()| push(&queue, RequestKind::Predict, at(1)).unwrap());
    let full = push(&queue, RequestKind::Predict, at(1));
    assert_eq!(refusal(&full), Some(Refusal::QueueFull));
}

#[test]
fn who_waited_too_long_is_dropped_or_goes_last_as_the_level_says() {
    for (action, expected) in [(TimeoutAction::Reject, 2), (TimeoutAction::Delay, 3)] {
        let policy = LevelPolicy {
            timeout_action: action,
            ..LevelPolicy::default()
        };
        let queue = queue_of(QueueRules {
            levels: vec![policy],
            ..rules(1, 10)
        });
        let waited = || Demand {
            wait_until: Some(Instant::now()),
            ..Demand::default()
        };
        let _first = predict(&queue).unwrap();
        let late = push(&queue, RequestKind::Predict, waited()).unwrap();
        let _last = predict(&queue).unwrap();
        let order: Vec<bool> = std::iter::from_fn(|| take(&queue))
            .map(|batch| batch.jobs[0].demand.wait_until.is_some())
            .collect();
        assert_eq!(order.len(), expected, "{action}");
        assert!(!order[0] && !order[1], "{action}");
        drop(late);
    }
}

#[test]
fn what_cannot_be_in_time_is_refused_on_arrival_or_at_the_cut() {
    let queue = queue(2, 100);
    for size in [1, 2] {
        queue.note(size, 1000 * MS + size as u32 * MS);
    }
    let within = |limit| Demand {
        deadline: Some(Instant::now() + limit),
        ..Demand::default()
    };
    let _kept: Vec<_> = (0..10).map(|_| predict(&queue).unwrap()).collect();
    let running = take(&queue).unwrap();
    // Eight wait before it: half a batch that runs and four more.
    let hopeless = push(&queue, RequestKind::Predict, within(3000 * MS));
    assert_eq!(refusal(&hopeless), Some(Refusal::TooLate));
    let _hopeful = push(&queue, RequestKind::Predict, within(50_000 * MS)).unwrap();
    while take(&queue).is_some_and(|batch| batch.jobs.len() == 2) {}
    assert_eq!(queue.explain().late, 0);
    drop(running);
    // In time when it came, and too late when a worker looks.
    let mut doomed = push(&queue, RequestKind::Predict, within(1100 * MS)).unwrap();
    std::thread::sleep(100 * MS);
    assert!(take(&queue).is_none());
    let answer = doomed.answered.try_recv().unwrap();
    let refused = matches!(
        answer,
        Err(ServingError::Refused {
            reason: Refusal::TooLate,
            ..
        })
    );
    assert!(refused, "{answer:?}");
}

#[test]
fn a_batch_stops_growing_where_one_of_it_would_be_late() {
    let queue = queue(8, 100);
    for size in [1, 2] {
        queue.note(size, size as u32 * 10 * MS);
    }
    let soon = Demand {
        deadline: Some(Instant::now() + 35 * MS),
        ..Demand::default()
    };
    let _soon = push(&queue, RequestKind::Predict, soon).unwrap();
    let _others: Vec<_> = (0..7).map(|_| predict(&queue).unwrap()).collect();
    let first = take(&queue).unwrap().jobs.len();
    assert!((1..=3).contains(&first), "{first} taken");
    assert_eq!(take(&queue).unwrap().jobs.len(), 8 - first);
}

#[test]
fn a_ticket_is_had_only_while_a_worker_waits() {
    let queue = queue_of(QueueRules {
        job_ticket: true,
        ..rules(1, 10)
    });
    assert_eq!(refusal(&predict(&queue)), Some(Refusal::NoIdleWorker));
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| matches!(queue.take(9000, || false, || None), Taken::Batch(_)));
        while queue.state.lock().idle == 0 {
            std::thread::yield_now();
        }
        let _taken = predict(&queue).unwrap();
        assert!(worker.join().unwrap());
    });
    assert_eq!(refusal(&predict(&queue)), Some(Refusal::NoIdleWorker));
}

#[test]
fn a_closed_queue_takes_nothing_and_hands_out_what_it_has() {
    let queue = queue(8, 100);
    let _kept = predict(&queue).unwrap();
    queue.close();
    assert!(matches!(predict(&queue), Err(NotQueued::Closed(_))));
    assert_eq!(take(&queue).unwrap().jobs.len(), 1);
    assert!(matches!(
        queue.take(9000, || false, || None),
        Taken::Stopped
    ));
}

#[test]
fn put_back_keeps_the_order() {
    let queue = queue(2, 100);
    let _kept: Vec<_> = (0..4).map(|_| predict(&queue).unwrap()).collect();
    let ids = |batch: &Batch| -> Vec<_> {
        batch
            .jobs
            .iter()
            .map(|job| job.request.id.clone())
            .collect()
    };
    let first = take(&queue).unwrap();
    let mut expected = ids(&first);
    queue.put_back(first.jobs);
    drop(first.running);
    let again = take(&queue).unwrap();
    assert_eq!(ids(&again), expected);
    expected = ids(&take(&queue).unwrap());
    assert_eq!(expected.len(), 2);
    assert_eq!(queue.occupancy(), (0, 100));
}

#[test]
fn of_a_sequence_one_runs_at_a_time_and_always_in_its_worker() {
    let sequences = SequencePolicy {
        strategy: SequenceStrategy::Direct,
        max_idle: Duration::from_secs(60),
        timeout: None,
        max_sequences: 2,
        max_waiting_sequences: 0,
        max_queued: 5,
        continuous: false,
    };
    let queue = queue_of(QueueRules {
        sequences: Some(sequences),
        ..rules(8, 100)
    });
    queue.spread_over(2);
    let of = |id: &str, ends| Demand {
        sequence: Some(InSequence {
            id: Arc::from(id),
            starts: false,
            ends,
        }),
        ..Demand::default()
    };
    let in_sequence = |id, ends| push(&queue, RequestKind::Predict, of(id, ends));
    let _kept =
        [("a", false), ("a", true), ("b", false)].map(|(id, ends)| in_sequence(id, ends).unwrap());
    assert_eq!(
        refusal(&in_sequence("c", false)),
        Some(Refusal::TooManySequences)
    );
    let first = take_as(&queue, 1).unwrap();
    assert_eq!(
        first.jobs.len(),
        1,
        "each of two workers keeps one sequence"
    );
    assert!(
        first.jobs[0]
            .request
            .headers
            .contains(&(SEQUENCE_ROW.to_owned(), "0".to_owned()))
    );
    let second = take_as(&queue, 2).unwrap();
    assert!(
        take_as(&queue, 1).is_none(),
        "the next of `a` waits for the first"
    );
    drop(first);
    assert!(take_as(&queue, 2).is_none(), "`a` is in the other worker");
    drop(take_as(&queue, 1).unwrap());
    let _kept = in_sequence("c", false).expect("`a` has ended");
    drop(second);
    queue.worker_lost(2);
    assert_eq!(queue.explain().sequences, Some((1, 0)));
}

#[test]
fn a_worker_holds_for_company_and_goes_when_it_has_come() {
    let rules = rules(4, 100);
    let queue = queue_of(QueueRules {
        batch: BatchPolicy {
            delay: Duration::from_secs(60),
            ..rules.batch.clone()
        },
        ..rules
    });
    std::thread::scope(|scope| {
        let workers = [1, 2].map(|worker| {
            let queue = &queue;
            scope.spawn(move || match queue.take(worker, || false, || None) {
                Taken::Batch(batch) => batch.jobs.len(),
                Taken::Idle | Taken::Stopped => 0,
            })
        });
        let kept: Vec<_> = (0..3).map(|_| predict(&queue).unwrap()).collect();
        while queue.state.lock().hold.is_none() {
            std::thread::yield_now();
        }
        let last = predict(&queue).unwrap();
        let is_done = || {
            workers
                .iter()
                .any(std::thread::ScopedJoinHandle::is_finished)
        };
        while !is_done() {
            std::thread::yield_now();
        }
        queue.close();
        let mut sizes = workers.map(|worker| worker.join().unwrap());
        sizes.sort_unstable();
        assert_eq!(sizes, [0, 4]);
        drop((kept, last));
    });
    assert_eq!(queue.explain().holds, 1);
}

#[test]
fn many_workers_share_a_queue_and_lose_nothing() {
    let queue = queue(3, 10_000);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let done: usize = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4)
            .map(|worker| {
                let (queue, stop) = (&queue, &stop);
                scope.spawn(move || {
                    let mut done = 0;
                    let stopped = || stop.load(Ordering::SeqCst);
                    while let Taken::Batch(batch) = queue.take(worker, stopped, || None) {
                        done += batch.jobs.len();
                    }
                    done
                })
            })
            .collect();
        let kept: Vec<_> = (0..5_000).map(|_| predict(&queue).unwrap()).collect();
        while queue.occupancy().0 > 0 {
            std::thread::yield_now();
        }
        stop.store(true, Ordering::SeqCst);
        queue.wake_all();
        drop(kept);
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .sum()
    });
    assert_eq!(done, 5_000);
}

#[derive(Debug, Clone)]
enum Step {
    Push {
        level: usize,
        group: u8,
        deadline: bool,
    },
    Leave(usize),
    Take,
    Finish(usize),
    PutBack(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0_usize..3, 0_u8..3, any::<bool>())
            .prop_map(|(level, group, deadline)| Step::Push { level, group, deadline }),
        2 => (0_usize..20).prop_map(Step::Leave),
        2 => Just(Step::Take),
        1 => (0_usize..4).prop_map(Step::Finish),
        1 => (0_usize..4).prop_map(Step::PutBack),
    ]
}

proptest! {
    /// Whatever happens in whatever order: no job is lost, none comes out twice, no batch is over
    /// the size, and all places are free in the end.
    #[test]
    fn no_job_is_lost_and_every_place_comes_back(steps in prop::collection::vec(step(), 1..300)) {
        let queue = queue_of(QueueRules {
            levels: vec![LevelPolicy::default(); 3],
            ..rules(4, 8)
        });
        let mut callers: Vec<Caller> = Vec::new();
        let mut running: Vec<Batch> = Vec::new();
        let (mut pushed, mut finished, mut left) = (0, 0, 0);
        for step in steps {
            match step {
                Step::Push { level, group, deadline } => {
                    let demand = Demand {
                        level,
                        group: Some(group.to_string().into()),
                        deadline: deadline.then(|| Instant::now() + Duration::from_secs(3600)),
                        ..Demand::default()
                    };
                    let (waiting, free) = queue.occupancy();
                    prop_assert_eq!(waiting + free, 8.max(waiting));
                    match push(&queue, RequestKind::Predict, demand) {
                        Ok(caller) => {
                            prop_assert!(free > 0);
                            pushed += 1;
                            callers.push(caller);
                        }
                        Err(_) => prop_assert_eq!(free, 0),
                    }
                }
                Step::Leave(which) if !callers.is_empty() => {
                    let caller = callers.swap_remove(which % callers.len());
                    left += usize::from(queue.leave(&caller.place));
                }
                Step::Take => {
                    if let Some(batch) = take(&queue) {
                        prop_assert!((1..=4).contains(&batch.jobs.len()));
                        let group = &batch.jobs[0].demand.group;
                        prop_assert!(batch.jobs.iter().all(|job| job.demand.group == *group));
                        running.push(batch);
                    } else {
                        prop_assert_eq!(queue.occupancy().0, 0);
                    }
                }
                Step::Finish(which) if !running.is_empty() => {
                    finished += running.swap_remove(which % running.len()).jobs.len();
                }
                Step::PutBack(which) if !running.is_empty() => {
                    let Batch { jobs, running: ended } = running.swap_remove(which % running.len());
                    left += jobs.iter().filter(|job| job.is_abandoned()).count();
                    queue.put_back(jobs);
                    drop(ended);
                }
                Step::Leave(_) | Step::Finish(_) | Step::PutBack(_) => {}
            }
        }
        while let Some(batch) = take(&queue) {
            finished += batch.jobs.len();
        }
        finished += running.drain(..).map(|batch| batch.jobs.len()).sum::<usize>();
        prop_assert_eq!(finished + left, pushed);
        prop_assert_eq!(queue.occupancy(), (0, 8));
        let state = queue.state.lock();
        prop_assert_eq!((state.running_batches, state.running_jobs), (0, 0));
        prop_assert!(state.groups.is_untouched());
        prop_assert_eq!(queue.left.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn joining_takes_what_waits_unless_another_kind_waits_longer() {
    use RequestKind::{Describe, Predict};
    let queue = queue(4, 10);
    drop(predict(&queue).unwrap());
    let _kept: Vec<_> = (0..3).map(|_| predict(&queue).unwrap()).collect();
    let join = |kind| {
        queue
            .try_take(9000, 2, kind)
            .map_or(0, |batch| batch.singly().count())
    };
    assert_eq!(join(Predict), 2);
    let _describe = push(&queue, Describe, Demand::default()).unwrap();
    assert_eq!(join(Describe), 0);
    assert_eq!(join(Predict), 1);
    let _later = predict(&queue).unwrap();
    assert_eq!(join(Predict), 0);
    let state = queue.state.lock();
    assert_eq!((state.running_batches, state.running_jobs), (0, 0));
}

#[test]
fn a_worker_that_has_waited_for_long_enough_takes_what_is_there_and_else_nothing() {
    let queue = queue(8, 100);
    let now = Instant::now();
    assert!(matches!(
        queue.take(9000, || false, || Some(now)),
        Taken::Idle
    ));
    let _kept = predict(&queue).unwrap();
    assert_eq!(take(&queue).unwrap().jobs.len(), 1);
    let soon = Instant::now() + 20 * MS;
    assert!(matches!(
        queue.take(9000, || false, || Some(soon)),
        Taken::Idle
    ));
    assert!(Instant::now() >= soon);
}
