use jiff::civil::date;

use super::*;

struct Case {
    folder: tempfile::TempDir,
    file: LogFile,
    now: Moment,
    news: Vec<String>,
}

impl Case {
    fn new(bytes: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let now = Moment {
            day: Timestamp::now()
                .to_zoned_datetime(TimeZone::system())
                .date(),
            instant: Instant::now(),
        };
        let mut file = LogFile::new(folder.path(), "ts_log", Limits { bytes, kept: 5 });
        file.open(now).unwrap();
        let news = Vec::new();
        Self {
            folder,
            file,
            now,
            news,
        }
    }

    fn write(&mut self, lines: &str) {
        let news = &mut self.news;
        self.file.write(lines.as_bytes(), self.now, |told| {
            let gap = match &told {
                News::WritableAgain { lost } => Some(format!("{lost} lost\n").into_bytes()),
                _ => None,
            };
            news.push(format!("{told:?}"));
            gap
        });
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.folder.path().join(name)).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

#[test]
fn a_full_file_is_followed_by_the_next_one_and_no_line_is_lost_or_cut() {
    let mut case = Case::new(10);
    let day = case.now.day.strftime("%d-%b").to_string();
    case.write("1111\n2222\n3333\n4444\n5555\n");
    case.write("a line longer than a whole file\n6\n");
    let aside = [
        case.text(&format!("ts_log.{day}.log")),
        case.text(&format!("ts_log.{day}.1.log")),
        case.text(&format!("ts_log.{day}.2.log")),
        case.text(&format!("ts_log.{day}.3.log")),
    ];
    assert_eq!(
        aside,
        [
            "1111\n2222\n",
            "3333\n4444\n",
            "5555\n",
            "a line longer than a whole file\n"
        ]
    );
    assert_eq!(case.text("ts_log.log"), "6\n");
    assert_eq!(case.news, ["Rolled"; 4]);
}

#[test]
fn a_new_day_begins_a_new_file_that_has_none_of_yesterday() {
    let mut case = Case::new(1000);
    let yesterday = case.now.day.strftime("%d-%b").to_string();
    case.write("old\n");
    case.now.day = case.now.day.tomorrow().unwrap();
    case.write("new\n");
    assert_eq!(case.text(&format!("ts_log.{yesterday}.log")), "old\n");
    assert_eq!(case.text("ts_log.log"), "new\n");
}

#[test]
fn a_file_of_an_earlier_day_is_put_aside_by_the_next_server() {
    let mut case = Case::new(1000);
    let path = case.folder.path().join("ts_log.log");
    fs::write(&path, "old\n").unwrap();
    let file = fs::OpenOptions::new().append(true).open(&path).unwrap();
    let then = TimeZone::system()
        .to_timestamp(date(2026, 2, 28).at(12, 0, 0, 0))
        .unwrap();
    let since = std::time::Duration::from_secs(then.as_second().unsigned_abs());
    file.set_modified(std::time::SystemTime::UNIX_EPOCH + since)
        .unwrap();
    case.file.open = None;
    case.write("new\n");
    assert_eq!(case.text("ts_log.28-Feb.log"), "old\n");
    assert_eq!(case.text("ts_log.log"), "new\n");
}

#[test]
fn a_file_that_was_moved_or_cut_by_others_is_followed() {
    let mut case = Case::new(1000);
    let path = case.folder.path().join("ts_log.log");
    case.write("1\n");
    fs::rename(&path, case.folder.path().join("moved")).unwrap();
    case.write("2\n");
    assert_eq!(
        (case.text("moved"), case.text("ts_log.log")),
        ("1\n".into(), "2\n".into())
    );
    fs::remove_file(&path).unwrap();
    case.write("3\n");
    fs::OpenOptions::new()
        .write(true)
        .truncate(true)
        .open(&path)
        .unwrap();
    case.write("4\n");
    assert_eq!(case.text("ts_log.log"), "4\n");
    fs::remove_dir_all(case.folder.path()).unwrap();
    case.write("5\n");
    assert_eq!(
        (case.text("ts_log.log"), case.names().len()),
        ("5\n".into(), 1)
    );
    assert_eq!(case.news, [""; 0]);
}

#[test]
fn what_a_file_did_not_take_is_counted_and_both_are_told_once() {
    let mut case = Case::new(1000);
    let path = case.folder.path().join("ts_log.log");
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    case.write("1\n2\n");
    case.write("3\n");
    assert_eq!(case.news.len(), 1, "{:?}", case.news);
    assert!(case.news[0].starts_with("Failing"), "{:?}", case.news);
    fs::remove_dir(&path).unwrap();
    case.write("4\n");
    case.now.instant += RETRY;
    case.write("5\n");
    assert_eq!(case.text("ts_log.log"), "4 lost\n5\n");
    assert_eq!(case.news[1..], ["WritableAgain { lost: 4 }"]);
}

#[test]
fn a_line_that_was_cut_is_ended() {
    let mut case = Case::new(1000);
    fs::write(case.folder.path().join("ts_log.log"), "half a li").unwrap();
    case.file.open = None;
    case.write("whole\n");
    assert_eq!(case.text("ts_log.log"), "half a li\nwhole\n");
}

#[test]
fn a_file_that_cannot_be_put_aside_goes_on() {
    let mut case = Case::new(4);
    let day = case.now.day.strftime("%d-%b").to_string();
    fs::create_dir_all(case.folder.path().join(format!("ts_log.{day}.log/x"))).unwrap();
    case.write("111\n");
    // The folder takes the first name, and counts as one that is put aside.
    case.write("222\n");
    assert_eq!(case.text(&format!("ts_log.{day}.1.log")), "111\n");
    assert_eq!(case.text("ts_log.log"), "222\n");
}
