//! What a Python file defines at its top level, found by reading it as text.
//!
//! Good enough to tell a missing handler or two candidate classes at packing time, without Python.
//! It follows strings, brackets and indentation; what is made at run time it cannot see, and says
//! so through [`Outline::is_open`].

/// The top-level names of a Python file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outline {
    /// Functions defined in the file.
    pub functions: Vec<String>,
    /// Classes defined in the file. Imported ones do not count, as in the server.
    pub classes: Vec<String>,
    /// Names that are assigned or imported.
    pub other_names: Vec<String>,
    /// Whether names may exist that reading cannot find (`from x import *`).
    pub is_open: bool,
}

impl Outline {
    /// Reads a file.
    pub fn of(source: &str) -> Self {
        let mut outline = Self::default();
        // Indentations of the functions and classes around the current line.
        let mut inside: Vec<usize> = Vec::new();
        for statement in statements(source) {
            while inside
                .last()
                .is_some_and(|indent| statement.indent <= *indent)
            {
                inside.pop();
            }
            let defines = outline.note(&statement.text, inside.is_empty());
            if defines {
                inside.push(statement.indent);
            }
        }
        outline
    }

    /// Whether the module has an attribute of this name, as far as can be told.
    pub fn has(&self, name: &str) -> bool {
        self.is_open
            || [&self.functions, &self.classes, &self.other_names]
                .iter()
                .any(|names| names.iter().any(|known| known == name))
    }

    /// Notes what a statement defines if it `counts`, and tells whether it opens a function or
    /// class.
    fn note(&mut self, text: &str, counts: bool) -> bool {
        let text = text.strip_prefix("async ").map_or(text, str::trim_start);
        for (keyword, names) in [("def ", &mut self.functions), ("class ", &mut self.classes)] {
            if let Some(rest) = text.strip_prefix(keyword) {
                let name = identifier(rest.trim_start());
                if counts && !name.is_empty() && !names.iter().any(|known| known == name) {
                    names.push(name.to_owned());
                }
                return true;
            }
        }
        if counts {
            self.note_binding(text);
        }
        false
    }

    fn note_binding(&mut self, text: &str) {
        if let Some(rest) = text.strip_prefix("from ") {
            let Some((_, names)) = rest.split_once(" import ") else {
                return;
            };
            let names = names.trim().trim_start_matches('(').trim_end_matches(')');
            if names.trim() == "*" {
                self.is_open = true;
            }
            self.note_imports(names, false);
        } else if let Some(rest) = text.strip_prefix("import ") {
            self.note_imports(rest, true);
        } else {
            let name = identifier(text);
            let rest = text[name.len()..].trim_start();
            let assigns = rest.starts_with('=') && !rest.starts_with("==");
            if !name.is_empty() && (assigns || rest.starts_with(':') && rest.contains('=')) {
                self.other_names.push(name.to_owned());
            }
        }
    }

    fn note_imports(&mut self, names: &str, modules: bool) {
        for item in names.split(',') {
            let item = item.trim();
            let bound = match item.split_once(" as ") {
                Some((_, alias)) => alias.trim(),
                None if modules => identifier(item),
                None => item,
            };
            let name = identifier(bound);
            if !name.is_empty() {
                self.other_names.push(name.to_owned());
            }
        }
    }
}

/// The identifier that `text` begins with, if any.
fn identifier(text: &str) -> &str {
    let end = text
        .char_indices()
        .find(|(at, character)| {
            !(*character == '_'
                || character.is_alphabetic()
                || (*at > 0 && character.is_alphanumeric()))
        })
        .map_or(text.len(), |(at, _)| at);
    &text[..end]
}

/// Whether `text` is one Python identifier.
pub fn is_identifier(text: &str) -> bool {
    !text.is_empty() && identifier(text) == text
}

/// A logical line: comments and the insides of strings left out, continued lines joined.
struct Statement {
    indent: usize,
    text: String,
}

