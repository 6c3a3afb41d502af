//! Checks that the descriptor of a share's file is still the library's: other code may close it.

use super::share::{Share, ShareInner};
use crate::backend::{Call, Errno};
use crate::error::Error;

/// The failure of mapping a file whose descriptor has been closed. It comes before any change.
pub(super) const LOST: (Call, Errno) = (Call::Map, Errno(libc::EBADF));

impl Share {
    /// Refuses if other code has closed the descriptor of the frames' file. Then no more of the
    /// file can be mapped, but existing mappings stay.
    pub(crate) fn check_descriptor(&self) -> Result<(), Error> {
        let inner = &*self.0;
        if inner.backend.has_file(inner.file) {
            return Ok(());
        }
        let (descriptor, is_reused) = inner.file.state();
        let what = format!("the pool on {}", inner.node);
        Err(Error::DescriptorLost { what, descriptor, is_reused })
    }

    /// Whether the descriptor of the frames' file is still this library's.
    pub(crate) fn has_descriptor(&self) -> bool {
        self.0.backend.has_file(self.0.file)
    }
}

impl ShareInner {
    /// Fails with [`LOST`] if the file's descriptor has been closed: a number that stands for another
    /// file now must not be mapped.
    pub(super) fn look_at_descriptor(&self) -> Result<(), (Call, Errno)> {
        if self.backend.has_file(self.file) { Ok(()) } else { Err(LOST) }
    }
}
