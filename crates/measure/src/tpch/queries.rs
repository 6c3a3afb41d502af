//! TPC-H Q1 and Q6 in exact integer arithmetic, and the thread that repeats them.
//!
//! Prices are hundredths, so a discounted price is exact in ten-thousandths and a charge in
//! millionths. Sums run in `i64` over a limited number of rows, and an `i128` collects them. Valid
//! data cannot overflow the `i64`. Damaged data wraps it, which shows as a wrong result instead of
//! a panic.
//!
//! No query reads `L_ORDERKEY`, because the writer changes that column while the queries run.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::phase::{PHASES, Phase, Stage, Times};

/// Rows that one `i64` sums. A charge is below 2^37 millionths; 2^16 rows of them stay far below
/// 2^63.
const ROWS_PER_SUM: usize = 1 << 16;

/// Q1 takes rows shipped up to 1998-12-01 minus 90 days, in days since 1970-01-01.
const Q1_LAST_SHIP_DATE: i32 = 10_471;
/// Q6 takes rows shipped in 1994.
const Q6_SHIP_DATES: std::ops::Range<i32> = 8_766..9_131;
/// Q6 takes discounts of 0.06 give or take 0.01.
const Q6_DISCOUNTS: std::ops::RangeInclusive<i64> = 5..=7;
/// Q6 takes quantities below this.
const Q6_QUANTITY_END: i64 = 24;

/// The columns that the two queries read.
#[derive(Clone, Copy)]
pub struct Columns<'a> {
    /// `L_QUANTITY`.
    pub quantity: &'a [i64],
    /// `L_EXTENDEDPRICE` in hundredths.
    pub extended_price: &'a [i64],
    /// `L_DISCOUNT` in hundredths.
    pub discount: &'a [i64],
    /// `L_TAX` in hundredths.
    pub tax: &'a [i64],
    /// `L_RETURNFLAG`.
    pub return_flag: &'a [u8],
    /// `L_LINESTATUS`.
    pub line_status: &'a [u8],
    /// `L_SHIPDATE` in days since 1970-01-01.
    pub ship_date: &'a [i32],
}

/// One group of Q1. Averages follow from the sums and the count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Q1Group {
    /// Sum of quantities.
    pub quantity: i128,
    /// Sum of prices, in hundredths.
    pub base_price: i128,
    /// Sum of discounted prices, in ten-thousandths.
    pub discounted_price: i128,
    /// Sum of discounted and taxed prices, in millionths.
    pub charge: i128,
    /// Sum of discounts, in hundredths.
    pub discount: i128,
    /// Number of rows.
    pub count: u64,
}

/// Result of Q1 by (return flag, line status). Rows with unknown flags count as (`?`, `?`); only
/// damaged memory has such rows.
pub type Q1Answer = BTreeMap<(u8, u8), Q1Group>;

/// Groups of Q1 by index. The last group takes the rows that fit no other group.
const Q1_GROUPS: [(u8, u8); 7] = [
    (b'A', b'F'),
    (b'A', b'O'),
    (b'N', b'F'),
    (b'N', b'O'),
    (b'R', b'F'),
    (b'R', b'O'),
    (b'?', b'?'),
];
const Q1_UNKNOWN: u8 = 6;

/// The part of a group's index that a return flag adds.
const RETURN_FLAG_INDEX: [u8; 256] = {
    let mut table = [Q1_UNKNOWN; 256];
    table[b'A' as usize] = 0;
    table[b'N' as usize] = 2;
    table[b'R' as usize] = 4;
    table
};
/// The part of a group's index that a line status adds.
const LINE_STATUS_INDEX: [u8; 256] = {
    let mut table = [Q1_UNKNOWN; 256];
    table[b'F' as usize] = 0;
    table[b'O' as usize] = 1;
    table
};

#[derive(Clone, Copy, Default)]
struct Q1Partial {
    quantity: i64,
    base_price: i64,
    discounted_price: i64,
    charge: i64,
    discount: i64,
    count: u64,
}

