//! A strict reader of Prometheus' text format 0.0.4, and of what TorchServe's form adds to it. Every
//! page of metrics that a test gets goes through it.

use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Labels by name.
pub(crate) type Labels = BTreeMap<String, String>;

/// A page that was read.
#[derive(Debug, Default)]
pub struct Page {
    /// Types by family.
    pub types: BTreeMap<String, String>,
    /// Values by the name and the labels of their sample.
    pub samples: BTreeMap<(String, BTreeMap<String, String>), f64>,
}

#[derive(Default)]
struct Reader {
    page: Page,
    /// Families that have ended.
    ended: BTreeSet<String>,
    family: String,
    helped: bool,
    typed: bool,
    filled: bool,
    /// Buckets in the order of the page, by the labels but `le`.
    buckets: HashMap<Labels, Vec<(f64, f64)>>,
}

impl Page {
    /// Reads a page.
    ///
    /// # Errors
    /// What is wrong with it, and where.
    pub fn parse(text: &str) -> Result<Self, String> {
        if !text.is_empty() && !text.ends_with('\n') {
            return Err("the last line does not end".to_owned());
        }
        let mut reader = Reader::default();
        for (number, line) in text.lines().enumerate() {
            reader
                .take(line)
                .map_err(|reason| format!("line {}: {reason}: {line}", number + 1))?;
        }
        reader.end_family()?;
        Ok(reader.page)
    }

    /// The value of the only sample of this name that has these labels among its own.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let mut found = self.samples.iter().filter(|((sample, all), _)| {
            let has = |(name, value): &(&str, &str)| all.get(*name).is_some_and(|v| v == value);
            sample == name && labels.iter().all(has)
        });
        let value = found.next().map(|(_, value)| *value);
        assert!(
            found.next().is_none(),
            "more than one `{name}` with {labels:?}"
        );
        value
    }

    /// How many samples have this label.
    pub fn labelled(&self, label: &str, value: &str) -> usize {
        let labels = self.samples.keys().map(|(_, labels)| labels);
        labels
            .filter(|labels| labels.get(label).is_some_and(|found| found == value))
            .count()
    }
}

impl Reader {
    fn take(&mut self, line: &str) -> Result<(), String> {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').ok_or("a HELP without text")?;
            self.begin_family(name)?;
            unescape(help, false)?;
            self.helped = true;
            return Ok(());
        }
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or("a TYPE without a type")?;
            if name != self.family || !self.helped || self.typed || self.filled {
                return Err("TYPE has to stand once between HELP and the samples".to_owned());
            }
            if !["counter", "gauge", "histogram"].contains(&kind) {
                return Err("an unknown type".to_owned());
            }
            self.typed = true;
            self.page.types.insert(name.to_owned(), kind.to_owned());
            return Ok(());
        }
        if line.is_empty() || line.starts_with('#') {
            return Err("a line that says nothing".to_owned());
        }
        self.sample(line)
    }

    fn begin_family(&mut self, name: &str) -> Result<(), String> {
        self.end_family()?;
        if !is_name(name, true) {
            return Err("no name of a metric".to_owned());
        }
        if self.ended.contains(name) {
            return Err("a family in two places, or two HELP of one".to_owned());
        }
        if self
            .ended
            .iter()
            .next_back()
            .is_some_and(|last| last.as_str() > name)
        {
            return Err("families are not in order".to_owned());
        }
        name.clone_into(&mut self.family);
        (self.helped, self.typed, self.filled) = (false, false, false);
        Ok(())
    }

    fn end_family(&mut self) -> Result<(), String> {
        if self.family.is_empty() {
            return Ok(());
        }
        let family = std::mem::take(&mut self.family);
        if !self.filled {
            return Err(format!("`{family}` has no samples"));
        }
        for (labels, buckets) in self.buckets.drain() {
            let bounds = buckets.windows(2).all(|two| two[0].0 < two[1].0);
            let sums = buckets.windows(2).all(|two| two[0].1 <= two[1].1);
            let Some((bound, last)) = buckets.last() else {
                continue;
            };
            if !bounds || !sums || *bound != f64::INFINITY {
                return Err(format!(
                    "buckets of `{family}` are not cumulative: {buckets:?}"
                ));
            }
            let of = |ending: &str| {
                let key = (format!("{family}{ending}"), labels.clone());
                self.page.samples.get(&key)
            };
            // A page of some names may have the buckets alone.
            if of("_count").is_some_and(|count| count != last) {
                return Err(format!("`{family}`: `+Inf` is not the count"));
            }
            if of("_count").is_some() != of("_sum").is_some() {
                return Err(format!("`{family}` has a sum or a count alone"));
            }
        }
        self.ended.insert(family);
        Ok(())
    }

    fn sample(&mut self, line: &str) -> Result<(), String> {
        let end = line.find(['{', ' ']).ok_or("no value")?;
        let name = &line[..end];
        let (mut labels, rest) = match line[end..].strip_prefix('{') {
            Some(rest) => read_labels(rest)?,
            None => (Labels::new(), &line[end..]),
        };
        let value = rest.strip_prefix(' ').ok_or("no blank before the value")?;
        let point = value.contains('.') || ["NaN", "+Inf", "-Inf"].contains(&value);
        let value: f64 = value.parse().map_err(|_| "no number")?;
        if !point {
            return Err("a value without a point".to_owned());
        }
        let Some(ending) = name
            .strip_prefix(self.family.as_str())
            .filter(|_| self.typed)
        else {
            return Err(format!("it stands among `{}`", self.family));
        };
        let kind = self.page.types.get(&self.family).map_or("", String::as_str);
        match (kind, ending) {
            ("histogram", "_bucket" | "_sum" | "_count") | ("gauge", "") => {}
            ("counter", "") if value >= 0.0 => {}
            _ => return Err(format!("no sample of a {kind}")),
        }
        let key = (name.to_owned(), labels.clone());
        if self.page.samples.insert(key, value).is_some() {
            return Err("a sample twice".to_owned());
        }
        if ending == "_bucket" && kind == "histogram" {
            let bound = labels.remove("le").ok_or("a bucket without a bound")?;
            let bound = bound.parse().map_err(|_| "a bound that is no number")?;
            self.buckets.entry(labels).or_default().push((bound, value));
        } else if labels.contains_key("le") {
            return Err("a bound of no bucket".to_owned());
        }
        self.filled = true;
        Ok(())
    }
}

