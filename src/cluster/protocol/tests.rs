//! The protocol over every interleaving and crash of the model.

use crate::cluster::protocol::model::ModelState;

fn explored(name: &str, world: ModelState) {
    let states = world.explore();
    println!("{name}: {states} states");
    assert!(states > 100, "{name}: the model hardly moved ({states} states)");
}

#[test]
fn two_claimants_that_want_one_address_never_share_it() {
    let world = ModelState::new(1).pod("a", "a", &[1, 2], false).pod("b", "b", &[1, 2], false);
    explored("two claimants", world);
}

#[test]
fn two_pods_of_one_claimant_end_with_one_stickyip() {
    let world = ModelState::new(1).pod("old", "db-0", &[1, 2], true).pod("new", "db-0", &[3, 4], false);
    explored("one claimant", world);
}

#[test]
fn a_repairer_in_a_hurry_takes_nothing_from_a_pod_on_its_way() {
    let world = ModelState::new(1).pod("a", "a", &[1, 2], false).repairer(3);
    explored("hurried repairer", world);
}

#[test]
fn recycler_and_repairer_never_pull_an_address_from_under_a_pod() {
    let world = ModelState::new(1).pod("a", "a", &[1], false).recycler(2).repairer(3);
    explored("recycler", world);
}

#[test]
fn a_released_address_goes_to_another_only_when_it_is_free() {
    let world =
        ModelState::new(0).pod("a", "a", &[1], true).pod("b", "b", &[1], false).recycler(1).repairer(2);
    explored("let go", world);
}

#[test]
fn a_recreated_stickyip_is_never_robbed_by_a_reader_of_the_old_one() {
    let world = ModelState::new(0)
        .pod("old", "db-0", &[1], false)
        .pod("new", "db-0", &[1], false)
        .recycler(1)
        .repairer(1);
    explored("recreated", world);
}

#[test]
fn a_pod_that_attaches_ahead_of_its_reads_lives_only_with_what_is_its_own() {
    let back = |crashes| {
        ModelState::new(crashes).pod("old", "db-0", &[1], true).pod("new", "db-0", &[1], false).ahead()
    };
    explored("ahead, and ended anywhere", back(1));
    explored("ahead, while it is let go", back(0).recycler(1).repairer(1));
    let three = ModelState::new(0).pod_of_families("old", "db-0", &[[1]], true, 3);
    let three = three.pod_of_families("new", "db-0", &[[1]], false, 3).ahead();
    explored("ahead, against its own", three.pod_of_families("late", "db-0", &[[1]], false, 3).ahead());
}

#[test]
fn a_released_address_is_never_shared_and_never_left_behind() {
    let old = ModelState::new(0).for_good().pod("old", "db-0", &[1], true);
    explored("for good", old.pod("new", "db-0", &[1, 2], false).recycler(1).repairer(1));
    let other = ModelState::new(0).for_good().pod("a", "a", &[1, 2], true).pod("b", "b", &[1], false);
    explored("for good, and another comes", other.recycler(1).repairer(1));
}

#[test]
fn a_stickyip_that_was_made_and_left_blocks_no_other_claimant() {
    let world = ModelState::new(1).pod("a", "a", &[1], false).pod("b", "b", &[1], false).repairer(2);
    explored("left before its claim", world);
}

#[test]
fn a_pod_that_loses_one_family_keeps_the_other_and_shares_neither() {
    let world = ModelState::new(0).pod_of_families("a", "a", &[[1, 2], [1, 3]], false, 9).pod_of_families(
        "b",
        "b",
        &[[4, 2], [4, 5]],
        false,
        9,
    );
    explored("one family lost", world);
}

#[test]
fn a_crash_between_the_claims_of_two_families_is_repaired() {
    let world = ModelState::new(1)
        .pod_of_families("a", "a", &[[1, 2]], false, 6)
        .pod("b", "b", &[2], false)
        .repairer(2);
    explored("two families", world);
}

#[test]
fn a_recycler_between_stickyip_and_claim_leaves_nothing_for_good() {
    let world = ModelState::new(1).pod("a", "a", &[1, 2], false).pod("b", "b", &[1, 2], false).recycler(1);
    explored("recycled before its claim", world);
}

#[test]
fn an_address_of_another_nodes_block_is_used_only_when_granted() {
    let world = ModelState::new(1).of_foreign_block().pod("a", "a", &[1], false).repairer(2);
    explored("foreign block", world);
}

mod single_steps {
    use std::collections::BTreeMap;

    use crate::cluster::objects::{ClaimPhase, ClaimantKind};
    use crate::cluster::protocol::model::{ModelServer, address, ask, sticky_pool};
    use crate::cluster::protocol::step::{
        BindInput, LiveState, NextStep, Refusal, Waiting, answer, detach, next,
    };
    use crate::cluster::view::Origin;
    use crate::cluster::writer::write::Write;
    use crate::names::StickyKey;
    use crate::policy::handover::{NodeState, OldPod, OldSandbox};

