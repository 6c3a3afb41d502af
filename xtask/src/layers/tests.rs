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
        ("crates/sys/src/lib.rs", ""),
        ("crates/cli/src/main.rs", ""),
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
    assert_eq!((found.imports, found.siblings, found.dependencies), (4, 0, 2));
}

#[test]
fn this_workspace_is_in_order() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let found = check(root).unwrap();
    assert_eq!(found.refusals, []);
    assert!(found.imports > 200 && found.siblings > 200 && found.dependencies > 3, "{found:?}");
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

/// What is refused of the folder `top`, which has these files instead of its own.
fn in_top(files: &[(&str, &str)]) -> Vec<String> {
    let files: Vec<(String, &str)> = files
        .iter()
        .map(|(file, text)| (format!("crates/pageleap/src/top/{file}"), *text))
        .collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(file, text)| (&**file, *text)).collect();
    refusals(&files)
}

/// What is refused of `top` with two modules: `b` imports `a`, and `a` has this text.
fn with_two(parent: &str, a: &str) -> Vec<String> {
    let parent = format!("mod a;\nmod b;\n{parent}");
    in_top(&[("mod.rs", &parent), ("a.rs", a), ("b.rs", "\nuse super::a::X;\n")])
}

#[test]
fn two_modules_of_a_folder_that_import_each_other_are_refused() {
    let expected = "crates/pageleap/src/top/a.rs:1: top: a -> b -> a \
                    (crates/pageleap/src/top/a.rs:1, crates/pageleap/src/top/b.rs:2)";
    for import in [
        "use super::b::Y;\n",
        "use super::{b, b::Y as Z};\n",
        "use crate::top::b::Y;\n",
        "fn f() { super::b::y() }\n",
        "struct S(crate::top::b::Y);\n",
        "fn f() { println!(\"{}\", super::b::Y); }\n",
        "mod inner { use super::super::b::Y; }\n",
    ] {
        assert_eq!(with_two("", import), [expected], "{import}");
    }
    assert_eq!(with_two("", "use crate::low::Thing;\n"), [""; 0]);
}

#[test]
fn a_circle_around_a_corner_is_refused_with_each_import() {
    let files = [
        ("mod.rs", "mod a;\nmod b;\nmod c;\nmod d;\n"),
        ("a.rs", "use super::c::X;\n"),
        ("b.rs", "\nuse super::a::X;\n"),
        ("c.rs", "\n\nuse super::b::X;\n"),
        ("d.rs", "use super::{a::X, b::Y};\n"),
    ];
    let file = "crates/pageleap/src/top";
    let expected = format!(
        "{file}/a.rs:1: top: a -> c -> b -> a ({file}/a.rs:1, {file}/c.rs:3, {file}/b.rs:2)"
    );
    assert_eq!(in_top(&files), [expected]);
}

#[test]
fn circles_that_share_modules_are_one_refusal_that_names_all_of_them() {
    let refused = in_top(&[
        ("mod.rs", "mod a;\nmod b;\nmod c;\nmod d;\nmod e;\n"),
        ("a.rs", "use super::b::X;\n"),
        ("b.rs", "use super::{a::X, c::Y};\n"),
        ("c.rs", "use super::b::X;\n"),
        ("d.rs", "use super::e::X;\n"),
        ("e.rs", "use super::d::X;\n"),
    ]);
    let [first, second] = &refused[..] else { panic!("{refused:?}") };
    assert!(first.contains("top: a -> b -> a ("), "{first}");
    assert!(first.ends_with("); in circles with these: c"), "{first}");
    assert!(second.contains("top: d -> e -> d (") && second.ends_with(')'), "{second}");
}

