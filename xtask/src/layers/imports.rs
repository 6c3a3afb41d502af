//! Finds what the modules of a crate import from each other.
//!
//! The search follows `mod` declarations from `lib.rs` or `main.rs`. It looks at paths in `use`, in
//! types and expressions, and among the tokens of macros. Comments and docs are no paths. What
//! `#[cfg]` keeps for tests is left out.
//!
//! A path that begins with `crate`, `self` or `super` is an import. Of the others, only those count
//! that begin with an ancestor's name, as `leap::Pages` does behind `use crate::leap`. The rest
//! begin with another crate, with a child of their module, or with a name whose `use` is counted.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, Meta, Token, UseTree};

use crate::syntax::{self, attributes};

/// How often a name may be handed on: a name that is brought in under itself ends there.
const MOST_HANDS: usize = 16;

/// What a crate consists of.
#[derive(Debug, Default)]
pub struct Sources {
    /// Its modules by their paths, also those for tests. The crate's root has the empty path.
    pub modules: BTreeMap<Vec<String>, Module>,
    /// Imports of modules below the root, in the order of the files.
    pub imports: Vec<Import>,
}

/// What is known of a module.
#[derive(Debug, Default)]
pub struct Module {
    /// The file that declares it, and the line.
    pub file: PathBuf,
    pub line: usize,
    /// The names of its own items.
    items: BTreeSet<String>,
    /// The paths behind the names that its `use` declarations bring in. Under `#[cfg]`, a name may
    /// have several.
    uses: BTreeMap<String, Vec<Vec<String>>>,
    /// The paths of which it takes in everything (`*`).
    globs: Vec<Vec<String>>,
}

/// A path from one module to an item of the same crate.
#[derive(Debug, Clone)]
pub struct Import {
    pub file: PathBuf,
    pub line: usize,
    /// As it is written, a nested `use` being one path for each of its leaves.
    pub path: String,
    /// The module that the path stands in, from the root.
    pub from: Vec<String>,
    /// The module that it leads to, from the root. If an ancestor of `from` only hands the name on,
    /// the module from which the ancestor has it. If that may be one of several, there is an import
    /// for each.
    pub target: Vec<String>,
    /// What is taken from there: an item, `*`, or the module itself.
    pub item: Option<String>,
}

impl Import {
    /// Whether it takes in everything of a module that `from` lies in, so that it cannot be told
    /// where the names come from.
    pub fn takes_all_of_ancestor(&self) -> bool {
        self.item.as_deref() == Some("*") && self.from.starts_with(&self.target)
    }
}

/// Reads a crate from its `lib.rs` or `main.rs`, a path from `root`.
pub fn read(root: &Path, top: &Path) -> Result<Sources> {
    let mut reader = Reader { root, modules: BTreeMap::new(), paths: Vec::new() };
    let parsed = reader.parse(top)?;
    reader.modules.insert(Vec::new(), Module { file: top.to_owned(), ..Module::default() });
    reader.items(&parsed.items, top, &[])?;
    let Reader { modules, paths, .. } = reader;
    let mut sources = Sources { modules, imports: Vec::new() };
    for found in paths.iter().filter(|found| !found.module.is_empty()) {
        for Place { module: target, item } in sources.targets(found) {
            let (file, from) = (found.file.clone(), found.module.clone());
            let path = found.path.join("::");
            sources.imports.push(Import { file, line: found.line, path, from, target, item });
        }
    }
    Ok(sources)
}

/// A path of the source.
#[derive(Debug)]
struct Found {
    file: PathBuf,
    line: usize,
    /// The module that it stands in, from the root.
    module: Vec<String>,
    path: Vec<String>,
}

/// Where a path leads.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    module: Vec<String>,
    /// What follows the module in the path.
    item: Option<String>,
}

impl Sources {
    /// What a path imports: nothing if its first name is counted elsewhere, and mostly one place.
    fn targets(&self, found: &Found) -> Vec<Place> {
        let from = &found.module;
        let is_ancestor = |place: &Place| place.item.is_none() && from.starts_with(&place.module);
        let first = || self.follow(from, from, &found.path[..1], MOST_HANDS);
        if is_root(&found.path[0]) || first().iter().any(is_ancestor) {
            self.follow(from, from, &found.path, MOST_HANDS)
        } else {
            Vec::new()
        }
    }

