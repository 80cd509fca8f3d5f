//! Limits on what a model's hosts may use (`memoryLimitMb`, `cpuLimit`).
//!
//! A control group of its own for each host is what limits mean: the memory that it really has, and
//! processor time. It needs version 2 of control groups, and a group of the server's that it may
//! divide: a container's, or one that was delegated to it. Elsewhere the kernel's per-process limits
//! stand in: on the data that a process maps, used or not, and on the cores that it runs on.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use ts_types::HostLimits;

/// Controllers that limits need.
const CONTROLLERS: [&str; 2] = ["memory", "cpu"];

/// Over which processor time is counted, in microseconds.
const CPU_PERIOD: u64 = 100_000;

/// What enforces the limits of this server's hosts.
#[derive(Debug, Default)]
pub(crate) struct Confinement {
    /// The group that hosts' groups are made in, or why there is none; looked for once.
    base: OnceLock<Result<PathBuf, String>>,
    next_core: AtomicUsize,
    /// Groups whose last process was still ending.
    left: Mutex<Vec<PathBuf>>,
}

/// The limits of one host, as they are enforced.
#[derive(Debug, Default)]
pub(crate) struct Confined {
    limits: HostLimits,
    group: Option<Group>,
}

/// The control group of one host; given back when it is dropped, after the host's end.
#[derive(Debug)]
struct Group {
    folder: PathBuf,
    all: Arc<Confinement>,
}

impl Confinement {
    /// What enforces limits here.
    pub(crate) fn means(&self) -> &'static str {
        match self.base() {
            Ok(_) => "control group",
            Err(_) => "data size and core affinity",
        }
    }

    /// Limits a host that has not loaded its model yet.
    ///
    /// # Errors
    /// The system refuses both ways.
    pub(crate) fn confine(self: &Arc<Self>, pid: Pid, limits: HostLimits) -> io::Result<Confined> {
        if limits.is_unlimited() {
            return Ok(Confined::default());
        }
        let group = self.base().as_ref().ok().and_then(|base| {
            let group = Group {
                folder: base.join(format!("host-{}", pid.as_raw_nonzero())),
                all: Arc::clone(self),
            };
            fill(&group.folder, pid, limits)
                .inspect_err(|error| tracing::warn!(%error, "a host gets no control group"))
                .ok()
                .map(|()| group)
        });
        if group.is_none() {
            self.limit_process(pid, limits)?;
        }
        Ok(Confined { limits, group })
    }

    fn base(&self) -> &Result<PathBuf, String> {
        self.base.get_or_init(|| {
            let base = own_group().and_then(|group| divide(&group).map(|()| group));
            match &base {
                Ok(group) => tracing::info!(group = %group.display(), "hosts get control groups"),
                Err(reason) => tracing::warn!(
                    "limits of models are enforced on data size and by core affinity: {reason}"
                ),
            }
            base
        })
    }

    fn limit_process(&self, pid: Pid, limits: HostLimits) -> io::Result<()> {
        if let Some(bytes) = limits.memory_bytes {
            let limit = Rlimit {
                current: Some(bytes),
                maximum: Some(bytes),
            };
            prlimit(Some(pid), Resource::Data, limit)?;
        }
        if let Some(count) = limits.cores() {
            let allowed = sched_getaffinity(None)?;
            let first = self.next_core.fetch_add(count, Ordering::Relaxed);
            // The host has one thread so far; the others inherit from it.
            sched_setaffinity(Some(pid), &some_of(&allowed, first, count))?;
        }
        Ok(())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Ends also those that have left the host's process group.
        let _old_kernel = fs_err::write(self.folder.join("cgroup.kill"), "1");
        let mut left = self.all.left.lock();
        left.push(std::mem::take(&mut self.folder));
        left.retain(|folder| fs_err::remove_dir(folder).is_err() && folder.exists());
    }
}

impl Confined {
    pub(crate) fn limits(&self) -> HostLimits {
        self.limits
    }

    /// Whether the kernel has ended a process of the host for its memory.
    pub(crate) fn was_over_memory(&self) -> bool {
        let events = self.group.as_ref();
        let events = events.map(|group| group.folder.join("memory.events"));
        events
            .and_then(|path| fs_err::read_to_string(path).ok())
            .is_some_and(|events| oom_kills(&events) > 0)
    }

