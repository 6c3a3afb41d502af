//! What a call needs of each share, where it takes frames piece by piece: an error speaks of all of
//! it.

use std::collections::BTreeMap;

use super::Share;
use crate::error::Error;

/// Frames by the number of their share: needed as far as that is known, and taken so far.
#[derive(Debug, Default)]
pub(crate) struct Needs(BTreeMap<u64, Need>);

#[derive(Debug, Default)]
struct Need {
    frames: u64,
    taken: u64,
}

impl Needs {
    /// Notes that so many frames of a share will be needed.
    pub(crate) fn add(&mut self, share: &Share, frames: u64) {
        self.0.entry(share.id()).or_default().frames += frames;
    }

    /// Notes that some of them have been taken; or has the error say how it was before any were,
    /// because they go back when it is read.
    pub(crate) fn taken<T>(
        &mut self,
        share: &Share,
        frames: u64,
        result: Result<T, Error>,
    ) -> Result<T, Error> {
        let need = self.0.entry(share.id()).or_default();
        if result.is_ok() {
            need.taken += frames;
        }
        result.map_err(|error| match error {
            Error::PoolExhausted { node, free_bytes, pool_bytes, needed_bytes } => {
                let page = share.page_size().bytes() as u64;
                let taken = need.taken * page;
                Error::PoolExhausted {
                    node,
                    free_bytes: free_bytes + taken,
                    pool_bytes,
                    needed_bytes: (needed_bytes + taken).max(need.frames * page),
                }
            }
            other => other,
        })
    }
}
