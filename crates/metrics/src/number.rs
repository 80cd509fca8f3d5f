//! Numbers as Java writes a double, which is what TorchServe's pages and lines have.

use std::fmt::Write as _;

/// Appends a value: `1.0`, `1.234E7`, `NaN`, `+Inf`.
pub(crate) fn push(text: &mut String, value: f64) {
    if value.is_nan() {
        text.push_str("NaN");
    } else if value.is_infinite() {
        text.push_str(if value > 0.0 { "+Inf" } else { "-Inf" });
    } else if value == 0.0 || (1e-3..1e7).contains(&value.abs()) {
        // The shortest digits that mean this number, with a point.
        let _infallible = write!(text, "{value:?}");
    } else {
        let start = text.len();
        let _infallible = write!(text, "{value:E}");
        if !text[start..].contains('.')
            && let Some(at) = text[start..].find('E')
        {
            text.insert_str(start + at, ".0");
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_look_as_java_writes_them() {
        for (value, expected) in [
            (0.0, "0.0"),
            (1.0, "1.0"),
            (-8.25, "-8.25"),
            (0.001, "0.001"),
            (0.0001, "1.0E-4"),
            (9_999_999.0, "9999999.0"),
            (12_340_000.0, "1.234E7"),
            (1e7, "1.0E7"),
            (f64::NAN, "NaN"),
            (f64::INFINITY, "+Inf"),
            (f64::NEG_INFINITY, "-Inf"),
        ] {
            let mut text = String::new();
            super::push(&mut text, value);
            assert_eq!(text, expected);
        }
    }
}
