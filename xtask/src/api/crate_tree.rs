//! The modules of a crate with their items, as the sources have them, and what names in them mean.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use syn::punctuated::Punctuated;
use syn::{Attribute, Item, Meta, Token, Visibility};

use crate::files::read;
use crate::syntax::{attributes, imports};

/// How far one `use` may lead to the next before that counts as a circle.
const USES_MAX: usize = 16;

/// The names of a module and of those around it, from the root of the crate.
pub type ModulePath = Vec<String>;

/// The modules of a crate.
#[derive(Debug)]
pub struct CrateTree {
    modules: BTreeMap<ModulePath, Vec<Item>>,
}

/// What a path leads to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// A module of the crate.
    Module(ModulePath),
    /// An item of the crate: its module, and its name there.
    Item(ModulePath, String),
}

impl CrateTree {
    /// Reads the crate whose `lib.rs` lies in a folder.
    pub fn load(folder: &Path) -> Result<CrateTree> {
        let mut tree = CrateTree { modules: BTreeMap::new() };
        tree.read_module(Vec::new(), &folder.join("lib.rs"), folder)?;
        Ok(tree)
    }

    /// Reads the file of a module, whose own modules lie in `folder`.
    fn read_module(&mut self, path: ModulePath, file: &Path, folder: &Path) -> Result<()> {
        let parsed = syn::parse_file(&read(file)?)
            .with_context(|| format!("cannot parse {}", file.display()))?;
        self.add(path, parsed.items, folder).with_context(|| file.display().to_string())
    }

    /// Adds the items of a module that are compiled, and its own modules.
    fn add(&mut self, path: ModulePath, items: Vec<Item>, folder: &Path) -> Result<()> {
        let mut compiled = Vec::new();
        for item in items {
            if is_compiled(attributes(&item))? {
                compiled.push(item);
            }
        }
        for item in &mut compiled {
            let Item::Mod(module) = item else { continue };
            let name = module.ident.to_string();
            let inner = [path.clone(), vec![name.clone()]].concat();
            let folder = folder.join(&name);
            if let Some((_, items)) = module.content.take() {
                self.add(inner, items, &folder)?;
                continue;
            }
            let has_path = module.attrs.iter().any(|attribute| attribute.path().is_ident("path"));
            ensure!(!has_path, "`#[path]` of module {name} is not understood here");
            let files = [folder.with_extension("rs"), folder.join("mod.rs")];
            let file = files.iter().find(|file| file.is_file());
            let file = file.with_context(|| format!("module {name} has no file"))?;
            self.read_module(inner, file, &folder)?;
        }
        self.modules.insert(path, compiled);
        Ok(())
    }

    /// The items of a module.
    pub fn items(&self, module: &[String]) -> &[Item] {
        self.modules.get(module).map_or(&[], Vec::as_slice)
    }

    /// All items with their modules.
    pub fn all(&self) -> impl Iterator<Item = (&ModulePath, &Item)> {
        self.modules.iter().flat_map(|(path, items)| items.iter().map(move |item| (path, item)))
    }

    /// The item that a target stands for.
    pub fn item(&self, module: &[String], name: &str) -> Option<&Item> {
        self.items(module).iter().find(|item| self::name(item).is_some_and(|found| found == name))
    }

    /// What a path means in a module; `None` for what other crates have.
    pub fn resolve(&self, module: &[String], path: &[String]) -> Option<Target> {
        self.resolve_within(module, path, USES_MAX)
    }

    fn resolve_within(&self, module: &[String], path: &[String], uses: usize) -> Option<Target> {
        let (first, mut rest) = path.split_first()?;
        let mut target = match first.as_str() {
            "crate" => Target::Module(Vec::new()),
            "self" => Target::Module(module.to_vec()),
            "super" => Target::Module(module.split_last()?.1.to_vec()),
            name => self.find(module, name, uses)?,
        };
        while let Some((name, after)) = rest.split_first() {
            let Target::Module(inner) = &target else { return None };
            target = match name.as_str() {
                "super" => Target::Module(inner.split_last()?.1.to_vec()),
                name => self.find(inner, name, uses)?,
            };
            rest = after;
        }
        Some(target)
    }

    /// What a name means in a module.
    fn find(&self, module: &[String], name: &str, uses: usize) -> Option<Target> {
        let uses = uses.checked_sub(1)?;
        let inner = [module, &[name.to_owned()]].concat();
        if self.modules.contains_key(&inner) {
            return Some(Target::Module(inner));
        }
        if self.item(module, name).is_some() {
            return Some(Target::Item(module.to_vec(), name.to_owned()));
        }
        let imports = self.items(module).iter().filter_map(|item| match item {
            Item::Use(one) => Some(imports(&one.tree)),
            _ => None,
        });
        imports.flatten().find_map(|import| match &import.name {
            // `use name::..` of another crate must not look for itself.
            Some(found) if found == name && import.path != [name] => {
                self.resolve_within(module, &import.path, uses)
            }
            Some(_) => None,
            None => match self.resolve_within(module, &import.path, uses)? {
                Target::Module(of) if of != module => self.find(&of, name, uses),
                _ => None,
            },
        })
    }
}

/// The name of an item that can be named.
pub fn name(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

/// Whether other crates can see an item, where they can see its module.
pub fn is_public(item: &Item) -> bool {
    let visibility = match item {
        Item::Const(item) => &item.vis,
        Item::Enum(item) => &item.vis,
        Item::Fn(item) => &item.vis,
        Item::Mod(item) => &item.vis,
        Item::Static(item) => &item.vis,
        Item::Struct(item) => &item.vis,
        Item::Trait(item) => &item.vis,
        Item::Type(item) => &item.vis,
        Item::Union(item) => &item.vis,
        Item::Use(item) => &item.vis,
        Item::Macro(item) => {
            return item.attrs.iter().any(|attribute| attribute.path().is_ident("macro_export"));
        }
        _ => return false,
    };
    matches!(visibility, Visibility::Public(_))
}

/// Whether an item with these attributes is there for other crates: on x86-64, outside of tests and
/// model checkers.
pub fn is_compiled(attributes: &[Attribute]) -> Result<bool> {
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("cfg")) {
        if !holds(&attribute.parse_args()?)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn holds(condition: &Meta) -> Result<bool> {
    let text = quote::quote!(#condition).to_string();
    match condition {
        Meta::Path(path)
            if ["test", "loom", "shuttle", "miri"].iter().any(|n| path.is_ident(n)) =>
        {
            Ok(false)
        }
        Meta::NameValue(pair) => {
            let value = &pair.value;
            match (
                pair.path.get_ident().map(ToString::to_string),
                quote::quote!(#value).to_string(),
            ) {
                (Some(name), value) if name == "target_os" => Ok(value == "\"linux\""),
                (Some(name), value) if name == "target_arch" => Ok(value == "\"x86_64\""),
                (Some(name), value) if name == "target_pointer_width" => Ok(value == "\"64\""),
                _ => bail!("the condition `{text}` is not understood here"),
            }
        }
        Meta::List(list) => {
            let inner = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated)?;
            let inner = inner.iter().map(holds).collect::<Result<Vec<_>>>()?;
            match list.path.get_ident().map(ToString::to_string).as_deref() {
                Some("not") => Ok(!inner.iter().all(|one| *one)),
                Some("all") => Ok(inner.iter().all(|one| *one)),
                Some("any") => Ok(inner.iter().any(|one| *one)),
                _ => bail!("the condition `{text}` is not understood here"),
            }
        }
        _ => bail!("the condition `{text}` is not understood here"),
    }
}
