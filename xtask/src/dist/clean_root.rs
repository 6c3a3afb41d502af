//! The packages, installed and used in a Debian that debootstrap has just made, with compilers,
//! pkg-config, CMake and man.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::{Packages, make};
use crate::commands::{Workspace, output, run};
use crate::files::copy;
use crate::process;
use crate::tally::Outcome;

/// How long making the root may take, and how long each check in it.
const LIMIT: Duration = Duration::from_secs(900);

/// The packages of the root besides those of the smallest Debian.
const PACKAGES: &str = "--include=g++,pkg-config,cmake,make,man-db";

/// The checks in order. Each is a script for a shell, run as root, which stops at the first
/// command that fails.
const CHECKS: [(&str, &str); 11] = [
    (
        "the .deb installs",
        r#"find / -xdev | LC_ALL=C sort >/before
        dpkg -i /packages/*.deb
        test -z "$(dpkg --audit)"
        test -z "$(dpkg --verify pageleap)""#,
    ),
    (
        "the command runs",
        r#"version=$(dpkg-query -W -f '${Version}' pageleap)
        test "$(pageleap --version)" = "pageleap $version"
        pageleap topology
        pageleap doctor"#,
    ),
    (
        "the C example is built with pkg-config",
        r#"cd /tmp
        cc -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Wpedantic -Werror -pthread -o buffer_pool \
            /usr/share/doc/pageleap/examples/buffer_pool.c $(pkg-config --cflags --libs pageleap)
        ./buffer_pool 64 16 1"#,
    ),
    (
        "the C++ example is built with pkg-config",
        r#"cd /tmp
        c++ -std=c++17 -O2 -Wall -Wextra -Wpedantic -Werror -pthread -o hash_join \
            /usr/share/doc/pageleap/examples/hash_join.cpp $(pkg-config --cflags --libs pageleap)
        ./hash_join 100000 1000000"#,
    ),
    (
        "the C++ example is built with CMake (pageleap::pageleap)",
        r#"cmake -S /usr/share/doc/pageleap/examples -B /tmp/shared
        cmake --build /tmp/shared --target hash_join
        readelf -d /tmp/shared/hash_join | grep libpageleap.so
        /tmp/shared/hash_join 100000 1000000"#,
    ),
    (
        "the C++ example is built with CMake (pageleap::static)",
        r#"cmake -S /usr/share/doc/pageleap/examples -B /tmp/static -DPAGELEAP_STATIC=ON
        cmake --build /tmp/static --target hash_join
        if readelf -d /tmp/static/hash_join | grep libpageleap.so; then exit 1; fi
        /tmp/static/hash_join 100000 1000000"#,
    ),
    (
        "manual pages are found and well formed",
        r#"export MANWIDTH=100 LC_ALL=C.UTF-8
        man 1 pageleap-demo | grep -q -- --page-size
        for page in $(dpkg -L pageleap | grep 'man/man.*gz$'); do
            lexgrog $page >/dev/null
            said=$(man --warnings=w -l $page 2>&1 >/dev/null)
            test -z "$said" || { echo "$page: $said"; exit 1; }
        done"#,
    ),
    (
        "shells complete",
        r#"bash --norc -euc '. /usr/share/bash-completion/completions/pageleap
            COMP_WORDS=(pageleap do)
            COMP_CWORD=1
            _pageleap pageleap do pageleap
            test "${COMPREPLY[*]}" = doctor'"#,
    ),
    (
        "nothing is left after removal",
        r#"rm -rf /tmp/*
        dpkg --purge pageleap
        find / -xdev | LC_ALL=C sort >/after
        LC_ALL=C comm -13 /before /after |
            grep -vE '^/(after|before|var/(cache|log|lib/dpkg)/|etc/ld.so.cache)' >/left || true
        cat /left
        test ! -s /left"#,
    ),
    (
        "the tarball works where it is unpacked",
        r#"mkdir -p /opt/elsewhere
        tar -C /opt/elsewhere -xf /packages/*.tar.gz
        cd /opt/elsewhere/pageleap-*
        bin/pageleap --version
        export PKG_CONFIG_PATH=$PWD/lib/pkgconfig
        MANPATH=$PWD/share/man man 1 pageleap >/dev/null
        cc -D_GNU_SOURCE -O2 -pthread -o /tmp/buffer_pool \
            share/doc/pageleap/examples/buffer_pool.c $(pkg-config --cflags --libs pageleap) \
            -Wl,-rpath,$PWD/lib
        /tmp/buffer_pool 64 16 1"#,
    ),
    (
        "CMake finds the tarball's library where it was moved",
        r#"mkdir -p /opt/moved
        mv /opt/elsewhere/pageleap-* /opt/moved/here
        cd /opt/moved/here
        cmake -S share/doc/pageleap/examples -B /tmp/tarball -DCMAKE_PREFIX_PATH=$PWD
        cmake --build /tmp/tarball --target hash_join
        ldd /tmp/tarball/hash_join | grep "$PWD/lib/libpageleap.so"
        /tmp/tarball/hash_join 100000 1000000"#,
    ),
];

/// Makes the packages and a root, and runs the checks there.
pub fn test(workspace: &Workspace) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let packages = make(workspace)?;
    if let Some(reason) = missing() {
        outcome.add("packages in a clean root", Ok(Some(reason)));
        return Ok(outcome);
    }
    let root = workspace.target.canonicalize()?.join("clean-root");
    remove(&root)?;
    debootstrap(&root)?;
    let folder = root.join("packages");
    fs::create_dir_all(&folder)?;
    let Packages { deb, tarball } = packages;
    for package in [deb, tarball] {
        copy(&package, &folder.join(package.file_name().context("a package has a name")?))?;
    }
    for (name, script) in CHECKS {
        outcome.add(name, check(&root, script).map(|()| None));
    }
    remove(&root)?;
    Ok(outcome)
}

/// Why no clean root can be made here.
fn missing() -> Option<String> {
    // SAFETY: the call takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return Some("debootstrap needs root".to_owned());
    }
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    if !release.lines().any(|line| line == "ID=debian") {
        return Some("this system is not Debian".to_owned());
    }
    let debootstrap = Command::new("debootstrap").arg("--version").output();
    if !debootstrap.is_ok_and(|output| output.status.success()) {
        return Some("debootstrap is missing; get it by: apt-get install debootstrap".to_owned());
    }
    let mount = in_private("mount --rbind /proc /proc").output();
    (!mount.is_ok_and(|output| output.status.success()))
        .then(|| "mounts are not allowed here".to_owned())
}

/// A shell whose mounts disappear with its last process, however that ends. So the root can be
/// removed afterwards, and nothing else with it.
fn in_private(script: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-euc", script]);
    command
}

/// Makes a Debian of the same release as this one, from the same mirror.
fn debootstrap(root: &Path) -> Result<()> {
    let release = fs::read_to_string("/etc/os-release").context("cannot read /etc/os-release")?;
    let suite = release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
        .context("/etc/os-release names no VERSION_CODENAME")?;
    let mut targets = Command::new("apt-get");
    targets.args([
        "indextargets",
        "--format",
        "$(SITE)",
        "Origin: Debian",
        &format!("Codename: {suite}"),
        "Created-By: Packages",
    ]);
    let sites = output(targets)?;
    let mirror = sites.lines().next().unwrap_or("http://deb.debian.org/debian");
    let mut command = in_private("exec debootstrap \"$@\"");
    command.args(["sh", "--variant=minbase", PACKAGES, suite]).arg(root).arg(mirror);
    println!("    making {} from {mirror}", root.display());
    let mut last = String::new();
    let ending = process::run(command, LIMIT, |line| last = line.to_owned())?;
    ensure!(ending.success(), "debootstrap: {}: {last}", ending.reason(LIMIT));
    Ok(())
}

/// Runs a script in a root, with the kernel's file systems mounted for that time.
fn check(root: &Path, script: &str) -> Result<()> {
    const ENTER: &str = r#"
        for folder in proc sys dev; do mount --rbind "/$folder" "$0/$folder"; done
        path=/usr/sbin:/usr/bin:/sbin:/bin
        exec chroot "$0" /usr/bin/env -i PATH=$path HOME=/root sh -euc "$1""#;
    let mut command = in_private(ENTER);
    command.arg(root).arg(script);
    let ending = process::run(command, LIMIT, |line| println!("    {line}"))?;
    ensure!(ending.success(), "{}", ending.reason(LIMIT));
    Ok(())
}

/// Removes an older root. Its mounts have gone with their processes.
fn remove(root: &Path) -> Result<()> {
    if root.exists() {
        let mut rm = Command::new("rm");
        rm.args(["-rf", "--one-file-system"]).arg(root);
        run(rm)?;
    }
    Ok(())
}
