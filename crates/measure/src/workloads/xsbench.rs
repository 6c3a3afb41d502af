//! Look-ups of cross sections as XSBench does them with a unionized grid: a binary search, then two
//! points of each nuclide of a material.
//!
//! Numbers of nuclides, sizes of materials and their probabilities are those of XSBench's small
//! problem (Tramm et al., PHYSOR 2014; version 20, `-s small`). The cross sections are
//! linear functions of the energy, so that each answer can be checked.

use std::sync::atomic::AtomicU64;

use super::{Control, Done, Structure, choices, load, operate, store};
use crate::random::SplitMix64;

/// The look-ups for each one that is timed.
const SAMPLED: u64 = 16;
/// Nuclides.
const NUCLIDES: usize = 68;
/// Kinds of cross sections.
const KINDS: usize = 5;
/// Words of a grid point of a nuclide: its energy, and cross sections.
const POINT: usize = 1 + KINDS;
/// Words of the indexes of a point of the unionized grid: two indexes in each.
const INDEXES: usize = NUCLIDES / 2;
/// Nuclides of each material.
const SIZES: [usize; 12] = [34, 5, 4, 4, 27, 21, 21, 21, 21, 21, 9, 9];
/// Of 1000 look-ups, those of each material. XSBench adds up the shares behind the first material
/// (`pick_mat`), which leaves it 139.
const SHARES: [usize; 12] = [139, 52, 275, 134, 154, 64, 66, 55, 8, 15, 25, 13];
/// Seed of energies and materials.
const SEED: u64 = 0x7865_6e6f;

/// The grids, one behind the other: the points of each nuclide, the energies of all of them in
/// order, and for each of these the index of the last point of each nuclide that is not above it.
pub(super) struct Grids {
    /// Points of each nuclide.
    points: usize,
    /// The nuclides of each material.
    materials: Vec<Vec<usize>>,
    /// For each material, the sum of the parts of a cross section that no energy changes.
    constants: Vec<f64>,
}

/// A cross section of a nuclide at an energy.
fn cross_section(nuclide: usize, kind: usize, energy: f64) -> f64 {
    slope(kind) * energy + constant(nuclide)
}

fn slope(kind: usize) -> f64 {
    (kind + 1) as f64
}

fn constant(nuclide: usize) -> f64 {
    (nuclide + 1) as f64
}

/// A number from 0 to 1.
fn unit(choice: &mut SplitMix64) -> f64 {
    const STEPS: usize = 1 << 52;
    choice.below(STEPS) as f64 / STEPS as f64
}

impl Grids {
    pub(super) fn fill(words: &[AtomicU64]) -> Grids {
        let points = words.len() / (NUCLIDES * (POINT + 1 + INDEXES));
        let mut choice = SplitMix64(SEED);
        let materials = SIZES.iter().map(|size| {
            let mut nuclides: Vec<usize> = (0..NUCLIDES).collect();
            for at in 0..*size {
                nuclides.swap(at, at + choice.below(NUCLIDES - at));
            }
            nuclides.truncate(*size);
            nuclides
        });
        let materials: Vec<Vec<usize>> = materials.collect();
        let sum = |nuclides: &Vec<usize>| nuclides.iter().map(|one| constant(*one)).sum();
        let constants = materials.iter().map(sum).collect();
        let grids = Grids { points, materials, constants };
        let mut all = Vec::with_capacity(NUCLIDES * points);
        for nuclide in 0..NUCLIDES {
            let mut energies: Vec<f64> = (0..points).map(|_| unit(&mut choice)).collect();
            energies.sort_unstable_by(f64::total_cmp);
            for (at, energy) in energies.iter().enumerate() {
                let place = grids.point(nuclide, at);
                store(words, place, energy.to_bits());
                for kind in 0..KINDS {
                    let value = cross_section(nuclide, kind, *energy);
                    store(words, place + 1 + kind, value.to_bits());
                }
            }
            all.extend(energies.into_iter().map(|energy| (energy, nuclide)));
        }
        all.sort_unstable_by(|(one, _), (other, _)| one.total_cmp(other));
        let mut seen = [0u64; NUCLIDES];
        for (at, (energy, nuclide)) in all.iter().enumerate() {
            store(words, grids.energy(at), energy.to_bits());
            seen[*nuclide] += 1;
            for (word, two) in seen.chunks_exact(2).enumerate() {
                let [low, high] = [two[0].saturating_sub(1), two[1].saturating_sub(1)];
                store(words, grids.indexes(at) + word, low | high << 32);
            }
        }
        grids
    }

