//! The folder of `--sysroot`, below which commands read `/proc` and `/sys`.

use std::io::ErrorKind;
use std::path::PathBuf;

/// Parses the name of a folder that the user may search (`x`). The permission to list it (`r`) is
/// not needed.
pub fn folder(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    // The lookup of `.` fails without permission to search the folder.
    match std::fs::metadata(path.join(".")) {
        Ok(_) => Ok(path),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err("there is no such folder".to_owned())
        }
        Err(error) if error.kind() == ErrorKind::NotADirectory => {
            Err("it is not a folder".to_owned())
        }
        Err(error) => Err(error.to_string()),
    }
}