    /// Follows a path that stands in the module `at`, until it leaves the ancestors of `from`. Finds
    /// nothing if it leads out of the crate.
    fn follow(&self, from: &[String], at: &[String], path: &[String], hands: usize) -> Vec<Place> {
        let mut at = at.to_vec();
        let mut rest = path;
        while let Some((step, behind)) = rest.split_first().filter(|(step, _)| is_root(step)) {
            match step.as_str() {
                "crate" => at.clear(),
                "super" => drop(at.pop()),
                _ => {}
            }
            rest = behind;
        }
        while let Some((step, behind)) = rest.split_first() {
            let child = [at.as_slice(), std::slice::from_ref(step)].concat();
            if self.modules.contains_key(&child) {
                (at, rest) = (child, behind);
                continue;
            }
            // Of another module's names, it is enough to know the module.
            let is_ancestor = from.starts_with(&at);
            let elsewhere =
                if is_ancestor { self.handed_on(from, &at, rest, hands) } else { Vec::new() };
            // A first name that is none of the crate's is that of another crate.
            let is_here = elsewhere.is_empty() && rest.len() < path.len();
            let here = is_here.then(|| Place { module: at, item: Some(step.clone()) });
            return elsewhere.into_iter().chain(here).collect();
        }
        vec![Place { module: at, item: None }]
    }

    /// Where a path leads whose first name the module `at` has from elsewhere.
    fn handed_on(
        &self,
        from: &[String],
        at: &[String],
        path: &[String],
        hands: usize,
    ) -> Vec<Place> {
        let Some(hands) = hands.checked_sub(1) else { return Vec::new() };
        let (module, name) = (&self.modules[at], &path[0]);
        let paths: Vec<Vec<String>> = match module.uses.get(name) {
            Some(known) => known.iter().map(|known| [known, &path[1..]].concat()).collect(),
            None if module.items.contains(name) => Vec::new(),
            None => module.globs.iter().map(|known| [known, path].concat()).collect(),
        };
        paths.iter().flat_map(|path| self.follow(from, at, path, hands)).collect()
    }
}

/// Whether a path that begins so is one of this crate.
fn is_root(step: &str) -> bool {
    matches!(step, "crate" | "self" | "super")
}

struct Reader<'a> {
    root: &'a Path,
    modules: BTreeMap<Vec<String>, Module>,
    paths: Vec<Found>,
}

impl Reader<'_> {
    fn parse(&self, file: &Path) -> Result<syn::File> {
        let text = fs::read_to_string(self.root.join(file))
            .with_context(|| format!("cannot read {}", file.display()))?;
        syn::parse_file(&text).map_err(|error| {
            let line = error.span().start().line;
            anyhow::anyhow!("{}:{line}: {error}", file.display())
        })
    }

    /// Looks at items of a module, and follows the modules among them.
    fn items(&mut self, items: &[Item], file: &Path, module: &[String]) -> Result<()> {
        for item in items {
            if let Item::Mod(declared) = item {
                self.module(declared, file, module)?;
                continue;
            }
            self.note_names(item, module);
            Finder { file, module, found: &mut self.paths }.visit_item(item);
        }
        Ok(())
    }

    /// Notes the names that an item adds to its module.
    fn note_names(&mut self, item: &Item, module: &[String]) {
        let noted = self.modules.entry(module.to_vec()).or_default();
        match item {
            item if is_for_tests(attributes(item)) => {}
            Item::Use(item) => {
                for import in syntax::imports(&item.tree) {
                    match import.name {
                        Some(name) => noted.uses.entry(name).or_default().push(import.path),
                        None => noted.globs.push(import.path),
                    }
                }
            }
            item => noted.items.extend(syntax::name(item).map(Ident::to_string)),
        }
    }

    /// Notes a module, and looks at its items. A module for tests is a module: it has a layer,
    /// although it may import anything.
    fn module(&mut self, declared: &syn::ItemMod, file: &Path, parent: &[String]) -> Result<()> {
        let path = [parent, &[declared.ident.to_string()]].concat();
        let line = declared.ident.span().start().line;
        let noted = Module { file: file.to_owned(), line, ..Module::default() };
        self.modules.entry(path.clone()).or_insert(noted);
        if is_for_tests(&declared.attrs) {
            return Ok(());
        }
        if let Some((_, items)) = &declared.content {
            return self.items(items, file, &path);
        }
        let file = self.file_of(declared, file, parent.len())?;
        let parsed = self.parse(&file)?;
        self.items(&parsed.items, &file, &path)
    }

    /// The file of `mod name;`, declared in `file` at that depth.
    fn file_of(&self, module: &syn::ItemMod, file: &Path, depth: usize) -> Result<PathBuf> {
        let folder = file.parent().context("a file has a folder")?;
        let given = module.attrs.iter().find_map(|attribute| match &attribute.meta {
            Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
                syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(path), .. }) => Some(path.value()),
                _ => None,
            },
            _ => None,
        });
        if let Some(path) = given {
            return Ok(folder.join(path));
        }
        let stem = file.file_stem().unwrap_or_default();
        let own_folder =
            if depth == 0 || stem == "mod" { folder.to_owned() } else { folder.join(stem) };
        let name = module.ident.to_string();
        let places = [own_folder.join(format!("{name}.rs")), own_folder.join(name).join("mod.rs")];
        match places.iter().find(|place| self.root.join(place).is_file()) {
            Some(place) => Ok(place.clone()),
            None => {
                let line = module.ident.span().start().line;
                bail!("{}:{line}: {} has no file", file.display(), module.ident)
            }
        }
    }
}

