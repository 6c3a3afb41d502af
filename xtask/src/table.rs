//! Columns of text for the terminal.

use std::fmt;
use std::time::Duration;

/// A table in which each column is as wide as its widest cell.
#[derive(Debug)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes a table with these column heads.
    pub fn new(heads: &[&str]) -> Table {
        let mut table = Table { rows: Vec::new() };
        table.row(heads);
        table
    }

    /// Adds a row.
    pub fn row(&mut self, cells: &[&str]) {
        self.rows.push(cells.iter().map(|&cell| cell.to_owned()).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, &width) in row.iter().zip(&widths) {
                line += &format!("{cell:width$}  ");
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A duration in seconds with one decimal.
pub fn seconds(duration: Duration) -> String {
    format!("{:.1}", duration.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(&["step", "result", "s"]);
        table.row(&["clippy", "ok", &seconds(Duration::from_millis(1_250))]);
        table.row(&["x", "FAILED"]);
        assert_eq!(table.to_string(), "step    result  s\nclippy  ok      1.2\nx       FAILED\n");
    }
}
