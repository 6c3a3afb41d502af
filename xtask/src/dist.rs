//! The packages: a `.deb` for the Debian that runs this, and a tarball for all other systems.
//!
//! Both have the library, its headers, the command, manual pages, completions for shells, examples,
//! and the licences of all that is linked in. Files carry the time of the last commit (or
//! `SOURCE_DATE_EPOCH`), so that the same sources, built in the same folder, give the same
//! packages.

pub mod clean_root;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::capi::{self, Layout};
use crate::commands::{Workspace, output, run};
use crate::files::{copy, entries, make_folder, read, with_extension, write};
use crate::notices;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The crates whose program and library are in the packages, and the files with the licences of
/// what is linked into them.
const NOTICES: [(&str, &str); 2] =
    [("crates/cli", "THIRD-PARTY-command"), ("crates/capi", "THIRD-PARTY-library")];

/// What Debian's tools show of the package: a line, then a text.
const DESCRIPTION: &str = "moves memory between nodes while threads use it
 On machines with several memory nodes pageleap moves exactly the pages that
 a program names, at the speed of a memcpy, while its threads keep reading
 and writing them, on a vanilla kernel, and always finishes.
 .
 This package has the library for C and C++, and the command.";

/// The two packages.
#[derive(Debug)]
pub struct Packages {
    /// For `dpkg -i`.
    pub deb: PathBuf,
    /// One folder, which may be unpacked anywhere.
    pub tarball: PathBuf,
}

/// Builds everything and makes the packages below `target/dist`.
pub fn make(workspace: &Workspace) -> Result<Packages> {
    let folder = workspace.target.join("dist");
    if folder.exists() {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot clear {}", folder.display()))?;
    }
    make_folder(&folder)?;
    let folder = folder.canonicalize()?;
    let time = time(workspace)?;
    run(workspace.cargo(&["build", "--release", "--locked", "-p", "pageleap-cli"]))?;
    let pages = folder.join("pages");
    let mut generate = Command::new(workspace.target.join("release/pageleap"));
    generate.arg("generate").arg(&pages);
    run(generate)?;
    for (package, file) in NOTICES {
        write(&pages.join(file), &notices::text(workspace, package)?)?;
    }
    let tarball = tarball(workspace, &folder, &pages, &time)?;
    let deb = deb(workspace, &folder, &pages, &time);
    let deb = deb.with_context(|| format!("{} is made, but no .deb", tarball.display()))?;
    Ok(Packages { deb, tarball })
}

/// The time of all files, in seconds since 1970.
fn time(workspace: &Workspace) -> Result<String> {
    if let Ok(time) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(time);
    }
    let mut git = Command::new("git");
    // A checkout that is mounted into a container often belongs to another user.
    git.args(["-c", "safe.directory=*", "log", "-1", "--format=%ct"]).current_dir(&workspace.root);
    output(git).context(
        "the packages carry the time of the last commit; without git, set SOURCE_DATE_EPOCH",
    )
}

fn tarball(workspace: &Workspace, folder: &Path, pages: &Path, time: &str) -> Result<PathBuf> {
    let name = format!("pageleap-{VERSION}-{}-linux", std::env::consts::ARCH);
    let root = folder.join(&name);
    capi::install(workspace, &Layout::movable(&root))?;
    rest(workspace, &root, pages, "share/zsh/site-functions")?;
    settle(&root)?;
    let tarball = folder.join(format!("{name}.tar.gz"));
    let mut tar = Command::new("tar");
    tar.args([
        "--sort=name",
        "--owner=0",
        "--group=0",
        "--numeric-owner",
        "--format=gnu",
        "--use-compress-program=gzip -9n",
    ]);
    tar.arg(format!("--mtime=@{time}")).arg("-C").arg(folder).arg("-cf").arg(&tarball).arg(&name);
    run(tar)?;
    Ok(tarball)
}

