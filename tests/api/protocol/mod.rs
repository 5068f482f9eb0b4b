//! What plugin, agent and controller promise each other: through crashes, outages, wrong clocks and manual
//! changes.

mod admission;
mod clocks;
mod crashes;
mod deleted_sticky_ip;
mod disk_crashes;
mod lost_objects;
mod lost_store;
mod objects;
mod outages;
mod repair;
mod stale_node;
