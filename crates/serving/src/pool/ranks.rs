//! Workers that are several processes (`parallelType`, `torchrun`).
//!
//! Such a worker is a group of hosts, one for each *rank*, that run the same handler and meet in
//! `torch.distributed`. To the pool it is one worker: the host of rank 0 stands for all of them
//! (`Host::join`), and ends with any of them. This file is what is said to the others: they load
//! when rank 0 loads and are handed what it is handed, and rank 0's reply counts once all have run.
//!
//! Ranks that have parted can wait for one another for ever. So one that fails where the others do
//! not, or that is silent, costs the whole group.

use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde_json::{Map, Value};
use ts_archive::{ModelConfig, ParallelType};
use ts_wire::frame::{BatchOutcome, RunFailure, WorkerReply, WorkerRequest};
use ts_wire::{Channel, WireError};

use crate::error::ServingError;
use crate::pool::exchange::Payload;

/// More processes than devices of any machine.
const MAX_PROCESSES: u32 = 64;

/// How long the others may take when one rank has failed: a batch that all of them raise on is the
/// batch's fault, and no reason to end them.
const FAIL_TOGETHER_WITHIN: Duration = Duration::from_secs(5);

/// Whether NCCL notices that a rank is lost; read by torch.
pub(super) const NCCL_ERRORS: &str = "TORCH_NCCL_ASYNC_ERROR_HANDLING";

/// How the workers of a model are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parallel {
    kind: ParallelType,
    /// Devices of a worker and, unless the handler starts what it needs, its processes.
    level: u32,
    /// Threads of a process, where the archive says so.
    threads: Option<u32>,
}

impl Parallel {
    /// What a model's configuration asks for.
    ///
    /// # Errors
    /// What one worker on one machine cannot be.
    pub(crate) fn read(yaml: &ModelConfig) -> Result<Option<Self>, ServingError> {
        let refused = |reason: String| Err(ServingError::BadRegistration(reason));
        let kind = match yaml.parallel_type {
            None | Some(ParallelType::None) => return Ok(None),
            Some(kind) => kind,
        };
        let level = yaml.parallel_level.unwrap_or(0);
        if level > MAX_PROCESSES {
            return refused(format!(
                "`parallelLevel` is {level}, and a worker has at most {MAX_PROCESSES} processes or \
                 devices"
            ));
        }
        let nothing = Map::new();
        let torchrun = yaml.torchrun.as_ref().unwrap_or(&nothing);
        if let Some(nodes) = torchrun.get("nnodes").filter(|nodes| !is_one(nodes)) {
            return refused(format!(
                "`torchrun.nnodes` is {nodes}, and a worker lives on one machine. Set it to 1"
            ));
        }
        let threads = torchrun.get("OMP_NUMBER_THREADS").and_then(Value::as_u64);
        let threads = threads.and_then(|threads| u32::try_from(threads).ok());
        let this = Self {
            kind,
            level,
            threads: threads.filter(|threads| *threads > 0),
        };
        if !this.is_group() {
            return Ok(Some(this));
        }
        if yaml.async_communication == Some(true) {
            return refused(format!(
                "`parallelType: {}` hands each batch to {level} processes in the same order, which \
                 `asyncCommunication` has none of. Leave one of them out, or use `parallelType: \
                 custom`",
                this.kind()
            ));
        }
        Ok(Some(this))
    }