    /// The place of a point of a nuclide.
    fn point(&self, nuclide: usize, at: usize) -> usize {
        (nuclide * self.points + at) * POINT
    }

    /// The place of an energy of the unionized grid.
    fn energy(&self, at: usize) -> usize {
        NUCLIDES * self.points * POINT + at
    }

    /// The place of the indexes that belong to it.
    fn indexes(&self, at: usize) -> usize {
        NUCLIDES * self.points * (POINT + 1) + at * INDEXES
    }

    /// The last point of the unionized grid that is not above an energy; the first one if all are.
    fn search(&self, words: &[AtomicU64], energy: f64) -> usize {
        let (mut low, mut high) = (0, NUCLIDES * self.points);
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if f64::from_bits(load(words, self.energy(middle))) > energy {
                high = middle;
            } else {
                low = middle;
            }
        }
        low
    }

    /// The cross sections of a material, all of whose nuclides have the concentration 1. `None` if
    /// two points do not lie around the energy: a line through any two points would give the same.
    fn look_up(&self, words: &[AtomicU64], material: usize, energy: f64) -> Option<[f64; KINDS]> {
        let indexes = self.indexes(self.search(words, energy));
        let (mut sums, mut is_between) = ([0.0; KINDS], true);
        for &nuclide in &self.materials[material] {
            let two = load(words, indexes + nuclide / 2);
            let index = (two >> (nuclide % 2 * 32)) as u32 as usize;
            // Beyond the last point the last two are extended.
            let first = index.min(self.points - 2);
            let low = self.point(nuclide, first);
            let of = |place: usize| f64::from_bits(load(words, place));
            is_between &= first == 0 || of(low) <= energy;
            is_between &= first == self.points - 2 || energy <= of(low + POINT);
            let share = (of(low + POINT) - energy) / (of(low + POINT) - of(low));
            for (kind, sum) in sums.iter_mut().enumerate() {
                let [below, above] = [of(low + 1 + kind), of(low + POINT + 1 + kind)];
                *sum += above - share * (above - below);
            }
        }
        is_between.then_some(sums)
    }

    fn is_right(&self, material: usize, energy: f64, found: Option<[f64; KINDS]>) -> bool {
        let Some(found) = found else { return false };
        let nuclides = self.materials[material].len() as f64;
        // The sum of all cross sections, in one step: the look-up is measured, and not the check.
        let right = |kind: usize| nuclides * slope(kind) * energy + self.constants[material];
        // Two points may be so near that their difference has few digits left.
        (0..KINDS).all(|kind| (found[kind] / right(kind) - 1.0).abs() < 1e-6)
    }
}

impl Structure for Grids {
    fn work(&self, words: &[AtomicU64], nth: usize, seed: u64, control: &Control<'_>) -> Done {
        let mut choice = choices(nth, seed);
        operate(control, SAMPLED, || {
            let energy = unit(&mut choice);
            let mut share = choice.below(SHARES.iter().sum());
            let material = SHARES.iter().position(|of| match share.checked_sub(*of) {
                Some(left) => {
                    share = left;
                    false
                }
                None => true,
            });
            let material = material.unwrap_or(0);
            self.is_right(material, energy, self.look_up(words, material, energy))
        })
    }
}
