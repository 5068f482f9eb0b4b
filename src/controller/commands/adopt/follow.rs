//! `adopt --follow`: adds the addresses of pods that start to their nodes' pools, by watches. Must never
//! offer an address to other pods: cilium-agent may use the pools already.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};

use super::plan::{Wish, into_crd};
use crate::controller::commands::adopt::write;
use crate::controller::context::Context;
use crate::controller::duty::{Duty, RoundResult, run_duty};
use crate::controller::flags::ControllerSettings;
use crate::controller::index::Kind;
use crate::controller::installation::Installation;
use crate::controller::queue::Key;
use crate::controller::run::{OurKinds, watches_until_dropped};
use crate::controller::writer::Writer;
use crate::policy::mode::CiliumMode;
use crate::runtime::http::Readiness;

/// Before a write that did not succeed is tried again.
const RETRY: Duration = Duration::from_millis(500);

/// Goes on putting in what is missing until dropped, for the time in which agents are restarted.
pub async fn follow(writer: Writer, settings: ControllerSettings) {
    let context = Context::new(writer, settings, Arc::default(), Readiness::default());
    let watching = pin!(watches_until_dropped(&context, OurKinds::Optional));
    let following = pin!(async {
        context.wait_until_listed().await;
        tracing::info!("following: every kind is listed");
        run_duty(Follow, &context).await;
    });
    match select(watching, following).await {
        Either::Left(_) | Either::Right(_) => {}
    }
}

/// Puts live pods' addresses into the pools, and nothing else.
struct Follow;

impl Duty for Follow {
    const NAME: &'static str = "follow";
    const TRIGGERS: &'static [Kind] = &[Kind::Pod, Kind::CiliumNode];
    const BATCH_DELAY: Duration = Duration::from_millis(50);

    async fn round(&mut self, context: &Context, _: Vec<Key>) -> RoundResult {
        let installation = Installation::default();
        let wish = Wish { installation: &installation, mode: CiliumMode::Crd, free: 0, canary: None };
        let (plans, _) = into_crd(&context.index(), &wish);
        let mut done = RoundResult::default();
        for mut plan in plans {
            // Ranges and settings were written before.
            (plan.pod_cidrs, plan.node_cidrs, plan.config) = (None, None, None);
            if plan.is_done() {
                continue;
            }
            let node = &plan.node;
            match write(&context.writer, &plan).await {
                Ok(true) => {
                    tracing::info!(node, entries = plan.put.len(), "added addresses to the pool");
                    continue;
                }
                Ok(false) => tracing::info!(node, "write conflict on the CiliumNode; trying again"),
                Err(error) => tracing::warn!(node, %error, "cannot write the pool; trying again"),
            }
            done.retry(Key::new(Kind::CiliumNode, node), RETRY);
        }
        done
    }
}
