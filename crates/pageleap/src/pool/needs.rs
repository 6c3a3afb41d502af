//! Counts the frames that a call needs of each share. A call takes frames piece by piece, but its
//! error has to name the sum.

use std::collections::BTreeMap;

use super::Share;
use crate::error::Error;

/// Frames by the number of their share: those that will be needed, and those that are taken so far.
#[derive(Debug, Default)]
pub(crate) struct Needs(BTreeMap<u64, Need>);

#[derive(Debug, Default)]
struct Need {
    frames: u64,
    taken: u64,
}

impl Needs {
    /// Notes that `frames` frames of a share will be needed.
    pub(crate) fn add(&mut self, share: &Share, frames: u64) {
        self.0.entry(share.id()).or_default().frames += frames;
    }

    /// Notes that `frames` frames have been taken. An error describes the pool before the call took
    /// any frame, because by the time a user reads it, all of them have been given back.
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
