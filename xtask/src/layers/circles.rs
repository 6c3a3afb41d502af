//! Finds modules of one folder that import each other, be it around a corner.
//!
//! Two modules are siblings if they have the same parent. An import joins the two siblings, or
//! their descendants, at the deepest module that both of its ends lie in. Where one end is that
//! module itself, nothing is joined: a parent may import its children, and they its items.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;

use super::imports::{Import, Sources};
use super::{Found, Refusal};

/// The imports between the children of one module: of these, the first from one child to another.
type Edges<'a> = BTreeMap<&'a str, BTreeMap<&'a str, &'a Import>>;

/// Refuses circles among the modules of the crate that begins in the file `top`. The children of
/// the crate's root are left out if `are_ordered`.
pub(super) fn check(top: &Path, sources: &Sources, are_ordered: bool, found: &mut Found) {
    let mut families: BTreeMap<&[String], Edges> = BTreeMap::new();
    for import in &sources.imports {
        let (from, to) = (&import.from, &import.target);
        let shared = from.iter().zip(to).take_while(|(one, other)| one == other).count();
        if are_ordered && shared == 0 {
            continue;
        }
        if import.takes_all_of_ancestor() {
            let Import { file, line, path, .. } = import;
            let what = format!("`{path}`: takes in all of a parent: name what is meant");
            found.refusals.push(Refusal { file: file.clone(), line: *line, what });
        }
        if let (Some(one), Some(other)) = (from.get(shared), to.get(shared)) {
            found.siblings += 1;
            let edges = families.entry(&from[..shared]).or_default();
            edges.entry(other).or_default();
            edges.entry(one).or_default().entry(other).or_insert(import);
        }
    }
    for (parent, edges) in families {
        let parent = if parent.is_empty() { top.display().to_string() } else { parent.join("::") };
        for component in Components::of(&edges) {
            found.refusals.push(refusal(&parent, &edges, &component));
        }
    }
}

/// Tells of modules that import each other: a shortest circle through the first of them.
fn refusal(parent: &str, edges: &Edges, component: &BTreeSet<&str>) -> Refusal {
    let circle = circle(edges, component);
    let imports: Vec<&Import> = circle.windows(2).map(|step| edges[step[0]][step[1]]).collect();
    let places: Vec<String> =
        imports.iter().map(|import| format!("{}:{}", import.file.display(), import.line)).collect();
    let mut what = format!("{parent}: {} ({})", circle.join(" -> "), places.join(", "));
    let others: Vec<&str> =
        component.iter().filter(|module| !circle.contains(module)).copied().collect();
    if !others.is_empty() {
        what += &format!("; in circles with these: {}", others.join(", "));
    }
    Refusal { file: imports[0].file.clone(), line: imports[0].line, what }
}

/// A shortest way from the first module of a component back to it.
fn circle<'a>(edges: &Edges<'a>, component: &BTreeSet<&'a str>) -> Vec<&'a str> {
    let start = *component.first().expect("a component has modules");
    let mut seen = BTreeSet::new();
    let mut ways = VecDeque::from([vec![start]]);
    while let Some(way) = ways.pop_front() {
        let last = way[way.len() - 1];
        for &next in edges[last].keys().filter(|next| component.contains(*next)) {
            let longer = [way.as_slice(), &[next]].concat();
            if next == start {
                return longer;
            }
            if seen.insert(next) {
                ways.push_back(longer);
            }
        }
    }
    unreachable!("a way leads from each module of a component to each other one")
}

/// Tarjan's search for strongly connected components.
struct Components<'a> {
    edges: &'a Edges<'a>,
    /// Modules by the order in which they were met.
    numbers: BTreeMap<&'a str, usize>,
    /// Modules that are in no component yet.
    open: Vec<&'a str>,
    /// Components of more than one module.
    found: Vec<BTreeSet<&'a str>>,
}

impl<'a> Components<'a> {
    fn of(edges: &'a Edges<'a>) -> Vec<BTreeSet<&'a str>> {
        let mut search =
            Self { edges, numbers: BTreeMap::new(), open: Vec::new(), found: Vec::new() };
        for module in edges.keys() {
            if !search.numbers.contains_key(module) {
                search.visit(module);
            }
        }
        search.found
    }

    /// Returns the lowest number of an open module that a way leads to from this one.
    fn visit(&mut self, module: &'a str) -> usize {
        let (number, place) = (self.numbers.len(), self.open.len());
        self.numbers.insert(module, number);
        self.open.push(module);
        let mut lowest = number;
        for next in self.edges[module].keys() {
            match self.numbers.get(next) {
                None => lowest = lowest.min(self.visit(next)),
                Some(known) if self.open.contains(next) => lowest = lowest.min(*known),
                Some(_) => {}
            }
        }
        if lowest == number {
            let component = self.open.split_off(place);
            if component.len() > 1 {
                self.found.push(component.into_iter().collect());
            }
        }
        lowest
    }
}
