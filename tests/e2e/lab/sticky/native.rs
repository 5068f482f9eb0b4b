//! `crd` mode without a tunnel: the route to an address away from home is one between the nodes.

use super::moves;
use crate::support::lab::api::ApiServer;
use crate::support::lab::stage::Stage;
use crate::support::lab::{Flavour, Lab, Mode};

#[test]
fn a_pod_keeps_its_address_over_nodes_and_is_reached_by_native_routes() {
    let lab = Lab::of(Flavour::OursNative);
    moves::planned(&Stage { lab, api: ApiServer::connect(), mode: Mode::Crd });
}