    /// As it is written.
    pub(crate) fn kind(self) -> &'static str {
        match self.kind {
            ParallelType::None => "",
            ParallelType::Pipeline => "pp",
            ParallelType::Tensor => "tp",
            ParallelType::PipelineTensor => "pptp",
            ParallelType::Custom => "custom",
        }
    }

    pub(crate) fn level(self) -> u32 {
        self.level
    }

    /// Whether each worker is a group of processes, though it be of one.
    pub(crate) fn is_group(self) -> bool {
        self.level > 0 && self.kind != ParallelType::Custom
    }

    /// Whether its workers cannot be threads of one host: they have an environment each.
    pub(crate) fn needs_own_processes(self) -> bool {
        self.level > 0
    }

    /// Processes of a worker.
    pub(crate) fn processes(self) -> u32 {
        if self.is_group() { self.level } else { 1 }
    }

    /// Devices of a worker, where there are devices.
    pub(crate) fn devices(self) -> usize {
        self.level.max(1) as usize
    }

    /// Threads of each process, of the `share` that its worker has.
    pub(crate) fn threads(self, share: u32) -> u32 {
        self.threads
            .unwrap_or_else(|| (share / self.processes()).max(1))
    }

    /// Whether all ranks are handed the batches. In a pipeline the first one is, and drives the
    /// others.
    pub(crate) fn all_run(self) -> bool {
        self.kind != ParallelType::Pipeline
    }

    /// What `torchrun` sets for the rank of a worker on one machine.
    pub(crate) fn variables(
        self,
        rank: u32,
        rendezvous: &Rendezvous,
    ) -> Vec<(&'static str, String)> {
        let size = self.processes();
        let numbers = [
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("ROLE_RANK", rank),
            ("WORLD_SIZE", size),
            ("LOCAL_WORLD_SIZE", size),
            ("ROLE_WORLD_SIZE", size),
            ("GROUP_RANK", 0),
            ("GROUP_WORLD_SIZE", 1),
            ("MASTER_PORT", u32::from(rendezvous.port)),
            ("TORCHELASTIC_RESTART_COUNT", 0),
            // A rank is never started again without the others.
            ("TORCHELASTIC_MAX_RESTARTS", 0),
        ];
        let texts = [
            ("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string()),
            ("ROLE_NAME", "default".to_owned()),
            ("TORCHELASTIC_RUN_ID", rendezvous.name.clone()),
            // There is no agent that holds the store: rank 0 opens it.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
        ];
        let numbers = numbers.map(|(name, number)| (name, number.to_string()));
        numbers.into_iter().chain(texts).collect()
    }
}

fn is_one(nodes: &Value) -> bool {
    nodes.as_u64() == Some(1) || matches!(nodes.as_str(), Some("1" | "1:1"))
}

/// Where the ranks of one generation of a worker find one another.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    port: u16,
    name: String,
}

impl Rendezvous {
    /// On a port that is free now. Rank 0 opens it a moment later; should another program be quicker,
    /// the load fails and the next try has another port.
    pub(crate) fn new(name: String) -> std::io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        Ok(Self { port, name })
    }
}

impl Rendezvous {
    /// The ranks, of processes in their order, that have not come here: none of their sockets has to
    /// do with its port.
    pub(crate) fn absent(&self, pids: &[u32]) -> Vec<u32> {
        let ranks = (0..).zip(pids);
        let absent = ranks.filter(|(_, pid)| !has_socket(**pid, self.port));
        absent.map(|(rank, _)| rank).collect()
    }
}

/// Whether a process has a TCP socket whose own or other end is this port.
fn has_socket(pid: u32, port: u16) -> bool {
    let port = format!(":{port:04X}");
    let of_port = ["tcp", "tcp6"].into_iter().flat_map(|table| {
        let table = fs_err::read_to_string(format!("/proc/{pid}/net/{table}"));
        let table = table.unwrap_or_default();
        let inodes = table.lines().skip(1).filter_map(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let (own, other) = (fields.next()?, fields.next()?);
            let inode = fields.nth(6)?;
            let is_of_it = own.ends_with(&port) || other.ends_with(&port);
            is_of_it.then(|| format!("socket:[{inode}]"))
        });
        inodes.collect::<Vec<_>>()
    });
    let of_port: Vec<String> = of_port.collect();
    let descriptors = fs_err::read_dir(format!("/proc/{pid}/fd"));
    descriptors
        .into_iter()
        .flatten()
        .flatten()
        .any(|descriptor| {
            let target = fs_err::read_link(descriptor.path());
            target.is_ok_and(|target| of_port.iter().any(|name| target.as_os_str() == &**name))
        })
}

