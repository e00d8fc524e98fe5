//! Evening out what hashing left uneven.
//!
//! Every OSD has a target, its weight's share of all copies (but no failure domain more than one copy of each PG).
//! While one is further off than the tolerance, the copy that costs least is moved: the one whose new place lost the
//! race by the smallest margin. A new OSD is filled in the same way, so it gets what it wins most clearly.

use super::draw::Draw;
use super::{Field, Race};
use crate::id::OsdId;

/// How far an OSD may be off its target, in percent. Measured: see `docs/map.md`.
const TOLERANCE_PERCENT: u64 = 7;
/// Targets are computed in units of 1/65536 copy.
const UNIT: u64 = 1 << 16;

/// Bounds of one OSD's load.
struct Bounds {
    target: Vec<u64>,
    min: Vec<u64>,
    max: Vec<u64>,
}

pub(super) fn balanced(field: &Field, mut races: Vec<Race>) -> Vec<Vec<OsdId>> {
    let copies = races.len() * field.size.min(field.domain_count);
    if copies > 0 {
        let bounds = Bounds::new(targets(field, races.len() as u64));
        Balance::new(field, &mut races, bounds).even_out();
        even_out_primaries(field, &mut races);
    }
    let osds = |race: &Race| race.members.iter().map(|member| field.runners[member.runner].osd).collect();
    races.iter().map(osds).collect()
}

impl Bounds {
    fn new(target: Vec<u64>) -> Self {
        let slack = |target: u64| target * TOLERANCE_PERCENT / 100;
        let min = target.iter().map(|target| (target - slack(*target)) / UNIT).collect();
        let max = target.iter().map(|target| (target + slack(*target)).div_ceil(UNIT)).collect();
        Self { target, min, max }
    }
}

/// The copies that each OSD should have. A domain never gets more than one copy of each PG; what it cannot take goes
/// to the others by weight.
fn targets(field: &Field, pgs: u64) -> Vec<u64> {
    let mut weights = vec![0u64; field.domain_count];
    for runner in &field.runners {
        weights[runner.domain] += u64::from(runner.weight);
    }
    let full = pgs * UNIT;
    let mut shares: Vec<Option<u64>> = vec![None; field.domain_count];
    let mut left = full * field.size.min(field.domain_count) as u64;
    let mut weight_left: u64 = weights.iter().sum();
    // Each round fixes the domains that are too big for their share; at most as many rounds as there are copies.
    loop {
        let too_big: Vec<usize> = (0..weights.len())
            .filter(|domain| shares[*domain].is_none())
            .filter(|domain| portion(left, weights[*domain], weight_left) > full)
            .collect();
        if too_big.is_empty() {
            break;
        }
        for domain in too_big {
            shares[domain] = Some(full);
            left = left.saturating_sub(full);
            weight_left -= weights[domain];
        }
    }
    let share = |domain: usize| shares[domain].unwrap_or_else(|| portion(left, weights[domain], weight_left));
    let target =
        |runner: &super::Runner| portion(share(runner.domain), runner.weight.into(), weights[runner.domain]);
    field.runners.iter().map(target).collect()
}

fn portion(whole: u64, part: u64, of: u64) -> u64 {
    let portion = u128::from(whole) * u128::from(part) / u128::from(of.max(1));
    u64::try_from(portion).unwrap_or(u64::MAX)
}

/// One move that could be made. Ordered by what it costs, then by place, so that it is unique.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Move {
    cost: i128,
    pg: usize,
    member: usize,
    alternate: usize,
}

struct Balance<'a> {
    field: &'a Field,
    races: &'a mut [Race],
    bounds: Bounds,
    load: Vec<u64>,
    /// The PGs in which a runner is member, and in which it is an alternate; entries may be out of date.
    member_of: Vec<Vec<usize>>,
    alternate_of: Vec<Vec<usize>>,
}

impl<'a> Balance<'a> {
    fn new(field: &'a Field, races: &'a mut [Race], bounds: Bounds) -> Self {
        let count = field.runners.len();
        let (mut load, mut member_of, mut alternate_of) =
            (vec![0; count], vec![vec![]; count], vec![vec![]; count]);
        for (pg, race) in races.iter().enumerate() {
            for member in &race.members {
                load[member.runner] += 1;
                member_of[member.runner].push(pg);
            }
            for alternate in &race.alternates {
                alternate_of[alternate.runner].push(pg);
            }
        }
        Self { field, races, bounds, load, member_of, alternate_of }
    }

    /// Fills those below their bounds, then empties those above, the furthest off first. Ends: each move brings one OSD
    /// nearer to its bounds and takes none out of its own; an OSD that cannot be helped is left alone.
    fn even_out(&mut self) {
        let mut helpless = vec![false; self.load.len()];
        while let Some(under) =
            self.furthest(&helpless, |this, at| this.bounds.min[at].saturating_sub(this.load[at]))
        {
            match self.cheapest_to(under) {
                Some(best) => self.apply(best),
                None => helpless[under] = true,
            }
        }
        helpless.fill(false);
        while let Some(over) =
            self.furthest(&helpless, |this, at| this.load[at].saturating_sub(this.bounds.max[at]))
        {
            match self.cheapest_from(over) {
                Some(best) => self.apply(best),
                None => helpless[over] = true,
            }
        }
    }

