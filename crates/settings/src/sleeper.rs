//! A process that tests use as the user of a setting.

use std::process::{Child, Command, Stdio};

use crate::user::User;

/// A process that does nothing. Dropping the value ends it.
pub(crate) struct Sleeper(pub Child);

impl Sleeper {
    pub fn new() -> Sleeper {
        let mut sleep = Command::new("sleep");
        // Without the test's streams: whoever reads these would wait for it.
        sleep.arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Sleeper(sleep.spawn().unwrap())
    }

    pub fn user(&self) -> User {
        User::of(self.0.id()).unwrap()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
