//! What a power cut may leave: every block that was not durable keeps its old contents or any newer ones, or a mix of
//! their sectors where the device tears blocks.
//!
//! The bound: of the 2^8 mixes of two versions of a block three are tried (the first sector new; all but the first;
//! all but the last), and of the product over the blocks at most `bound` images, the rest being cut off and counted. When it
//! has more, the two extremes come first, then each block alone old, new or torn, then images drawn at random.

use super::device::{Block, Media, Rng};
use crate::store::codec::BLOCK;
use loligo_reactor::env::Geometry;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Bytes of a sector: what a device writes whole in any case.
const SECTOR: usize = 512;

/// A block that is not settled.
#[derive(Debug)]
struct Unsettled {
    lba: u64,
    /// The old contents, the newer ones, newest last, then the torn ones.
    choices: Vec<Block>,
    newest: usize,
}

#[derive(Debug)]
pub struct Crash {
    geometry: Geometry,
    durable: Vec<Block>,
    blocks: Vec<Unsettled>,
    /// A hash of everything durable, and of nothing else.
    base: u64,
}

/// One image, as the choice made for each unsettled block.
pub type Image = Vec<usize>;

impl Crash {
    pub fn new(geometry: Geometry, durable: Vec<Block>, unsettled: BTreeMap<u64, Vec<Block>>) -> Self {
        let tears = geometry.atomic_blocks.0 == 0;
        let blocks: Vec<_> = unsettled
            .into_iter()
            .map(|(lba, newer)| Unsettled::new(lba, durable[lba as usize].clone(), newer, tears))
            .filter(|block| block.choices.len() > 1)
            .collect();
        let base = (0..).zip(&durable).fold(0u64, |sum, (lba, block)| sum.wrapping_add(placed(lba, block)));
        Self { geometry, durable, blocks, base }
    }

    /// How many images there are.
    pub fn count(&self) -> u128 {
        self.blocks.iter().map(|block| block.choices.len() as u128).product()
    }

    /// All images, or `bound` of them.
    pub fn images(&self, bound: usize, rng: &mut Rng) -> Vec<Image> {
        if self.count() <= bound as u128 {
            return self.all();
        }
        let old: Image = vec![0; self.blocks.len()];
        let new: Image = self.blocks.iter().map(|block| block.newest).collect();
        let mut images: BTreeSet<Image> = [old.clone(), new.clone()].into();
        let mut ordered = vec![old.clone(), new.clone()];
        for base in [new, old] {
            for (at, block) in self.blocks.iter().enumerate() {
                for choice in 0..block.choices.len() {
                    let mut image = base.clone();
                    image[at] = choice;
                    if images.insert(image.clone()) {
                        ordered.push(image);
                    }
                }
            }
        }
        while ordered.len() < bound {
            let pick = |block: &Unsettled| rng.below(block.choices.len() as u64) as usize;
            let image: Image = self.blocks.iter().map(pick).collect();
            // One that was drawn before counts too, or the last ones would take for ever.
            images.insert(image.clone());
            ordered.push(image);
        }
        ordered.truncate(bound);
        ordered
    }

    fn all(&self) -> Vec<Image> {
        let mut images = vec![Image::new()];
        for block in &self.blocks {
            let longer = images.iter().flat_map(|image| {
                (0..block.choices.len()).map(move |choice| [&image[..], &[choice]].concat())
            });
            images = longer.collect();
        }
        images
    }

    /// A hash of the whole device as the image has it.
    pub fn hash(&self, image: &Image) -> u64 {
        self.blocks.iter().zip(image).fold(self.base, |sum, (block, choice)| {
            sum.wrapping_sub(placed(block.lba, &block.choices[0]))
                .wrapping_add(placed(block.lba, &block.choices[*choice]))
        })
    }

    /// The device as the image has it, all of it durable.
    pub fn media(&self, image: &Image) -> Rc<RefCell<Media>> {
        let mut durable = self.durable.clone();
        for (block, choice) in self.blocks.iter().zip(image) {
            durable[block.lba as usize] = block.choices[*choice].clone();
        }
        let media = Media::with(self.geometry.clone(), durable, self.base);
        media.borrow_mut().chaos = false;
        media
    }

    /// The image in words, to be printed when it fails.
    pub fn describe(&self, image: &Image) -> String {
        let one = |(block, choice): (&Unsettled, &usize)| match *choice {
            0 => format!("{} old", block.lba),
            choice if choice <= block.newest => format!("{} new {choice}/{}", block.lba, block.newest),
            choice => format!("{} torn {}", block.lba, choice - block.newest),
        };
        self.blocks.iter().zip(image).map(one).collect::<Vec<_>>().join(", ")
    }
}

impl Unsettled {
    fn new(lba: u64, old: Block, newer: Vec<Block>, tears: bool) -> Self {
        let mut choices = vec![old];
        choices.extend(newer);
        let mut distinct = BTreeSet::new();
        choices.retain(|block| distinct.insert(block.hash()));
        let newest = choices.len() - 1;
        let whole = choices.clone();
        for new in whole[1..].iter().filter(|_| tears) {
            for mixed in [0..SECTOR, SECTOR..BLOCK, 0..BLOCK - SECTOR] {
                let mut torn = choices[0].to_vec();
                torn[mixed.clone()].copy_from_slice(&new[mixed]);
                let torn = Block::new(&torn);
                if distinct.insert(torn.hash()) {
                    choices.push(torn);
                }
            }
        }
        Self { lba, choices, newest }
    }
}

fn placed(lba: u64, block: &Block) -> u64 {
    let mixed = (block.hash() ^ lba.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ mixed >> 31
}
