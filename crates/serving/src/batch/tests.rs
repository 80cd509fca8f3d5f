use proptest::prelude::*;

use super::*;

fn policy(size: usize, delay_ms: u64, gather: Gather) -> BatchPolicy {
    BatchPolicy {
        size,
        delay: Duration::from_millis(delay_ms),
        gather,
        preferred: Vec::new(),
    }
}

/// A model for which company is worth a wait: 5 ms a batch, 0.3 ms an item.
const COSTLY_BATCH: BatchCost = BatchCost {
    per_batch_micros: 5000.0,
    per_item_micros: 300.0,
};

/// A model for which it is not.
const COSTLY_ITEMS: BatchCost = BatchCost {
    per_batch_micros: 500.0,
    per_item_micros: 4000.0,
};

fn view(waiting: usize, now: Instant) -> View {
    View {
        waiting,
        oldest: now,
        tightest: None,
        target: 16,
        idle_since: now,
        seen_since: now,
        fit: Some(COSTLY_BATCH),
        now,
    }
}

const MS: Duration = Duration::from_millis(1);

#[test]
fn a_full_batch_goes_at_once_whatever_the_mode() {
    let now = Instant::now();
    for gather in [Gather::Auto, Gather::Fixed, Gather::Strict] {
        let cut = policy(8, 100, gather).cut(&view(20, now));
        assert_eq!(cut, Cut::Take(8, Why::Full));
    }
    let single = policy(1, 100, Gather::Strict).cut(&view(1, now));
    assert_eq!(single, Cut::Take(1, Why::Full));
}

#[test]
fn a_lone_caller_never_waits() {
    let now = Instant::now();
    for delay in [0, 5, 100, 10_000] {
        let lone = View {
            target: 1,
            ..view(1, now)
        };
        let cut = policy(16, delay, Gather::Auto).cut(&lone);
        assert_eq!(cut, Cut::Take(1, Why::NoGain));
    }
}

#[test]
fn nobody_waits_where_items_cost_more_than_batches_or_costs_are_unknown() {
    let now = Instant::now();
    let policy = policy(16, 100, Gather::Auto);
    let costly_items = View {
        fit: Some(COSTLY_ITEMS),
        ..view(3, now)
    };
    assert_eq!(policy.cut(&costly_items), Cut::Take(3, Why::NoGain));
    let unknown = View {
        fit: None,
        ..view(3, now)
    };
    assert_eq!(policy.cut(&unknown), Cut::Take(3, Why::CostUnknown));
}

#[test]
fn a_wait_ends_with_the_target_the_share_of_the_overhead_or_the_cap() {
    let now = Instant::now();
    let auto = policy(16, 100, Gather::Auto);
    assert_eq!(
        auto.cut(&view(3, now)),
        Cut::Hold {
            until: now + Duration::from_micros(1500),
            wake_at: 16
        }
    );
    let few = View {
        target: 3,
        ..view(3, now)
    };
    assert_eq!(auto.cut(&few), Cut::Take(3, Why::TargetReached));
    let later = View {
        now: now + 2 * MS,
        ..view(3, now)
    };
    assert_eq!(auto.cut(&later), Cut::Take(3, Why::HoldOver));
    let capped = policy(16, 1, Gather::Auto).cut(&view(3, now));
    assert_eq!(
        capped,
        Cut::Hold {
            until: now + MS,
            wake_at: 16
        }
    );
}

#[test]
fn a_deadline_shortens_a_wait() {
    let now = Instant::now();
    let auto = policy(16, 100, Gather::Auto);
    // Three take 5.9 ms to run.
    let tight = View {
        tightest: Some(now + Duration::from_micros(6900)),
        ..view(3, now)
    };
    assert_eq!(
        auto.cut(&tight),
        Cut::Hold {
            until: now + MS,
            wake_at: 16
        }
    );
    let too_tight = View {
        tightest: Some(now + 5 * MS),
        ..view(3, now)
    };
    assert_eq!(auto.cut(&too_tight), Cut::Take(3, Why::Deadline));
}

#[test]
fn fixed_counts_from_the_oldest_request_and_strict_from_the_pick_up() {
    let now = Instant::now() + Duration::from_secs(1);
    let seen = View {
        oldest: now - 40 * MS,
        seen_since: now - 10 * MS,
        ..view(2, now)
    };
    for (gather, left) in [(Gather::Fixed, 10), (Gather::Strict, 40)] {
        assert_eq!(
            policy(8, 50, gather).cut(&seen),
            Cut::Hold {
                until: now + left * MS,
                wake_at: 8
            }
        );
    }
    let waited = View {
        oldest: now - 60 * MS,
        seen_since: now - 50 * MS,
        ..seen
    };
    for gather in [Gather::Fixed, Gather::Strict] {
        assert_eq!(
            policy(8, 50, gather).cut(&waited),
            Cut::Take(2, Why::HoldOver)
        );
    }
}

