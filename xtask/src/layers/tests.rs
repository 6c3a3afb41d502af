//! Workspaces with one thing that is wrong, and what the check says of each.

use super::*;
use crate::scratch::Scratch;

/// Three modules, lowest first, in two layers; `top` has a child that is a folder.
const ORDER_TEXT: &str = "
crates = [['pageleap-sys'], ['pageleap'], ['pageleap-cli']]
[modules]
ground = ['low', 'middle']
sky = ['top']
";
const LIB: &str = "mod low;\nmod middle;\nmod top;\npub use top::Thing;\n";

/// Writes a workspace and checks it: `changed` are its files that differ from a right one.
fn check_with(changed: &[(&str, &str)]) -> Found {
    let folder = Scratch::new("layers");
    let sys = "[package]\nname = 'pageleap-sys'\n";
    let library = "[package]\nname = 'pageleap'\n\n[dependencies]\npageleap-sys.workspace = true\n";
    let cli = "[package]\nname = 'pageleap-cli'\n\n[dependencies]\n\
               leap = { package = 'pageleap', path = '../pageleap' }\n";
    let workspace = "[workspace]\nmembers = ['crates/sys', 'crates/pageleap', 'crates/cli']\n";
    let right = [
        ("Cargo.toml", workspace),
        (ORDER, ORDER_TEXT),
        ("crates/sys/Cargo.toml", sys),
        ("crates/pageleap/Cargo.toml", library),
        ("crates/cli/Cargo.toml", cli),
        ("crates/pageleap/src/lib.rs", LIB),
        ("crates/pageleap/src/low.rs", "pub struct Thing;\n"),
        ("crates/pageleap/src/middle.rs", "use crate::low::Thing;\n"),
        ("crates/pageleap/src/top/mod.rs", "mod child;\npub use crate::low::Thing;\n"),
        ("crates/pageleap/src/top/child.rs", "use super::super::middle;\nuse super::Thing;\n"),
    ];
    for (file, text) in right.iter().chain(changed) {
        let path = folder.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    check(folder.path()).unwrap()
}

fn refusals(changed: &[(&str, &str)]) -> Vec<String> {
    check_with(changed).refusals.iter().map(Refusal::to_string).collect()
}

/// That this text of `low.rs`, the lowest module, is refused at this line and for this import, and
/// for nothing else.
fn refuses_in_low(text: &str, line: usize, import: &str) {
    let refused = refusals(&[("crates/pageleap/src/low.rs", text)]);
    let [refusal] = &refused[..] else { panic!("{refused:?}") };
    let start =
        format!("crates/pageleap/src/low.rs:{line}: `{import}`: low (ground, place 1) imports ");
    assert!(refusal.starts_with(&start), "{refusal}");
    assert!(refusal.ends_with("which stands above it"), "{refusal}");
}

fn passes_in_low(text: &str) {
    assert_eq!(refusals(&[("crates/pageleap/src/low.rs", text)]), [""; 0]);
}

#[test]
fn a_workspace_in_order_passes_and_has_been_looked_at() {
    let found = check_with(&[]);
    assert_eq!(found.refusals, []);
    assert_eq!((found.imports, found.dependencies), (3, 2));
}

#[test]
fn this_workspace_is_in_order() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let found = check(root).unwrap();
    assert_eq!(found.refusals, []);
    assert!(found.imports > 200 && found.dependencies > 3, "{found:?}");
}

#[test]
fn an_upward_import_is_refused_with_its_line_and_both_layers() {
    let refused = refusals(&[("crates/pageleap/src/low.rs", "\nuse crate::top::Thing;\n")]);
    let expected = "crates/pageleap/src/low.rs:2: `crate::top::Thing`: low (ground, place 1) imports \
                    top (sky, place 3), which stands above it";
    assert_eq!(refused, [expected]);
}

#[test]
fn a_module_of_the_same_layer_that_stands_behind_is_refused() {
    refuses_in_low("use crate::middle;\n", 1, "crate::middle");
}

#[test]
fn super_leads_up_from_any_depth() {
    refuses_in_low(
        "mod inner {\n    use super::super::top::Thing;\n}\n",
        2,
        "super::super::top::Thing",
    );
    let child = ("crates/pageleap/src/low/child.rs", "use super::super::top;\n");
    let refused = refusals(&[("crates/pageleap/src/low.rs", "mod child;\n"), child]);
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(
        refused[0].starts_with("crates/pageleap/src/low/child.rs:1: `super::super::top`: low ")
    );
}

#[test]
fn each_leaf_of_a_nested_use_is_looked_at() {
    let text = "use crate::{\n    low::Thing,\n    top::{\n        self,\n        \
                child as c,\n    },\n};\n";
    let refused = refusals(&[("crates/pageleap/src/low.rs", text)]);
    let at = |refusal: &String| refusal.split('`').take(2).collect::<Vec<_>>().join("");
    let places: Vec<_> = refused.iter().map(at).collect();
    let file = "crates/pageleap/src/low.rs";
    assert_eq!(places, [format!("{file}:4: crate::top"), format!("{file}:5: crate::top::child")]);
}

