//! Builds what the demo measures: huge pages if asked for, two pools, the region, and the table in
//! it.

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

/// More threads than this generate no faster: memory bandwidth is used up.
const MOST_THREADS: usize = 16;

/// The table in its region, and where it can leap to.
///
/// The fields are dropped in this order: the region gives its frames back to the pools, the pools
/// give theirs back to the kernel, and only then can reserved huge pages be returned.
pub struct Built {
    /// The region that holds the table.
    pub region: Region,
    /// Where the columns lie in the region.
    pub layout: Layout,
    /// The pool to leap to; as large as the region.
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

    /// Every byte behind the column that the writer changes.
    pub fn other_columns(&self) -> Result<&[u64], Stop> {
        let range = self.layout.range(Array::PartKey).start..self.region.len();
        // SAFETY: after `build` nothing writes outside L_ORDERKEY; the range starts at a multiple
        // of 64 and ends with a page.
        Ok(unsafe { self.region.slice::<u64>(range) }?)
    }

    /// The columns that the queries read.
    pub fn columns(&self) -> Result<Columns<'_>, Stop> {
        let range = |array| -> Range<usize> { self.layout.range(array) };
        // SAFETY: after `build` nothing writes these columns, and they contain elements of these
        // types. That their pages move is the region's promise: readers see the same bytes
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

/// Builds everything; refuses before it generates anything if the table will not fit.
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
    // SAFETY: the region starts at a page and is at least as long as the layout; nobody else knows
    // it yet.
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
