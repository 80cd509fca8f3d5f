//! A log4j2 configuration, as far as it says what is logged: the levels of its loggers become the
//! filter where none is set. Where lines go and how they look is settled by other settings.

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

use super::raw::{DEFAULT, Raw, Written};

/// Bytes of a file at most.
const MAX_BYTES: u64 = 1 << 20;

/// The options of Java that name the file.
const OPTIONS: [&str; 2] = ["-Dlog4j.configurationFile=", "-Dlog4j2.configurationFile="];

/// Loggers of TorchServe's own classes are those of this server.
const JAVA_PACKAGE: &str = "org.pytorch.serve";
const OWN_TARGETS: [&str; 3] = ["ts_server", "ts_serving", "ts_archive"];

/// Loggers that have the same names here.
const SHARED: [&str; 4] = ["ACCESS_LOG", "MODEL_LOG", "TS_METRICS", "MODEL_METRICS"];

/// What a file says that counts, and what does not.
#[derive(Debug, Default, PartialEq, Eq)]
struct Levels {
    root: Option<&'static str>,
    /// By target.
    targets: Vec<(String, &'static str)>,
    ignored: Vec<String>,
}

/// Reads the file that is named, by the option or else in `vmargs`, and puts its levels in the
/// place of a filter that nobody has set.
pub(super) fn apply(named: Option<&Path>, raw: &mut Raw) {
    let vmargs = raw.values.get("vmargs").map(|written| written.text.clone());
    let (path, origin) = match (named, vmargs.as_deref().and_then(file_in)) {
        (Some(path), _) => (path.to_owned(), "--log-config"),
        (None, Some(path)) => (path, "vmargs"),
        (None, None) => return,
    };
    let shown = path.display();
    let levels = match read(&path).and_then(|text| parse(&text)) {
        Ok(levels) => levels,
        Err(reason) => {
            raw.notices.push(format!(
                "`{shown}` ({origin}) is ignored: {reason}. What is logged is set by `log_filter`"
            ));
            return;
        }
    };
    let is_set = raw
        .values
        .get("log_filter")
        .is_some_and(|written| written.origin != DEFAULT);
    let filter = levels.filter();
    let mut told = match (&filter, is_set) {
        (Some(_), true) => {
            format!("the levels in `{shown}` ({origin}) are overruled by `log_filter`")
        }
        (Some(filter), false) => {
            format!("levels of loggers are read from `{shown}` ({origin}): `{filter}`")
        }
        (None, _) => format!("`{shown}` ({origin}) has no level of a logger that is one here"),
    };
    if !levels.ignored.is_empty() {
        let _infallible = write!(
            told,
            "; ignored: {}. Files and their form are set by `LOG_LOCATION`, `METRICS_LOCATION`, \
             `log_format` and `log_file_size`",
            levels.ignored.join(", ")
        );
    }
    raw.notices.push(told);
    if let (Some(text), false) = (filter, is_set) {
        let origin = format!("{origin} {shown}");
        raw.values.insert("log_filter", Written { text, origin });
    }
}

/// Whether options of Java name such a file and say nothing else.
pub(super) fn is_all_of(vmargs: &str) -> bool {
    let mut options = vmargs.split_whitespace();
    file_in(vmargs).is_some()
        && options.all(|option| OPTIONS.iter().any(|of| option.starts_with(of)))
}

fn file_in(vmargs: &str) -> Option<PathBuf> {
    let options = vmargs.split_whitespace();
    let mut named =
        options.filter_map(|option| OPTIONS.iter().find_map(|of| option.strip_prefix(of)));
    let path = named.next_back()?;
    let path = path
        .strip_prefix("file://")
        .or_else(|| path.strip_prefix("file:"))
        .unwrap_or(path);
    Some(PathBuf::from(path))
}

fn read(path: &Path) -> Result<String, String> {
    let file = fs_err::File::open(path).map_err(|error| error.to_string())?;
    let mut bytes = Vec::new();
    let read = file.take(MAX_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(format!("it has more than {MAX_BYTES} bytes"));
    }
    String::from_utf8(bytes).map_err(|_| "it is not UTF-8".to_owned())
}

fn parse(text: &str) -> Result<Levels, String> {
    let mut reader = Reader::from_str(text);
    let mut levels = Levels::default();
    let mut has_root = false;
    loop {
        let (element, is_empty) = match reader.read_event() {
            Ok(Event::Start(element)) => (element, false),
            Ok(Event::Empty(element)) => (element, true),
            Ok(Event::Eof) if has_root => return Ok(levels),
            Ok(Event::Eof) => return Err("it is no XML".to_owned()),
            Ok(_) => continue,
            Err(error) => return Err(format!("it is no XML: {error}")),
        };
        has_root = true;
        let name = String::from_utf8_lossy(element.name().as_ref()).to_ascii_lowercase();
        match name.as_str() {
            "configuration" | "loggers" => {}
            "logger" | "asynclogger" | "root" | "asyncroot" => {
                levels.add(name.ends_with("root"), &element);
                // Its references to appenders and filters.
                skip(&mut reader, &element, is_empty)?;
            }
            _ => {
                levels.ignored.push(format!("`{}`", shown(&name)));
                skip(&mut reader, &element, is_empty)?;
            }
        }
    }
}

fn skip(
    reader: &mut Reader<&[u8]>,
    element: &BytesStart<'_>,
    is_empty: bool,
) -> Result<(), String> {
    if is_empty {
        return Ok(());
    }
    let skipped = reader.read_to_end(element.name());
    skipped
        .map(drop)
        .map_err(|error| format!("it is no XML: {error}"))
}

impl Levels {
    fn add(&mut self, is_root: bool, element: &BytesStart<'_>) {
        let text = |wanted: &str| {
            let attributes = element.attributes().flatten();
            let mut named =
                attributes.filter(|one| one.key.as_ref().eq_ignore_ascii_case(wanted.as_bytes()));
            named
                .next()
                .map(|one| String::from_utf8_lossy(&one.value).trim().to_owned())
        };
        let name = text("name").unwrap_or_default();
        let written = text("level");
        let level = match written.as_deref().map(str::to_ascii_lowercase).as_deref() {
            Some("off") => "off",
            Some("fatal" | "error") => "error",
            Some("warn") => "warn",
            Some("info") => "info",
            Some("debug") => "debug",
            Some("trace" | "all") => "trace",
            // It takes that of the one above it.
            None => return,
            Some(_) => {
                let written = written.unwrap_or_default();
                self.ignored.push(format!("level `{}`", shown(&written)));
                return;
            }
        };
        if is_root || name.is_empty() {
            self.root = Some(level);
        } else if SHARED.contains(&name.as_str()) {
            self.targets.push((name, level));
        } else if name == JAVA_PACKAGE {
            let own = OWN_TARGETS
                .iter()
                .map(|target| ((*target).to_owned(), level));
            self.targets.extend(own);
        } else {
            self.ignored.push(format!("logger `{}`", shown(&name)));
        }
    }

