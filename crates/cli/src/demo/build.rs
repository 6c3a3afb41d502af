//! Builds what the demo measures: two pools, the region, and the table in the region. Reserves huge
//! pages first if a flag asks for them.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::thread::available_parallelism;

use pageleap::pool::HugePageReservation;
use pageleap::{NodeId, Pool, Region};

use super::args::DemoArgs;
use super::lineitem::{self, Array, Generator, Layout};
use super::queries::Columns;
use super::setup::Demand;
use crate::stop::Stop;
use crate::{interrupt, machine, progress};

/// Most threads that generate the table. More threads gain no speed, because they exhaust the
/// memory bandwidth.
const MOST_THREADS: usize = 16;

/// The table in its region, and the pool that the region can leap to.
///
/// Rust drops the fields in this order, and the order matters. First the region returns its frames
/// to the pools. Then the pools return their frames to the kernel. Only then can reserved huge
/// pages be released.
pub struct Built {
    /// The region that holds the table.
    pub region: Region,
    /// Where the columns lie in the region.
    pub layout: Layout,
    /// The pool to leap to. It is as large as the region.
    pub destination: Pool,
    /// Node of the pool that the region starts in.
    pub from: u32,
    /// Node of the destination.
    pub to: u32,
    /// Number of nodes with memory.
    pub nodes: usize,
    /// The pool that the region starts in.
    pub source: Pool,
    _reservations: Vec<HugePageReservation>,
}

impl Built {
    /// The column that the writer changes.
    pub fn order_keys(&self) -> Result<&[AtomicU64], Stop> {
        Ok(self.region.atomics_u64(self.layout.range(Array::OrderKey))?)
    }

    /// Every byte after the column that the writer changes.
    pub fn other_columns(&self) -> Result<&[u64], Stop> {
        let range = self.layout.range(Array::PartKey).start..self.region.len();
        // SAFETY: after `build` nothing writes outside L_ORDERKEY. The range starts at a multiple
        // of 64 and ends where a page ends.
        Ok(unsafe { self.region.slice::<u64>(range) }?)
    }

    /// The columns that the queries read.
    pub fn columns(&self) -> Result<Columns<'_>, Stop> {
        let range = |array| -> Range<usize> { self.layout.range(array) };
        // SAFETY: after `build` nothing writes these columns, and they contain elements of these
        // types. Their pages move, but the region promises that readers see the same bytes
        // throughout.
        unsafe {
            Ok(Columns {
                quantity: self.region.slice(range(Array::Quantity))?,
                extended_price: self.region.slice(range(Array::ExtendedPrice))?,
                discount: self.region.slice(range(Array::Discount))?,
                tax: self.region.slice(range(Array::Tax))?,
                return_flag: self.region.slice(range(Array::ReturnFlag))?,
                line_status: self.region.slice(range(Array::LineStatus))?,
                ship_date: self.region.slice(range(Array::ShipDate))?,
            })
        }
    }
}

/// Builds everything. If the table will not fit, refuses before it generates anything.
pub fn build(args: &DemoArgs) -> Result<Built, Stop> {
    let nodes = machine::nodes(args.page_size)?;
    let (from, to) = machine::choose_nodes(&nodes, args.from, args.to)?;
    let page = args.page_size.bytes();
    Demand {
        scale_factor: args.scale_factor,
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

    let mut reservations = Vec::new();
    if args.reserve_huge_pages {
        // Two reservations on one node could count the same free pages twice.
        let pages = (bytes / page) as u64;
        if from == to {
            reservations.push(HugePageReservation::reserve(
                NodeId(from),
                args.page_size,
                2 * pages,
            )?);
        } else {
            reservations.push(HugePageReservation::reserve(NodeId(from), args.page_size, pages)?);
            reservations.push(HugePageReservation::reserve(NodeId(to), args.page_size, pages)?);
        }
    }
    let pool = |node, title: &str| -> Result<Pool, Stop> {
        super::stop_if_interrupted()?;
        let bar = progress::bytes(title, bytes as u64);
        let shown = bar.clone();
        let pool = Pool::builder(NodeId(node), bytes as u64)
            .page_size(args.page_size)
            .threads(threads)
            .progress(move |done, _total| shown.set_position(done))
            .build();
        bar.finish_and_clear();
        Ok(pool?)
    };
    let source = pool(from, "filling source pool")?;
    let destination = pool(to, "filling second pool")?;
    super::stop_if_interrupted()?;
    let region = Region::new(&source, bytes)?;

    let bar = progress::rows("generating lineitem", layout.rows() as u64);
    let watch = |rows| {
        bar.inc(rows);
        interrupt::received().is_none()
    };
    // SAFETY: the region starts at a page and is at least as long as the layout. No other code has
    // its address yet.
    unsafe { generator.write(region.as_ptr(), &watch) };
    bar.finish_and_clear();
    super::stop_if_interrupted()?;

    Ok(Built {
        region,
        layout,
        destination,
        from,
        to,
        nodes: nodes.iter().filter(|node| node.total_bytes > 0).count(),
        source,
        _reservations: reservations,
    })
}