    fn key(name: &str) -> StickyKey {
        StickyKey { namespace: "ns".into(), name: name.into() }
    }

    fn step(ask: &BindInput, server: &ModelServer) -> NextStep {
        next(ask, &live(ask, server))
    }

    fn live<'a>(ask: &BindInput, server: &'a ModelServer) -> LiveState<'a> {
        LiveState {
            sticky: server.stickies.get(&ask.key),
            claims: &server.claims,
            old_node: NodeState::Ready,
            old_pod: OldPod::Gone,
            old_sandbox: OldSandbox::MayLive,
            home_node: NodeState::Ready,
        }
    }

    /// Runs to the end and names each write, in order.
    fn run(ask: &BindInput, server: &mut ModelServer) -> (Vec<&'static str>, NextStep) {
        let mut writes = Vec::new();
        loop {
            match step(ask, server) {
                NextStep::Do(write) => {
                    writes.push(match &write {
                        Write::CreateClaim { .. } => "claim",
                        Write::CreateSticky { .. } => "bind",
                        Write::SealClaim { .. } => "seal",
                        Write::Attach { .. } => "attach",
                        _ => "other",
                    });
                    server.apply(&write).unwrap();
                }
                end => return (writes, end),
            }
        }
    }

    fn own_block() -> Origin {
        Origin::OwnBlock { node: "n1".into(), block: "10.0.0.0/24".parse().unwrap() }
    }

    #[test]
    fn a_first_pod_binds_claims_and_attaches_and_a_repeated_add_writes_nothing() {
        let mut server = ModelServer::default();
        let ask = ask("p", &key("db-0"), &[1, 2], false, &sticky_pool());
        let (writes, end) = run(&ask, &mut server);
        assert_eq!(
            writes,
            ["bind", "claim", "claim", "attach"],
            "three writes, and one more for the second family"
        );
        assert_eq!(end, NextStep::Done(vec![address(1), address(2)]));
        assert_eq!(run(&ask, &mut server), (vec![], NextStep::Done(vec![address(1), address(2)])));
        let claim = &server.claims[&address(1)];
        assert!(claim.sealed_to(&server.stickies[&key("db-0")].uid), "{claim:?}");
    }

    #[test]
    fn what_only_a_node_may_claim_is_claimed_before_the_stickyip_and_sealed_after_it() {
        let mut server = ModelServer::default();
        let one = ask("p", &key("db-0"), &[1], false, &own_block());
        assert_eq!(run(&one, &mut server).0, ["claim", "bind", "seal", "attach"]);
        // Of two families, each by its own origin.
        let mut both = ask("q", &key("db-1"), &[2, 3], false, &sticky_pool());
        both.candidates[1].origin = own_block();
        let mut server = ModelServer::default();
        assert_eq!(run(&both, &mut server).0, ["claim", "bind", "claim", "seal", "attach"]);
    }

    #[test]
    fn a_claim_from_an_earlier_life_is_taken_back_and_not_recreated() {
        let mut server = ModelServer::default();
        let first = ask("p", &key("db-0"), &[1], false, &sticky_pool());
        run(&first, &mut server);
        server.stickies.clear();
        assert_eq!(
            run(&first, &mut server).0,
            ["bind", "other", "seal", "attach"],
            "it rests, then it is sealed"
        );
    }

    #[test]
    fn nothing_is_claimed_for_a_stickyip_of_which_another_has_an_address() {
        let mut server = ModelServer::default();
        run(&ask("p", &key("db-0"), &[2], false, &sticky_pool()), &mut server);
        let made = Write::CreateSticky {
            key: key("late"),
            addresses: vec![address(1), address(2)],
            claimant: ask("q", &key("late"), &[], false, &sticky_pool()).claimant,
            workload: ask("q", &key("late"), &[], false, &sticky_pool()).workload,
            retention: Default::default(),
        };
        server.apply(&made).unwrap();
        let late = ask("q", &key("late"), &[1, 2], false, &sticky_pool());
        let next = step(&late, &server);
        assert!(matches!(next, NextStep::Do(Write::DeleteSticky { .. })), "{next:?}");
    }

    #[test]
    fn a_late_del_of_an_older_sandbox_frees_nothing() {
        let mut server = ModelServer::default();
        run(&ask("p", &key("db-0"), &[1], false, &sticky_pool()), &mut server);
        let sticky = &server.stickies[&key("db-0")];
        assert_eq!(detach(sticky, &"older".into()), None);
        assert!(matches!(detach(sticky, &"p".into()), Some(Write::Detach { .. })));
    }

    #[test]
    fn a_stolen_pin_is_refused_with_the_claimants_name_and_its_claims_are_undone() {
        let mut server = ModelServer::default();
        run(&ask("p", &key("db-0"), &[1], false, &sticky_pool()), &mut server);
        let mut thief = ask("t", &key("thief"), &[2, 1], true, &own_block());
        thief.candidates.truncate(1);
        let first = step(&thief, &server);
        let NextStep::Do(write) = first else { panic!("{first:?}") };
        server.apply(&write).unwrap();
        let both = ask("t", &key("thief"), &[2, 1], true, &sticky_pool());
        let NextStep::Refuse { undo, why } = step(&both, &server) else { panic!("not refused") };
        assert_eq!(undo.len(), 1);
        assert!(why.to_string().contains("ns/db-0"), "{why}");
    }

    #[test]
    fn a_pin_outside_every_pool_is_refused() {
        let outside = ask("p", &key("db-0"), &[1], true, &Origin::Nowhere);
        let refused =
            NextStep::Refuse { undo: vec![], why: Refusal::OutsideEveryPool { address: address(1) } };
        assert_eq!(step(&outside, &ModelServer::default()), refused);
    }

    #[test]
    fn a_name_of_another_workload_is_refused_and_a_changed_pin_too() {
        let mut server = ModelServer::default();
        run(&ask("p", &key("web-0"), &[1], false, &sticky_pool()), &mut server);
        let mut slot = ask("q", &key("web-0"), &[2], false, &sticky_pool());
        slot.claimant.kind = ClaimantKind::Slot;
        assert!(matches!(step(&slot, &server), NextStep::Refuse { why: Refusal::NameTaken { .. }, .. }));
        let moved = ask("p", &key("web-0"), &[2], true, &sticky_pool());
        assert!(matches!(step(&moved, &server), NextStep::Refuse { why: Refusal::PinDiffers { .. }, .. }));
    }

    #[test]
    fn an_address_in_use_on_its_home_node_is_attached_only_once_that_is_over() {
        let mut server = ModelServer::default();
        let first = ask("p", &key("db-0"), &[1], false, &own_block());
        assert_eq!(run(&first, &mut server).0, ["claim", "bind", "seal", "attach"]);
        let use_it = |server: &mut ModelServer| {
            server.claims.get_mut(&address(1)).unwrap().in_use_by = Some("pod shop/cart".into());
        };
        use_it(&mut server);
        assert!(
            matches!(run(&first, &mut server), (none, NextStep::Done(_)) if none.is_empty()),
            "it has it"
        );
        let sticky = server.stickies.get_mut(&key("db-0")).unwrap();
        (sticky.attached, sticky.was_attached) = (None, true);
        let asker = ask("q", &key("db-0"), &[1], false, &own_block());
        let (writes, end) = run(&asker, &mut server);
        assert!(writes.is_empty(), "{writes:?}");
        let waits = NextStep::Wait(Waiting::InUse {
            address: address(1),
            home: "n1".into(),
            by: "pod shop/cart".into(),
        });
        assert_eq!(end, waits);
        // The home node is dead, and with it what runs there.
        let mut seen = live(&asker, &server);
        seen.home_node = NodeState::Gone;
        let NextStep::Do(write) = self::next(&asker, &seen) else { panic!("it waits") };
        assert!(matches!(&write, Write::ReportUse { in_use_by: None, .. }), "{write:?}");
        server.apply(&write).unwrap();
        assert_eq!(run(&asker, &mut server).0, ["attach"]);
        // Before there is a StickyIP, another address is tried.
        let mut server = ModelServer::default();
        let NextStep::Do(write) = step(&first, &server) else { panic!("nothing to claim") };
        server.apply(&write).unwrap();
        use_it(&mut server);
        let NextStep::TryAnother { undo, avoid } = step(&first, &server) else { panic!("not avoided") };
        assert_eq!((undo.len(), avoid), (1, [address(1)].into()));
    }

    #[test]
    fn a_foreign_blocks_address_waits_for_its_home_node_alone() {
        let origin = Origin::ForeignBlock { home: "n1".into(), block: "10.0.0.0/24".parse().unwrap() };
        let ask = ask("p", &key("db-0"), &[1], true, &origin);
        let mut server = ModelServer::default();
        let (writes, end) = run(&ask, &mut server);
        assert!(writes == ["claim"] && matches!(end, NextStep::Wait(_)), "{writes:?} {end:?}");
        let claim = server.claims[&address(1)].clone();
        assert_eq!(answer("n2", &claim, Ok(())), None);
        server.apply(&answer("n1", &claim, Err("with pod x".into())).unwrap()).unwrap();
        let NextStep::Refuse { undo, why } = step(&ask, &server) else { panic!("not refused") };
        assert!(undo.len() == 1 && why.to_string().contains("with pod x"), "{why}");
        let phases: BTreeMap<_, _> =
            server.claims.values().map(|claim| (claim.address, claim.phase)).collect();
        assert_eq!(phases[&address(1)], ClaimPhase::Refused);
    }
}
