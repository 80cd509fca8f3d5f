//! The manifest's way of writing a time.

/// `dd/mm/YYYY HH:MM:SS` in UTC.
pub(super) fn date_text(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = civil_date(days);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{day:02}/{month:02}/{year:04} {hour:02}:{minute:02}:{second:02}")
}

/// The date of a day counted from 1970, by the calendar's cycle of 400 years. Years begin in March
/// here, so that the leap day is the last of its year.
fn civil_date(days: u64) -> (u64, u64, u64) {
    /// Days from the first of March of year 0 to 1970.
    const SHIFT: u64 = 719_468;
    const DAYS_OF_CYCLE: u64 = 146_097;
    let day = days.saturating_add(SHIFT);
    let (cycle, day) = (day / DAYS_OF_CYCLE, day % DAYS_OF_CYCLE);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 {
        (month + 3, 0)
    } else {
        (month - 9, 1)
    };
    (cycle * 400 + year + carry, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_follow_the_calendar() {
        for (seconds, text) in [
            (0, "01/01/1970 00:00:00"),
            (951_782_399, "28/02/2000 23:59:59"),
            (951_782_400, "29/02/2000 00:00:00"),
            (1_709_251_199, "29/02/2024 23:59:59"),
            (4_107_542_400, "01/03/2100 00:00:00"),
            (1_798_761_599, "31/12/2026 23:59:59"),
        ] {
            assert_eq!(date_text(seconds), text);
        }
    }
}