    /// Whether running out of memory shows as a failed allocation, which ends native code.
    pub(crate) fn refuses_memory(&self) -> bool {
        self.limits.memory_bytes.is_some() && self.group.is_none()
    }
}

fn oom_kills(events: &str) -> u64 {
    let counts = events
        .lines()
        .filter_map(|line| line.strip_prefix("oom_kill "));
    counts.filter_map(|count| count.parse::<u64>().ok()).sum()
}

/// `count` of the allowed cores, beginning with number `first` of them, and around.
fn some_of(allowed: &CpuSet, first: usize, count: usize) -> CpuSet {
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU)
        .filter(|core| allowed.is_set(*core))
        .collect();
    let mut some = CpuSet::new();
    for core in cores
        .iter()
        .cycle()
        .skip(first % cores.len().max(1))
        .take(count.min(cores.len()))
    {
        some.set(*core);
    }
    some
}

/// Makes a host's group and puts it in.
fn fill(group: &Path, pid: Pid, limits: HostLimits) -> io::Result<()> {
    fs_err::create_dir(group)?;
    if let Some(bytes) = limits.memory_bytes {
        fs_err::write(group.join("memory.max"), bytes.to_string())?;
        // Without it a model over its limit would slow down everything instead. Not every kernel
        // counts swap.
        let _no_swap_to_limit = fs_err::write(group.join("memory.swap.max"), "0");
        fs_err::write(group.join("memory.oom.group"), "1")?;
    }
    if let Some(millis) = limits.cpu_millis {
        let quota = u64::from(millis) * CPU_PERIOD / 1000;
        fs_err::write(group.join("cpu.max"), format!("{quota} {CPU_PERIOD}"))?;
    }
    fs_err::write(group.join("cgroup.procs"), pid.as_raw_nonzero().to_string())
}

/// The folder of the server's own group in version 2 of control groups.
fn own_group() -> Result<PathBuf, String> {
    let read = |path: &str| fs_err::read_to_string(path).map_err(|error| error.to_string());
    group_folder(&read("/proc/self/cgroup")?, &read("/proc/self/mountinfo")?)
        .ok_or_else(|| "there are no control groups of version 2".to_owned())
}

fn group_folder(cgroup: &str, mountinfo: &str) -> Option<PathBuf> {
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::"))?;
    // `36 35 98:0 /root /mount/point options - cgroup2 …`
    let (root, mount_point) = mountinfo.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let of_version_2 = kind.starts_with("cgroup2 ");
        of_version_2.then_some((fields.next()?, fields.next()?))
    })?;
    let below = Path::new(path).strip_prefix(root).ok()?;
    Some(Path::new(mount_point).join(below))
}

/// Makes sure that groups below the server's can have limits. A group that is divided has no
/// processes itself, so the server moves into one below; it does so only where nobody else is.
fn divide(group: &Path) -> Result<(), String> {
    let read =
        |name: &str| fs_err::read_to_string(group.join(name)).map_err(|error| error.to_string());
    let missing = |list: &str| {
        let has = |controller: &&&str| !list.split_whitespace().any(|word| word == **controller);
        CONTROLLERS.iter().find(has).copied()
    };
    if let Some(controller) = missing(&read("cgroup.controllers")?) {
        return Err(format!(
            "the control group `{}` has no controller `{controller}`",
            group.display()
        ));
    }
    if missing(&read("cgroup.subtree_control")?).is_none() {
        return Ok(());
    }
    let processes = read("cgroup.procs")?;
    let processes: Vec<u32> = processes
        .lines()
        .filter_map(|pid| pid.parse().ok())
        .collect();
    if let Some(other) = processes
        .iter()
        .find(|pid| !descends_from_this_process(**pid))
    {
        return Err(format!(
            "process {other} shares the control group `{}` with the server. Start the server in a \
             group of its own, for example with systemd's `Delegate=yes`",
            group.display()
        ));
    }
    let own = group.join("server");
    let moved = fs_err::create_dir_all(&own)
        .and_then(|()| {
            let procs = own.join("cgroup.procs");
            processes
                .iter()
                .try_for_each(|pid| fs_err::write(&procs, pid.to_string()))
        })
        .and_then(|()| {
            let wanted = CONTROLLERS
                .map(|controller| format!("+{controller}"))
                .join(" ");
            fs_err::write(group.join("cgroup.subtree_control"), wanted)
        });
    moved.map_err(|error| error.to_string())
}

