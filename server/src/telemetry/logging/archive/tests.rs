use std::io::Read as _;
use std::time::Duration;

use super::*;

fn archives(folder: &std::path::Path, kept: usize) -> Archives {
    Archives {
        folder: folder.to_owned(),
        name: "ts_log",
        kept,
    }
}

fn write(folder: &std::path::Path, name: &str, age_hours: u64) {
    let path = folder.join(name);
    fs::write(&path, name).unwrap();
    let then = SystemTime::now() - Duration::from_secs(3600 * age_hours);
    let file = fs::OpenOptions::new().append(true).open(path).unwrap();
    file.set_modified(then).unwrap();
}

fn names(folder: &std::path::Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn old_files_are_compressed_and_only_the_newest_kept() {
    let folder = tempfile::tempdir().unwrap();
    for (name, age) in [
        ("ts_log.28-Feb.log", 50),
        ("ts_log.01-Mar.log.gz", 30),
        ("ts_log.01-Mar.1.log", 29),
        ("ts_log.02-Mar.log", 5),
        ("ts_log.log", 0),
        ("model_log.28-Feb.log.gz", 99),
        ("ts_log.notes.log", 99),
    ] {
        write(folder.path(), name, age);
    }
    let archives = archives(folder.path(), 3);
    archives.tidy().unwrap();
    let expected = [
        "model_log.28-Feb.log.gz",
        "ts_log.01-Mar.1.log.gz",
        "ts_log.01-Mar.log.gz",
        "ts_log.02-Mar.log.gz",
        "ts_log.log",
        "ts_log.notes.log",
    ];
    assert_eq!(names(folder.path()), expected);
    let file = fs::File::open(folder.path().join("ts_log.02-Mar.log.gz")).unwrap();
    let mut text = String::new();
    flate2::read::GzDecoder::new(file)
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text, "ts_log.02-Mar.log");
    // The age of what was compressed stays: the next one to go is the oldest.
    write(folder.path(), "ts_log.03-Mar.log", 1);
    archives.tidy().unwrap();
    assert!(!names(folder.path()).contains(&"ts_log.01-Mar.log.gz".to_owned()));
}

#[test]
fn a_second_file_of_a_day_gets_a_number_above_all_others() {
    let folder = tempfile::tempdir().unwrap();
    let archives = archives(folder.path(), 5);
    let day = jiff::civil::date(2026, 11, 30);
    for expected in [
        "ts_log.30-Nov.log",
        "ts_log.30-Nov.1.log",
        "ts_log.30-Nov.2.log",
    ] {
        fs::write(archives.live(), expected).unwrap();
        archives.put_aside(day).unwrap();
        assert_eq!(
            fs::read_to_string(folder.path().join(expected)).unwrap(),
            expected
        );
        archives.tidy().unwrap();
    }
    // What was deleted leaves no place for a newer one.
    fs::remove_file(folder.path().join("ts_log.30-Nov.log.gz")).unwrap();
    fs::write(archives.live(), "").unwrap();
    archives.put_aside(day).unwrap();
    assert!(names(folder.path()).contains(&"ts_log.30-Nov.3.log".to_owned()));
}

#[test]
fn what_cannot_be_compressed_stays_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "ts_log.30-Nov.log", 1);
    // The place of the unfinished file is taken, as by a disk that is full.
    fs::create_dir(folder.path().join("ts_log.30-Nov.log.gz.part")).unwrap();
    assert!(archives(folder.path(), 5).tidy().is_err());
    let text = fs::read_to_string(folder.path().join("ts_log.30-Nov.log")).unwrap();
    assert_eq!(text, "ts_log.30-Nov.log");
}
