//! `pageleap generate`: writes the command's manual pages and shell completions for packagers.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Command};
use clap_complete::Shell;

use crate::stop::Stop;

/// Write the manual pages of this command and its completions for bash, zsh and fish into a folder.
#[derive(Args, Clone, Debug)]
pub struct GenerateArgs {
    /// The folder to write to; created if it is missing
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// Writes the manual pages and the completions.
pub fn run(args: &GenerateArgs, command: Command) -> Result<(), Stop> {
    let folder = &args.folder;
    let cannot = || format!("cannot write to {}", folder.display());
    fs::create_dir_all(folder).with_context(cannot)?;
    // Completions would offer hidden commands, so those are filtered out.
    let shown = command.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let mut shown = Command::new("pageleap")
        .version(env!("CARGO_PKG_VERSION"))
        .args(command.get_arguments().cloned())
        .subcommands(shown);
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut shown, "pageleap", folder).with_context(cannot)?;
    }
    clap_mangen::generate_to(command, folder).with_context(cannot)?;
    Ok(())
}
