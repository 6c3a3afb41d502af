//! A result without a format: sections of facts, tables and notes. Each value knows its unit, and
//! exporters decide how values look.
//!
//! An exporter leaves out everything without a name in its format. A fact without a key is for
//! people only, a fact without a label for programs only; likewise columns without a key or a head,
//! and sections without a title.

use std::borrow::Cow;

use crate::plot::Plot;

/// A value with its unit.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Not known, or without meaning here.
    Unknown,
    /// Words.
    Text(String),
    /// Yes or no.
    Flag(bool),
    /// How many.
    Count(u64),
    /// A time.
    Ns(u64),
    /// A time of a short job, also in nanoseconds, which exporters for people show in microseconds.
    ShortNs(u64),
    /// A time of an operation that is so short that a whole number of nanoseconds would be coarse.
    FineNs(f64),
    /// A difference of times.
    SignedNs(i64),
    /// A size.
    Bytes(u64),
    /// A rate; infinity means as many as possible.
    PerSecond(f64),
    /// A quotient of two times.
    Ratio(f64),
    /// A part of a whole, from 0 to 1.
    Share(f64),
    /// Several values of one kind.
    List(Vec<Value>),
    /// Values by name.
    Map(Vec<(String, Value)>),
}

impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(value: Option<T>) -> Value {
        value.map_or(Value::Unknown, T::into)
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::Text(text)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::Text(text.to_owned())
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Value {
        Value::Flag(flag)
    }
}

impl Value {
    /// A count, from an integer of any type.
    pub fn count(count: impl TryInto<u64>) -> Value {
        Value::Count(count.try_into().unwrap_or(u64::MAX))
    }

    /// A time, or unknown.
    pub fn ns(ns: Option<u64>) -> Value {
        ns.map_or(Value::Unknown, Value::Ns)
    }

    /// A size, or unknown.
    pub fn bytes(bytes: Option<u64>) -> Value {
        bytes.map_or(Value::Unknown, Value::Bytes)
    }

    /// A ratio, or unknown.
    pub fn ratio(ratio: Option<f64>) -> Value {
        ratio.map_or(Value::Unknown, Value::Ratio)
    }

    /// A share, or unknown.
    pub fn share(share: Option<f64>) -> Value {
        share.map_or(Value::Unknown, Value::Share)
    }

    /// A rate, or unknown.
    pub fn per_second(rate: Option<f64>) -> Value {
        rate.map_or(Value::Unknown, Value::PerSecond)
    }
}

/// One value with its names.
#[derive(Clone, Debug)]
pub struct Fact {
    /// Name for programs; with its unit (`_ns`, `_per_s`, `_bytes`, `_ratio`). Empty: not for them.
    pub key: &'static str,
    /// Name for people. Empty: not for them.
    pub label: &'static str,
    /// The value.
    pub value: Value,
    /// A remark for people. May be empty.
    pub remark: String,
}

/// A fact for people and programs.
pub fn fact(key: &'static str, label: &'static str, value: impl Into<Value>) -> Fact {
    Fact { key, label, value: value.into(), remark: String::new() }
}

impl Fact {
    /// Adds a remark for people.
    pub fn remark(mut self, remark: impl Into<String>) -> Fact {
        self.remark = remark.into();
        self
    }
}

/// A column of a table over rows of type `R`.
pub struct Column<R> {
    /// Name for programs, with its unit. Empty: not for them.
    pub key: &'static str,
    /// Name for people, one word. Empty: not for them.
    pub head: &'static str,
    /// The meaning of the head, for the legend below the table. Empty if the head is clear by
    /// itself.
    pub meaning: &'static str,
    /// The cell of a row.
    pub cell: fn(&R) -> Value,
}

/// A column, in short.
pub fn column<R>(
    key: &'static str,
    head: &'static str,
    meaning: &'static str,
    cell: fn(&R) -> Value,
) -> Column<R> {
    Column { key, head, meaning, cell }
}

/// The head of a column in a finished table.
#[derive(Clone, Debug)]
pub struct Head {
    /// See [`Column::key`].
    pub key: Cow<'static, str>,
    /// See [`Column::head`].
    pub head: &'static str,
    /// See [`Column::meaning`].
    pub meaning: &'static str,
}

/// Cells in rows. All rows have as many cells as the table has heads.
#[derive(Clone, Debug)]
pub struct Table {
    /// Names of the columns.
    pub heads: Vec<Head>,
    /// The cells.
    pub rows: Vec<Vec<Value>>,
    /// For each row the name of the group that it belongs to; a change starts a new group.
    pub groups: Vec<String>,
}

impl Table {
    /// A table of these rows. `group` names the group of a row; an empty name is no group.
    pub fn of<R>(columns: &[Column<R>], rows: &[R], group: fn(&R) -> String) -> Table {
        let head = |column: &Column<R>| Head {
            key: column.key.into(),
            head: column.head,
            meaning: column.meaning,
        };
        let cells = |row| columns.iter().map(|column| (column.cell)(row)).collect();
        Table {
            heads: columns.iter().map(head).collect(),
            rows: rows.iter().map(cells).collect(),
            groups: rows.iter().map(group).collect(),
        }
    }
}

/// The contents of a section.
#[derive(Clone, Debug)]
pub enum Body {
    /// Facts, one below the other.
    Facts(Vec<Fact>),
    /// A table.
    Table(Table),
    /// Sentences.
    Notes(Vec<String>),
    /// Whole results, one after the other.
    Documents(Vec<Document>),
    /// Plots of numbers that other sections have. Only some formats draw them.
    Plots(Vec<Plot>),
}

/// A part of a result.
#[derive(Clone, Debug)]
pub struct Section {
    /// Name for programs. Empty: not for them, or, if the body is facts, facts of the whole result.
    pub key: &'static str,
    /// Title for people. Empty: not for them.
    pub title: String,
    /// The contents.
    pub body: Body,
}

impl Section {
    /// A section for people and programs.
    pub fn new(key: &'static str, title: impl Into<String>, body: Body) -> Section {
        Section { key, title: title.into(), body }
    }

    /// A section for programs only.
    pub fn data(key: &'static str, body: Body) -> Section {
        Section::new(key, "", body)
    }
}

/// A whole result.
#[derive(Clone, Debug, Default)]
pub struct Document {
    /// Its parts, in the order in which people read them.
    pub sections: Vec<Section>,
}