#[test]
fn paths_in_code_types_and_macros_count() {
    refuses_in_low("fn f() {\n    crate::top::call()\n}\n", 2, "crate::top::call");
    refuses_in_low("struct S<T>(Vec<super::top::Thing>, T);\n", 1, "super::top::Thing");
    refuses_in_low("impl crate::top::Trait for u8 {}\n", 1, "crate::top::Trait");
    refuses_in_low("fn f() {\n    println!(\"{}\", g(crate::top::X));\n}\n", 2, "crate::top::X");
    refuses_in_low("macro_rules! m { () => { $crate::top::X } }\n", 1, "crate::top::X");
    refuses_in_low("m! { use crate::{top::X, low::Y}; }\n", 1, "crate::top::X");
    refuses_in_low("fn f() {\n    use super::middle::*;\n}\n", 2, "super::middle::*");
    refuses_in_low("#[cfg(not(test))]\nuse crate::top::X;\n", 2, "crate::top::X");
    refuses_in_low("#[cfg(any(test, loom))]\nuse crate::top::X;\n", 2, "crate::top::X");
}

#[test]
fn what_lib_hands_on_leads_to_its_module() {
    refuses_in_low("use crate::Thing;\n", 1, "crate::Thing");
    let unknown = refusals(&[("crates/pageleap/src/low.rs", "use crate::Nothing;\n")]);
    assert!(unknown[0].contains("Nothing is neither a module nor handed on"), "{unknown:?}");
    for all in [
        "use crate::*;\n",
        "use super::*;\n",
        "use crate as root;\n",
        "use super::{self as r};\n",
        "extern crate self as root;\n",
    ] {
        let refused = refusals(&[("crates/pageleap/src/low.rs", all)]);
        assert_eq!(refused.len(), 1, "{all}: {refused:?}");
        assert!(refused[0].contains("takes in all of the library"), "{all}: {refused:?}");
    }
}

#[test]
fn tests_and_comments_may_name_anything() {
    passes_in_low(
        "//! [`crate::top`]\n/// See [crate::top::X].\n// use crate::top::X;\nstruct S;\n",
    );
    passes_in_low("#[cfg(test)]\nmod tests {\n    use crate::top::X;\n}\n");
    passes_in_low("#[cfg(all(test, not(miri)))]\n#[path = \"low_tests.rs\"]\nmod tests;\n");
    passes_in_low("#[cfg(test)]\nuse crate::top::X;\n");
    passes_in_low("struct S;\nimpl S {\n    #[cfg(test)]\n    fn f() { crate::top::f() }\n}\n");
    passes_in_low("const TEXT: &str = \"crate::top::X\";\npub(in crate::low) struct S;\n");
}

#[test]
fn a_module_without_a_layer_and_a_layer_without_a_module_are_refused() {
    let lib = format!("{LIB}mod new;\n");
    let new = ("crates/pageleap/src/new.rs", "");
    let refused = refusals(&[("crates/pageleap/src/lib.rs", &lib), new]);
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].starts_with("crates/pageleap/src/lib.rs:5: the module new has no layer"));

    let order = ORDER_TEXT.replace("'top'", "'top', \"gone\"");
    let refused = refusals(&[(ORDER, &order)]);
    assert_eq!(
        refused,
        ["crates/layers.toml:5: the library has no module gone: take it out of the list"]
    );
}

#[test]
fn a_module_for_tests_has_a_layer_too() {
    let lib = format!("{LIB}#[cfg(test)]\nmod checks;\n");
    let refused = refusals(&[("crates/pageleap/src/lib.rs", &lib)]);
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].contains("lib.rs:6: the module checks has no layer"), "{refused:?}");
}

#[test]
fn crates_depend_downward_only() {
    let up =
        "[package]\nname = 'pageleap-sys'\n\n[dependencies]\npageleap = { path = '../pageleap' }\n";
    let refused = refusals(&[("crates/sys/Cargo.toml", up)]);
    let expected = "crates/sys/Cargo.toml:5: `pageleap`: pageleap-sys (row 1) depends on pageleap \
                    (row 2), which stands no lower";
    assert_eq!(refused, [expected]);

    let renamed = "[package]\nname = 'pageleap'\n\n[target.'cfg(loom)'.build-dependencies]\n\
                   face = { package = 'pageleap-cli' }\n";
    let refused = refusals(&[("crates/pageleap/Cargo.toml", renamed)]);
    assert!(
        refused[0].starts_with(
            "crates/pageleap/Cargo.toml:5: `face`: pageleap (row 2) depends on pageleap-cli"
        ),
        "{refused:?}"
    );

    let inherited = "[package]\nname = 'pageleap'\n[dependencies]\nface.workspace = true\n";
    let workspace = "[workspace]\nmembers = ['crates/sys', 'crates/pageleap', 'crates/cli']\n\
                     [workspace.dependencies]\n\
                     face = { package = 'pageleap-cli', path = 'crates/cli' }\n";
    let refused = refusals(&[("crates/pageleap/Cargo.toml", inherited), ("Cargo.toml", workspace)]);
    assert!(
        refused[0].starts_with("crates/pageleap/Cargo.toml:4: `face`: pageleap (row 2)"),
        "{refused:?}"
    );

    let tests = "[package]\nname = 'pageleap-sys'\n[dev-dependencies]\npageleap.workspace = true\n";
    assert_eq!(refusals(&[("crates/sys/Cargo.toml", tests)]), [""; 0]);
}

#[test]
fn a_crate_without_a_layer_is_refused() {
    let order = ORDER_TEXT.replace("['pageleap-cli']", "[\"pageleap-gone\"]");
    let refused = refusals(&[(ORDER, &order)]);
    assert_eq!(refused.len(), 2, "{refused:?}");
    assert!(refused[0].starts_with("crates/cli/Cargo.toml:2: the crate pageleap-cli has no layer"));
    assert!(
        refused[1].starts_with("crates/layers.toml:2: the workspace has no crate pageleap-gone")
    );
}