/// Q1, the pricing summary report.
pub fn q1(columns: Columns) -> Q1Answer {
    let rows = columns.ship_date.len();
    let mut groups = [Q1Group::default(); Q1_GROUPS.len()];
    for start in (0..rows).step_by(ROWS_PER_SUM) {
        let range = start..rows.min(start + ROWS_PER_SUM);
        // Slices of equal, known length let the compiler drop the bounds checks of the inner loop.
        let len = range.len();
        let quantity = &columns.quantity[range.clone()][..len];
        let price = &columns.extended_price[range.clone()][..len];
        let discount = &columns.discount[range.clone()][..len];
        let tax = &columns.tax[range.clone()][..len];
        let flag = &columns.return_flag[range.clone()][..len];
        let status = &columns.line_status[range.clone()][..len];
        let date = &columns.ship_date[range][..len];
        let mut partial = [Q1Partial::default(); Q1_GROUPS.len()];
        for row in 0..len {
            if date[row] > Q1_LAST_SHIP_DATE {
                continue;
            }
            let index =
                RETURN_FLAG_INDEX[flag[row] as usize] + LINE_STATUS_INDEX[status[row] as usize];
            let sum = &mut partial[index.min(Q1_UNKNOWN) as usize];
            let discounted = price[row].wrapping_mul(100i64.wrapping_sub(discount[row]));
            let charge = discounted.wrapping_mul(100i64.wrapping_add(tax[row]));
            sum.quantity = sum.quantity.wrapping_add(quantity[row]);
            sum.base_price = sum.base_price.wrapping_add(price[row]);
            sum.discounted_price = sum.discounted_price.wrapping_add(discounted);
            sum.charge = sum.charge.wrapping_add(charge);
            sum.discount = sum.discount.wrapping_add(discount[row]);
            sum.count += 1;
        }
        for (group, sum) in groups.iter_mut().zip(partial) {
            group.quantity += i128::from(sum.quantity);
            group.base_price += i128::from(sum.base_price);
            group.discounted_price += i128::from(sum.discounted_price);
            group.charge += i128::from(sum.charge);
            group.discount += i128::from(sum.discount);
            group.count += sum.count;
        }
    }
    Q1_GROUPS.into_iter().zip(groups).filter(|(_, group)| group.count > 0).collect()
}

/// Q6, the forecast of revenue change. Returns the revenue in ten-thousandths.
pub fn q6(columns: Columns) -> i128 {
    let rows = columns.ship_date.len();
    let mut revenue = 0i128;
    for start in (0..rows).step_by(ROWS_PER_SUM) {
        let range = start..rows.min(start + ROWS_PER_SUM);
        let len = range.len();
        let quantity = &columns.quantity[range.clone()][..len];
        let price = &columns.extended_price[range.clone()][..len];
        let discount = &columns.discount[range.clone()][..len];
        let date = &columns.ship_date[range][..len];
        let mut sum = 0i64;
        for row in 0..len {
            // No branches here, so that memory bounds the loop and not mispredicted branches.
            let take = Q6_SHIP_DATES.contains(&date[row])
                & Q6_DISCOUNTS.contains(&discount[row])
                & (quantity[row] < Q6_QUANTITY_END);
            sum = sum.wrapping_add(price[row].wrapping_mul(discount[row]) * i64::from(take));
        }
        revenue += i128::from(sum);
    }
    revenue
}

/// Latencies of one query by phase, and whether all its answers were equal.
#[derive(Debug)]
pub struct Series<A> {
    first: Option<A>,
    /// Whether every answer equalled the first one.
    pub equal: bool,
    latency: Times,
}

impl<A: PartialEq> Series<A> {
    fn new() -> Series<A> {
        Series { first: None, equal: true, latency: Times::new() }
    }

    fn add(&mut self, phase: Phase, latency: Duration, answer: A) {
        self.latency.add(phase, latency);
        match &self.first {
            None => self.first = Some(answer),
            Some(first) => self.equal &= *first == answer,
        }
    }

    /// The first answer. All later answers are compared with it.
    pub fn first(&self) -> Option<&A> {
        self.first.as_ref()
    }

    /// Median latency of the runs in `phase`; `None` if the phase has no runs.
    pub fn median_ns(&self, phase: Phase) -> Option<u64> {
        self.latency.quantile_ns(phase, 0.5)
    }

    /// Each latency that occurred in `phase`, with its number of occurrences.
    pub fn counts(&self, phase: Phase) -> impl Iterator<Item = (u64, u64)> {
        self.latency.counts(phase)
    }

    /// Number of runs in `phase`.
    pub fn runs(&self, phase: Phase) -> u64 {
        self.latency.count(phase)
    }
}

/// The measurements of the query thread.
#[derive(Debug)]
pub struct QueryLog {
    /// Runs of Q1.
    pub q1: Series<Q1Answer>,
    /// Runs of Q6.
    pub q6: Series<i128>,
}

/// Finished pairs of both queries by phase. The main thread reads these counts.
#[derive(Debug, Default)]
pub struct QueryCounts([AtomicU64; PHASES.len()]);

