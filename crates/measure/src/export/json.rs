//! A document as one JSON object on one line.
//!
//! Each section is a member: facts are an object, a table is an array of objects, notes are an
//! array of strings. Values are plain numbers; their unit is in the name of their key. Unknown
//! values are null, and so are numbers that JSON does not have, such as infinity.

use serde::ser::{Serialize, SerializeMap, SerializeSeq, Serializer};

use crate::document::{Body, Document, Fact, Section, Table, Value};

/// Writes the object and a newline.
pub(super) fn write(document: &Document) -> String {
    let text = serde_json::to_string(&Object(document));
    text.expect("strings, numbers and lists are JSON") + "\n"
}

struct Object<'a>(&'a Document);

impl Serialize for Object<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for section in &self.0.sections {
            match (section, &section.body) {
                (Section { key: "", .. }, Body::Facts(facts)) => {
                    facts_into(&mut map, facts)?;
                }
                (Section { key: "", .. }, _) | (_, Body::Plots(_)) => {}
                (Section { key, .. }, Body::Facts(facts)) => {
                    map.serialize_entry(key, &Facts(facts))?;
                }
                (Section { key, .. }, Body::Table(table)) => {
                    map.serialize_entry(key, &Rows(table))?;
                }
                (Section { key, .. }, Body::Notes(notes)) => map.serialize_entry(key, notes)?,
                (Section { key, .. }, Body::Documents(documents)) => {
                    let documents: Vec<Object> = documents.iter().map(Object).collect();
                    map.serialize_entry(key, &documents)?;
                }
            }
        }
        map.end()
    }
}

fn facts_into<M: SerializeMap>(map: &mut M, facts: &[Fact]) -> Result<(), M::Error> {
    let named = facts.iter().filter(|fact| !fact.key.is_empty());
    named.into_iter().try_for_each(|fact| map.serialize_entry(fact.key, &Json(&fact.value)))
}

struct Facts<'a>(&'a [Fact]);

impl Serialize for Facts<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        facts_into(&mut map, self.0)?;
        map.end()
    }
}

struct Rows<'a>(&'a Table);

impl Serialize for Rows<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.rows.iter().map(|row| Row { table: self.0, row }))
    }
}

struct Row<'a> {
    table: &'a Table,
    row: &'a [Value],
}

impl Serialize for Row<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let cells = self.table.heads.iter().zip(self.row);
        let named = cells.filter(|(head, _)| !head.key.is_empty());
        serializer.collect_map(named.map(|(head, value)| (&head.key, Json(value))))
    }
}

struct Json<'a>(&'a Value);

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Unknown => serializer.serialize_unit(),
            Value::Text(text) => serializer.serialize_str(text),
            Value::Flag(flag) => serializer.serialize_bool(*flag),
            Value::Count(number)
            | Value::Ns(number)
            | Value::ShortNs(number)
            | Value::Bytes(number) => serializer.serialize_u64(*number),
            Value::SignedNs(number) => serializer.serialize_i64(*number),
            Value::FineNs(number)
            | Value::PerSecond(number)
            | Value::Ratio(number)
            | Value::Share(number) => {
                // Infinity and NaN become null.
                serializer.serialize_f64(*number)
            }
            Value::List(values) => {
                let mut list = serializer.serialize_seq(Some(values.len()))?;
                values.iter().try_for_each(|value| list.serialize_element(&Json(value)))?;
                list.end()
            }
            Value::Map(values) => {
                serializer.collect_map(values.iter().map(|(name, value)| (name, Json(value))))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::document;
    use super::*;

    #[test]
    fn sections_are_members_and_units_are_plain_numbers() {
        let value: serde_json::Value = serde_json::from_str(&write(&document())).unwrap();
        let expected = serde_json::json!({
            "kernel": "6.12",
            "leap": {
                "migrate_ns": 61_234_567, "moved_ratio": 0.5, "unknown_ns": null,
                "by_node": {"0": 7}, "asked_per_s": null, "job_ns": 1_234_567
            },
            "rows": [
                {"engine": "precopy", "ratio": 1.25, "first_touch_ns": -5},
                {"engine": "mprotect", "ratio": 12.5, "first_touch_ns": 7}
            ],
            "samples": [{"run": 1}],
            "skipped": ["no pages of 2m"]
        });
        assert_eq!(value, expected);
    }

    #[test]
    fn the_text_is_one_line() {
        let text = write(&document());
        assert_eq!(text.find('\n'), Some(text.len() - 1));
    }
}