    fn furthest(&self, helpless: &[bool], off: impl Fn(&Self, usize) -> u64) -> Option<usize> {
        let all = (0..self.load.len()).filter(|at| !helpless[*at] && off(self, *at) > 0);
        all.max_by_key(|at| {
            (portion(off(self, *at), UNIT * UNIT, self.bounds.target[*at]), std::cmp::Reverse(*at))
        })
    }

    fn cheapest_from(&self, over: usize) -> Option<Move> {
        // Below its target first: a place that is filled up to its bound would be the next to be emptied.
        let roomy = |at: usize| (self.load[at] + 1) * UNIT <= self.bounds.target[at];
        let open = |at: usize| self.load[at] < self.bounds.max[at];
        let best = |room: &dyn Fn(usize) -> bool| {
            let moves = self.member_of[over].iter().flat_map(|pg| self.moves(*pg));
            moves.filter(|step| self.runner(step).0 == over && room(self.runner(step).1)).min()
        };
        best(&roomy).or_else(|| best(&open))
    }

    fn cheapest_to(&self, under: usize) -> Option<Move> {
        let rich = |at: usize| (self.load[at].saturating_sub(1)) * UNIT >= self.bounds.target[at];
        let spare = |at: usize| self.load[at] > self.bounds.min[at];
        let best = |can: &dyn Fn(usize) -> bool| {
            let moves = self.alternate_of[under].iter().flat_map(|pg| self.moves(*pg));
            moves.filter(|step| self.runner(step).1 == under && can(self.runner(step).0)).min()
        };
        best(&rich).or_else(|| best(&spare))
    }

    /// From which runner to which.
    fn runner(&self, step: &Move) -> (usize, usize) {
        let race = &self.races[step.pg];
        (race.members[step.member].runner, race.alternates[step.alternate].runner)
    }

    /// Every exchange of a member for an alternate that keeps the copies in different failure domains.
    fn moves(&self, pg: usize) -> impl Iterator<Item = Move> + '_ {
        let race = &self.races[pg];
        let members = race.members.iter().enumerate().skip(race.fixed);
        members.flat_map(move |(member, from)| {
            let alternates = race.alternates.iter().enumerate();
            let fitting = alternates.filter(move |(_, to)| {
                let domain = self.field.runners[to.runner].domain;
                let mut others = race.members.iter().enumerate().filter(|(at, _)| *at != member);
                others.all(|(_, other)| self.field.runners[other.runner].domain != domain)
            });
            fitting.map(move |(alternate, to)| Move { cost: cost(from.draw, to.draw), pg, member, alternate })
        })
    }

    fn apply(&mut self, step: Move) {
        let (from, to) = self.runner(&step);
        let race = &mut self.races[step.pg];
        std::mem::swap(&mut race.members[step.member], &mut race.alternates[step.alternate]);
        self.load[from] -= 1;
        self.load[to] += 1;
        self.member_of[from].retain(|pg| *pg != step.pg);
        self.alternate_of[to].retain(|pg| *pg != step.pg);
        self.member_of[to].push(step.pg);
        self.alternate_of[from].push(step.pg);
    }
}

/// How far the alternate is behind; negative when it would win: a new OSD begins with what it wins most clearly.
fn cost(member: Draw, alternate: Draw) -> i128 {
    i128::from(alternate.0) - i128::from(member.0)
}

/// The primary does most of the work of a PG, and exchanging it moves no data: each OSD should be primary of its share
/// of the PGs that it has a copy of. Within the tolerance nothing is changed, since a new primary means a new interval.
fn even_out_primaries(field: &Field, races: &mut [Race]) {
    let (mut shares, mut primaries) = (vec![0u64; field.runners.len()], vec![0u64; field.runners.len()]);
    for race in races.iter() {
        for member in &race.members {
            shares[member.runner] += UNIT / race.members.len() as u64;
        }
        if let Some(primary) = race.members.first() {
            primaries[primary.runner] += 1;
        }
    }
    let bounds = Bounds::new(shares);
    for at in 0..primaries.len() {
        while primaries[at] > bounds.max[at] {
            let room = |to: usize| (primaries[to] + 1) * UNIT <= bounds.target[to];
            let Some(step) = cheapest_primary(races, |from, to| from == at && room(to)) else { break };
            exchange_primary(&mut races[step.pg], step.member, &mut primaries);
        }
    }
    for at in 0..primaries.len() {
        while primaries[at] < bounds.min[at] {
            let rich = |from: usize| primaries[from].saturating_sub(1) * UNIT >= bounds.target[from];
            let Some(step) = cheapest_primary(races, |from, to| to == at && rich(from)) else { break };
            exchange_primary(&mut races[step.pg], step.member, &mut primaries);
        }
    }
}

fn exchange_primary(race: &mut Race, member: usize, primaries: &mut [u64]) {
    primaries[race.members[0].runner] -= 1;
    primaries[race.members[member].runner] += 1;
    race.members.swap(0, member);
}

fn cheapest_primary(races: &[Race], wanted: impl Fn(usize, usize) -> bool) -> Option<Move> {
    let mut best: Option<Move> = None;
    for (pg, race) in races.iter().enumerate().filter(|(_, race)| race.fixed == 0) {
        let Some(primary) = race.members.first() else { continue };
        for (member, other) in race.members.iter().enumerate().skip(1) {
            if wanted(primary.runner, other.runner) {
                let step = Move { cost: cost(primary.draw, other.draw), pg, member, alternate: 0 };
                best = Some(best.map_or(step, |best| best.min(step)));
            }
        }
    }
    best
}