impl QueryCounts {
    /// Pairs of Q1 and Q6 that ended in `phase`.
    pub fn get(&self, phase: Phase) -> u64 {
        self.0[phase as usize].load(Ordering::Relaxed)
    }
}

/// Runs Q1 and Q6 in turn until `stage` is stopped.
pub fn run(columns: Columns, stage: &Stage, counts: &QueryCounts) -> QueryLog {
    let mut log = QueryLog { q1: Series::new(), q6: Series::new() };
    while !stage.stopped() {
        let pair = stage.phase();
        timed(stage, &mut log.q1, || q1(columns));
        timed(stage, &mut log.q6, || q6(columns));
        let phase = Phase::of_interval(pair, stage.phase());
        counts.0[phase as usize].fetch_add(1, Ordering::Relaxed);
    }
    log
}

fn timed<A: PartialEq>(stage: &Stage, series: &mut Series<A>, query: impl FnOnce() -> A) {
    let (from, start) = (stage.phase(), Instant::now());
    let answer = query();
    let latency = start.elapsed();
    series.add(Phase::of_interval(from, stage.phase()), latency, answer);
}

/// A decimal number: a count of units of `10^-digits`.
#[derive(Clone, Copy, Debug)]
pub struct Decimal(
    /// The number of units.
    pub i128,
    /// Digits after the point.
    pub u32,
);

impl fmt::Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let scale = 10u128.pow(self.1);
        let magnitude = self.0.unsigned_abs();
        let sign = if self.0 < 0 { "-" } else { "" };
        write!(
            f,
            "{sign}{}.{:0width$}",
            magnitude / scale,
            magnitude % scale,
            width = self.1 as usize
        )
    }
}

