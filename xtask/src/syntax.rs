//! What the checks of sources ask of a parsed file.

use syn::{Attribute, Ident, Item, UseTree};

/// One name that a `use` brings into a module.
#[derive(Debug)]
pub struct Import {
    /// The line of its last step.
    pub line: usize,
    /// The path that the source has, without the new name.
    pub path: Vec<String>,
    /// The name in the importing module; `None` for `*`.
    pub name: Option<String>,
}

/// The names that a `use` brings, one by one, in the order of the source.
pub fn imports(tree: &UseTree) -> Vec<Import> {
    let mut found = Vec::new();
    let mut open = vec![(Vec::new(), tree)];
    while let Some((path, tree)) = open.pop() {
        let with = |name: &syn::Ident| [path.as_slice(), &[name.to_string()]].concat();
        let line = |name: &syn::Ident| name.span().start().line;
        match tree {
            UseTree::Path(inner) => open.push((with(&inner.ident), &inner.tree)),
            UseTree::Group(group) => {
                open.extend(group.items.iter().rev().map(|one| (path.clone(), one)));
            }
            UseTree::Glob(glob) => {
                found.push(Import { line: glob.star_token.span.start().line, path, name: None });
            }
            UseTree::Name(last) if last.ident == "self" && !path.is_empty() => {
                found.push(Import { line: line(&last.ident), name: path.last().cloned(), path });
            }
            UseTree::Name(last) => found.push(Import {
                line: line(&last.ident),
                path: with(&last.ident),
                name: Some(last.ident.to_string()),
            }),
            UseTree::Rename(last) => {
                let in_group = last.ident == "self" && !path.is_empty();
                let path = if in_group { path } else { with(&last.ident) };
                let name = Some(last.rename.to_string());
                found.push(Import { line: line(&last.ident), path, name });
            }
        }
    }
    found
}

/// The name that an item has in its module.
pub fn name(item: &Item) -> Option<&Ident> {
    match item {
        Item::Const(item) => Some(&item.ident),
        Item::Enum(item) => Some(&item.ident),
        Item::Fn(item) => Some(&item.sig.ident),
        Item::Macro(item) => item.ident.as_ref(),
        Item::Mod(item) => Some(&item.ident),
        Item::Static(item) => Some(&item.ident),
        Item::Struct(item) => Some(&item.ident),
        Item::Trait(item) => Some(&item.ident),
        Item::Type(item) => Some(&item.ident),
        Item::Union(item) => Some(&item.ident),
        _ => None,
    }
}

/// The attributes of an item.
pub fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}
