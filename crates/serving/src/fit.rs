//! What a batch of `n` costs: `b + a·n`, fitted to the batches that ran (*batching-and-scheduling*
//! 15.3). Pure.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Batches that are remembered.
const SAMPLES: usize = 64;

/// How long a batch tells something of those to come. One that was slow for a reason of its own, such
/// as the first of its size, is to be forgotten even if no other of its size runs.
const LIFE: Duration = Duration::from_secs(60);

/// Least slope, so that a division by it is one.
const LEAST_SLOPE_MICROS: f64 = 1e-3;

/// A batch of `n` takes `per_batch + n * per_item`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchCost {
    /// Microseconds whatever its size: b.
    pub per_batch_micros: f64,
    /// Microseconds of each item: a.
    pub per_item_micros: f64,
}

impl BatchCost {
    /// How long a batch of `size` items runs.
    pub(crate) fn duration(self, size: usize) -> Duration {
        micros(self.per_batch_micros + self.per_item_micros * size as f64)
    }

    /// The part of it that does not depend on the size, times `share`.
    pub(crate) fn overhead(self, share: f64) -> Duration {
        micros(self.per_batch_micros * share)
    }

    /// Whether a batch costs so much more than an item that company is worth a wait.
    pub(crate) fn gains_from_company(self) -> bool {
        self.per_batch_micros >= 4.0 * self.per_item_micros
    }
}

fn micros(value: f64) -> Duration {
    Duration::from_secs_f64(value.max(0.0) / 1e6)
}

/// The last batches, by size.
///
/// Traffic that always makes batches of one size would soon fill the memory with that size, and one
/// size cannot tell the cost of an item from that of a batch. So the size with the most samples
/// loses its oldest one.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    by_size: BTreeMap<usize, VecDeque<Sample>>,
    count: usize,
    fit: Option<BatchCost>,
    cost: Option<BatchCost>,
}

#[derive(Debug, Clone, Copy)]
struct Sample {
    at: Instant,
    micros: f64,
}

impl Samples {
    /// Notes a batch of `size` items that ran for `took` and ended at `now`.
    pub(crate) fn add(&mut self, size: usize, took: Duration, now: Instant) {
        let is_old = |sample: &Sample| now.saturating_duration_since(sample.at) >= LIFE;
        self.by_size.retain(|_, kept| {
            while kept.front().is_some_and(is_old) {
                kept.pop_front();
                self.count -= 1;
            }
            !kept.is_empty()
        });
        if self.count == SAMPLES
            && let Some((&size, kept)) = self.by_size.iter_mut().max_by_key(|(_, kept)| kept.len())
        {
            kept.pop_front();
            self.count -= 1;
            if kept.is_empty() {
                self.by_size.remove(&size);
            }
        }
        let micros = took.as_secs_f64() * 1e6;
        let kept = self.by_size.entry(size).or_default();
        kept.push_back(Sample { at: now, micros });
        self.count += 1;
        self.fit = self.least_squares();
        self.cost = self.fit.or_else(|| self.mean());
    }

    /// The line through them; `None` until batches of two sizes have run. It tells what belongs to a
    /// batch and what to its items.
    pub(crate) fn fit(&self) -> Option<BatchCost> {
        self.fit
    }

    /// What a batch will cost: that line, or what those of the one size that there was did.
    pub(crate) fn cost(&self) -> Option<BatchCost> {
        self.cost
    }

