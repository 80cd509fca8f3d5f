//! The jobs of a queue by group and level: what may run together, in which order.

use std::collections::VecDeque;
use std::time::Instant;

use ts_types::{LevelPolicy, RequestKind, TimeoutAction};

use crate::error::{Refusal, ServingError};
use crate::fit::BatchCost;
use crate::job::Job;

/// All groups that have a job.
#[derive(Debug, Default)]
pub(super) struct Groups {
    groups: Vec<Group>,
    /// Jobs in them, those of callers that have left included.
    jobs: usize,
    /// Of those, how many have a deadline.
    with_deadline: usize,
}

/// Jobs that may share a batch.
#[derive(Debug)]
struct Group {
    kind: RequestKind,
    label: Option<Box<str>>,
    levels: Vec<Level>,
    jobs: usize,
}

#[derive(Debug, Default)]
struct Level {
    fifo: VecDeque<Job>,
    /// Those that have waited too long and are to go last.
    late: VecDeque<Job>,
}

/// The head of the group that is next.
#[derive(Debug, Clone, Copy)]
pub(super) struct Head {
    /// The group's place, good until the groups change.
    pub(super) group: usize,
    pub(super) kind: RequestKind,
    pub(super) level: usize,
    pub(super) arrived: Instant,
    /// Jobs in the group.
    pub(super) jobs: usize,
}

/// What a batch is cut by.
pub(super) struct Knife<'q, C> {
    pub(super) count: usize,
    pub(super) now: Instant,
    /// What a batch costs, as far as that is known.
    pub(super) cost: Option<BatchCost>,
    /// Nothing runs: the first job is run even if it seems to be late, since only a batch that runs
    /// can tell that batches have become faster.
    pub(super) nothing_runs: bool,
    pub(super) policies: &'q [LevelPolicy],
    /// Takes a job out of the queue for good. Not if its caller has left.
    pub(super) claim: C,
}

impl Groups {
    pub(super) fn len(&self) -> usize {
        self.groups.len()
    }

    pub(super) fn jobs(&self) -> usize {
        self.jobs
    }

    pub(super) fn add(&mut self, job: Job, levels: usize) {
        self.level(&job, levels).fifo.push_back(job);
    }

    pub(super) fn put_back(&mut self, job: Job, levels: usize) {
        self.level(&job, levels).fifo.push_front(job);
    }

    /// The place of a job that is about to be added there.
    fn level(&mut self, job: &Job, levels: usize) -> &mut Level {
        self.jobs += 1;
        self.with_deadline += usize::from(job.demand.deadline.is_some());
        let (kind, label) = (job.request.kind, &job.demand.group);
        let known = |group: &Group| group.kind == kind && group.label == *label;
        let index = self.groups.iter().position(known).unwrap_or_else(|| {
            self.groups.push(Group {
                kind,
                label: label.clone(),
                levels: std::iter::repeat_with(Level::default)
                    .take(levels)
                    .collect(),
                jobs: 0,
            });
            self.groups.len() - 1
        });
        let group = &mut self.groups[index];
        group.jobs += 1;
        let last = group.levels.len() - 1;
        &mut group.levels[job.demand.level.min(last)]
    }

    /// The group whose head is the most urgent and then the oldest.
    pub(super) fn next(&self) -> Option<Head> {
        let heads = (0..self.groups.len()).filter_map(|index| self.head(index));
        heads.min_by_key(|head| (head.level, head.arrived))
    }

    fn head(&self, index: usize) -> Option<Head> {
        let group = self.groups.get(index)?;
        let mut levels = group.levels.iter().enumerate();
        let (level, head) = levels.find_map(|(at, level)| Some((at, level.head()?)))?;
        Some(Head {
            group: index,
            kind: group.kind,
            level,
            arrived: head.arrived,
            jobs: group.jobs,
        })
    }

    /// A group that fills a batch.
    pub(super) fn full(&self, size: usize) -> Option<Head> {
        let heads = self.groups.iter().enumerate();
        let full =
            heads.filter(|(_, group)| group.jobs >= size && group.kind != RequestKind::Describe);
        full.filter_map(|(index, _)| self.head(index))
            .min_by_key(|head| (head.level, head.arrived))
    }

    /// Drops jobs at the heads for which `forget` holds, and moves those that waited too long.
    pub(super) fn skip(
        &mut self,
        policies: &[LevelPolicy],
        now: Instant,
        forget: impl Fn(&Job) -> bool,
    ) {
        let mut dropped = 0;
        for group in &mut self.groups {
            for (level, policy) in group.levels.iter_mut().zip(policies) {
                while let Some(head) = level.fifo.front() {
                    if forget(head) {
                        self.with_deadline -= usize::from(head.demand.deadline.is_some());
                        level.fifo.pop_front();
                        group.jobs -= 1;
                        dropped += 1;
                    } else if is_late(head, policy, now) {
                        level.late.extend(level.fifo.pop_front());
                    } else {
                        break;
                    }
                }
            }
        }
        self.dropped(dropped);
    }

    /// Drops all jobs for which `forget` holds.
    pub(super) fn purge(&mut self, forget: impl Fn(&Job) -> bool) {
        let mut dropped = 0;
        let Self {
            groups,
            with_deadline,
            ..
        } = self;
        for group in groups {
            for level in &mut group.levels {
                for jobs in [&mut level.fifo, &mut level.late] {
                    jobs.retain(|job| {
                        let gone = forget(job);
                        dropped += usize::from(gone);
                        group.jobs -= usize::from(gone);
                        *with_deadline -= usize::from(gone && job.demand.deadline.is_some());
                        !gone
                    });
                }
            }
        }
        self.dropped(dropped);
    }

