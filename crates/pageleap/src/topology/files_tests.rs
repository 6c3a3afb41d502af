//! Tests of [`SysFiles`].

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::time::{Duration, Instant};

use super::*;

/// A directory that is removed when the value is dropped.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Tree {
        let path =
            std::env::temp_dir().join(format!("pageleap-files-{}-{name}", std::process::id()));
        fs::create_dir_all(path.join("root/sub")).unwrap();
        fs::write(path.join("secret"), "secret").unwrap();
        fs::write(path.join("root/number"), "42\n").unwrap();
        fs::write(path.join("root/sub/text"), "hello").unwrap();
        Tree(path)
    }

    fn root(&self) -> PathBuf {
        self.0.join("root")
    }

    fn link(&self, name: &str, target: &str) {
        symlink(target, self.root().join(name)).unwrap();
    }

    /// The tree, resolved by the kernel and resolved by `walk`.
    fn both(&self) -> [SysFiles; 2] {
        [Resolve::Kernel, Resolve::Walk].map(|resolve| SysFiles { root: self.root(), resolve })
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn refusal<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::SystemFile { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn files_directories_and_links_inside_the_tree_are_read() {
    let tree = Tree::new("inside");
    tree.link("to-file", "sub/text");
    tree.link("to-directory", "./sub/");
    tree.link("sub/up", "../number");
    tree.link("sub/back", "../sub/../to-directory");
    for files in tree.both() {
        assert_eq!(files.number("number").unwrap(), 42);
        for path in [
            "sub/text",
            "to-file",
            "to-directory/text",
            "sub//./text",
            "sub/../sub/text",
            "sub/back/text",
        ] {
            assert_eq!(files.text(path).unwrap(), "hello", "{path}");
        }
        assert_eq!(files.text("to-directory/up").unwrap(), "42\n");
        assert_eq!(files.names(".").unwrap(), ["number", "sub", "to-directory", "to-file"]);
        assert_eq!(files.names("sub/back").unwrap(), ["back", "text", "up"]);
        assert_eq!(files.text_if_there("sub/none").unwrap(), None);
        assert_eq!(files.text_if_there("none/none").unwrap(), None);
        assert!(refusal(files.text("sub/none")).contains("sub/none"));
        assert!(refusal(files.number("sub/text")).contains("`hello` is not a number"));
    }
}

#[test]
fn nothing_outside_the_tree_is_read() {
    let tree = Tree::new("outside");
    let above = "../".repeat(40);
    tree.link("absolute", "/etc/passwd");
    tree.link("climbing", &format!("{above}etc/passwd"));
    tree.link("beside", "../secret");
    tree.link("directory", "..");
    tree.link("sub/twice", "../directory/secret");
    tree.link("own-root-by-name", tree.root().join("number").to_str().unwrap());
    tree.link("loop", "loop");
    tree.link("ping", "pong");
    tree.link("pong", "ping");
    for files in tree.both() {
        for path in [
            "absolute",
            "climbing",
            "beside",
            "directory/secret",
            "sub/twice",
            "../secret",
            "own-root-by-name",
            "/etc/passwd",
        ] {
            for text in [
                refusal(files.text(path)),
                refusal(files.text_if_there(path)),
                refusal(files.number(path)),
            ] {
                assert!(text.contains("out of the directory"), "{path}: {text}");
            }
        }
        for path in ["directory", "..", "/"] {
            assert!(refusal(files.names(path)).contains("out of the directory"), "{path}");
        }
        for path in ["loop", "ping", "loop/x"] {
            assert!(refusal(files.text(path)).contains("too many symbolic links"), "{path}");
        }
    }
}

#[test]
fn only_files_are_read_and_a_fifo_is_not_waited_for() {
    let tree = Tree::new("kinds");
    let fifo = CString::new(tree.root().join("fifo").as_os_str().as_bytes()).unwrap();
    // SAFETY: the path outlives the call.
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
    let _socket = std::os::unix::net::UnixListener::bind(tree.root().join("socket")).unwrap();
    let began = Instant::now();
    for files in tree.both() {
        for (path, kind) in [("fifo", "a FIFO"), ("socket", "a socket"), ("sub", "a directory")] {
            assert!(refusal(files.text(path)).contains(kind), "{path}");
        }
        for (path, kind) in [("fifo", "a FIFO"), ("number", "a file")] {
            assert!(refusal(files.names(path)).contains(kind), "{path}");
        }
        refusal(files.text("number/below"));
        refusal(files.text("nul\0byte"));
    }
    // A device of this machine is refused without being opened.
    assert!(refusal(SysFiles::host().text("dev/zero")).contains("a device"));
    assert!(began.elapsed() < Duration::from_secs(60));
}

#[test]
fn only_text_up_to_the_limit_is_read() {
    let tree = Tree::new("caps");
    let write = |name: &str, text: &[u8]| fs::write(tree.root().join(name), text).unwrap();
    write("fits", &vec![b'1'; MAX_BYTES as usize]);
    write("larger", &vec![b'1'; MAX_BYTES as usize + 1]);
    write("digits", &[b'1'; MAX_NUMBER_BYTES as usize]);
    write("zeros", &[b'0'; MAX_NUMBER_BYTES as usize]);
    write("binary", b"\xff\xfe");
    File::create(tree.root().join("sparse")).unwrap().set_len(1 << 40).unwrap();
    for files in tree.both() {
        assert_eq!(files.text("fits").unwrap().len() as u64, MAX_BYTES);
        for path in ["larger", "sparse"] {
            assert!(refusal(files.text(path)).contains("more than 1024 KB"), "{path}");
        }
        assert!(refusal(files.text("binary")).contains("not UTF-8 text"));
        assert_eq!(files.number("zeros").unwrap(), 0);
        assert!(refusal(files.number("fits")).contains("more than 4 KB"));
        let long = refusal(files.number("digits"));
        assert!(long.contains("1…`") && long.len() < 300, "{long}");
    }
    write("steering", b"\x1b]0;title\x07 5");
    let shown = refusal(tree.both()[0].number("steering"));
    assert!(!shown.contains('\x1b') && shown.contains("\\u{1b}"), "{shown}");
}

#[test]
fn a_directory_with_too_many_entries_is_refused() {
    let tree = Tree::new("entries");
    let many = tree.root().join("many");
    fs::create_dir(&many).unwrap();
    for n in 0..MAX_ENTRIES {
        fs::hard_link(tree.root().join("number"), many.join(n.to_string()))
            .or_else(|_| fs::write(many.join(n.to_string()), ""))
            .unwrap();
    }
    let [files, _] = tree.both();
    assert_eq!(files.names("many").unwrap().len(), MAX_ENTRIES);
    fs::write(many.join("one more"), "").unwrap();
    assert!(refusal(files.names("many")).contains("more than 65536 entries"));
}

#[test]
fn a_missing_root_is_an_error_and_not_a_missing_file() {
    for root in ["/nonexistent/root", "/etc/passwd"] {
        let text = refusal(SysFiles::at(root).text_if_there("sys/devices/system/node/online"));
        assert!(text.starts_with(root), "{text}");
    }
}

#[test]
fn files_of_this_machine_are_read_by_the_kernel_and_by_walk() {
    for files in [SysFiles::host(), SysFiles { resolve: Resolve::Walk, ..SysFiles::host() }] {
        // `/proc/self` is a symbolic link.
        assert!(files.text("proc/self/status").unwrap().starts_with("Name:"));
        assert!(files.names("proc/self").unwrap().contains(&"maps".to_owned()));
        // The current directory of the process lies outside `/proc`.
        refusal(files.names("proc/self/cwd"));
    }
}
