//! Which worker gets which device, and how many of the cores. What there is was settled when the
//! server started; it is leased to workers here and comes back when their slots end. A worker that
//! is started again keeps what it has.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use ts_types::DeviceType;

/// Where the workers of a model may run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Placement {
    /// On the processor.
    Cpu,
    /// On a GPU, of which this server has none.
    Missing,
    /// On any of the server's devices.
    Any,
    /// On these, in this order.
    Listed(Vec<u32>),
}

impl Placement {
    /// Decides (*torchserve-contract* 8.8) for a server with the devices `present`.
    ///
    /// # Errors
    /// The id of a device that is not there. TorchServe drops the whole list without a word.
    pub(crate) fn of(
        kind: Option<DeviceType>,
        listed: Option<&[u32]>,
        present: &[u32],
    ) -> Result<Self, u32> {
        match (kind, listed) {
            (Some(DeviceType::Cpu), _) => Ok(Self::Cpu),
            (_, Some(listed)) if !listed.is_empty() => {
                match listed.iter().find(|id| !present.contains(id)) {
                    Some(unknown) => Err(*unknown),
                    None => Ok(Self::Listed(listed.to_vec())),
                }
            }
            (Some(DeviceType::Gpu), _) if present.is_empty() => Ok(Self::Missing),
            _ if present.is_empty() => Ok(Self::Cpu),
            _ => Ok(Self::Any),
        }
    }

    /// Devices that the model may use, of those `present`; `None` on the processor.
    pub(crate) fn devices(&self, present: &[u32]) -> Option<usize> {
        match self {
            Self::Cpu | Self::Missing => None,
            Self::Any => Some(present.len()),
            Self::Listed(ids) => Some(ids.len()),
        }
    }
}

/// Counts the workers in each of several places, and whose turn it is among places that have as
/// few.
#[derive(Debug)]
struct Turns {
    workers: Vec<usize>,
    next: usize,
}

impl Turns {
    fn new(places: usize, first: usize) -> Self {
        Self {
            workers: vec![0; places],
            next: first,
        }
    }

    /// The first of `count` places that follow one another and have the fewest workers; they then
    /// have one more. `None` where there are not as many.
    fn take(&mut self, count: usize) -> Option<usize> {
        let runs = self.workers.len() / count;
        let first = (self.next / count).checked_rem(runs)?;
        let place = (first..first + runs)
            .map(|run| run % runs * count)
            .min_by_key(|place| self.workers[*place..][..count].iter().sum::<usize>())?;
        self.next = (first + 1) * count;
        for workers in &mut self.workers[place..][..count] {
            *workers += 1;
        }
        Some(place)
    }
}

/// The devices of the server, shared by all its pools.
#[derive(Debug)]
pub(crate) struct Devices {
    ids: Vec<u32>,
    turns: Mutex<Turns>,
}

impl Devices {
    pub(crate) fn new(ids: Vec<u32>) -> Arc<Self> {
        // As TorchServe, whose counter goes up before it is used: the first worker gets the second
        // device.
        let turns = Mutex::new(Turns::new(ids.len(), 1));
        Arc::new(Self { ids, turns })
    }
}

/// The devices that the workers of one pool may have.
#[derive(Debug)]
pub(crate) struct PoolDevices {
    all: Arc<Devices>,
    placement: Placement,
    /// Devices of one worker.
    each: usize,
    /// Of a list, by position: an id that is listed twice gets twice as many workers.
    listed: Arc<Mutex<Turns>>,
}

impl PoolDevices {
    /// `each`, at least 1, is how many devices one worker has.
    pub(crate) fn new(all: Arc<Devices>, placement: Placement, each: usize) -> Self {
        let listed = match &placement {
            Placement::Listed(ids) => ids.len(),
            Placement::Cpu | Placement::Missing | Placement::Any => 0,
        };
        Self {
            all,
            placement,
            each,
            listed: Arc::new(Mutex::new(Turns::new(listed, 0))),
        }
    }

    /// The model asks for a device, and there is none.
    pub(crate) fn is_missing(&self) -> bool {
        self.placement == Placement::Missing
    }

    /// Workers that there are devices for, where one with several cannot share them.
    pub(crate) fn room(&self) -> Option<usize> {
        let devices = self.placement.devices(&self.all.ids)?;
        (self.each > 1).then(|| devices / self.each)
    }