/// The value of `CUDA_VISIBLE_DEVICES` that leaves these devices, which count as this process sees
/// them under `own`, its value.
pub(crate) fn visible_devices(devices: &[u32], own: Option<&str>) -> String {
    let own: Option<Vec<&str>> = own.map(|own| own.split(',').map(str::trim).collect());
    let names = devices.iter().map(|id| {
        let name = own.as_ref().and_then(|own| own.get(*id as usize));
        name.map_or_else(|| id.to_string(), |name| (*name).to_owned())
    });
    names.collect::<Vec<_>>().join(",")
}

/// Why a worker cannot go on.
#[derive(Debug)]
pub(super) enum Loss {
    /// Its channel, or that of rank 0.
    Channel(WireError),
    /// The channel of another rank.
    Rank(u32, WireError),
    /// These ranks have not answered in time.
    Silent(Vec<u32>),
    /// Some failed in a batch, and the others did not.
    Apart {
        failed: Vec<u32>,
        out_of_memory: bool,
    },
}

impl From<WireError> for Loss {
    fn from(error: WireError) -> Self {
        Self::Channel(error)
    }
}

/// The ranks of a worker but the first; none, of an ordinary one.
#[derive(Default)]
pub(super) struct Ranks {
    others: Vec<Other>,
    /// They are handed the batches too.
    all_run: bool,
    /// How long one may take to be handed a batch.
    limit: Duration,
    /// When one of them was heard to have failed in the batch that runs.
    failed: Option<Instant>,
    /// One that could not be handed it.
    lost: Option<(u32, WireError)>,
}

struct Other {
    rank: u32,
    channel: Channel,
    batch: State,
}

/// Where a rank stands with the last batch.
enum State {
    /// It has run it, or had none yet.
    Ran,
    Runs,
    Failed {
        out_of_memory: bool,
    },
}

impl Ranks {
    /// Takes the channels of ranks that have loaded.
    pub(super) fn new(channels: Vec<Channel>, all_run: bool, limit: Duration) -> Self {
        let others = (1..).zip(channels).map(|(rank, channel)| Other {
            rank,
            channel,
            batch: State::Ran,
        });
        Self {
            others: others.collect(),
            all_run,
            limit,
            failed: None,
            lost: None,
        }
    }

    /// Whether rank 0 runs its batches together with others.
    pub(super) fn run_together(&self) -> bool {
        self.all_run && !self.others.is_empty()
    }

    /// As [`Channel::limit_sending`], from the next batch on.
    pub(super) fn limit_sending(&mut self, limit: Duration) {
        self.limit = limit;
    }

    /// Hands them what rank 0 was handed. One that cannot have it shows when it is listened to.
    pub(super) fn hand_over(&mut self, run: &WorkerRequest<'_>, values: &[&[u8]], way: Payload) {
        self.failed = None;
        if !self.all_run {
            return;
        }
        for other in &mut self.others {
            let (sender, _) = other.channel.halves();
            let limited = sender.limit(self.limit);
            match limited.and_then(|()| way.send(sender, run, values)) {
                Ok(()) => other.batch = State::Runs,
                Err(error) => self.lost = Some((other.rank, error)),
            }
        }
    }

    /// Listens without waiting, while rank 0 runs.
    ///
    /// # Errors
    /// The group is of no more use.
    pub(super) fn look(&mut self) -> Result<(), Loss> {
        let now = Instant::now();
        self.listen(now)?;
        match self.failed {
            Some(since) if now.duration_since(since) >= FAIL_TOGETHER_WITHIN => {
                Err(self.apart(None))
            }
            _ => Ok(()),
        }
    }

