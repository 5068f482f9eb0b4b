use super::*;
use crate::policy::selection::selector::Selector;
use proptest::prelude::*;

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn pool(name: &str, priority: i32, ranges: &[&str]) -> Pool {
    Pool {
        name: name.into(),
        ranges: ranges.iter().map(|text| net(text)).collect(),
        ipv4: 24,
        ipv6: 112,
        selector: None,
        priority,
        excluded: Vec::new(),
    }
}

fn node(name: &str) -> NodeFacts {
    NodeFacts { name: name.into(), uid: Some(format!("uid-{name}")), writable: true, ..NodeFacts::default() }
}

fn with(name: &str, blocks: &[&str]) -> NodeFacts {
    NodeFacts { blocks: blocks.iter().map(|text| net(text)).collect(), ..node(name) }
}

fn lock(block: &str, node: &str) -> BlockLock {
    BlockLock { block: net(block), node: node.into(), uid: format!("lock-{block}"), version: "7".into() }
}

fn broken(block: &str) -> UnreadableLock {
    let (object, uid) = (format!("Lease {block}"), format!("broken-{block}"));
    UnreadableLock { block: net(block), object, uid, why: "it is torn".into() }
}

fn plan(view: &BlockFacts) -> Plan {
    decide(view, BlockLimits::default(), &mut GoneNodes::default(), TimePoint(0))
}

/// What is given, as `node block`.
fn given(plan: &Plan) -> Vec<String> {
    let assigned = |step: &BlockStep| match step {
        BlockStep::Assign { block, node, .. } => Some(format!("{node} {block}")),
        _ => None,
    };
    plan.steps.iter().filter_map(assigned).collect()
}

fn labelled(mut node: NodeFacts, key: &str, value: &str) -> NodeFacts {
    node.labels.insert(key.into(), value.into());
    node
}

fn only(mut pool: Pool, json: &str) -> Pool {
    pool.selector = Some(Selector::parse(json).unwrap());
    pool
}