    /// Devices for one more worker; `None` where it runs on the processor.
    pub(crate) fn lease(&self) -> Option<DeviceLease> {
        let all = Arc::clone(&self.all);
        match &self.placement {
            Placement::Cpu | Placement::Missing => None,
            Placement::Any => {
                let place = all.turns.lock().take(self.each)?;
                Some(DeviceLease {
                    all,
                    places: (place..place + self.each).collect(),
                    listed: None,
                })
            }
            Placement::Listed(ids) => {
                let position = self.listed.lock().take(self.each)?;
                let positions = position..position + self.each;
                let place = |wanted| all.ids.iter().position(|id| *id == wanted);
                let places = ids[positions.clone()].iter().copied();
                let places: Vec<usize> = places.filter_map(place).collect();
                for place in &places {
                    all.turns.lock().workers[*place] += 1;
                }
                Some(DeviceLease {
                    all,
                    places,
                    listed: Some((Arc::clone(&self.listed), positions)),
                })
            }
        }
    }
}

/// The use of devices by one worker; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct DeviceLease {
    all: Arc<Devices>,
    places: Vec<usize>,
    listed: Option<(Arc<Mutex<Turns>>, Range<usize>)>,
}

impl DeviceLease {
    /// At least one.
    pub(crate) fn ids(&self) -> Vec<u32> {
        self.places
            .iter()
            .map(|place| self.all.ids[*place])
            .collect()
    }
}

impl Drop for DeviceLease {
    fn drop(&mut self) {
        let mut turns = self.all.turns.lock();
        for place in &self.places {
            turns.workers[*place] -= 1;
        }
        drop(turns);
        if let Some((turns, positions)) = &self.listed {
            for workers in &mut turns.lock().workers[positions.clone()] {
                *workers -= 1;
            }
        }
    }
}

