//! What a scenario gets.

use super::api::ApiServer;
use super::{Flavour, Lab, Mode};

/// A lab of a mode, and what a scenario needs of it.
pub struct Stage {
    pub lab: Lab,
    pub api: ApiServer,
    pub mode: Mode,
}

impl Stage {
    pub fn of(mode: Mode) -> Self {
        let lab = Lab::of(Flavour::Ours(mode));
        let api = ApiServer::connect();
        Self { lab, api, mode }
    }
}