/// Notes the paths of one item.
struct Finder<'a> {
    file: &'a Path,
    module: &'a [String],
    found: &'a mut Vec<Found>,
}

impl Finder<'_> {
    /// A path of a type or an expression. One step leads nowhere: `self` is a value.
    fn note(&mut self, line: usize, path: Vec<String>) {
        if path.len() > 1 {
            self.note_import(line, path);
        }
    }

    /// A path that brings in what it names, also in one step: `use crate as all`.
    fn note_import(&mut self, line: usize, path: Vec<String>) {
        let (file, module) = (self.file.to_owned(), self.module.to_vec());
        self.found.push(Found { file, line, module, path });
    }

    fn note_use(&mut self, tree: &UseTree) {
        for mut import in syntax::imports(tree) {
            if import.name.is_none() {
                import.path.push("*".to_owned());
            }
            self.note_import(import.line, import.path);
        }
    }

    /// Notes the paths among the tokens of a macro.
    fn note_tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            at += match &tokens[at] {
                TokenTree::Group(group) => {
                    self.note_tokens(group.stream());
                    1
                }
                TokenTree::Ident(first) => self.note_path(first, &tokens[at..]),
                _ => 1,
            };
        }
    }

    /// Notes the path that begins with the first of these tokens. Returns how many tokens it has.
    fn note_path(&mut self, first: &Ident, tokens: &[TokenTree]) -> usize {
        let is_colon =
            |at: usize| matches!(tokens.get(at), Some(TokenTree::Punct(p)) if p.as_char() == ':');
        let mut path = vec![first.to_string()];
        let mut len = 1;
        while is_colon(len) && is_colon(len + 1) {
            match tokens.get(len + 2) {
                Some(TokenTree::Ident(step)) => path.push(step.to_string()),
                Some(TokenTree::Punct(star)) if star.as_char() == '*' => path.push("*".to_owned()),
                // The rest of a `use`: looked at as one.
                Some(TokenTree::Group(_)) => {
                    let len = len + 3;
                    if let Ok(tree) = syn::parse2(tokens[..len].iter().cloned().collect()) {
                        self.note_use(&tree);
                    }
                    return len;
                }
                _ => break,
            }
            len += 3;
        }
        self.note(first.span().start().line, path);
        len
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_for_tests(attributes(item)) {
            return;
        }
        match item {
            Item::Use(item) => self.note_use(&item.tree),
            // `extern crate self as all` brings in the library.
            Item::ExternCrate(item) if item.ident == "self" => {
                self.note_import(item.ident.span().start().line, vec!["crate".to_owned()]);
            }
            other => visit::visit_item(self, other),
        }
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        let attributes = match item {
            syn::ImplItem::Const(item) => &item.attrs,
            syn::ImplItem::Fn(item) => &item.attrs,
            syn::ImplItem::Type(item) => &item.attrs,
            _ => return visit::visit_impl_item(self, item),
        };
        if !is_for_tests(attributes) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let steps = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.note(path.span().start().line, steps);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.note_tokens(call.tokens.clone());
        visit::visit_macro(self, call);
    }

    /// `pub(in crate::x)` imports nothing, and attributes hold docs.
    fn visit_visibility(&mut self, _: &'ast syn::Visibility) {}
    fn visit_attribute(&mut self, _: &'ast Attribute) {}
}

/// Whether `#[cfg]` keeps an item for tests.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().filter(|attribute| attribute.path().is_ident("cfg")).any(|attribute| {
        attribute.parse_args::<Meta>().is_ok_and(|condition| takes_tests(&condition))
    })
}

/// Whether a condition holds in tests only.
fn takes_tests(condition: &Meta) -> bool {
    let parts = |list: &syn::MetaList| {
        list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).unwrap_or_default()
    };
    match condition {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("all") => parts(list).iter().any(takes_tests),
        Meta::List(list) if list.path.is_ident("any") => {
            let parts = parts(list);
            !parts.is_empty() && parts.iter().all(takes_tests)
        }
        _ => false,
    }
}
