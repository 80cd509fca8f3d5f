//! What a batch of `n` costs: `b + a·n`, fitted to the batches that ran (*batching-and-scheduling*
//! 15.3). Pure.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Batches that are remembered.
const SAMPLES: usize = 64;

/// Least slope, so that a division by it is one.
const LEAST_SLOPE_MICROS: f64 = 1e-3;

/// The cost of a batch as a line over its size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Fit {
    /// Microseconds of a batch whatever its size: b.
    pub(crate) per_batch_micros: f64,
    /// Microseconds of each item: a.
    pub(crate) per_item_micros: f64,
}

impl Fit {
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
    by_size: BTreeMap<usize, VecDeque<f64>>,
    count: usize,
    fit: Option<Fit>,
}

impl Samples {
    /// Notes a batch of `size` items that ran for `took`.
    pub(crate) fn add(&mut self, size: usize, took: Duration) {
        if self.count == SAMPLES {
            let largest = self.by_size.iter_mut().max_by_key(|(_, kept)| kept.len());
            if let Some((&size, kept)) = largest {
                kept.pop_front();
                if kept.is_empty() {
                    self.by_size.remove(&size);
                }
                self.count -= 1;
            }
        }
        let kept = self.by_size.entry(size).or_default();
        kept.push_back(took.as_secs_f64() * 1e6);
        self.count += 1;
        self.fit = self.least_squares();
    }

    /// The line through them; `None` until batches of two sizes have run.
    pub(crate) fn fit(&self) -> Option<Fit> {
        self.fit
    }

    /// How many batches it rests on.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    fn least_squares(&self) -> Option<Fit> {
        if self.by_size.len() < 2 {
            return None;
        }
        let points = || {
            let sizes = self.by_size.iter();
            sizes.flat_map(|(size, kept)| kept.iter().map(|took| (*size as f64, *took)))
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
            return Some(Fit {
                per_batch_micros: intercept,
                per_item_micros: slope,
            });
        }
        // All of the cost lies in the items: the best line through the origin.
        let through_origin = points().map(|(size, took)| size * took).sum::<f64>()
            / points().map(|(size, _)| size * size).sum::<f64>();
        Some(Fit {
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
        samples.add(size, micros(took));
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