    fn dropped(&mut self, count: usize) {
        if count > 0 {
            self.jobs -= count;
            self.groups.retain(|group| group.jobs > 0);
        }
    }

    /// Cuts a batch from a group: its jobs, and how many were answered instead since they could not
    /// have been in time.
    pub(super) fn cut(
        &mut self,
        group: usize,
        knife: &Knife<'_, impl Fn(&Job) -> bool>,
    ) -> (Vec<Job>, u64) {
        let Knife { now, cost, .. } = *knife;
        let ends = |size: usize| cost.and_then(|cost| now.checked_add(cost.duration(size)));
        let mut jobs: Vec<Job> = Vec::with_capacity(knife.count);
        let mut late = 0;
        let mut tightest: Option<Instant> = None;
        let Some(group) = self.groups.get_mut(group) else {
            return (jobs, late);
        };
        'levels: for (level, policy) in group.levels.iter_mut().zip(knife.policies) {
            while jobs.len() < knife.count
                && let Some((job, was_late)) = level.next(policy, now)
            {
                let deadline = job.demand.deadline;
                let both = [tightest, deadline].into_iter().flatten().min();
                if !jobs.is_empty()
                    && let (Some(end), Some(due)) = (ends(jobs.len() + 1), both)
                    && end > due
                {
                    // One more would make one of them late.
                    let back = if was_late {
                        &mut level.late
                    } else {
                        &mut level.fifo
                    };
                    back.push_front(job);
                    break 'levels;
                }
                group.jobs -= 1;
                self.jobs -= 1;
                self.with_deadline -= usize::from(deadline.is_some());
                if !(knife.claim)(&job) {
                    continue;
                }
                let probes = knife.nothing_runs && jobs.is_empty();
                let end = ends(1).filter(|_| !probes).unwrap_or(now);
                match too_late(&job, policy, end, now) {
                    None => {
                        tightest = both;
                        jobs.push(job);
                    }
                    Some(error) => {
                        late += 1;
                        job.fail(error);
                    }
                }
            }
        }
        self.groups.retain(|group| group.jobs > 0);
        (jobs, late)
    }

    /// Takes all jobs out.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = Job> + use<> {
        let groups = std::mem::take(self).groups;
        let levels = groups.into_iter().flat_map(|group| group.levels);
        levels.flat_map(|level| level.fifo.into_iter().chain(level.late))
    }

    /// The earliest deadline in a group.
    pub(super) fn tightest(&self, group: usize) -> Option<Instant> {
        if self.with_deadline == 0 {
            return None;
        }
        let levels = self.groups.get(group)?.levels.iter();
        let jobs = levels.flat_map(|level| level.fifo.iter().chain(&level.late));
        jobs.filter_map(|job| job.demand.deadline).min()
    }

    /// Jobs that would run before a new one of this level.
    pub(super) fn ahead(&self, level: usize) -> usize {
        let groups = self.groups.iter();
        let levels = groups.flat_map(|group| group.levels.iter().take(level + 1));
        levels
            .map(|level| level.fifo.len() + level.late.len())
            .sum()
    }

    /// Jobs of one level whose callers wait.
    pub(super) fn waiting_at(&self, level: usize) -> usize {
        let levels = self
            .groups
            .iter()
            .filter_map(|group| group.levels.get(level));
        let jobs = levels.flat_map(|level| level.fifo.iter().chain(&level.late));
        jobs.filter(|job| !job.is_abandoned()).count()
    }

    #[cfg(test)]
    pub(super) fn is_untouched(&self) -> bool {
        self.groups.is_empty() && self.jobs == 0 && self.with_deadline == 0
    }
}

impl Level {
    fn head(&self) -> Option<&Job> {
        self.fifo.front().or_else(|| self.late.front())
    }

    /// The next job, and whether it has waited too long.
    fn next(&mut self, policy: &LevelPolicy, now: Instant) -> Option<(Job, bool)> {
        while let Some(job) = self.fifo.pop_front() {
            if !is_late(&job, policy, now) {
                return Some((job, false));
            }
            self.late.push_back(job);
        }
        Some((self.late.pop_front()?, true))
    }
}

/// Whether a job has waited so long that it goes behind the others.
fn is_late(job: &Job, policy: &LevelPolicy, now: Instant) -> bool {
    policy.timeout_action == TimeoutAction::Delay
        && job.demand.wait_until.is_some_and(|until| until <= now)
}

/// The answer of a job that is not worth running: it would end at `end` at the earliest.
fn too_late(job: &Job, policy: &LevelPolicy, end: Instant, now: Instant) -> Option<ServingError> {
    let expired = |since: Instant| ServingError::Expired {
        limit: since.saturating_duration_since(job.arrived),
    };
    match (job.demand.wait_until, job.demand.deadline) {
        (Some(until), _) if until <= now && !is_late(job, policy, now) => Some(expired(until)),
        (_, Some(deadline)) if deadline <= now => Some(expired(deadline)),
        (_, Some(deadline)) if deadline < end => Some(job.refusal(Refusal::TooLate, end - now)),
        _ => None,
    }
}