#[test]
fn preferred_sizes_are_cut_down_to_until_the_delay_is_over() {
    let now = Instant::now() + Duration::from_secs(1);
    let policy = BatchPolicy {
        preferred: vec![4, 8],
        ..policy(16, 50, Gather::Auto)
    };
    let aged = |waiting, age| View {
        oldest: now - age * MS,
        ..view(waiting, now)
    };
    for (waiting, age, expected) in [
        (20, 0, Cut::Take(8, Why::Full)),
        (9, 0, Cut::Take(8, Why::PreferredSize)),
        (7, 0, Cut::Take(4, Why::PreferredSize)),
        (7, 50, Cut::Take(7, Why::HoldOver)),
        (
            3,
            20,
            Cut::Hold {
                until: now + 30 * MS,
                wake_at: 4,
            },
        ),
    ] {
        assert_eq!(
            policy.cut(&aged(waiting, age)),
            expected,
            "{waiting} of age {age}"
        );
    }
}

#[test]
fn the_target_is_the_median_peak_less_what_runs_elsewhere() {
    let mut peaks = Peaks::default();
    assert_eq!(peaks.target(0), 0);
    for peak in [1, 1, 16, 16, 16, 16, 2, 16, 16] {
        peaks.arrival(1);
        peaks.arrival(peak);
        peaks.cut();
    }
    assert_eq!(peaks.target(0), 16);
    assert_eq!(peaks.target(10), 6);
    assert_eq!(peaks.target(20), 0);
    for _ in 0..PEAKS {
        peaks.arrival(1);
        peaks.cut();
    }
    assert_eq!(peaks.target(0), 1);
}

proptest! {
    #[test]
    fn a_batch_is_never_empty_never_over_the_size_and_never_held_past_the_cap(
        size in 1_usize..64,
        waiting in 1_usize..200,
        delay_ms in 0_u64..200,
        age_ms in 0_u64..300,
        idle_ms in 0_u64..300,
        seen_ms in 0_u64..300,
        target in 0_usize..100,
        per_batch in 0.0_f64..50_000.0,
        per_item in 0.001_f64..5_000.0,
        deadline_ms in prop::option::of(-50_i64..300),
        mode in 0_u8..3,
        preferred in prop::collection::btree_set(1_usize..64, 0..4),
    ) {
        let now = Instant::now() + Duration::from_secs(10);
        let gather = [Gather::Auto, Gather::Fixed, Gather::Strict][usize::from(mode)];
        let policy = BatchPolicy {
            preferred: preferred.into_iter().filter(|preferred| *preferred <= size).collect(),
            ..policy(size, delay_ms, gather)
        };
        let ago = |ms: u64| now - Duration::from_millis(ms);
        let seen = View {
            waiting,
            oldest: ago(age_ms),
            tightest: deadline_ms.map(|ms| {
                let by = Duration::from_millis(ms.unsigned_abs());
                if ms < 0 { now - by } else { now + by }
            }),
            target,
            idle_since: ago(idle_ms),
            seen_since: ago(seen_ms),
            fit: Some(BatchCost { per_batch_micros: per_batch, per_item_micros: per_item }),
            now,
        };
        match policy.cut(&seen) {
            Cut::Take(count, _) => prop_assert!((1..=size.min(waiting)).contains(&count)),
            Cut::Hold { until, wake_at } => {
                prop_assert!(waiting < size && waiting < wake_at && wake_at <= size);
                prop_assert!(now < until && until <= now + policy.delay);
                if let Some(deadline) = seen.tightest {
                    prop_assert!(until <= deadline);
                }
                // What was decided at that instant is a batch.
                let then = View { now: until, ..seen };
                prop_assert!(matches!(policy.cut(&then), Cut::Take(..)));
            }
        }
    }
}

#[test]
fn a_wait_too_short_to_be_one_is_none() {
    let now = Instant::now();
    let fast = View {
        fit: Some(BatchCost {
            per_batch_micros: 800.0,
            per_item_micros: 10.0,
        }),
        ..view(3, now)
    };
    let cut = policy(16, 100, Gather::Auto).cut(&fast);
    assert_eq!(cut, Cut::Take(3, Why::NoGain));
}
