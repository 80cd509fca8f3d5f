//! The description of a listener as a page to read: one file, no script, nothing fetched.

use std::fmt::Write as _;

use serde_json::Value;

const STYLE: &str = "\
:root{color-scheme:light dark}\
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}\
h2{margin-top:2.5rem}\
details{border:1px solid #8886;border-radius:.4rem;margin:.5rem 0;padding:.4rem .8rem}\
summary{cursor:pointer}\
code{font:14px ui-monospace,monospace}\
.method{display:inline-block;min-width:5rem;font-weight:600;text-transform:uppercase}\
.deprecated{text-decoration:line-through}\
table{border-collapse:collapse;width:100%;margin:.5rem 0}\
th,td{text-align:left;vertical-align:top;border-top:1px solid #8884;padding:.25rem .5rem}";

/// The page of an OpenAPI document.
pub(crate) fn page(document: &Value) -> String {
    let mut page = String::with_capacity(32 << 10);
    let title = text(&document["info"]["title"]);
    let version = text(&document["info"]["version"]);
    let summary = text(&document["info"]["summary"]);
    page.push_str("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">");
    page.push_str("<meta name=\"viewport\" content=\"width=device-width\">");
    push(&mut page, format_args!("<title>{title} {version}</title>"));
    push(
        &mut page,
        format_args!("<style>{STYLE}</style></head><body>\n"),
    );
    push(
        &mut page,
        format_args!("<h1>{title} {version}</h1>\n<p>{summary}. "),
    );
    page.push_str("For programs: <a href=\"/openapi.json\">openapi.json</a>.</p>\n");
    let operations = || {
        let paths = document["paths"].as_object().into_iter().flatten();
        paths.flat_map(|(path, methods)| {
            let methods = methods.as_object().into_iter().flatten();
            methods.map(move |(method, operation)| (path, method, operation))
        })
    };
    let mut tags: Vec<&str> = Vec::new();
    for (_, _, operation) in operations() {
        let tag = tag_of(operation);
        if !tags.contains(&tag) {
            tags.push(tag);
        }
    }
    for tag in tags {
        push(&mut page, format_args!("<h2>{}</h2>\n", escaped(tag)));
        for (path, method, operation) in operations().filter(|(_, _, one)| tag_of(one) == tag) {
            push_operation(&mut page, path, method, operation);
        }
    }
    page.push_str("</body></html>\n");
    page
}

fn tag_of(operation: &Value) -> &str {
    operation["tags"][0].as_str().unwrap_or_default()
}

fn push_operation(page: &mut String, path: &str, method: &str, operation: &Value) {
    let class = if operation["deprecated"] == true {
        " class=\"deprecated\""
    } else {
        ""
    };
    push(
        page,
        format_args!(
            "<details id=\"{}\"><summary><span class=\"method\">{}</span> <code{class}>{}</code> \
             {}</summary>\n",
            text(&operation["operationId"]),
            escaped(method),
            escaped(path),
            text(&operation["summary"]),
        ),
    );
    if let Some(description) = operation["description"].as_str() {
        push(page, format_args!("<p>{}</p>\n", escaped(description)));
    }
    if operation["security"].is_array() {
        page.push_str("<p>Needs a token: <code>Authorization: Bearer …</code></p>\n");
    }
    let parameters = operation["parameters"].as_array();
    if let Some(parameters) = parameters {
        page.push_str("<table><tr><th>parameter</th><th>in</th><th>type</th><th></th></tr>\n");
        for parameter in parameters {
            let star = if parameter["required"] == true {
                " *"
            } else {
                ""
            };
            push(
                page,
                format_args!(
                    "<tr><td><code>{}</code>{star}</td><td>{}</td><td>{}</td><td>{}</td></tr>\n",
                    text(&parameter["name"]),
                    text(&parameter["in"]),
                    kind_of(&parameter["schema"]),
                    text(&parameter["description"]),
                ),
            );
        }
        page.push_str("</table>\n");
    }
    if let Some(description) = operation["requestBody"]["description"].as_str() {
        push(
            page,
            format_args!("<p>Body: {}</p>\n", escaped(description)),
        );
    }
    page.push_str("<table><tr><th>answer</th><th>type</th><th></th></tr>\n");
    for (status, response) in operation["responses"].as_object().into_iter().flatten() {
        let kinds = response["content"].as_object().into_iter().flatten();
        let kinds: Vec<_> = kinds.map(|(kind, _)| escaped(kind)).collect();
        push(
            page,
            format_args!(
                "<tr><td>{}</td><td>{}</td><td>{}</td></tr>\n",
                escaped(status),
                kinds.join(", "),
                text(&response["description"]),
            ),
        );
    }
    page.push_str("</table></details>\n");
}

fn kind_of(schema: &Value) -> String {
    match schema["enum"].as_array() {
        Some(values) => values.iter().map(text).collect::<Vec<_>>().join(", "),
        None => text(&schema["type"]),
    }
}

fn text(value: &Value) -> String {
    escaped(value.as_str().unwrap_or_default())
}

/// As it may stand between tags and in quoted attributes.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

fn push(page: &mut String, arguments: std::fmt::Arguments<'_>) {
    let _never_fails = page.write_fmt(arguments);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nothing_in_a_document_can_become_markup() {
        const EVIL: &str = "</title><script>alert('1')</script>\"&";
        let page = page(&json!({
            "info": { "title": EVIL, "version": EVIL, "summary": EVIL },
            "paths": { EVIL: { EVIL: {
                "operationId": EVIL, "summary": EVIL, "description": EVIL, "tags": [EVIL],
                "parameters": [{ "name": EVIL, "in": EVIL, "description": EVIL,
                                 "schema": { "type": EVIL, "enum": [EVIL] } }],
                "requestBody": { "description": EVIL },
                "responses": { EVIL: { "description": EVIL, "content": { EVIL: {} } } },
            } } },
        }));
        assert!(
            !page.contains("<script") && !page.contains("('1')"),
            "{page}"
        );
        assert_eq!(page.matches("</title>").count(), 1);
        assert!(page.contains("&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&quot;&amp;"));
    }
}