fn statements(source: &str) -> Vec<Statement> {
    let mut found = Vec::new();
    let mut characters = source
        .strip_prefix('\u{feff}')
        .unwrap_or(source)
        .chars()
        .peekable();
    let mut text = String::new();
    let mut depth = 0_usize;
    while let Some(character) = characters.next() {
        match character {
            '#' => while characters.next_if(|next| *next != '\n').is_some() {},
            '\'' | '"' => {
                text.push_str("\"\"");
                skip_string(&mut characters, character);
            }
            '\\' if characters.peek() == Some(&'\n') => {
                characters.next();
                text.push(' ');
            }
            '\\' if characters.peek() == Some(&'\r') => {
                characters.next();
                characters.next_if_eq(&'\n');
                text.push(' ');
            }
            '\n' | '\r' if depth > 0 => text.push(' '),
            '\n' | '\r' => finish(&mut text, &mut found),
            _ => {
                match character {
                    '(' | '[' | '{' => depth += 1,
                    ')' | ']' | '}' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                text.push(character);
            }
        }
    }
    finish(&mut text, &mut found);
    found
}

/// Ends a logical line. `a; b` on one line are two statements.
fn finish(text: &mut String, found: &mut Vec<Statement>) {
    let indent = text
        .chars()
        .take_while(|character| matches!(character, ' ' | '\t' | '\u{c}'))
        .fold(0, |column, character| {
            if character == '\t' {
                column / 8 * 8 + 8
            } else {
                column + 1
            }
        });
    for part in text.split(';') {
        let part = part.trim();
        if !part.is_empty() {
            found.push(Statement {
                indent,
                text: part.to_owned(),
            });
        }
    }
    text.clear();
}

/// Moves past a string whose first quote was read. A prefix such as `r` changes nothing here: even
/// in a raw string a quote after a backslash does not end it.
fn skip_string(characters: &mut std::iter::Peekable<std::str::Chars<'_>>, quote: char) {
    let mut triple = false;
    if characters.next_if_eq(&quote).is_some() {
        if characters.next_if_eq(&quote).is_none() {
            return;
        }
        triple = true;
    }
    let mut run = 0;
    while let Some(character) = characters.next() {
        if character == '\\' {
            characters.next();
            run = 0;
        } else if character == quote {
            run += 1;
            if !triple || run == 3 {
                return;
            }
        } else if character == '\n' && !triple {
            return;
        } else {
            run = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outline(source: &str) -> (Vec<String>, Vec<String>) {
        let outline = Outline::of(source);
        (outline.functions, outline.classes)
    }

    #[test]
    fn only_the_top_level_counts() {
        let source = "
import os
from ts.torch_handler.base_handler import BaseHandler as Base, other

@decorated(
    'class Fake:'
)
class MyHandler(Base):
    '''class InDoc:'''
    class Inner: pass
    def handle(self, data, context):
        def nested(): pass

    x = 1
async  def handle(data, context): return data
def _helper(): pass
";
        let found = Outline::of(source);
        assert_eq!(found.classes, ["MyHandler"]);
        assert_eq!(found.functions, ["handle", "_helper"]);
        assert_eq!(found.other_names, ["os", "Base", "other"]);
        assert!(found.has("Base") && !found.has("BaseHandler") && !found.has("Inner"));
    }

    #[test]
    fn text_that_looks_like_code_is_not_code() {
        let source = r#"
"""
class InString:
def f(): pass
"""
x = r'\' ; y = "\"\"\"class No:"
s = """a "quoted" ""
class No2:
"""
# class Comment:
call(
class_=1,
)
y = 1 \
class_
class Real: pass
"#;
        assert_eq!(outline(source), (vec![], vec!["Real".to_owned()]));
    }

    #[test]
    fn blocks_that_are_not_functions_belong_to_the_top_level() {
        let source = "try:\n  class A: pass\nexcept ImportError:\n  class A: pass\n\
                      if True:\n\tdef handle(d, c):\n\t\tclass B: pass\n\tclass C: pass\n";
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        assert_eq!(outline(source), (names(&["handle"]), names(&["A", "C"])));
    }

    #[test]
    fn assigned_and_starred_names_are_seen() {
        let found = Outline::of("_s = H()\nhandle = _s.handle\nn: int = 3\nif x == 2: pass\n");
        assert!(found.has("handle") && found.has("n") && !found.has("x"));
        assert!(Outline::of("from m import *\n").has("anything"));
        assert!(Outline::of("from m import (\n    a,\n    b as handle,\n)\n").has("handle"));
    }

    #[test]
    fn broken_files_end() {
        for source in [
            "'''",
            "\"",
            "class",
            "def ",
            "(((",
            "\\",
            "class A",
            "\u{feff}class B:\r\n",
        ] {
            Outline::of(source);
        }
        assert_eq!(
            outline("\u{feff}class B:\r\n  x=1\r\nclass C:\r\n").1,
            ["B", "C"]
        );
    }
}
