//! Builds the memory that leaps, and the table in it.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::thread::available_parallelism;

use pageleap_measure::tpch;
use pageleap_measure::tpch::lineitem::{self, Generator, Layout};
use pageleap_measure::tpch::queries::Columns;

use super::args::DemoArgs;
use super::home::{self, Home, MOST_THREADS};
use super::setup::Demand;
use crate::stop::Stop;
use crate::{interrupt, machine, progress};

/// The table in its memory.
pub struct Built {
    /// The memory that holds the table.
    pub home: Box<dyn Home>,
    /// Where the columns lie in it.
    pub layout: Layout,
    /// Node that the table starts on.
    pub from: u32,
    /// Node of the destination.
    pub to: u32,
    /// Number of nodes with memory.
    pub nodes: usize,
}

impl Built {
    /// Bytes of the memory that leaps.
    pub fn bytes(&self) -> Result<usize, Stop> {
        Ok(size_of_val(self.home.words()?))
    }

    /// The column that the writer changes.
    pub fn order_keys(&self) -> Result<&[AtomicU64], Stop> {
        Ok(tpch::order_keys(self.home.words()?, &self.layout))
    }

    /// Every byte after the column that the writer changes.
    pub fn other_columns(&self) -> Result<&[u64], Stop> {
        // SAFETY: after `build` no thread writes outside L_ORDERKEY.
        Ok(unsafe { tpch::other_columns(self.home.words()?, &self.layout) })
    }

    /// The columns that the queries read.
    pub fn columns(&self) -> Result<Columns<'_>, Stop> {
        // SAFETY: after `build` no thread writes to these columns.
        Ok(unsafe { tpch::columns(self.home.words()?, &self.layout) })
    }
}

/// Builds everything. Refuses a table that does not fit before anything is generated.
pub fn build(args: &DemoArgs) -> Result<Built, Stop> {
    let nodes = machine::nodes(args.page_size)?;
    let (from, to) = machine::choose_nodes(&nodes, args.from, args.to)?;
    let page = args.page_size.bytes();
    home::check(args, [from, to])?;
    Demand {
        scale_factor: args.scale_factor,
        memory: args.memory,
        from,
        to,
        page: args.page_size,
        reserve: args.reserve_huge_pages,
    }
    .check(&nodes)?;

    let threads = available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
    let expected_rows = Generator::expected_rows(args.scale_factor);
    let bar = progress::rows("sizing lineitem", expected_rows);
    let watch = |rows| {
        bar.inc(rows);
        interrupt::received().is_none()
    };
    let text = lineitem::text_pool();
    let generator = Generator::size(&text, args.scale_factor, threads, &watch);
    bar.finish_and_clear();
    super::stop_if_interrupted()?;
    let Some(generator) = generator else { unreachable!("only a signal stops the generator") };
    let layout = generator.layout();
    let bytes = layout.bytes().next_multiple_of(page);

    let home = home::take(args, bytes, [from, to])?;
    super::stop_if_interrupted()?;

    let bar = progress::rows("generating lineitem", layout.rows() as u64);
    let watch = |rows| {
        bar.inc(rows);
        interrupt::received().is_none()
    };
    let start = home.words()?.as_ptr().cast::<u8>().cast_mut();
    let Some(start) = NonNull::new(start) else { unreachable!("a slice has an address") };
    // SAFETY: the memory starts at a page and is at least as long as the layout. It is atomics,
    // which may be written through a shared reference, and no other code uses it yet.
    unsafe { generator.write(start, &watch) };
    bar.finish_and_clear();
    super::stop_if_interrupted()?;

    let nodes = nodes.iter().filter(|node| node.total_bytes > 0).count();
    Ok(Built { home, layout, from, to, nodes })
}
