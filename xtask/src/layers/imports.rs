//! Finds what the modules of a library import from each other.
//!
//! The search follows `mod` declarations from `lib.rs`, and looks at all paths that begin with
//! `crate`, `self` or `super`: in `use`, in types and expressions, and among the tokens of macros.
//! Comments and docs are no paths. What `#[cfg]` keeps for tests is left out.
//!
//! Every other path begins with a crate, with a child of its module, or with a name that a `use`
//! has brought in: none of these leads up.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use proc_macro2::{Ident, TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, Meta, Token, UseTree};

use crate::syntax::{self, attributes};

/// What a library consists of.
#[derive(Debug, Default)]
pub struct Library {
    /// Its top-level modules, and where `lib.rs` declares them.
    pub modules: BTreeMap<String, (PathBuf, usize)>,
    /// Imports of modules below `lib.rs`, in the order of the files.
    pub imports: Vec<Import>,
}

/// A path from one module to an item of the same library.
#[derive(Debug, Clone)]
pub struct Import {
    pub file: PathBuf,
    pub line: usize,
    /// As it is written, a nested `use` being one path for each of its leaves.
    pub path: String,
    /// The top-level module that the path stands in.
    pub from: String,
    /// The top-level module that it leads to, or why that cannot be told.
    pub target: Result<String, String>,
}

/// Reads a library from its `lib.rs`, a path from `root`.
pub fn read(root: &Path, lib: &Path) -> Result<Library> {
    let mut reader = Reader { root, library: Library::default(), paths: Vec::new() };
    let parsed = reader.parse(lib)?;
    // What `lib.rs` hands on under its own name: `crate::Pool` leads to `pool`.
    let mut handed_on = BTreeMap::new();
    for item in parsed.items.iter().filter(|item| !is_for_tests(attributes(item))) {
        match item {
            Item::Mod(module) => {
                let at = (lib.to_owned(), module.ident.span().start().line);
                reader.library.modules.insert(module.ident.to_string(), at);
            }
            Item::Use(item) => {
                let named = |one: syntax::Import| Some((one.name?, one.path));
                handed_on.extend(syntax::imports(&item.tree).into_iter().filter_map(named));
            }
            _ => {}
        }
    }
    // A module for tests is a module: it has a layer, although it may import anything.
    for item in &parsed.items {
        if let Item::Mod(module) = item {
            let at = (lib.to_owned(), module.ident.span().start().line);
            reader.library.modules.entry(module.ident.to_string()).or_insert(at);
        }
    }
    reader.items(&parsed.items, lib, &[])?;
    let Reader { mut library, paths, .. } = reader;
    for found in paths {
        let Some(from) = found.module.first().cloned() else { continue };
        let target = target(&found, &library.modules, &handed_on);
        let path = found.path.join("::");
        library.imports.push(Import { file: found.file, line: found.line, path, from, target });
    }
    Ok(library)
}

/// A path that begins with `crate`, `self` or `super`.
#[derive(Debug)]
struct Found {
    file: PathBuf,
    line: usize,
    /// The module that it stands in, from the root.
    module: Vec<String>,
    path: Vec<String>,
}

/// The top-level module that a path leads to.
fn target(
    found: &Found,
    modules: &BTreeMap<String, (PathBuf, usize)>,
    handed_on: &BTreeMap<String, Vec<String>>,
) -> Result<String, String> {
    let mut at = found.module.clone();
    let mut rest = found.path.iter().map(String::as_str).peekable();
    if rest.next_if_eq(&"crate").is_some() {
        at.clear();
    }
    while let Some(step) = rest.next_if(|step| matches!(*step, "self" | "super")) {
        if step == "super" && at.pop().is_none() {
            return Err("leads out of the library".to_owned());
        }
    }
    if let Some(top) = at.first() {
        return Ok(top.clone());
    }
    match rest.next() {
        None | Some("*") => Err("takes in all of the library: name what is meant".to_owned()),
        Some(name) if modules.contains_key(name) => Ok(name.to_owned()),
        Some(name) => {
            let path = handed_on.get(name).map(Vec::as_slice).unwrap_or_default();
            let first = path.iter().find(|step| !matches!(step.as_str(), "crate" | "self"));
            first.filter(|first| modules.contains_key(*first)).cloned().ok_or_else(|| {
                format!("{name} is neither a module nor handed on by lib.rs: name its module")
            })
        }
    }
}

struct Reader<'a> {
    root: &'a Path,
    library: Library,
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
            match item {
                Item::Mod(declared) if is_for_tests(&declared.attrs) => {}
                Item::Mod(declared) => {
                    let inner = [module, &[declared.ident.to_string()]].concat();
                    match &declared.content {
                        Some((_, items)) => self.items(items, file, &inner)?,
                        None => {
                            let file = self.file_of(declared, file, module.len())?;
                            let parsed = self.parse(&file)?;
                            self.items(&parsed.items, &file, &inner)?;
                        }
                    }
                }
                other => {
                    let mut finder = Finder { file, module, found: &mut self.paths };
                    finder.visit_item(other);
                }
            }
        }
        Ok(())
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
        if matches!(path[0].as_str(), "crate" | "self" | "super") {
            let (file, module) = (self.file.to_owned(), self.module.to_vec());
            self.found.push(Found { file, line, module, path });
        }
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
                TokenTree::Ident(first)
                    if *first == "crate" || *first == "self" || *first == "super" =>
                {
                    self.note_path(first, &tokens[at..])
                }
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
