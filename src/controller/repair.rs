//! The repair loop: a StickyIP has its claims and a claim its StickyIP, or it is made so. Released addresses rest here, and are
//! freed here. Must never cure by anything but the protocol's own writes, and never free what a pod shows.

use std::collections::HashSet;
use std::net::IpAddr;
use std::time::Duration;

use futures_util::StreamExt;

use super::index::{Index, Kind};
use super::metrics::Metrics;
use super::queue::Key;
use super::settings::Settings;
use super::world::{Done, Duty, World};
use crate::cluster::claims::mend::{Mender, Outcome, Surroundings, cure};
use crate::cluster::claims::repair::{Fault, Finding};
use crate::cluster::claims::view::Origin;
use crate::cluster::events::{self, Told};
use crate::cluster::objects::{Holder, PoolUse, StickyIP};

/// Cures side by side; no two findings of one pass write the same object's state twice.
const SIDE_BY_SIDE: usize = 16;
/// After a cure that failed.
const AFTER_FAILURE: Duration = Duration::from_secs(2);

/// The duty's memory: since when a claim stands as it does. Lost with the process at no harm.
pub struct Repair {
    mender: Mender,
}

impl Repair {
    /// A duty that has seen nothing yet.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        Self { mender: Mender::new(settings.times()) }
    }
}

/// What the index shows around the claims.
struct Around<'a> {
    index: &'a Index,
    /// The addresses of Cilium's endpoints.
    endpoints: HashSet<IpAddr>,
}

impl<'a> Around<'a> {
    fn of(index: &'a Index) -> Self {
        let endpoints = index.endpoints.values().flat_map(|endpoint| endpoint.addresses.iter().copied());
        Self { index, endpoints: endpoints.collect() }
    }
}

impl Surroundings for Around<'_> {
    fn shown(&self, address: IpAddr) -> bool {
        self.index.is_shown(address) || self.endpoints.contains(&address)
    }

    /// A controller is no node: whatever is of a block is asked of its home node, which knows what it has given out.
    fn origin(&self, address: IpAddr) -> Origin {
        let sticky = self.index.pools.values().filter(|pool| pool.spec.purpose == PoolUse::Sticky);
        if let Some(range) = sticky.flat_map(|pool| &pool.spec.cidrs).find(|range| range.contains(&address)) {
            return Origin::StickyPool { range: *range };
        }
        match self.index.home_of(address) {
            Some((home, block)) => Origin::ForeignBlock { home: home.to_owned(), block },
            None => Origin::Nowhere,
        }
    }

    fn unreadable(&self, holder: &Holder) -> bool {
        let name = holder.to_string();
        self.index.stickies.is_there(&name) && self.index.stickies.get(&name).is_none()
    }
}

impl Duty for Repair {
    const NAME: &'static str = "repair";
    const WAKES: &'static [Kind] = &[Kind::StickyIP, Kind::AddressClaim];
    // A pass looks at everything: gather what changes together.
    const CALM: Duration = Duration::from_millis(100);
    const TICK: Option<Duration> = Some(Duration::from_secs(1));

    async fn round(&mut self, world: &World, due: Vec<Key>) -> Done {
        // At rest, with no claim whose time has yet to come, there is nothing to find.
        if due.is_empty() && !self.mender.waits() {
            return Done::default();
        }
        let found: Vec<(Finding, Option<StickyIP>)> = {
            let index = world.index();
            let found = self.mender.find(
                index.stickies.values(),
                index.claims.values(),
                &Around::of(&index),
                world.now(),
            );
            let known = |finding: &Finding| index.stickies.get(&finding.sticky.to_string()).cloned();
            found.into_iter().map(|finding| (finding.clone(), known(&finding))).collect()
        };
        let cures = found.iter().map(|(finding, known)| async move {
            let outcome = cure(&mut world.hands.carrier(), finding, known.as_ref()).await;
            tell(world, finding, known.as_ref(), &outcome).await;
            outcome
        });
        let outcomes: Vec<Outcome> =
            futures_util::stream::iter(cures).buffer_unordered(SIDE_BY_SIDE).collect().await;
        let failures = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Failed(_))).count();
        // Whatever was cured changes an object, and the watch tells of it. What failed changes nothing.
        let again = (failures > 0).then(|| (Key::new(Kind::AddressClaim, ""), AFTER_FAILURE));
        Done { again: again.into_iter().collect(), failures }
    }
}

async fn tell(world: &World, finding: &Finding, known: Option<&StickyIP>, outcome: &Outcome) {
    if let (Outcome::Cured, Some(write)) = (outcome, &finding.cure) {
        Metrics::count(&world.metrics.repaired, write.word());
    }
    // A claim that rests or has rested is the ordinary end of an address.
    if matches!(finding.fault, Fault::HolderGone | Fault::Rested) {
        return;
    }
    let next = match outcome {
        Outcome::Cured => "it was repaired",
        Outcome::ForAPerson if finding.fault == Fault::ClaimMissing => {
            "the address is in no Sticky pool and in no node's block: add it to a pool, or delete the StickyIP"
        }
        Outcome::ForAPerson => "delete one of the two StickyIPs",
        Outcome::Overtaken | Outcome::Failed(_) => return,
    };
    let Some(sticky) = known else { return };
    world
        .tell(Told {
            about: events::sticky_ip(sticky),
            reason: if matches!(outcome, Outcome::Cured) { "Repaired" } else { "NeedsAPerson" },
            message: format!("{finding}; {next}"),
            warning: !matches!(outcome, Outcome::Cured)
                || matches!(finding.fault, Fault::ClaimedForAnother { .. }),
        })
        .await;
}