fn deb(workspace: &Workspace, folder: &Path, pages: &Path, time: &str) -> Result<PathBuf> {
    let remedy = "a .deb is made on Debian, with dpkg-dev: apt-get install dpkg-dev";
    let mut architecture = Command::new("dpkg-architecture");
    architecture.args(["-qDEB_HOST_MULTIARCH"]);
    let multiarch = output(architecture).context(remedy)?;
    let mut architecture = Command::new("dpkg");
    architecture.arg("--print-architecture");
    let architecture = output(architecture).context(remedy)?;

    let root = folder.join("deb");
    let lib = format!("lib/{multiarch}");
    let usr = root.join("usr");
    capi::install(workspace, &Layout { root: &usr, lib: &lib, prefix: "/usr" })?;
    rest(workspace, &usr, pages, "share/zsh/vendor-completions")?;

    let library = format!("usr/{lib}/libpageleap.so.{VERSION}");
    let depends = depends(folder, &root, &["usr/bin/pageleap", &library])?;
    control(&root, &architecture, &depends)?;
    settle(&root)?;

    let deb = folder.join(format!("pageleap_{VERSION}_{architecture}.deb"));
    let mut build = Command::new("dpkg-deb");
    build
        .args(["--root-owner-group", "--build"])
        .arg(&root)
        .arg(&deb)
        .env("SOURCE_DATE_EPOCH", time);
    run(build)?;
    Ok(deb)
}

/// Writes the files that say what the package is.
fn control(root: &Path, architecture: &str, depends: &str) -> Result<()> {
    let folder = root.join("DEBIAN");
    make_folder(&folder)?;
    let abi = capi::abi(VERSION);
    let fields = [
        ("Package", "pageleap"),
        ("Version", VERSION),
        ("Architecture", architecture),
        ("Maintainer", &maintainer()),
        ("Installed-Size", &settle(root)?.div_ceil(1024).to_string()),
        ("Depends", depends),
        ("Suggests", "libc6-dev, pkg-config, cmake"),
        ("Provides", &format!("libpageleap{abi} (= {VERSION}), libpageleap-dev (= {VERSION})")),
        ("Section", "libdevel"),
        ("Priority", "optional"),
        ("Description", DESCRIPTION),
    ];
    let text: String = fields.iter().map(|(name, value)| format!("{name}: {value}\n")).collect();
    write(&folder.join("control"), &text)?;
    write(&folder.join("shlibs"), &format!("libpageleap {abi} pageleap (>= {VERSION})\n"))?;
    write(&folder.join("triggers"), "activate-noawait ldconfig\n")?;
    let mut sums = Command::new("sh");
    sums.args(["-c", "find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum"])
        .current_dir(root);
    write(&folder.join("md5sums"), &format!("{}\n", output(sums)?))
}

/// The maintainer of the package, from the variables that Debian's tools use.
fn maintainer() -> String {
    let variable = |name, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_owned());
    format!("{} <{}>", variable("DEBFULLNAME", "pageleap"), variable("DEBEMAIL", "root@localhost"))
}

/// The packages, with their versions, that programs and libraries of a tree need.
fn depends(folder: &Path, root: &Path, files: &[&str]) -> Result<String> {
    // The tool expects a folder of sources.
    let debian = folder.join("shlibs/debian");
    make_folder(&debian)?;
    write(&debian.join("control"), "Source: pageleap\n\nPackage: pageleap\nArchitecture: any\n")?;
    let mut command = Command::new("dpkg-shlibdeps");
    command
        .arg("-O")
        .args(files.iter().map(|file| root.join(file)))
        .current_dir(folder.join("shlibs"));
    let depends = output(command)?;
    let depends =
        depends.strip_prefix("shlibs:Depends=").context("dpkg-shlibdeps names no packages")?;
    Ok(depends.to_owned())
}

