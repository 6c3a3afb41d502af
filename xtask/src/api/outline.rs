//! What of a crate others can use, written as Rust without bodies.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use quote::ToTokens;
use syn::{
    Attribute, Fields, FnArg, ImplItem, Item, ItemImpl, Pat, TraitItem, Type, Visibility,
    parse_quote,
};

use super::crate_tree::{CrateTree, Target, is_compiled, is_public, name};
use crate::syntax::{Import, imports};

/// Attributes that users see the effect of.
const KEPT: [&str; 5] = ["derive", "non_exhaustive", "must_use", "repr", "deprecated"];

/// Stands for the body of a function until the text is finished.
const NO_BODY: &str = "__no_body!()";
/// Stands for the body of a method that a trait provides.
const PROVIDED: &str = "__provided!()";
/// Stands for the fields that users cannot see.
const PRIVATE_FIELDS: &str = "__private_fields: (),";

/// One name that a module offers.
#[derive(Debug)]
struct Export {
    name: String,
    target: Exported,
}

#[derive(Debug)]
enum Exported {
    Ours(Target),
    /// Of another crate: the path as the source has it.
    Foreign(String),
}

/// The outline of a crate.
pub fn of(tree: &CrateTree) -> Result<String> {
    let mut outline = Outline { tree, homes: BTreeMap::new(), impls: BTreeMap::new() };
    outline.find_homes(&[], &[]);
    let elsewhere = outline.collect_impls()?;
    let mut items = outline.module(&[], &[])?;
    items.extend(elsewhere);
    items.extend(outline.macro_calls());
    let file = syn::File { shebang: None, attrs: Vec::new(), items };
    Ok(without_bodies(&prettyplease::unparse(&file)))
}

struct Outline<'a> {
    tree: &'a CrateTree,
    /// Where each target is shown: the shortest path by which users reach it.
    homes: BTreeMap<Target, Vec<String>>,
    /// The impls of each type that is shown.
    impls: BTreeMap<Target, Vec<ItemImpl>>,
}