#[test]
fn every_node_gets_a_block_a_family_of_the_pool_that_serves_it() {
    let ssd = only(pool("ssd", 0, &["10.8.0.0/16"]), r#"{"matchLabels":{"disk":"ssd"}}"#);
    let view = BlockFacts {
        pools: vec![ssd, pool("all", -1, &["10.9.0.0/16", "fd00::/64"])],
        nodes: vec![node("a"), labelled(node("b"), "disk", "ssd"), node("c")],
        ..BlockFacts::default()
    };
    let expected = [
        "a 10.9.0.0/24",
        "a fd00::/112",
        "b 10.8.0.0/24",
        "b fd00::1:0/112",
        "c 10.9.1.0/24",
        "c fd00::2:0/112",
    ];
    assert_eq!(given(&plan(&view)), expected);
}

#[test]
fn the_next_pool_is_used_when_one_is_full_and_exhaustion_is_reported() {
    let mut view = BlockFacts {
        pools: vec![pool("second", 1, &["10.2.0.0/24"]), pool("first", 5, &["10.1.0.0/24"])],
        nodes: vec![node("a"), node("b"), node("c")],
        ..BlockFacts::default()
    };
    let decided = plan(&view);
    assert_eq!(given(&decided), ["a 10.1.0.0/24", "b 10.2.0.0/24"]);
    assert_eq!(
        decided.problems,
        [BlockProblem::NoRoom {
            node: "c".into(),
            family: Family::V4,
            pools: vec!["first".into(), "second".into()]
        }]
    );
    view.pools = vec![only(pool("none", 0, &["10.1.0.0/24"]), r#"{"matchLabels":{"x":"y"}}"#)];
    assert_eq!(plan(&view).problems[0].reason(), "NoPoolForNode");
    view.pools.clear();
    assert_eq!(plan(&view), Plan::default(), "without a pool no node is missing one");
}

#[test]
fn nothing_that_is_said_or_kept_or_locked_or_excluded_anywhere_is_given() {
    let mut first = pool("p", 0, &["10.1.0.0/16"]);
    first.excluded = vec![net("10.1.0.0/24")];
    let mut said = with("a", &["10.1.1.0/24"]);
    said.other_ranges = vec![net("10.1.2.0/23")];
    let view = BlockFacts {
        pools: vec![first],
        nodes: vec![said, node("z")],
        locks: vec![lock("10.1.1.0/24", "a"), lock("10.1.4.0/25", "gone")],
        broken: vec![broken("10.1.7.0/26")],
        kept: ["10.1.5.77".parse().unwrap()].into(),
        closed: vec![net("10.1.6.0/25")],
    };
    let decided = plan(&view);
    assert_eq!(given(&decided), ["z 10.1.8.0/24"]);
    // 10.1.1, .2, .3, .4 and .7 of 256 less the excluded one.
    assert_eq!(decided.fill["p"], Fill { allocated: 5, total: 255 });
}

#[test]
fn a_lock_that_cannot_be_read_blocks_no_node_and_is_reported() {
    let mut said = node("said");
    said.other_ranges = vec![net("10.1.0.0/24")];
    let view = BlockFacts {
        pools: vec![pool("p", 0, &["10.1.0.0/16"])],
        nodes: vec![said, with("stands", &["10.1.1.0/24"]), node("locked")],
        locks: vec![lock("10.1.2.0/25", "locked")],
        broken: ["10.1.0.0/24", "10.1.1.0/24", "10.1.2.0/24"].map(broken).into(),
        ..BlockFacts::default()
    };
    let decided = plan(&view);
    assert_eq!(given(&decided), ["said 10.1.3.0/24", "locked 10.1.4.0/24"]);
    assert_eq!(decided.steps.len(), 2, "no lock is made where one stands: {:?}", decided.steps);
    assert_eq!(decided.problems, view.broken.iter().cloned().map(BlockProblem::Broken).collect::<Vec<_>>());
    let text = decided.problems[0].to_string();
    for part in ["Lease 10.1.0.0/24", "torn", "block 10.1.0.0/24", "corrected or deleted"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_node_gets_what_its_node_object_says_if_that_is_of_its_pool_and_free() {
    let mut a = node("a");
    a.other_ranges = vec![net("10.1.9.0/24")];
    let mut b = node("b");
    b.other_ranges = vec![net("172.16.0.0/24")];
    let mut c = node("c");
    c.other_ranges = vec![net("10.1.9.128/25")];
    let pools = vec![pool("p", 0, &["10.1.0.0/16"])];
    let view = BlockFacts { pools: pools.clone(), nodes: vec![a.clone(), b], ..BlockFacts::default() };
    assert_eq!(given(&plan(&view)), ["a 10.1.9.0/24", "b 10.1.0.0/24"]);
    let contested = BlockFacts { pools, nodes: vec![a, c], ..BlockFacts::default() };
    assert_eq!(given(&plan(&contested)), ["a 10.1.0.0/24", "c 10.1.1.0/24"]);
}

#[test]
fn a_block_that_is_locked_for_a_node_is_written_on_it_whatever_happened_between() {
    let pools = vec![pool("p", 0, &["10.1.0.0/16"])];
    let mut view = BlockFacts {
        pools,
        nodes: vec![node("a"), with("b", &["10.1.0.0/24"])],
        locks: vec![lock("10.1.4.0/24", "a"), lock("10.1.0.0/24", "b")],
        ..BlockFacts::default()
    };
    let decided = plan(&view);
    assert_eq!(given(&decided), ["a 10.1.4.0/24"]);
    assert!(
        matches!(&decided.steps[0], BlockStep::Assign { lock: Some(lock), why: BlockReason::Locked, .. } if lock.version == "7")
    );
    // Another node says that it has it: nothing is written, it is reported.
    view.nodes[1].other_ranges = vec![net("10.1.4.9/32")];
    let decided = plan(&view);
    assert_eq!(decided.problems[0].reason(), "BlockContested");
    assert_eq!(given(&decided), ["a 10.1.1.0/24"], "it is served all the same");
}

#[test]
fn a_node_without_an_object_to_write_on_waits_and_one_without_a_node_gets_nothing() {
    let mut starting = node("a");
    starting.writable = false;
    let mut leaving = node("b");
    leaving.uid = None;
    let pools = vec![pool("p", 0, &["10.1.0.0/16"])];
    assert_eq!(
        plan(&BlockFacts { pools, nodes: vec![starting, leaving], ..BlockFacts::default() }).steps,
        []
    );
}

#[test]
fn blocks_that_stand_get_their_locks_unless_two_have_them() {
    let pools = vec![pool("p", 0, &["10.1.0.0/16"])];
    let nodes = vec![
        with("a", &["10.1.0.0/24", "192.168.0.0/24"]),
        with("b", &["10.1.1.0/24"]),
        with("c", &["10.1.1.0/25"]),
    ];
    let decided = plan(&BlockFacts { pools, nodes, ..BlockFacts::default() });
    assert_eq!(decided.steps, [BlockStep::Lock { block: net("10.1.0.0/24"), node: "a".into() }]);
}

#[test]
fn a_node_that_runs_low_gets_another_block_up_to_a_limit() {
    let mut low = with("a", &["10.1.0.0/24"]);
    let view = |low: &NodeFacts| BlockFacts {
        pools: vec![pool("p", 0, &["10.1.0.0/16"])],
        nodes: vec![low.clone()],
        locks: low.blocks.iter().map(|block| lock(&block.to_string(), "a")).collect(),
        ..BlockFacts::default()
    };
    low.used = [(Family::V4, 237)].into();
    assert_eq!(given(&plan(&view(&low))), [""; 0], "sixteen are left");
    low.used = [(Family::V4, 238)].into();
    assert_eq!(given(&plan(&view(&low))), ["a 10.1.1.0/24"]);
    let never = BlockLimits { low: 0, ..BlockLimits::default() };
    assert_eq!(decide(&view(&low), never, &mut GoneNodes::default(), TimePoint(0)).steps, []);
    let one = BlockLimits { most: 1, ..BlockLimits::default() };
    assert_eq!(decide(&view(&low), one, &mut GoneNodes::default(), TimePoint(0)).steps, []);
}

/// The block of a node that is gone.
fn left_by(node: &str) -> BlockFacts {
    BlockFacts {
        pools: vec![pool("p", 0, &["10.1.0.0/16"])],
        locks: vec![lock("10.1.0.0/24", node)],
        ..BlockFacts::default()
    }
}

/// How many steps are decided at a time, and when the next look is due.
fn steps_and_next(view: &BlockFacts, memory: &mut GoneNodes, time: i64) -> (usize, Option<u64>) {
    let decided = decide(view, BlockLimits::default(), memory, TimePoint(time));
    (decided.steps.len(), decided.again)
}

#[test]
fn a_block_returns_when_its_node_was_gone_for_long_and_nothing_is_kept_in_it() {
    let (mut view, mut memory) = (left_by("a"), GoneNodes::default());
    let mut at = |view: &BlockFacts, time| steps_and_next(view, &mut memory, time);
    assert_eq!(at(&view, 0), (0, Some(600)));
    assert_eq!(at(&view, 599), (0, Some(1)));
    view.kept = ["10.1.0.200".parse().unwrap()].into();
    assert_eq!(at(&view, 600), (0, None));
    view.kept = ["10.1.1.0".parse().unwrap(), "10.0.255.255".parse().unwrap()].into();
    assert_eq!(at(&view, 601), (1, None));
    // It came again, with or without its Node, and went: the time starts again.
    let mut back = node("a");
    back.uid = None;
    view.nodes = vec![back];
    assert_eq!(at(&view, 602), (0, None));
    view.nodes.clear();
    assert_eq!(at(&view, 603), (0, Some(600)));
}

#[test]
fn blocks_of_other_nodes_do_not_prolong_the_quarantine_of_one_that_is_gone() {
    let (mut view, mut memory) = (left_by("first"), GoneNodes::default());
    let mut at = |view: &BlockFacts, time| steps_and_next(view, &mut memory, time);
    assert_eq!(at(&view, 0), (0, Some(600)));
    view.locks.push(lock("10.1.1.0/24", "second"));
    view.nodes = vec![node("new")];
    assert_eq!(at(&view, 500), (1, Some(100)), "a block for the new node");
    view.nodes = vec![with("new", &["10.1.2.0/24"])];
    view.locks.push(lock("10.1.2.0/24", "new"));
    assert_eq!(at(&view, 600), (1, Some(500)), "the first comes back");
    view.locks.remove(0);
    assert_eq!(at(&view, 1099), (0, Some(1)));
    assert_eq!(at(&view, 1100), (1, None), "and the second in its own time");
}

proptest! {
    /// Whatever stands, however often it is decided, no two nodes have one address.
    #[test]
    fn no_two_nodes_ever_have_one_address(
        standing in proptest::collection::vec((0usize..12, 0u8..16, 22u8..=26), 0..6),
        locked in proptest::collection::vec((0usize..12, 0u8..16), 0..6),
        leaving in proptest::collection::btree_set(0usize..12, 0..6),
    ) {
        let block = |third: u8, bits| IpNet::new(std::net::Ipv4Addr::new(10, 1, third, 0).into(), bits).unwrap().trunc();
        let mut nodes: Vec<NodeFacts> = (0..12).map(|n| node(&format!("n{n:02}"))).collect();
        let mut owned = BlockMap::default();
        for (n, third, bits) in standing {
            let range = block(third, bits);
            if owned.overlapping(range).next().is_none() {
                owned.add(range, &nodes[n].name);
                nodes[n].blocks.push(range);
            }
        }
        let mut locks: Vec<BlockLock> = Vec::new();
        for (n, third) in locked {
            let range = block(third, 24);
            if !locks.iter().any(|lock| lock.block == range) {
                locks.push(lock(&range.to_string(), &nodes[n].name));
            }
        }
        let nodes = nodes.into_iter().enumerate().filter(|(n, _)| !leaving.contains(n)).map(|(_, node)| node).collect();
        let mut view = BlockFacts { pools: vec![pool("p", 0, &["10.1.0.0/20"])], nodes, locks, ..BlockFacts::default() };
        for round in 0..3 {
            for step in plan(&view).steps {
                match step {
                    BlockStep::Assign { block, node, lock: held, .. } => {
                        if held.is_none() {
                            prop_assert!(!view.locks.iter().any(|lock| overlap(lock.block, block)), "{block} is locked");
                            view.locks.push(lock(&block.to_string(), &node));
                        }
                        view.nodes.iter_mut().find(|facts| facts.name == node).unwrap().blocks.push(block);
                    }
                    BlockStep::Lock { block, node } => view.locks.push(lock(&block.to_string(), &node)),
                    BlockStep::Release { .. } => prop_assert!(false, "no node was gone for long"),
                }
            }
            let all: Vec<(IpNet, &str)> =
                view.nodes.iter().flat_map(|node| node.blocks.iter().map(|b| (*b, node.name.as_str()))).collect();
            for (n, (a, _)) in all.iter().enumerate() {
                for (b, who) in &all[n + 1..] {
                    prop_assert!(!overlap(*a, *b), "round {round}: {a} and {b} of {who}");
                }
            }
        }
        prop_assert_eq!(given(&plan(&view)), Vec::<String>::new(), "it comes to rest");
    }
}

#[test]
fn a_thousand_nodes_get_a_thousand_blocks() {
    let nodes = (0..1000).map(|n| node(&format!("n{n:04}"))).collect();
    let mut taken = pool("p", 0, &["10.0.0.0/8"]);
    taken.excluded = vec![net("10.1.0.0/16")];
    let decided = plan(&BlockFacts { pools: vec![taken], nodes, ..BlockFacts::default() });
    let blocks: BTreeSet<String> = given(&decided).iter().map(|text| text[6..].to_owned()).collect();
    assert_eq!(blocks.len(), 1000);
    assert!(!blocks.iter().any(|block| block.starts_with("10.1.")));
}
