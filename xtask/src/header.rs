//! Makes `pageleap.h` of the comments and items of `crates/capi`, module by module.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use cbindgen::{Config, DocumentationStyle, Language, ParseConfig, RenameRule, Style};

use crate::capi::fill;
use crate::commands::Workspace;
use crate::files::{read, write};

/// The modules in the order in which a reader needs them, each with the title of its part of the
/// header.
const PARTS: [(&str, &str); 16] = [
    ("status", "Errors"),
    ("last_error", "The last error of a thread"),
    ("page_size", "Page sizes"),
    ("topology", "The machine"),
    ("probe", "What machine, user and container allow"),
    ("placement", "Where pages should go, and where they lie"),
    ("pool", "Pools"),
    ("region", "Regions"),
    ("guard", "Guards"),
    ("context", "Migration contexts"),
    ("migration", "What is to move, and how"),
    ("warning", "Warnings of reports"),
    ("report", "Reports"),
    ("job", "Jobs"),
    ("memory", "Memory that no pool owns"),
    ("move_pages", "Lists of pages"),
];

/// The path of the header in the workspace.
const HEADER: &str = "crates/capi/include/pageleap.h";

/// The values of `opening.h`; all crates of the workspace have one version.
const VERSION: [(&str, &str); 4] = [
    ("VERSION", env!("CARGO_PKG_VERSION")),
    ("MAJOR", env!("CARGO_PKG_VERSION_MAJOR")),
    ("MINOR", env!("CARGO_PKG_VERSION_MINOR")),
    ("PATCH", env!("CARGO_PKG_VERSION_PATCH")),
];

/// Writes the header anew, or, with `check`, says whether it is current.
pub fn run(workspace: &Workspace, check: bool) -> Result<bool> {
    let (path, wanted) = (workspace.root.join(HEADER), text(&workspace.root)?);
    let current = fs::read_to_string(&path).is_ok_and(|found| found == wanted);
    if check {
        let state = if current { "is current" } else { "is out of date; type: cargo xtask header" };
        println!("{HEADER} {state}");
        return Ok(current);
    }
    if !current {
        write(&path, &wanted)?;
    }
    Ok(true)
}

/// The header that the sources give.
pub fn text(root: &Path) -> Result<String> {
    let sources = root.join("crates/capi/src");
    let mut header = fill(&read(&sources.join("opening.h"))?, &VERSION)?;
    for (module, title) in PARTS {
        header += &format!("\n/* ---- {title} {} */\n\n", "-".repeat(88 - title.len()));
        header += compact(&part(&sources.join(format!("{module}.rs")))?).trim();
        header.push('\n');
    }
    header += "\n#ifdef __cplusplus\n}\n#endif\n\n#endif /* PAGELEAP_H */\n";
    Ok(header)
}

/// The part of the header that a module adds.
fn part(source: &PathBuf) -> Result<String> {
    let mut config = Config {
        language: Language::C,
        style: Style::Both,
        no_includes: true,
        documentation_style: DocumentationStyle::C,
        line_length: 98,
        tab_width: 4,
        usize_is_size_t: true,
        parse: ParseConfig::default(),
        ..Config::default()
    };
    config.function.rename_args = RenameRule::None;
    config.function.sort_by = None;
    config.export.rename.insert("flag".to_owned(), "bool".to_owned());
    let cannot_read = || format!("cannot read {}", source.display());
    // Types, too, that no function of the same module takes.
    config.export.include = types(&read(source)?);
    let bindings = cbindgen::Builder::new().with_config(config).with_src(source).generate();
    let bindings = bindings.with_context(cannot_read)?;
    let mut text = Vec::new();
    bindings.write(&mut text);
    let text = String::from_utf8(text)?;
    ensure!(text.contains("pageleap_"), "{} adds nothing to the header", source.display());
    Ok(text)
}

/// Moves the beginnings and ends of comments to lines that have text, and takes `struct` from
/// the names of types.
fn compact(text: &str) -> String {
    let mut compacted = String::new();
    // The indentation of the open comment, and its lines.
    let mut comment: Option<(usize, Vec<&str>)> = None;
    for line in text.lines() {
        match (line.trim(), comment.as_mut()) {
            ("/*", None) => comment = Some((line.len() - 2, Vec::new())),
            ("*/", Some((indent, lines))) => {
                let indent = " ".repeat(*indent);
                compacted += &format!("{indent}/* {} */\n", lines.join(&format!("\n{indent} * ")));
                comment = None;
            }
            (_, Some((indent, lines))) => lines.push(line.get(*indent + 1..).unwrap_or_default()),
            (_, None) if line.starts_with("typedef") => compacted += &format!("{line}\n"),
            (_, None) => {
                compacted += &format!("{}\n", line.replace("struct pageleap_", "pageleap_"))
            }
        }
    }
    compacted.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// The types that a module defines for C.
fn types(source: &str) -> Vec<String> {
    let names = source.lines().filter_map(|line| {
        let name = line.strip_prefix("pub struct ").or_else(|| line.strip_prefix("pub enum "))?;
        name.split(|c: char| !c.is_alphanumeric() && c != '_').next()
    });
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_begin_and_end_on_lines_with_text() {
        let wide = "/*
 One.
 */
int a(struct pageleap_x x);
    /*
     Two,

       three.
     */
    int b;
";
        let compacted = "/* One. */
int a(pageleap_x x);
    /* Two,
     *
     *   three. */
    int b;
";
        assert_eq!(compact(wide), compacted);
    }

    #[test]
    fn the_header_is_current() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let found = fs::read_to_string(root.join(HEADER)).unwrap();
        assert!(found == text(root).unwrap(), "{HEADER} is out of date; type: cargo xtask header");
    }
}
