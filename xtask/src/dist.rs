//! The packages: a `.deb` for the Debian that this is, and a tarball for everybody else.
//!
//! Both have the library, its headers, the command, manual pages, completions for shells, examples,
//! and the licences of all that is linked in. Files carry the time of the last commit (or
//! `SOURCE_DATE_EPOCH`), so that the same sources, built in the same place, give the same packages.

pub mod clean_root;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::capi::{self, Layout};
use crate::commands::{Workspace, output, run};
use crate::files::{copy, entries, make_folder, read, with_extension, write};
use crate::{header, manual, notices};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What is linked into the packages.
const ROOTS: [&str; 2] = ["pageleap-cli", "pageleap-capi"];

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
    for (name, text) in manual::pages(&header::text(&workspace.root)?)? {
        write(&pages.join(name), &text)?;
    }
    write(&pages.join("THIRD-PARTY"), &notices::text(workspace, &ROOTS)?)?;
    let tarball = tarball(workspace, &folder, &pages, &time)?;
    let deb = deb(workspace, &folder, &pages, &time);
    let deb = deb.with_context(|| format!("{} is made, but no .deb", tarball.display()))?;
    Ok(Packages { deb, tarball })
}

/// Seconds since 1970 that all files carry.
fn time(workspace: &Workspace) -> Result<String> {
    if let Ok(time) = std::env::var("SOURCE_DATE_EPOCH") {
        return Ok(time);
    }
    let mut git = Command::new("git");
    // safe.directory: a checkout that is mounted into a container often belongs to another user.
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
    let abi = capi::abi(VERSION);
    let control = root.join("DEBIAN");
    make_folder(&control)?;
    let size = settle(&root)?.div_ceil(1024);
    write(
        &control.join("control"),
        &format!(
            "Package: pageleap\nVersion: {VERSION}\nArchitecture: {architecture}\nMaintainer: {}\nInstalled-Size: {size}\n\
             Depends: {depends}\nSuggests: libc6-dev, pkg-config\n\
             Provides: libpageleap{abi} (= {VERSION}), libpageleap-dev (= {VERSION})\nSection: libdevel\nPriority: optional\n\
             Description: moves memory between nodes while threads use it\n \
             On machines with several memory nodes pageleap moves exactly the pages that\n \
             a program names, at the speed of a memcpy, while its threads keep reading\n \
             and writing them, on a vanilla kernel, and always finishes.\n .\n \
             This package has the library for C and C++, and the command.\n",
            maintainer()
        ),
    )?;
    write(&control.join("shlibs"), &format!("libpageleap {abi} pageleap (>= {VERSION})\n"))?;
    write(&control.join("triggers"), "activate-noawait ldconfig\n")?;
    let mut sums = Command::new("sh");
    sums.args(["-c", "find usr -type f -print0 | LC_ALL=C sort -z | xargs -0 md5sum"])
        .current_dir(&root);
    write(&control.join("md5sums"), &format!("{}\n", output(sums)?))?;
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

/// Who answers for the package, as Debian's tools are told it.
fn maintainer() -> String {
    let variable = |name, default: &str| std::env::var(name).unwrap_or_else(|_| default.to_owned());
    format!("{} <{}>", variable("DEBFULLNAME", "pageleap"), variable("DEBEMAIL", "root@localhost"))
}

/// The packages that programs and libraries of a tree need, in which versions.
fn depends(folder: &Path, root: &Path, files: &[&str]) -> Result<String> {
    // The tool wants to be called where sources lie.
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

/// All that is neither library nor header.
fn rest(workspace: &Workspace, root: &Path, pages: &Path, zsh: &str) -> Result<()> {
    let folders = [
        "bin",
        "share/man/man1",
        "share/man/man3",
        "share/bash-completion/completions",
        "share/fish/vendor_completions.d",
        zsh,
        "share/doc/pageleap/docs",
        "share/doc/pageleap/examples",
    ];
    for folder in folders {
        make_folder(&root.join(folder))?;
    }
    let [bin, man1, man3, bash, fish, zsh, docs, examples] =
        folders.map(|folder| root.join(folder));
    let command = bin.join("pageleap");
    copy(&workspace.target.join("release/pageleap"), &command)?;
    // Names of functions stay, for perf and gdb.
    let mut strip = Command::new("strip");
    strip.arg("--strip-debug").arg(&command);
    run(strip)?;

    for (file, folder, name) in [
        ("pageleap.bash", bash, "pageleap"),
        ("pageleap.fish", fish, "pageleap.fish"),
        ("_pageleap", zsh, "_pageleap"),
    ] {
        copy(&pages.join(file), &folder.join(name))?;
    }
    for (section, folder) in [("1", man1), ("3", man3)] {
        let mut found = 0;
        for page in with_extension(pages, section)? {
            let page = page.file_name().context("a page has a name")?.to_owned();
            copy(&pages.join(&page), &folder.join(&page))?;
            compress(&folder.join(&page))?;
            found += 1;
        }
        ensure!(found > 0, "no pages of section {section}");
    }

    let doc = root.join("share/doc/pageleap");
    for file in ["README.md", "LICENSE-APACHE"] {
        copy(&workspace.root.join(file), &doc.join(file))?;
    }
    let mut sysroot = Command::new("rustc");
    sysroot.args(["--print", "sysroot"]).current_dir(&workspace.root);
    let of_rust = Path::new(&output(sysroot)?).join("share/doc/rust");
    for file in ["COPYRIGHT-library.html", "licenses/Unicode-3.0.txt"] {
        let file = of_rust.join(file);
        copy(&file, &doc.join(file.file_name().context("a file has a name")?)).context(
            "packages are made with a toolchain of rustup, which has the standard library's licences",
        )?;
    }
    copy(&workspace.root.join("CHANGELOG.md"), &doc.join("CHANGELOG.md"))?;
    compress(&doc.join("CHANGELOG.md"))?;
    let licence = read(&workspace.root.join("LICENSE-MIT"))?;
    write(
        &doc.join("copyright"),
        &format!(
            "pageleap may be used under the MIT License or the Apache License 2.0, at your choice. LICENSE-APACHE has the latter,\n\
             THIRD-PARTY names what other crates are in the command and the library, and has their licences.\n\n{licence}"
        ),
    )?;
    copy(&pages.join("THIRD-PARTY"), &doc.join("THIRD-PARTY"))?;
    compress(&doc.join("THIRD-PARTY"))?;
    for file in with_extension(&workspace.root.join("docs"), "md")? {
        copy(&file, &docs.join(file.file_name().context("a file has a name")?))?;
    }
    let sources = workspace.root.join("crates/capi/examples");
    for file in entries(&sources)? {
        copy(&file, &examples.join(file.file_name().context("a file has a name")?))?;
    }
    Ok(())
}

fn compress(file: &Path) -> Result<()> {
    let mut gzip = Command::new("gzip");
    gzip.arg("-9n").arg(file);
    run(gzip)
}

/// Gives files the rights that they should have, whatever the umask is here; returns how many bytes
/// they have.
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