/// Adds everything that is neither library nor header. `zsh` is the folder for completions of zsh.
fn rest(workspace: &Workspace, root: &Path, pages: &Path, zsh: &str) -> Result<()> {
    add_command(workspace, root)?;
    for (file, folder, name) in [
        ("pageleap.bash", "share/bash-completion/completions", "pageleap"),
        ("pageleap.fish", "share/fish/vendor_completions.d", "pageleap.fish"),
        ("_pageleap", zsh, "_pageleap"),
    ] {
        add_as(&pages.join(file), &root.join(folder), name)?;
    }
    let found = with_extension(pages, "1")?;
    ensure!(!found.is_empty(), "the command has no manual pages");
    for page in found {
        compress(&add_file(&page, &root.join("share/man/man1"))?)?;
    }
    let doc = root.join("share/doc/pageleap");
    for file in with_extension(&workspace.root.join("docs"), "md")? {
        add_file(&file, &doc.join("docs"))?;
    }
    for file in entries(&workspace.root.join("crates/capi/examples"))? {
        add_file(&file, &doc.join("examples"))?;
    }
    add_documents(workspace, pages, &doc)
}

/// Adds the command, with the names of functions for perf and gdb.
fn add_command(workspace: &Workspace, root: &Path) -> Result<()> {
    let command = add_file(&workspace.target.join("release/pageleap"), &root.join("bin"))?;
    let mut strip = Command::new("strip");
    strip.arg("--strip-debug").arg(&command);
    run(strip)
}

/// Adds what there is to read before use, and the licences.
fn add_documents(workspace: &Workspace, pages: &Path, doc: &Path) -> Result<()> {
    for file in ["README.md", "LICENSE-APACHE"] {
        add_file(&workspace.root.join(file), doc)?;
    }
    let mut sysroot = Command::new("rustc");
    sysroot.args(["--print", "sysroot"]).current_dir(&workspace.root);
    let of_rust = Path::new(&output(sysroot)?).join("share/doc/rust");
    for file in ["COPYRIGHT-library.html", "licenses/Unicode-3.0.txt"] {
        add_file(&of_rust.join(file), doc).context(
            "packages are made with a toolchain of rustup, which has the licences of the standard \
             library",
        )?;
    }
    compress(&add_file(&workspace.root.join("CHANGELOG.md"), doc)?)?;
    let licence = read(&workspace.root.join("LICENSE-MIT"))?;
    write(
        &doc.join("copyright"),
        &format!(
            "pageleap may be used under the MIT License or the Apache License 2.0, at your\n\
             choice. LICENSE-APACHE has the latter. THIRD-PARTY-command and\n\
             THIRD-PARTY-library name the crates of others in each, with their licences.\n\n{licence}"
        ),
    )?;
    for (_, file) in NOTICES {
        compress(&add_file(&pages.join(file), doc)?)?;
    }
    Ok(())
}

/// Copies a file into a folder, which is made; returns the copy.
fn add_as(file: &Path, folder: &Path, name: &str) -> Result<PathBuf> {
    make_folder(folder)?;
    let copied = folder.join(name);
    copy(file, &copied)?;
    Ok(copied)
}

/// Copies a file into a folder under its own name.
fn add_file(file: &Path, folder: &Path) -> Result<PathBuf> {
    add_as(file, folder, &file.file_name().context("a file has a name")?.to_string_lossy())
}

fn compress(file: &Path) -> Result<()> {
    let mut gzip = Command::new("gzip");
    gzip.arg("-9n").arg(file);
    run(gzip)
}

/// Gives all files the permissions that they should have, independent of the umask; returns how
/// many bytes the files have.
fn settle(root: &Path) -> Result<u64> {
    let mut bytes = 0;
    let mut open = vec![root.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let (path, kind) = (entry.path(), entry.file_type()?);
            let is_program = folder.ends_with("bin");
            let mode = if kind.is_dir() || is_program { 0o755 } else { 0o644 };
            if !kind.is_symlink() {
                fs::set_permissions(&path, fs::Permissions::from_mode(mode))?;
            }
            if kind.is_dir() {
                open.push(path);
            } else {
                bytes += entry.metadata()?.len();
            }
        }
    }
    fs::set_permissions(root, fs::Permissions::from_mode(0o755))?;
    Ok(bytes)
}
