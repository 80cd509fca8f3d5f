//! Which accelerators there are, and which of them this server may use. Found without a GPU library:
//! the server itself must start where there is none.

use std::path::Path;

/// The variable that CUDA's users limit devices with.
pub(crate) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// An accelerator of this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FoundDevice {
    /// `GPU-…`, where the driver tells it.
    pub(crate) uuid: Option<String>,
}

/// The NVIDIA devices of this machine: those that the driver tells of and that have a device file,
/// since a container may see more of the first than it may use.
pub(crate) fn find(proc_gpus: &Path, dev: &Path) -> Vec<FoundDevice> {
    let file_of = |minor: u32| dev.join(format!("nvidia{minor}"));
    let mut told: Vec<(u32, FoundDevice)> = fs_err::read_dir(proc_gpus)
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let text = fs_err::read_to_string(entry.ok()?.path().join("information")).ok()?;
            let value = |name: &str| {
                let (_, value) = text
                    .lines()
                    .filter_map(|line| line.split_once(':'))
                    .find(|(key, _)| key.trim() == name)?;
                Some(value.trim().to_owned())
            };
            let minor = value("Device Minor")?.parse().ok()?;
            let uuid = value("GPU UUID");
            Some((minor, FoundDevice { uuid }))
        })
        .filter(|(minor, _)| file_of(*minor).exists())
        .collect();
    if told.is_empty() {
        told = fs_err::read_dir(dev)
            .into_iter()
            .flatten()
            .filter_map(|entry| {
                let name = entry.ok()?.file_name().into_string().ok()?;
                let minor = name.strip_prefix("nvidia")?.parse().ok()?;
                Some((minor, FoundDevice::default()))
            })
            .collect();
    }
    told.sort_unstable_by_key(|(minor, _)| *minor);
    told.into_iter().map(|(_, device)| device).collect()
}

/// How many of the devices found a process sees under this value of [`VISIBLE`], by the rules of
/// CUDA. It sees them as 0, 1, …, whatever the value calls them.
pub(crate) fn visible(found: &[FoundDevice], value: Option<&str>) -> usize {
    let Some(value) = value else {
        return found.len();
    };
    let mut seen: Vec<usize> = Vec::new();
    for item in value.split(',').map(str::trim) {
        if item.starts_with("MIG-") {
            // A slice of a device; a process gets one, however many are named.
            return usize::from(!found.is_empty());
        }
        // The first that is none ends the list.
        let Some(index) = device(found, item) else {
            break;
        };
        if seen.contains(&index) {
            return 0;
        }
        seen.push(index);
    }
    seen.len()
}

/// The device that an index, or the beginning of a UUID, names.
fn device(found: &[FoundDevice], item: &str) -> Option<usize> {
    if let Ok(index) = item.parse::<usize>() {
        return (index < found.len()).then_some(index);
    }
    if !item.starts_with("GPU-") {
        return None;
    }
    let is_named = |device: &FoundDevice| {
        let uuid = device.uuid.as_deref();
        uuid.is_some_and(|uuid| uuid.starts_with(item))
    };
    let mut named = (0..found.len()).filter(|index| is_named(&found[*index]));
    named.next().filter(|_| named.next().is_none())
}

/// What the setting `devices` says: ids between commas, each once.
///
/// # Errors
/// What is no id, in a sentence.
pub(crate) fn parse_ids(text: &str) -> Result<Option<Vec<u32>>, String> {
    if text.trim().is_empty() {
        return Ok(None);
    }
    let mut ids = Vec::new();
    for item in text.split(',').map(str::trim) {
        let id = item
            .parse()
            .map_err(|_| format!("`{item}` is not the id of a device"))?;
        if ids.contains(&id) {
            return Err(format!("device `{id}` is there twice"));
        }
        ids.push(id);
    }
    Ok(Some(ids))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(devices: usize) -> Vec<FoundDevice> {
        let device = |number| FoundDevice {
            uuid: Some(format!("GPU-{number}f00-aa")),
        };
        (0..devices).map(device).collect()
    }

    /// PF-02.
    #[test]
    fn only_the_visible_devices_count() {
        let four = machine(4);
        for (value, seen) in [
            (None, 4),
            (Some("1"), 1),
            (Some(""), 0),
            (Some("-1"), 0),
            (Some("0,0"), 0),
            (Some("3, 1"), 2),
            (Some("0,1,2,3,4,5"), 4),
            (Some("0,9,1"), 1),
            (Some("0,-1,1"), 1),
            (Some("GPU-2f00-aa"), 1),
            (Some("GPU-2f,GPU-0"), 2),
            (Some("GPU-"), 0),
            (Some("GPU-beef"), 0),
            (Some("GPU-2f,GPU-2f00"), 0),
            (Some("MIG-1,MIG-2"), 1),
            (Some("none"), 0),
            (Some("NoDevFiles"), 0),
        ] {
            assert_eq!(visible(&four, value), seen, "{value:?}");
        }
        assert_eq!(visible(&[], Some("0")), 0);
        assert_eq!(visible(&[], Some("MIG-1")), 0);
        assert_eq!(visible(&[], None), 0);
    }

    #[test]
    fn devices_are_found_in_the_order_of_their_numbers() {
        let root = tempfile::tempdir().unwrap();
        let (proc_gpus, dev) = (root.path().join("gpus"), root.path().join("dev"));
        assert_eq!(find(&proc_gpus, &dev), []);
        fs_err::create_dir_all(&dev).unwrap();
        for file in ["nvidia1", "nvidia0", "nvidiactl", "nvidia-uvm", "null"] {
            fs_err::write(dev.join(file), "").unwrap();
        }
        assert_eq!(find(&proc_gpus, &dev), vec![FoundDevice::default(); 2]);
        // The third is not for this container.
        for (place, minor) in [("0000:01", 1), ("0000:02", 0), ("0000:03", 2)] {
            let folder = proc_gpus.join(place);
            fs_err::create_dir_all(&folder).unwrap();
            let text = format!("Model: \t H\nGPU UUID: \t GPU-{minor}\nDevice Minor: \t {minor}\n");
            fs_err::write(folder.join("information"), text).unwrap();
        }
        let uuids: Vec<_> = find(&proc_gpus, &dev)
            .into_iter()
            .filter_map(|device| device.uuid)
            .collect();
        assert_eq!(uuids, ["GPU-0", "GPU-1"]);
    }

    #[test]
    fn ids_are_read_or_refused() {
        assert_eq!(parse_ids(" "), Ok(None));
        assert_eq!(parse_ids("0, 3"), Ok(Some(vec![0, 3])));
        for text in ["x", "0,", "-1", "1,1", "0;1"] {
            assert!(parse_ids(text).is_err(), "{text}");
        }
    }
}