/// Threads of one forward pass in a pool that is to have `workers`: together they stay within the
/// cores, since more only wait for one another. Never zero.
pub(crate) fn core_share(cores: usize, workers: usize) -> u32 {
    u32::try_from((cores / workers.max(1)).max(1)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn server(devices: u32) -> Arc<Devices> {
        Devices::new((0..devices).collect())
    }

    fn lease(pool: &PoolDevices, workers: usize) -> Vec<DeviceLease> {
        (0..workers).filter_map(|_| pool.lease()).collect()
    }

    fn ids(leases: &[DeviceLease]) -> Vec<u32> {
        leases.iter().flat_map(DeviceLease::ids).collect()
    }

    #[test]
    fn a_model_is_placed_as_it_and_the_server_say() {
        use DeviceType::{Cpu, Gpu};
        let place =
            |kind, listed: Option<&[u32]>, present: &[u32]| Placement::of(kind, listed, present);
        assert_eq!(place(None, None, &[]), Ok(Placement::Cpu));
        assert_eq!(place(None, None, &[0, 1]), Ok(Placement::Any));
        assert_eq!(place(Some(Gpu), None, &[0]), Ok(Placement::Any));
        assert_eq!(place(Some(Gpu), None, &[]), Ok(Placement::Missing));
        assert_eq!(place(Some(Cpu), Some(&[7]), &[0]), Ok(Placement::Cpu));
        assert_eq!(place(None, Some(&[]), &[0]), Ok(Placement::Any));
        let listed = place(None, Some(&[1, 0]), &[0, 1]);
        assert_eq!(listed, Ok(Placement::Listed(vec![1, 0])));
        // PF-04: on a host without devices, too.
        assert_eq!(place(None, Some(&[0, 2]), &[0, 1]), Err(2));
        assert_eq!(place(Some(Gpu), Some(&[0]), &[]), Err(0));
    }

    #[test]
    fn the_first_worker_of_a_server_gets_the_second_device() {
        let pool = PoolDevices::new(server(3), Placement::Any, 1);
        assert_eq!(ids(&lease(&pool, 4)), [1, 2, 0, 1]);
    }

    /// PF-03: models of 1, 2 and 3 workers on four devices, one of them with a list.
    #[test]
    fn workers_of_several_models_are_spread_evenly() {
        let devices = server(4);
        let pool = |placement| PoolDevices::new(Arc::clone(&devices), placement, 1);
        let listed = pool(Placement::Listed(vec![3, 2]));
        let on_list = lease(&listed, 3);
        assert_eq!(ids(&on_list), [3, 2, 3]);
        let two = lease(&pool(Placement::Any), 2);
        assert_eq!(ids(&two), [1, 0]);
        let one = lease(&pool(Placement::Any), 1);
        assert_eq!(ids(&one), [0]);
        // The list is the model's own business, whatever the others do.
        drop(on_list);
        assert_eq!(ids(&lease(&listed, 2)), [2, 3]);
    }

    #[test]
    fn a_device_that_comes_back_is_the_next_to_go() {
        let pool = PoolDevices::new(server(3), Placement::Any, 1);
        let mut leases = lease(&pool, 6);
        let freed = leases.remove(2);
        assert_eq!(freed.ids(), [0]);
        drop(freed);
        assert_eq!(pool.lease().map(|lease| lease.ids()), Some(vec![0]));
    }

    #[test]
    fn a_worker_with_several_devices_gets_neighbours() {
        let devices = server(5);
        let pool = |placement, each| PoolDevices::new(Arc::clone(&devices), placement, each);
        let pairs = pool(Placement::Any, 2);
        assert_eq!(pairs.room(), Some(2));
        let first = lease(&pairs, 2);
        assert_eq!(ids(&first), [0, 1, 2, 3]);
        // What is not part of a pair is free for others.
        let one = lease(&pool(Placement::Any, 1), 1);
        assert_eq!(ids(&one), [4]);
        drop(first);
        let one_more = lease(&pool(Placement::Any, 1), 1);
        assert_eq!(ids(&one_more), [0]);
        assert_eq!(
            ids(&lease(&pairs, 1)),
            [2, 3],
            "the pair with fewer workers"
        );
        let listed = pool(Placement::Listed(vec![4, 1, 0]), 2);
        assert_eq!(
            (listed.room(), ids(&lease(&listed, 1))),
            (Some(1), vec![4, 1])
        );
        assert!(pool(Placement::Any, 6).lease().is_none());
        drop((one, one_more));
        assert_eq!(devices.turns.lock().workers, [0; 5]);
    }

    #[test]
    fn there_is_nothing_to_lease_where_there_are_no_devices() {
        assert!(
            PoolDevices::new(server(0), Placement::Any, 1)
                .lease()
                .is_none()
        );
        assert!(
            PoolDevices::new(server(2), Placement::Cpu, 1)
                .lease()
                .is_none()
        );
        let missing = PoolDevices::new(server(0), Placement::Missing, 1);
        assert!(missing.is_missing() && missing.lease().is_none());
    }

    #[test]
    fn threads_never_exceed_the_cores_and_never_reach_zero() {
        assert_eq!(core_share(8, 2), 4);
        assert_eq!(core_share(8, 3), 2);
        assert_eq!(core_share(2, 4), 1);
        assert_eq!(core_share(2, 0), 2);
        assert_eq!(core_share(0, 1), 1);
    }

    proptest! {
        /// Whatever comes and goes, no device has two workers more than another unless workers
        /// that left made it so, and in the end nothing is leased.
        #[test]
        fn leases_are_even_and_all_come_back(
            devices in 1_u32..9, steps in proptest::collection::vec((any::<bool>(), 0_usize..64), 0..80),
        ) {
            let devices = server(devices);
            let pool = PoolDevices::new(Arc::clone(&devices), Placement::Any, 1);
            let mut leases = Vec::new();
            for (comes, which) in steps {
                if comes || leases.is_empty() {
                    let fewest = devices.turns.lock().workers.iter().copied().min();
                    let lease = pool.lease().unwrap();
                    let now = devices.turns.lock().workers[lease.places[0]];
                    prop_assert_eq!(Some(now - 1), fewest);
                    leases.push(lease);
                } else {
                    leases.swap_remove(which % leases.len());
                }
                let leased: usize = devices.turns.lock().workers.iter().sum();
                prop_assert_eq!(leased, leases.len());
            }
            leases.clear();
            prop_assert!(devices.turns.lock().workers.iter().all(|workers| *workers == 0));
        }

        #[test]
        fn shares_of_a_pool_stay_within_the_cores(cores in 1_usize..256, workers in 1_usize..256) {
            let share = core_share(cores, workers) as usize;
            prop_assert!(share >= 1 && (share == 1 || share * workers <= cores));
        }
    }
}