    /// Waits until all have run what rank 0 has: until `due`, and not for long where one has failed.
    /// `failure` is rank 0's.
    ///
    /// # Errors
    /// The group is of no more use.
    pub(super) fn agree(
        &mut self,
        failure: Option<&RunFailure>,
        due: Option<Instant>,
    ) -> Result<(), Loss> {
        if !self.run_together() {
            return Ok(());
        }
        let failure = failure.filter(|failure| has_raised(failure));
        if failure.is_some() {
            self.failed.get_or_insert_with(Instant::now);
        }
        loop {
            let over = self.failed.map(|since| since + FAIL_TOGETHER_WITHIN);
            let until = [due, over].into_iter().flatten().min();
            self.listen(until.unwrap_or_else(|| Instant::now() + FAIL_TOGETHER_WITHIN))?;
            let running = self
                .others
                .iter()
                .any(|other| matches!(other.batch, State::Runs));
            if !running {
                break;
            }
            if until.is_some_and(|until| until <= Instant::now()) {
                return Err(match self.failed {
                    Some(_) => self.apart(failure),
                    None => self.silent(false),
                });
            }
        }
        let failed = self.failed().count() + usize::from(failure.is_some());
        if failed == 0 || failed == self.others.len() + 1 {
            return Ok(());
        }
        Err(self.apart(failure))
    }

    /// Those that have not answered; with rank 0, or without it.
    pub(super) fn silent(&self, with_first: bool) -> Loss {
        if self.others.is_empty() {
            return WireError::TimedOut.into();
        }
        let running = self.others.iter();
        let running = running.filter(|other| matches!(other.batch, State::Runs));
        let first = with_first.then_some(0);
        Loss::Silent(
            first
                .into_iter()
                .chain(running.map(|other| other.rank))
                .collect(),
        )
    }

    fn apart(&self, first: Option<&RunFailure>) -> Loss {
        let first_out_of_memory = first.is_some_and(is_out_of_memory);
        let failed = self.failed();
        Loss::Apart {
            out_of_memory: first_out_of_memory || failed.clone().any(|(_, memory)| memory),
            failed: first
                .map(|_| 0)
                .into_iter()
                .chain(failed.map(|(rank, _)| rank))
                .collect(),
        }
    }

    fn failed(&self) -> impl Iterator<Item = (u32, bool)> + Clone {
        self.others.iter().filter_map(|other| match other.batch {
            State::Failed { out_of_memory } => Some((other.rank, out_of_memory)),
            _ => None,
        })
    }

    /// Waits for words of those that run, and takes what has come.
    fn listen(&mut self, until: Instant) -> Result<(), Loss> {
        if let Some((rank, error)) = self.lost.take() {
            return Err(Loss::Rank(rank, error));
        }
        let mut running: Vec<&mut Other> = self
            .others
            .iter_mut()
            .filter(|other| matches!(other.batch, State::Runs))
            .collect();
        if running.is_empty() {
            return Ok(());
        }
        let channels: Vec<&Channel> = running.iter().map(|other| &other.channel).collect();
        for index in readable(&channels, Some(until))? {
            let other = &mut running[index];
            other.batch = other
                .hear()
                .map_err(|error| Loss::Rank(other.rank, error))?;
            if let State::Failed { .. } = other.batch {
                self.failed.get_or_insert_with(Instant::now);
            }
        }
        Ok(())
    }
}

impl Other {
    /// Takes a word that has come.
    fn hear(&mut self) -> Result<State, WireError> {
        let deadline = Instant::now() + FAIL_TOGETHER_WITHIN;
        match self.channel.receive(Some(deadline))?.header()? {
            WorkerReply::Done(done) => Ok(match done.outcome {
                BatchOutcome::Failed(failure) if has_raised(&failure) => State::Failed {
                    out_of_memory: is_out_of_memory(&failure),
                },
                BatchOutcome::Failed(_) | BatchOutcome::Items(_) => State::Ran,
            }),
            _ => Err(WireError::Malformed("words of a rank that end no batch")),
        }
    }
}

/// Whether a handler was left before its end. What it returns matters of rank 0 only.
fn has_raised(failure: &RunFailure) -> bool {
    matches!(
        failure,
        RunFailure::HandlerFailed | RunFailure::HandlerStatus { .. }
    ) || is_out_of_memory(failure)
}

fn is_out_of_memory(failure: &RunFailure) -> bool {
    matches!(
        failure,
        RunFailure::OutOfMemory | RunFailure::DeviceOutOfMemory
    )
}