    /// How many batches it rests on.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    fn mean(&self) -> Option<BatchCost> {
        let (_, kept) = self.by_size.first_key_value()?;
        let total: f64 = kept.iter().map(|sample| sample.micros).sum();
        Some(BatchCost {
            per_batch_micros: total / kept.len() as f64,
            per_item_micros: LEAST_SLOPE_MICROS,
        })
    }

    fn least_squares(&self) -> Option<BatchCost> {
        if self.by_size.len() < 2 {
            return None;
        }
        let points = || {
            let sizes = self.by_size.iter();
            sizes.flat_map(|(size, kept)| kept.iter().map(|one| (*size as f64, one.micros)))
        };
        let count = self.count as f64;
        let mean_size = points().map(|(size, _)| size).sum::<f64>() / count;
        let mean_took = points().map(|(_, took)| took).sum::<f64>() / count;
        let spread: f64 = points().map(|(size, _)| (size - mean_size).powi(2)).sum();
        let together: f64 = points()
            .map(|(size, took)| (size - mean_size) * (took - mean_took))
            .sum();
        let slope = (together / spread).max(LEAST_SLOPE_MICROS);
        let intercept = mean_took - slope * mean_size;
        if intercept >= 0.0 {
            return Some(BatchCost {
                per_batch_micros: intercept,
                per_item_micros: slope,
            });
        }
        // All of the cost lies in the items: the best line through the origin.
        let through_origin = points().map(|(size, took)| size * took).sum::<f64>()
            / points().map(|(size, _)| size * size).sum::<f64>();
        Some(BatchCost {
            per_batch_micros: 0.0,
            per_item_micros: through_origin.max(LEAST_SLOPE_MICROS),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn add(samples: &mut Samples, size: usize, took: f64) {
        samples.add(size, micros(took), Instant::now());
    }

    #[test]
    fn one_size_tells_what_its_batches_cost_and_old_batches_tell_nothing() {
        let now = Instant::now();
        let mut samples = Samples::default();
        assert_eq!(samples.cost(), None);
        samples.add(1, micros(1_500_000.0), now);
        samples.add(2, micros(3_000_000.0), now);
        assert!(samples.fit().is_some());
        let later = now + LIFE;
        samples.add(1, micros(1000.0), later);
        assert_eq!((samples.fit(), samples.count()), (None, 1));
        assert_eq!(samples.cost().unwrap().duration(1).as_millis(), 1);
    }

    #[test]
    fn one_size_tells_nothing_and_two_tell_all() {
        let mut samples = Samples::default();
        for _ in 0..100 {
            add(&mut samples, 4, 6200.0);
        }
        assert_eq!(samples.fit(), None);
        add(&mut samples, 16, 9800.0);
        let fit = samples.fit().unwrap();
        assert!((fit.per_batch_micros - 5000.0).abs() < 1.0, "{fit:?}");
        assert!((fit.per_item_micros - 300.0).abs() < 1.0, "{fit:?}");
        assert!(fit.gains_from_company());
        assert_eq!(fit.duration(10).as_millis(), 8);
    }

    #[test]
    fn a_rare_size_is_not_forgotten_under_a_flood_of_another() {
        let mut samples = Samples::default();
        add(&mut samples, 1, 5300.0);
        for _ in 0..10_000 {
            add(&mut samples, 16, 9800.0);
        }
        assert_eq!(samples.count(), SAMPLES);
        assert!(samples.fit().is_some());
    }

    proptest! {
        #[test]
        fn the_line_is_found_through_noise(
            per_batch in 0.0_f64..20_000.0,
            per_item in 1.0_f64..5_000.0,
            batches in prop::collection::vec((1_usize..64, -0.03_f64..0.03), 64..200),
        ) {
            let mut samples = Samples::default();
            for (size, noise) in [(1, 0.0), (64, 0.0)].into_iter().chain(batches) {
                add(&mut samples, size, (per_batch + per_item * size as f64) * (1.0 + noise));
            }
            let fit = samples.fit().unwrap();
            prop_assert!(fit.per_batch_micros >= 0.0 && fit.per_item_micros > 0.0);
            let expected = per_batch + per_item * 32.0;
            let found = fit.duration(32).as_secs_f64() * 1e6;
            prop_assert!((found - expected).abs() < 0.05 * expected, "{found} for {expected}");
        }
    }
}