fn descends_from_this_process(pid: u32) -> bool {
    let own = std::process::id();
    let mut pid = pid;
    while pid > 1 && pid != own {
        let parent = fs_err::read_to_string(format!("/proc/{pid}/stat"))
            .ok()
            .and_then(|stat| stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok());
        pid = match parent {
            Some(parent) => parent,
            // It has ended meanwhile.
            None => return true,
        };
    }
    pid == own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_a_group_is_found_below_its_mount() {
        let mounts = "24 1 0:21 / /proc rw - proc proc rw\n\
                      30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
        let found = |cgroup| group_folder(cgroup, mounts);
        assert_eq!(found("0::/\n"), Some("/sys/fs/cgroup/".into()));
        assert_eq!(
            found("1:cpu:/x\n0::/a.slice/b\n"),
            Some("/sys/fs/cgroup/a.slice/b".into())
        );
        assert_eq!(found("4:memory:/x\n"), None);
        // A part of the tree, mounted elsewhere.
        let part = "30 24 0:26 /a /groups rw - cgroup2 none rw\n";
        assert_eq!(group_folder("0::/a/b\n", part), Some("/groups/b".into()));
        assert_eq!(group_folder("0::/b\n", part), None);
        assert_eq!(
            group_folder("0::/b\n", "30 24 0:26 / /sys rw - sysfs s rw\n"),
            None
        );
    }

    /// A folder with the files of a group, as far as they are read.
    fn group(controllers: &str, subtree: &str, processes: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("cgroup.controllers", controllers),
            ("cgroup.subtree_control", subtree),
            ("cgroup.procs", processes),
        ] {
            fs_err::write(folder.path().join(name), text).unwrap();
        }
        folder
    }

    #[test]
    fn a_group_is_divided_only_where_nobody_else_is() {
        let own = std::process::id();
        let read = |folder: &tempfile::TempDir, name: &str| {
            fs_err::read_to_string(folder.path().join(name)).unwrap()
        };
        let alone = group("cpu io memory\n", "\n", &format!("{own}\n"));
        divide(alone.path()).unwrap();
        assert_eq!(read(&alone, "cgroup.subtree_control"), "+memory +cpu");
        assert_eq!(read(&alone, "server/cgroup.procs"), own.to_string());

        let ready = group("cpu memory\n", "cpu memory\n", "1\n");
        divide(ready.path()).unwrap();
        assert!(!ready.path().join("server").exists());

        let shared = group("cpu memory\n", "\n", &format!("1\n{own}\n"));
        let reason = divide(shared.path()).unwrap_err();
        assert!(reason.starts_with("process 1 shares"), "{reason}");
        let less = group("cpu\n", "\n", "");
        let reason = divide(less.path()).unwrap_err();
        assert!(reason.ends_with("no controller `memory`"), "{reason}");
    }

    #[test]
    fn a_host_gets_a_group_with_its_limits() {
        let folder = tempfile::tempdir().unwrap();
        let group = folder.path().join("host-1");
        let limits = HostLimits {
            memory_bytes: Some(1 << 20),
            cpu_millis: Some(1500),
        };
        fill(&group, Pid::INIT, limits).unwrap();
        for (file, text) in [
            ("memory.max", "1048576"),
            ("memory.oom.group", "1"),
            ("cpu.max", "150000 100000"),
            ("cgroup.procs", "1"),
        ] {
            assert_eq!(
                fs_err::read_to_string(group.join(file)).unwrap(),
                text,
                "{file}"
            );
        }
        assert_eq!(oom_kills("low 0\noom 3\noom_kill 2\noom_group_kill 1\n"), 2);
    }

    #[test]
    fn cores_are_taken_in_turn_from_those_allowed() {
        let set = |cores: &[usize]| {
            let mut set = CpuSet::new();
            cores.iter().for_each(|core| set.set(*core));
            set
        };
        let allowed = set(&[1, 3, 5]);
        assert_eq!(some_of(&allowed, 0, 1), set(&[1]));
        assert_eq!(some_of(&allowed, 2, 2), set(&[5, 1]));
        assert_eq!(some_of(&allowed, 7, 9), allowed);
    }
}