impl Outline<'_> {
    /// The names that a module offers, in order.
    fn exports(&self, module: &[String]) -> Vec<Export> {
        let mut exports = Vec::new();
        for item in self.tree.items(module).iter().filter(|item| is_public(item)) {
            let inner = |name: String| [module, &[name]].concat();
            match item {
                Item::Use(one) => exports
                    .extend(imports(&one.tree).into_iter().flat_map(|i| self.import(module, i))),
                Item::Mod(one) => exports.push(Export {
                    name: one.ident.to_string(),
                    target: Exported::Ours(Target::Module(inner(one.ident.to_string()))),
                }),
                _ => exports.extend(name(item).map(|name| Export {
                    target: Exported::Ours(Target::Item(module.to_vec(), name.clone())),
                    name,
                })),
            }
        }
        exports.sort_by(|a, b| a.name.cmp(&b.name));
        exports
    }

    /// What a `pub use` offers.
    fn import(&self, module: &[String], import: Import) -> Vec<Export> {
        let target = self.tree.resolve(module, &import.path);
        match (import.name, target) {
            (Some(name), Some(target)) => vec![Export { name, target: Exported::Ours(target) }],
            (Some(name), None) => {
                let text = import.path.join("::");
                vec![Export { name, target: Exported::Foreign(text) }]
            }
            (None, Some(Target::Module(of))) => self.exports(&of),
            (None, _) => {
                let text = format!("{}::*", import.path.join("::"));
                vec![Export { name: "*".to_owned(), target: Exported::Foreign(text) }]
            }
        }
    }

    /// Finds the shortest path to each target that users reach.
    fn find_homes(&mut self, module: &[String], shown_at: &[String]) {
        for export in self.exports(module) {
            let Exported::Ours(target) = export.target else { continue };
            let path = [shown_at, &[export.name]].concat();
            let is_nearer = self.homes.get(&target).is_none_or(|home| path.len() < home.len());
            if !is_nearer {
                continue;
            }
            self.homes.insert(target.clone(), path.clone());
            if let Target::Module(inner) = target {
                self.find_homes(&inner, &path);
            }
        }
    }

    /// Sorts the impls by their types; returns those of types of other crates.
    fn collect_impls(&mut self) -> Result<Vec<Item>> {
        let mut elsewhere = Vec::new();
        for (module, item) in self.tree.all() {
            let Item::Impl(block) = item else { continue };
            if let Some((_, path, _)) = &block.trait_ {
                let of_the_crate = self.tree.resolve(module, &segments(path));
                if of_the_crate.is_some_and(|target| !self.homes.contains_key(&target)) {
                    continue; // users cannot name the trait
                }
            }
            let of = match &*block.self_ty {
                Type::Path(path) => self.tree.resolve(module, &segments(&path.path)),
                _ => None,
            };
            let shown = seen_from_outside(block)?;
            match of {
                Some(target) if self.homes.contains_key(&target) => {
                    self.impls.entry(target).or_default().extend(shown);
                }
                Some(_) => {}
                None if block.trait_.is_some() => elsewhere.extend(shown.map(Item::Impl)),
                None => {}
            }
        }
        elsewhere.sort_by_key(|item| item.to_token_stream().to_string());
        Ok(elsewhere)
    }

    /// Calls of macros that may implement traits which users see: those of this crate that have an
    /// impl in them, and those of other crates.
    fn macro_calls(&self) -> Vec<Item> {
        let macros = || {
            self.tree.all().filter_map(|(_, item)| match item {
                Item::Macro(one) => Some(one),
                _ => None,
            })
        };
        let may_be_seen = |call: &&syn::ItemMacro| {
            let is_called = |one: &&syn::ItemMacro| {
                one.ident.as_ref().is_some_and(|name| call.mac.path.is_ident(name))
            };
            let Some(definition) = macros().find(is_called) else {
                let name = call.mac.path.segments.last();
                return name.is_none_or(|name| name.ident != "thread_local");
            };
            let text = definition.mac.tokens.to_string();
            text.split_whitespace().any(|word| word == "impl")
        };
        let calls = macros().filter(|call| call.ident.is_none()).filter(may_be_seen);
        let mut shown: Vec<Item> =
            calls.map(|call| stripped(Item::Macro(call.clone()), "")).collect();
        shown.sort_by_key(|item| item.to_token_stream().to_string());
        shown
    }

    /// What is shown of a module.
    fn module(&self, module: &[String], shown_at: &[String]) -> Result<Vec<Item>> {
        let mut shown = Vec::new();
        for Export { name: shown_as, target } in self.exports(module) {
            let target = match target {
                Exported::Ours(target) => target,
                Exported::Foreign(path) => {
                    shown.push(use_of(&path, &shown_as)?);
                    continue;
                }
            };
            let path = [shown_at, std::slice::from_ref(&shown_as)].concat();
            let home = self.homes.get(&target).context("each export has a home")?;
            if *home != path {
                shown.push(use_of(&format!("crate::{}", home.join("::")), &shown_as)?);
                continue;
            }
            match &target {
                Target::Module(inner) => {
                    let (items, name) = (self.module(inner, &path)?, ident(&shown_as));
                    shown.push(parse_quote!(pub mod #name { #(#items)* }));
                }
                Target::Item(of, name) => {
                    let item = self.tree.item(of, name).context("a target is there")?;
                    shown.push(stripped(item.clone(), &shown_as));
                    let impls = self.impls.get(&target).cloned().unwrap_or_default();
                    shown.extend(merged(impls, &shown_as).into_iter().map(Item::Impl));
                }
            }
        }
        Ok(shown)
    }
}

fn ident(name: &str) -> syn::Ident {
    syn::Ident::new(name, proc_macro2::Span::call_site())
}

fn segments(path: &syn::Path) -> Vec<String> {
    path.segments.iter().map(|segment| segment.ident.to_string()).collect()
}

/// `pub use path as name;`
fn use_of(path: &str, name: &str) -> Result<Item> {
    let last = path.rsplit("::").next().unwrap_or(path);
    let renamed = if last == name { String::new() } else { format!(" as {name}") };
    Ok(syn::parse_str(&format!("pub use {path}{renamed};"))?)
}

fn keep(attributes: &mut Vec<Attribute>) {
    attributes.retain(|attribute| KEPT.iter().any(|kept| attribute.path().is_ident(kept)));
}

fn block(marker: &str) -> syn::Block {
    syn::parse_str(&format!("{{ {marker} }}")).expect("a marker is an expression")
}

/// An item by the name that users have for it, without documentation, bodies and private fields.
fn stripped(mut item: Item, shown_as: &str) -> Item {
    match &mut item {
        Item::Const(one) => {
            keep(&mut one.attrs);
            one.ident = ident(shown_as);
        }
        Item::Static(one) => {
            keep(&mut one.attrs);
            one.ident = ident(shown_as);
        }
        Item::Fn(one) => {
            keep(&mut one.attrs);
            one.sig.ident = ident(shown_as);
            plain(&mut one.sig);
            *one.block = block(NO_BODY);
        }
        Item::Type(one) => {
            keep(&mut one.attrs);
            one.ident = ident(shown_as);
        }
        Item::Struct(one) => {
            keep(&mut one.attrs);
            one.ident = ident(shown_as);
            hide_private(&mut one.fields);
        }
        Item::Enum(one) => {
            keep(&mut one.attrs);
            one.ident = ident(shown_as);
            for variant in &mut one.variants {
                keep(&mut variant.attrs);
                variant.fields.iter_mut().for_each(|field| keep(&mut field.attrs));
            }
        }
        Item::Trait(one) => {
            keep(&mut one.attrs);
            one.ident = ident(shown_as);
            one.items.iter_mut().for_each(strip_trait_item);
        }
        Item::Macro(one) => keep(&mut one.attrs),
        _ => {}
    }
    item
}

/// Takes `mut` from the names of arguments: only the body sees it.
fn plain(signature: &mut syn::Signature) {
    for argument in &mut signature.inputs {
        match argument {
            FnArg::Receiver(this) if this.reference.is_none() => this.mutability = None,
            FnArg::Typed(argument) => {
                if let Pat::Ident(name) = &mut *argument.pat {
                    name.mutability = None;
                }
            }
            FnArg::Receiver(_) => {}
        }
    }
}

fn hide_private(fields: &mut Fields) {
    let is_seen = |field: &syn::Field| matches!(field.vis, Visibility::Public(_));
    fields.iter_mut().for_each(|field| keep(&mut field.attrs));
    match fields {
        Fields::Named(named) => {
            let all = std::mem::take(&mut named.named);
            let count = all.len();
            named.named.extend(all.into_iter().filter(is_seen));
            if named.named.len() < count {
                named.named.push(parse_quote!(__private_fields: ()));
            }
        }
        Fields::Unnamed(unnamed) => {
            for field in unnamed.unnamed.iter_mut().filter(|field| !is_seen(field)) {
                field.ty = parse_quote!(_);
                field.vis = Visibility::Inherited;
            }
        }
        Fields::Unit => {}
    }
}

fn strip_trait_item(item: &mut TraitItem) {
    match item {
        TraitItem::Fn(one) => {
            keep(&mut one.attrs);
            plain(&mut one.sig);
            if one.default.is_some() {
                one.default = Some(block(PROVIDED));
                one.semi_token = None;
            }
        }
        TraitItem::Const(one) => keep(&mut one.attrs),
        TraitItem::Type(one) => keep(&mut one.attrs),
        _ => {}
    }
}

/// What users see of an impl: public functions and constants; of a trait, the types that it names.
/// `None` if that is nothing.
fn seen_from_outside(block_of: &ItemImpl) -> Result<Option<ItemImpl>> {
    let mut shown = block_of.clone();
    keep(&mut shown.attrs);
    shown.items.clear();
    let is_of_trait = block_of.trait_.is_some();
    for item in &block_of.items {
        let (attributes, visibility) = match item {
            ImplItem::Fn(one) => (&one.attrs, &one.vis),
            ImplItem::Const(one) => (&one.attrs, &one.vis),
            ImplItem::Type(one) => (&one.attrs, &one.vis),
            _ => continue,
        };
        let is_seen = match is_of_trait {
            true => matches!(item, ImplItem::Type(_)),
            false => matches!(visibility, Visibility::Public(_)),
        };
        if !is_seen || !is_compiled(attributes)? {
            continue;
        }
        let mut item = item.clone();
        match &mut item {
            ImplItem::Fn(one) => {
                keep(&mut one.attrs);
                plain(&mut one.sig);
                one.block = block(NO_BODY);
            }
            ImplItem::Const(one) => keep(&mut one.attrs),
            ImplItem::Type(one) => keep(&mut one.attrs),
            _ => {}
        }
        shown.items.push(item);
    }
    let is_empty = shown.items.is_empty() && !is_of_trait;
    Ok((!is_empty).then_some(shown))
}

/// The impls of a type by the name that users have for it: those with the same head as one, in
/// order, with their items in the order of names.
fn merged(impls: Vec<ItemImpl>, shown_as: &str) -> Vec<ItemImpl> {
    let mut by_head: BTreeMap<(bool, String), ItemImpl> = BTreeMap::new();
    for mut block in impls {
        if let Type::Path(of) = &mut *block.self_ty
            && let Some(mut last) = of.path.segments.pop().map(|last| last.into_value())
        {
            last.ident = ident(shown_as);
            of.path = last.into();
        }
        let head = ItemImpl { items: Vec::new(), ..block.clone() };
        let key = (block.trait_.is_some(), head.to_token_stream().to_string());
        by_head.entry(key).or_insert(head).items.extend(block.items);
    }
    let mut merged: Vec<ItemImpl> = by_head.into_values().collect();
    for block in &mut merged {
        block.items.sort_by_key(|item| match item {
            ImplItem::Type(one) => (0, one.ident.to_string()),
            ImplItem::Const(one) => (1, one.ident.to_string()),
            ImplItem::Fn(one) => (2, one.sig.ident.to_string()),
            other => (3, other.to_token_stream().to_string()),
        });
    }
    merged
}

/// The text with the places of bodies and private fields as readers know them.
fn without_bodies(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    let mut text = text.lines().peekable();
    while let Some(line) = text.next() {
        match line.trim() {
            NO_BODY => {
                text.next();
                let mut before = lines.pop().unwrap_or_default();
                if before.trim() == "{" {
                    before = lines.pop().unwrap_or_default();
                }
                lines.push(format!("{};", before.trim_end_matches(['{', ',', ' '])));
            }
            PROVIDED => {
                text.next();
                let before = lines.pop().unwrap_or_default();
                lines.push(format!("{before} .. }}"));
            }
            PRIVATE_FIELDS => lines.push(line.replace(PRIVATE_FIELDS, "..")),
            _ => lines.push(line.to_owned()),
        }
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::scratch::Scratch;

    /// The outline of a crate with these files.
    fn outline(files: &[(&str, &str)]) -> Result<String> {
        let folder = Scratch::new("api");
        for (name, text) in files {
            let file = folder.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        of(&CrateTree::load(folder.path())?)
    }

    const LIB: &str = r#"
        //! The crate.
        mod inner;
        #[cfg(test)]
        mod none_of_these;
        pub mod shown {
            pub use super::inner::*;
            #[cfg(not(any(test, loom)))]
            pub const LIMIT: usize = 4;
            #[cfg(all(test, target_os = "linux"))]
            pub const UNSEEN: usize = 4;
            pub use other::Foreign as Theirs;
        }
        pub use inner::Thing as Renamed;
        pub(crate) fn unseen() {}
    "#;
    const INNER: &str = r#"
        mod deeper;
        use crate::inner::deeper::Trait;
        /// A thing.
        #[derive(Clone)]
        #[allow(dead_code)]
        pub struct Thing { /** Seen. */ pub seen: u8, unseen: u8 }
        pub struct Pair(pub u8, u8);
        struct Unseen;
        pub fn free<T>(mut value: T) -> T where T: Clone { value.clone() }
        impl Thing {
            pub fn second(mut self) -> Self { self }
            fn unseen(&self) {}
        }
        impl Unseen { pub fn also_unseen() {} }
        impl Trait for Thing { type Of = u8; fn needed(&self) {} }
        impl Private for Thing {}
        trait Private {}
        macro_rules! makes { ($name:ident) => { impl Default for $name {} } }
        makes!(Pair);
    "#;
    const DEEPER: &str = r#"
        pub trait Trait { type Of; fn needed(&self); fn given(&self) { self.needed() } }
        impl super::Thing { pub fn first(&self) {} }
        impl From<super::Thing> for u8 { fn from(_: super::Thing) -> u8 { 0 } }
    "#;

    #[test]
    fn users_see_what_they_can_reach_each_once() {
        let text =
            outline(&[("lib.rs", LIB), ("inner/mod.rs", INNER), ("inner/deeper.rs", DEEPER)]);
        let wanted = "\
#[derive(Clone)]
pub struct Renamed {
    pub seen: u8,
    ..
}
impl Renamed {
    pub fn first(&self);
    pub fn second(self) -> Self;
}
pub mod shown {
    pub const LIMIT: usize = 4;
    pub struct Pair(pub u8, _);
    pub use other::Foreign as Theirs;
    pub use crate::Renamed as Thing;
    pub fn free<T>(value: T) -> T
    where
        T: Clone;
}
impl From<super::Thing> for u8 {}
makes!(Pair);
";
        assert_eq!(text.unwrap(), wanted);
    }

    #[test]
    fn traits_tell_what_they_provide() {
        let text = outline(&[("lib.rs", DEEPER.split("impl").next().unwrap())]).unwrap();
        assert_eq!(
            text,
            "pub trait Trait {
    type Of;
    fn needed(&self);
    fn given(&self) { .. }
}
"
        );
    }

    #[test]
    fn conditions_that_are_not_understood_are_errors() {
        let refused = outline(&[("lib.rs", "#[cfg(feature = \"x\")] pub fn a() {}")]).unwrap_err();
        assert!(format!("{refused:#}").contains("feature = \"x\""), "{refused:#}");
    }
}