/// Waits until there is something to read on some of these channels, and tells on which; none at
/// `until`.
pub(super) fn readable(
    channels: &[&Channel],
    until: Option<Instant>,
) -> Result<Vec<usize>, WireError> {
    let mut watched: Vec<PollFd<'_>> = channels
        .iter()
        .map(|channel| PollFd::new(*channel, PollFlags::IN))
        .collect();
    loop {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut watched, left.as_ref()) {
            Ok(_) => break,
            Err(Errno::INTR) => {}
            Err(errno) => {
                return Err(WireError::System {
                    call: "poll",
                    source: errno.into(),
                });
            }
        }
    }
    let ready = watched.iter().enumerate();
    let ready = ready.filter(|(_, watched)| !watched.revents().is_empty());
    Ok(ready.map(|(index, _)| index).collect())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read(yaml: &str) -> Result<Option<Parallel>, String> {
        let yaml = ModelConfig::parse(yaml, Path::new("model-config.yaml")).unwrap();
        Parallel::read(&yaml).map_err(|error| error.to_string())
    }

    fn parallel(yaml: &str) -> Parallel {
        read(yaml).unwrap().unwrap()
    }

    #[test]
    fn the_type_decides_what_a_worker_is() {
        assert_eq!(read("parallelLevel: 2\n"), Ok(None));
        assert_eq!(read("torchrun:\n  nproc-per-node: 2\n"), Ok(None));
        for (kind, processes, all_run) in [
            ("tp", 3, true),
            ("PPTP", 3, true),
            ("pp", 3, false),
            ("custom", 1, true),
        ] {
            let read = parallel(&format!("parallelType: {kind}\nparallelLevel: 3\n"));
            assert_eq!((read.processes(), read.devices()), (processes, 3), "{kind}");
            assert_eq!(
                (read.is_group(), read.needs_own_processes()),
                (processes > 1, true)
            );
            assert!(read.all_run() == all_run || processes == 1);
            assert_eq!(read.kind(), kind.to_ascii_lowercase());
        }
        // A group of one meets itself; nothing to spread over is a worker as any other.
        assert!(parallel("parallelType: tp\nparallelLevel: 1\n").is_group());
        let none = parallel("parallelType: tp\n");
        assert_eq!(
            (none.is_group(), none.needs_own_processes(), none.devices()),
            (false, false, 1)
        );
    }

    #[test]
    fn threads_are_those_asked_for_or_a_share() {
        let two = "parallelType: tp\nparallelLevel: 2\n";
        assert_eq!(
            [1, 2, 9].map(|share| parallel(two).threads(share)),
            [1, 1, 4]
        );
        let asked = parallel(&format!("{two}torchrun:\n  OMP_NUMBER_THREADS: 6\n"));
        assert_eq!(asked.threads(1), 6);
    }

    #[test]
    fn more_than_one_machine_is_refused() {
        let nodes = |nodes: &str| {
            read(&format!(
                "parallelType: tp\ntorchrun:\n  nnodes: {nodes}\n  nproc-per-node: 2\n"
            ))
        };
        for one in ["1", "'1'", "'1:1'"] {
            assert!(nodes(one).is_ok(), "{one}");
        }
        for more in ["2", "'1:2'", "0", "many"] {
            let told = nodes(more).unwrap_err();
            assert!(told.contains("lives on one machine"), "{told}");
        }
    }

    #[test]
    fn devices_keep_the_names_that_the_server_was_given() {
        assert_eq!(visible_devices(&[2, 3], None), "2,3");
        assert_eq!(visible_devices(&[0, 1], Some("5, GPU-a")), "5,GPU-a");
        assert_eq!(visible_devices(&[1], Some("7")), "1");
    }

    #[test]
    fn who_has_come_shows_in_its_sockets() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let own = std::process::id();
        let rendezvous = |port| Rendezvous {
            port,
            name: String::new(),
        };
        assert_eq!(rendezvous(port).absent(&[own, 0, own]), [1]);
        drop(listener);
        assert_eq!(rendezvous(port).absent(&[own]), [0]);
        // The other end of a connection.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let connection = std::net::TcpStream::connect(address).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        drop((listener, accepted));
        assert_eq!(rendezvous(address.port()).absent(&[own]), [0; 0]);
        drop(connection);
    }

    /// A rank that answers what it is told to, and the others' view of it.
    fn ranks(count: u32) -> (Ranks, Vec<Channel>) {
        let pairs = (0..count).map(|_| Channel::pair().unwrap());
        let (near, far): (Vec<_>, Vec<_>) = pairs.unzip();
        let channel = |socket| Channel::new(socket, 1 << 20);
        let near = near.into_iter().map(channel).collect();
        let mut ranks = Ranks::new(near, true, Duration::from_secs(1));
        let run = ts_wire::frame::RunBatch {
            departures: false,
            items: Vec::new(),
        };
        ranks.hand_over(&WorkerRequest::Run(run), &[], Payload::Shared);
        (ranks, far.into_iter().map(channel).collect())
    }

    fn say(far: &mut Channel, outcome: BatchOutcome<'_>) {
        let done = ts_wire::frame::BatchDone {
            ran_micros: 0,
            outcome,
            metrics: Vec::new(),
        };
        far.send(&WorkerReply::Done(done), None).unwrap();
    }

    fn soon() -> Option<Instant> {
        Some(Instant::now() + Duration::from_millis(200))
    }

    #[test]
    fn ranks_agree_if_all_ran_or_all_raised() {
        let failed = RunFailure::HandlerFailed;
        let (mut ran, mut far) = ranks(2);
        say(&mut far[0], BatchOutcome::Items(Vec::new()));
        // What it returned is of no interest.
        say(&mut far[1], BatchOutcome::Failed(RunFailure::NotAList));
        ran.agree(None, soon()).unwrap();
        let (mut raised, mut far) = ranks(2);
        for far in &mut far {
            say(far, BatchOutcome::Failed(RunFailure::HandlerFailed));
        }
        raised.agree(Some(&failed), soon()).unwrap();
        // Rank 0 returned what cannot be sent: all have run.
        let (mut ran, mut far) = ranks(1);
        say(&mut far[0], BatchOutcome::Items(Vec::new()));
        ran.agree(Some(&RunFailure::UnsupportedOutput), soon())
            .unwrap();
    }

    #[test]
    fn ranks_that_part_are_named() {
        let out_of_memory = RunFailure::DeviceOutOfMemory;
        let (mut parted, mut far) = ranks(2);
        say(&mut far[0], BatchOutcome::Items(Vec::new()));
        say(&mut far[1], BatchOutcome::Failed(RunFailure::HandlerFailed));
        let loss = parted.agree(None, soon()).unwrap_err();
        assert!(matches!(loss, Loss::Apart { failed, out_of_memory: false } if failed == [2]));
        let (mut parted, mut far) = ranks(1);
        say(&mut far[0], BatchOutcome::Items(Vec::new()));
        let loss = parted.agree(Some(&out_of_memory), soon()).unwrap_err();
        assert!(matches!(loss, Loss::Apart { failed, out_of_memory: true } if failed == [0]));
        let (mut silent, mut far) = ranks(2);
        say(&mut far[0], BatchOutcome::Items(Vec::new()));
        let loss = silent.agree(None, soon()).unwrap_err();
        assert!(matches!(loss, Loss::Silent(ranks) if ranks == [2]));
        let (mut lost, mut far) = ranks(2);
        drop(far.remove(1));
        let loss = lost.agree(None, soon()).unwrap_err();
        assert!(matches!(loss, Loss::Rank(2, WireError::Closed)));
        let (mut none, _) = ranks(0);
        none.agree(None, None).unwrap();
        assert!(matches!(
            none.silent(true),
            Loss::Channel(WireError::TimedOut)
        ));
    }

    #[test]
    fn one_that_raised_is_seen_while_rank_0_still_runs() {
        let (mut ranks, mut far) = ranks(1);
        ranks.look().unwrap();
        say(&mut far[0], BatchOutcome::Failed(RunFailure::HandlerFailed));
        ranks.look().unwrap();
        ranks.failed = ranks.failed.map(|since| since - FAIL_TOGETHER_WITHIN);
        let loss = ranks.look().unwrap_err();
        assert!(matches!(loss, Loss::Apart { failed, .. } if failed == [1]));
    }
}
