//! The protocol over every interleaving and crash of the model.

use super::model::World;

fn explored(name: &str, world: World) {
    let states = world.explore();
    println!("{name}: {states} states");
    assert!(states > 100, "{name}: the model hardly moved ({states} states)");
}

#[test]
fn two_claimants_that_want_one_address_never_share_it() {
    let world = World::new(1).pod("a", "a", &[1, 2], false).pod("b", "b", &[1, 2], false);
    explored("two claimants", world);
}

#[test]
fn two_pods_of_one_claimant_end_with_one_stickyip() {
    let world = World::new(1).pod("old", "db-0", &[1, 2], true).pod("new", "db-0", &[3, 4], false);
    explored("one claimant", world);
}

#[test]
fn a_repairer_in_a_hurry_takes_nothing_from_a_pod_on_its_way() {
    let world = World::new(1).pod("a", "a", &[1, 2], false).repairer(3);
    explored("hurried repairer", world);
}

#[test]
fn recycler_and_repairer_never_pull_an_address_from_under_a_pod() {
    let world = World::new(1).pod("a", "a", &[1], false).recycler(2).repairer(3);
    explored("recycler", world);
}

#[test]
fn an_address_that_was_let_go_goes_to_another_only_when_it_is_free() {
    let world = World::new(0).pod("a", "a", &[1], true).pod("b", "b", &[1], false).recycler(1).repairer(2);
    explored("let go", world);
}

#[test]
fn a_recreated_stickyip_is_never_robbed_by_a_reader_of_the_old_one() {
    let world =
        World::new(0).pod("old", "db-0", &[1], false).pod("new", "db-0", &[1], false).recycler(1).repairer(1);
    explored("recreated", world);
}

#[test]
fn an_address_of_another_nodes_block_is_used_only_when_granted() {
    let world = World::new(1).of_foreign_block().pod("a", "a", &[1], false).repairer(2);
    explored("foreign block", world);
}