    fn filter(&self) -> Option<String> {
        if self.root.is_none() && self.targets.is_empty() {
            return None;
        }
        let mut filter = self.root.unwrap_or("info").to_owned();
        for (target, level) in &self.targets {
            let _infallible = write!(filter, ",{target}={level}");
        }
        Some(filter)
    }
}

fn shown(text: &str) -> String {
    text.chars().take(60).flat_map(char::escape_debug).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const USUAL: &str = r#"<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
  <!-- as people write it -->
  <Appenders><RollingFile name="f" fileName="${env:LOG_LOCATION:-logs}/x.log">
    <PatternLayout pattern="%d{ISO8601} - %m%n"/></RollingFile></Appenders>
  <Loggers>
    <Logger name="ACCESS_LOG" level="warn"><AppenderRef ref="f"/></Logger>
    <AsyncLogger name="org.pytorch.serve" level="DEBUG"/>
    <Logger name="io.netty" level="error"/>
    <Logger name="MODEL_LOG" level="${env:LEVEL:-info}"/>
    <Root level="ERROR"><AppenderRef ref="f"/></Root>
  </Loggers>
</Configuration>"#;

    #[test]
    fn levels_become_the_filter_and_all_else_is_named() {
        let levels = parse(USUAL).unwrap();
        assert_eq!(
            levels.filter().unwrap(),
            "error,ACCESS_LOG=warn,ts_server=debug,ts_serving=debug,ts_archive=debug"
        );
        assert_eq!(
            levels.ignored,
            [
                "`appenders`",
                "logger `io.netty`",
                "level `${env:LEVEL:-info}`"
            ]
        );
    }

    #[test]
    fn what_is_no_xml_is_told_and_nothing_panics() {
        for text in [
            "",
            "status = warn",
            "<a",
            "<a></b>",
            "<Configuration><Loggers>",
        ] {
            let parsed = parse(text);
            assert!(
                parsed.as_ref().is_err() || parsed.as_ref().unwrap().filter().is_none(),
                "{text}: {parsed:?}"
            );
        }
        let entities = r#"<!DOCTYPE c [<!ENTITY e SYSTEM "file:///etc/passwd">]>
            <Configuration><Loggers><Root level="&e;"/></Loggers></Configuration>"#;
        assert_eq!(parse(entities).unwrap().filter(), None);
    }

    #[test]
    fn the_file_may_stand_among_the_options_of_java() {
        assert_eq!(
            file_in("-Xmx1g -Dlog4j.configurationFile=file:///a/b.xml"),
            Some(PathBuf::from("/a/b.xml"))
        );
        assert!(is_all_of("-Dlog4j.configurationFile=x.xml"));
        assert!(!is_all_of("-Xmx1g -Dlog4j.configurationFile=x.xml") && !is_all_of("-Xmx1g"));
    }

    #[test]
    fn a_filter_that_is_set_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log4j2.xml");
        fs_err::write(&path, USUAL).unwrap();
        for (origin, expected) in [(DEFAULT, "error,ACCESS_LOG=warn"), ("a file", "debug")] {
            let mut raw = Raw::default();
            let text = "debug".to_owned();
            let origin = origin.to_owned();
            raw.values.insert("log_filter", Written { text, origin });
            apply(Some(&path), &mut raw);
            let filter = &raw.values["log_filter"];
            assert!(filter.text.starts_with(expected), "{filter:?}");
            assert_eq!(raw.notices.len(), 1);
            assert!(
                raw.notices[0].contains("logger `io.netty`"),
                "{:?}",
                raw.notices
            );
        }
    }
}