#[test]
fn a_name_that_the_parent_hands_on_leads_to_the_child_that_has_it() {
    for (parent, import) in [
        ("pub use b::Y;\n", "use super::Y;\n"),
        ("use b::Y;\n", "use crate::top::Y;\n"),
        ("pub(crate) use self::b::Y as Z;\n", "fn f() -> super::Z { super::Z::new() }\n"),
        ("use crate::top::b::{self, Y};\n", "use super::{Thing, Y};\n"),
        ("pub use b::*;\n", "use super::Y;\n"),
        ("#[cfg(loom)]\nuse crate::low::Y;\n#[cfg(not(loom))]\nuse b::Y;\n", "use super::Y;\n"),
        ("", "use crate::top;\nfn f() { top::b::y() }\n"),
        ("", "use super as up;\nfn f() { g!(up::b::Y) }\n"),
        ("", "use super::super::top::{self as up};\nstruct S(up::b::Y);\n"),
    ] {
        let parent = format!("use crate::low::Thing;\n{parent}");
        let refused = with_two(&parent, import);
        assert_eq!(refused.len(), 1, "{parent}{import}: {refused:?}");
        assert!(refused[0].contains("top: a -> b -> a ("), "{refused:?}");
    }
    // What the parent has from elsewhere leads there, and what it brings in under itself ends.
    assert_eq!(with_two("use crate::low::Thing;\n", "use super::Thing;\n"), [""; 0]);
    assert_eq!(with_two("use std::fmt;\nuse libc;\n", "use super::{fmt, libc};\n"), [""; 0]);
    assert_eq!(with_two("macro_rules! m {}\nuse m;\n", "use super::m;\n"), [""; 0]);
}

#[test]
fn circles_of_nested_folders_belong_to_the_folder_where_they_close() {
    let nested = [
        ("mod.rs", "mod a;\nmod inner;\n"),
        ("inner/mod.rs", "mod x;\nmod y;\n"),
        ("inner/x.rs", "use super::y::X;\n"),
    ];
    let within = [("a.rs", ""), ("inner/y.rs", "use crate::top::inner::x::X;\n")];
    let refused = in_top(&[nested.as_slice(), &within].concat());
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].contains(": top::inner: x -> y -> x ("), "{refused:?}");

    let between = [("a.rs", "use super::inner::x::X;\n"), ("inner/y.rs", "use super::super::a;\n")];
    let refused = in_top(&[nested.as_slice(), &between].concat());
    assert_eq!(refused.len(), 1, "{refused:?}");
    assert!(refused[0].contains(": top: a -> inner -> a ("), "{refused:?}");
}

#[test]
fn a_parent_may_import_its_children_and_they_its_items() {
    let parent = "use a::X;\npub use b::X as Y;\npub struct Own;\nfn f() { a::f(); b::f() }\n";
    for import in [
        "use super::Own;\n",
        "use crate::top::{self, Own};\nfn f(own: top::Own) {}\n",
        "mod inner { use super::super::Own; }\n",
        "use super::X;\n",
    ] {
        let parent = &format!("{parent}pub use b::*;\n");
        assert_eq!(with_two(parent, import), [""; 0], "{import}");
    }
}

#[test]
fn all_of_a_parent_is_refused() {
    for import in ["use super::*;\n", "use crate::top::*;\n"] {
        let refused = with_two("", import);
        assert_eq!(refused.len(), 1, "{refused:?}");
        assert!(refused[0].contains("::*`: takes in all of a parent"), "{refused:?}");
    }
}

#[test]
fn tests_close_no_circle() {
    for import in [
        "#[cfg(test)]\nmod tests {\n    use super::super::b::Y;\n    use super::*;\n}\n",
        "#[cfg(all(test, not(miri)))]\nuse super::b::Y;\n",
        "/// [`super::b::Y`]\nstruct S;\n",
    ] {
        assert_eq!(with_two("", import), [""; 0], "{import}");
    }
    let parent = "mod a;\n#[cfg(test)]\nmod b;\n";
    let files = [("a.rs", "use super::b::Y;\n"), ("b.rs", "use super::a::X;\n")];
    assert_eq!(in_top(&[&[("mod.rs", parent)], &files[..]].concat()), [""; 0]);
}

#[test]
fn circles_of_other_crates_are_refused_from_the_top_level_on() {
    let cli = |file: &str| format!("crates/cli/src/{file}");
    let (main, one, other) = (cli("main.rs"), cli("one.rs"), cli("other.rs"));
    let refused = refusals(&[
        (&main, "mod one;\nmod other;\nuse one::X;\nstruct Args;\n"),
        (&one, "use crate::{Args, other::Y};\n"),
        (&other, "use crate::X;\n"),
    ]);
    let expected = format!("{one}:1: {main}: one -> other -> one ({one}:1, {other}:1)");
    assert_eq!(refused, [expected]);
}
