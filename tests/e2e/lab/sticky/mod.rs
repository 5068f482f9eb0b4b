//! A pod keeps its address over restarts and over nodes, on unpatched Cilium, in each mode.
//!
//! The scenarios are functions of a lab; each mode runs all of them on one lab of its own.

// Beside the module `crd` by their names, whose lab they share.
mod crd_blast;
mod crd_host_routes;
mod crd_mac;
mod cut_off;
mod dual_stack;
mod lost_store;
mod moves;
mod native;
mod outages;
mod restarts;
mod storm;

use crate::support::lab::Mode;
use crate::support::lab::stage::Stage;

macro_rules! proofs_in {
    ($name:ident, $mode:expr) => {
        mod $name {
            use super::{Mode, Stage, cut_off, lost_store, moves, outages, restarts, storm};

            #[test]
            fn every_kind_of_restart_keeps_the_addresses() {
                restarts::keep_the_addresses(&Stage::of($mode));
            }

            #[test]
            fn a_pinned_pod_has_its_address_and_another_is_refused_with_its_name() {
                restarts::pins(&Stage::of($mode));
            }

            #[test]
            fn a_pod_keeps_its_address_over_nodes_and_is_reached() {
                moves::planned(&Stage::of($mode));
            }

            #[test]
            fn a_pod_of_a_crashed_node_keeps_its_address_and_is_reached() {
                moves::crash(&Stage::of($mode));
            }

            #[test]
            fn a_pod_that_still_runs_on_a_cut_off_node_keeps_its_address_from_its_successor() {
                cut_off::still_runs(&Stage::of($mode));
            }

            #[test]
            fn a_node_that_lost_its_store_gives_no_address_away() {
                lost_store::gives_nothing_away(&Stage::of($mode));
            }

            #[test]
            fn no_address_is_with_two_pods_when_fifty_are_recreated_at_once() {
                storm::fifty_at_once(&Stage::of($mode));
            }

            #[test]
            fn a_new_sandbox_has_the_address_while_the_api_server_is_away() {
                outages::api_server(&Stage::of($mode));
            }

            #[test]
            fn pods_start_without_the_agent_and_all_is_in_sync_when_it_is_back() {
                outages::agent(&Stage::of($mode));
            }
        }
    };
}

proofs_in!(chained, Mode::Chained);
proofs_in!(crd, Mode::Crd);
proofs_in!(delegated, Mode::Delegated);