/// Reads what follows a `{`; returns what follows its `}`.
fn read_labels(text: &str) -> Result<(Labels, &str), String> {
    let mut labels = Labels::new();
    let mut rest = text;
    loop {
        if let Some(after) = rest.strip_prefix('}') {
            return Ok((labels, after));
        }
        let (name, after) = rest.split_once("=\"").ok_or("a label without a value")?;
        if !is_name(name, false) {
            return Err(format!("`{name}` is no name of a label"));
        }
        let mut escaped = false;
        let end = after.find(|c| {
            let ends = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            ends
        });
        let (value, after) = after.split_at(end.ok_or("a value that does not end")?);
        if labels
            .insert(name.to_owned(), unescape(value, true)?)
            .is_some()
        {
            return Err(format!("the label `{name}` twice"));
        }
        rest = &after[1..];
        // TorchServe's library ends each label with one.
        rest = rest.strip_prefix(',').ok_or("no comma after a label")?;
    }
}

fn is_name(name: &str, colon: bool) -> bool {
    let fits = |(at, c): (usize, char)| {
        c.is_ascii_alphabetic() || c == '_' || (colon && c == ':') || (at > 0 && c.is_ascii_digit())
    };
    !name.is_empty() && name.char_indices().all(fits)
}

fn unescape(text: &str, quotes: bool) -> Result<String, String> {
    let mut plain = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match (c, quotes) {
            ('\\', _) => match (chars.next(), quotes) {
                (Some('\\'), _) => plain.push('\\'),
                (Some('n'), _) => plain.push('\n'),
                (Some('"'), true) => plain.push('"'),
                _ => return Err("an unknown escape".to_owned()),
            },
            (c, _) => plain.push(c),
        }
    }
    Ok(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "# HELP a A \\\\ b\n# TYPE a counter\na{x=\"1\\\"\\\\\\n,}\",y=\"é\",} 1.0\n\
        a{x=\"2\",} 1.5E9\n# HELP h H\n# TYPE h histogram\nh_bucket{le=\"0.5\",} 1.0\n\
        h_bucket{le=\"+Inf\",} 2.0\nh_sum 3.0\nh_count 2.0\n";

    #[test]
    fn a_good_page_is_read() {
        let page = Page::parse(GOOD).unwrap();
        assert_eq!(
            page.value("a", &[("x", "1\"\\\n,}"), ("y", "é")]),
            Some(1.0)
        );
        assert_eq!(page.value("h_count", &[]), Some(2.0));
        assert_eq!(page.labelled("x", "2"), 1);
        assert!(Page::parse("").is_ok());
    }

    #[test]
    fn each_rule_is_kept() {
        for (from, to) in [
            ("h_count 2.0\n", "h_count 2.0"),
            ("1.5E9", "15"),
            ("1.5E9", "x.5"),
            ("1.5E9", "-1.5"),
            ("x=\"2\",", "x=\"2\""),
            ("x=\"2\",", "x=\"2\",x=\"3\","),
            ("x=\"2\",", "x=\"1\\\"\\\\\\n,}\",y=\"é\","),
            ("x=\"2\",", "2=\"2\","),
            ("x=\"2\",", "x=\"\\t\","),
            ("x=\"2\",", "le=\"2\","),
            ("a{x=\"2\",}", "b{x=\"2\",}"),
            ("# TYPE a counter\n", ""),
            ("# HELP a A \\\\ b\n", ""),
            ("# TYPE a counter\n", "# TYPE a counter\n# TYPE a counter\n"),
            ("# TYPE a counter\n", "# TYPE a summary\n"),
            ("# HELP h H\n", "\n# HELP h H\n"),
            ("# HELP h H\n", "# HELP a H\n"),
            ("# HELP a A", "# HELP z A"),
            ("h_bucket{le=\"0.5\",} 1.0", "h_bucket{le=\"0.5\",} 3.0"),
            ("h_bucket{le=\"+Inf\",} 2.0\n", ""),
            ("h_count 2.0", "h_count 3.0"),
            ("h_sum 3.0\n", ""),
            ("h_sum 3.0\n", "h_sum 3.0\nh 3.0\n"),
            (
                "h_sum 3.0\nh_count 2.0\n",
                "h_sum 3.0\nh_count 2.0\n# HELP i I\n# TYPE i gauge\n",
            ),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let bad = GOOD.replacen(from, to, 1);
            assert!(Page::parse(&bad).is_err(), "{bad}");
        }
    }
}
