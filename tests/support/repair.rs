//! The repair loop over one test's own objects.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use sticky_ipam::cluster::api::client::Connection;
use sticky_ipam::cluster::objects::StickyIP;
use sticky_ipam::cluster::protocol::faults::{RepairFacts, RepairTimes};
use sticky_ipam::cluster::protocol::repair::{RepairOutcome, Repairer, repair};
use sticky_ipam::cluster::view::{Origin, StickyView};
use sticky_ipam::cluster::writer::apply::{ApiWriter, NoObserver, WriteObserver};
use sticky_ipam::policy::selection::facts::TimePoint;

use super::api_server::case::Case;
use super::node::{claims, stickies};

/// Everything is old enough at once.
pub const HURRIED: RepairTimes = RepairTimes { orphan: 0, quarantine: 0 };

/// More passes than any of these faults needs.
pub const MOST_PASSES: usize = 10;

/// What surrounds the objects: the addresses that pods use, and the ranges that addresses come from.
#[derive(Default)]
pub struct Surroundings {
    pub in_use: BTreeSet<IpAddr>,
    pub pools: Vec<ipnet::IpNet>,
    pub blocks: Vec<(ipnet::IpNet, String)>,
}

impl Surroundings {
    pub fn of(case: &Case<'_>) -> Self {
        Self { pools: vec![case.range().into()], ..Self::default() }
    }

    /// A repairer is no node: an address of a block is asked of its home node, which knows what it has given
    /// out.
    pub fn origin(&self, address: IpAddr) -> Origin {
        if let Some((block, home)) = self.blocks.iter().find(|(block, _)| block.contains(&address)) {
            return Origin::ForeignBlock { home: home.clone(), block: *block };
        }
        let range = self.pools.iter().find(|range| range.contains(&address));
        range.map_or(Origin::Nowhere, |range| Origin::StickyPool { range: *range })
    }

    fn facts(&self, stickies: &[StickyIP]) -> RepairFacts {
        let addresses = stickies.iter().flat_map(|sticky| &sticky.spec.addresses);
        RepairFacts {
            times: HURRIED,
            in_use: self.in_use.clone(),
            origins: addresses.map(|address| (*address, self.origin(*address))).collect(),
            ..RepairFacts::default()
        }
    }
}

pub fn api_writer<'a>(case: &Case<'_>, observer: &'a dyn WriteObserver) -> ApiWriter<'a> {
    let api = Connection::with_client(case.client(), Path::new("admin"), Duration::from_secs(60));
    ApiWriter::new(api, observer)
}

/// One pass over the test's own objects, as they stand now.
pub async fn pass(
    case: &Case<'_>,
    repairer: &mut Repairer,
    observer: &dyn WriteObserver,
    around: &Surroundings,
) -> usize {
    let (stickies, claims) = (stickies(case).await, claims(case).await);
    let mut writer = api_writer(case, observer);
    let mut repaired = 0;
    for fault in repairer.find(stickies.iter(), claims.iter(), around.facts(&stickies), TimePoint(0)) {
        let known = stickies.iter().find(|sticky| StickyView::from(*sticky).key == fault.sticky);
        let outcome = repair(&mut writer, &fault, known).await;
        assert!(!matches!(outcome, RepairOutcome::Failed(_)), "{fault}: {outcome:?}");
        repaired += usize::from(!matches!(outcome, RepairOutcome::ManualActionRequired));
    }
    repaired
}

/// Passes until nothing is left to do.
pub async fn mend(case: &Case<'_>) {
    let (mut repairer, around) = (Repairer::default(), Surroundings::of(case));
    for _ in 0..MOST_PASSES {
        if pass(case, &mut repairer, &NoObserver, &around).await == 0 {
            return;
        }
    }
    panic!("the repair loop does not come to rest");
}