/// Whether both answers equal those that the TPC publishes for scale factor 1.
pub fn is_published_sf1(q1: &Q1Answer, q6: i128) -> bool {
    const COUNTS: [((u8, u8), u64); 4] = [
        ((b'A', b'F'), 1_478_493),
        ((b'N', b'F'), 38_854),
        ((b'N', b'O'), 2_920_374),
        ((b'R', b'F'), 1_478_870),
    ];
    q6 == 1_231_410_782_283
        && q1.len() == COUNTS.len()
        && COUNTS.iter().all(|(key, count)| q1.get(key).is_some_and(|group| group.count == *count))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use tpchgen::dates::TPCHDate;
    use tpchgen::generators::LineItemGenerator;
    use tpchgen::q_and_a::answers_sf1::Q1_ANSWER;

    use super::super::lineitem::Array;
    use super::super::lineitem::tests::Table;
    use super::*;

    fn columns(table: &Table) -> Columns<'_> {
        Columns {
            quantity: table.array(Array::Quantity),
            extended_price: table.array(Array::ExtendedPrice),
            discount: table.array(Array::Discount),
            tax: table.array(Array::Tax),
            return_flag: table.array(Array::ReturnFlag),
            line_status: table.array(Array::LineStatus),
            ship_date: table.array(Array::ShipDate),
        }
    }

    /// Counts the days from 1970-01-01 to an ISO date, as a second opinion on the constants.
    fn days(date: &str) -> i32 {
        let (year, rest) = date.split_once('-').unwrap();
        let (month, day) = rest.split_once('-').unwrap();
        let year: i32 = year.parse().unwrap();
        let leap = |year: i32| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let lengths =
            [31, if leap(year) { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        let years: i32 = (1970..year).map(|year| if leap(year) { 366 } else { 365 }).sum();
        let months: i32 = lengths[..month.parse::<usize>().unwrap() - 1].iter().sum();
        years + months + day.parse::<i32>().unwrap() - 1
    }

    #[test]
    fn date_constants_are_the_dates_they_name() {
        assert_eq!(TPCHDate::UNIX_EPOCH_OFFSET, days("1992-01-01"));
        assert_eq!(Q1_LAST_SHIP_DATE, days("1998-12-01") - 90);
        assert_eq!(Q6_SHIP_DATES, days("1994-01-01")..days("1995-01-01"));
    }

    /// Computes the same queries in another way, over the generator's rows. Dates are compared as
    /// text, decimals are `i128` expressions, and text keys the groups.
    #[test]
    fn answers_equal_those_of_another_formulation() {
        let scale_factor = 0.003;
        let table = Table::new(scale_factor, 2);
        let mut expected_q1 = Q1Answer::new();
        let mut expected_q6 = 0i128;
        for row in LineItemGenerator::new(scale_factor, 1, 1).iter() {
            let shipped = row.l_shipdate.to_string();
            let price = i128::from(row.l_extendedprice.0);
            let (discount, tax) = (i128::from(row.l_discount.0), i128::from(row.l_tax.0));
            if shipped.as_str() <= "1998-09-02" {
                let key = (row.l_returnflag.as_bytes()[0], row.l_linestatus.as_bytes()[0]);
                let group = expected_q1.entry(key).or_default();
                group.quantity += i128::from(row.l_quantity);
                group.base_price += price;
                group.discounted_price += price * 100 - price * discount;
                group.charge += price * 10_000 + price * tax * 100
                    - price * discount * 100
                    - price * discount * tax;
                group.discount += discount;
                group.count += 1;
            }
            let discount = row.l_discount.to_string();
            if shipped.starts_with("1994-")
                && ["0.05", "0.06", "0.07"].contains(&discount.as_str())
                && row.l_quantity < 24
            {
                expected_q6 += price * i128::from(row.l_discount.0);
            }
        }
        assert_eq!(q1(columns(&table)), expected_q1);
        assert_eq!(q6(columns(&table)), expected_q6);
        assert!(expected_q6 > 0);
    }

    #[test]
    fn published_answers_at_scale_factor_1() {
        let table = Table::new(1.0, 2);
        let (q1, q6) = (q1(columns(&table)), q6(columns(&table)));
        assert_eq!(table.layout.rows(), super::super::lineitem::ROWS_AT_SF1 as usize);
        assert!(is_published_sf1(&q1, q6));
        assert_eq!(Decimal(q6, 4).to_string(), "123141078.2283");
        let mut published = 0;
        for line in Q1_ANSWER.trim().lines().skip(1) {
            let fields: Vec<&str> = line.split('|').map(str::trim).collect();
            let group = q1[&(fields[0].as_bytes()[0], fields[1].as_bytes()[0])];
            // The published sums have two digits: round half up.
            let rounded =
                |value: i128, unit: i128| Decimal((value + unit / 2) / unit, 2).to_string();
            assert_eq!(fields[2], Decimal(group.quantity * 100, 2).to_string());
            assert_eq!(fields[3], Decimal(group.base_price, 2).to_string());
            assert_eq!(fields[4], rounded(group.discounted_price, 100));
            assert_eq!(fields[5], rounded(group.charge, 10_000));
            assert_eq!(fields[9], group.count.to_string());
            published += 1;
        }
        assert_eq!(published, q1.len());
    }

    #[test]
    fn damaged_values_change_the_answer_and_do_not_panic() {
        let one = |flag, price| {
            q1(Columns {
                quantity: &[1],
                extended_price: &[price],
                discount: &[i64::MIN],
                tax: &[i64::MAX],
                return_flag: &[flag],
                line_status: &[0xFF],
                ship_date: &[0],
            })
        };
        assert_eq!(one(b'A', i64::MAX).keys().collect::<Vec<_>>(), [&(b'?', b'?')]);
        assert_ne!(one(0, 1), one(0, 3));
    }

    #[test]
    fn the_loop_files_runs_by_phase_and_compares_answers() {
        let table = Table::new(0.001, 1);
        let (stage, counts) = (Stage::new(), QueryCounts::default());
        let log = thread::scope(|scope| {
            let queries = scope.spawn(|| run(columns(&table), &stage, &counts));
            for phase in [Phase::Before, Phase::During, Phase::After] {
                stage.enter(phase);
                while counts.get(phase) == 0 {
                    thread::yield_now();
                }
            }
            stage.stop();
            queries.join().unwrap()
        });
        for phase in [Phase::Before, Phase::During, Phase::After] {
            assert!(log.q1.runs(phase) > 0 && log.q6.median_ns(phase).is_some());
        }
        assert!(log.q1.equal && log.q6.equal);
        assert_eq!(log.q6.first(), Some(&q6(columns(&table))));
    }

    #[test]
    fn a_differing_answer_is_noticed() {
        let mut series = Series::new();
        for (answer, equal) in [(7, true), (7, true), (8, false), (7, false)] {
            series.add(Phase::During, Duration::from_micros(5), answer);
            assert_eq!(series.equal, equal);
        }
    }

    #[test]
    fn decimals_print_with_all_digits() {
        assert_eq!(Decimal(-5, 2).to_string(), "-0.05");
        assert_eq!(Decimal(1_000_001, 6).to_string(), "1.000001");
    }
}
