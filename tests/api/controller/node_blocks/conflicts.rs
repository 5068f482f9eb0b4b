//! Others write what the duty is about to write.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;
use sticky_ipam::cluster::objects::IPPool;
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::cluster::writer::apply::{SentWrite, WriteObserver};
use sticky_ipam::policy::mode::BlockLocation;

use super::{block, blocks_of, duty, settle};
use crate::support::api_server::access::Access;
use crate::support::duty::{Desk, case, locks, node, pool, ranges, remove_node};

/// Writes the agent's route between the controller's lock and its write on the node, once.
struct Meddler {
    access: Mutex<Option<Access>>,
    node: String,
    route: String,
}

impl WriteObserver for Meddler {
    fn before(&self, _: usize, write: SentWrite<'_>) {
        let what = write.description();
        if !what.starts_with("patch CiliumNode") {
            return;
        }
        let Some(access) = self.access.lock().unwrap().take() else { return };
        let (node, route) = (self.node.clone(), self.route.clone());
        let meddling = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let api: Api<CiliumNode> = Api::all(access.client().await);
                let patch = json!({"spec": {"ipam": {"podCIDRs": [route]}}});
                api.patch(&node, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
            });
        });
        meddling.join().unwrap();
    }
}

#[tokio::test]
async fn a_conflict_on_the_node_is_tried_again_with_the_other_writers_entry_kept() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    let name = node(&case, "a", json!({}), &[]).await;
    let route = format!("{}/32", case.range().hosts().last().unwrap());
    let access = Mutex::new(Some(case.admin()));
    let meddler = Meddler { access, node: name.clone(), route: route.clone() };
    let desk = Desk::watched(&case, &[], Box::new(meddler)).await;
    settle(&desk, &mut duty(&case, BlockLocation::CiliumNode)).await;
    assert_eq!(ranges(&case).await, [(name, vec![route, block(&case, 0)])]);
}

/// Writes every object that the duty writes, just before it does, the first times of each kind of write.
struct Toucher {
    access: Access,
    namespace: String,
    node: String,
    pool: String,
    met: Arc<Mutex<BTreeMap<&'static str, usize>>>,
}

const TOUCHED: usize = 2;
const OF_BLOCKS: [&str; 4] = ["patch CiliumNode", "patch Lease", "delete Lease", "patch status of IPPool"];

impl WriteObserver for Toucher {
    fn before(&self, _: usize, write: SentWrite<'_>) {
        let what = write.description();
        let Some(kind) = OF_BLOCKS.into_iter().find(|kind| what.starts_with(kind)) else { return };
        let times = {
            let mut met = self.met.lock().unwrap();
            let times = met.entry(kind).or_default();
            *times += 1;
            *times
        };
        if times > TOUCHED {
            return;
        }
        let (access, namespace) = (self.access.clone(), self.namespace.clone());
        let (node, pool) = (self.node.clone(), self.pool.clone());
        let mark = json!({"metadata": {"annotations": {"touched": format!("{what} {times}")}}});
        let touching = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async move {
                let client = access.client().await;
                let (params, mark) = (PatchParams::default(), Patch::Merge(&mark));
                // The node may be gone by now.
                let _ = Api::<CiliumNode>::all(client.clone()).patch(&node, &params, &mark).await;
                Api::<IPPool>::all(client.clone()).patch(&pool, &params, &mark).await.unwrap();
                let leases: Api<Lease> = Api::namespaced(client, &namespace);
                for lease in leases.list(&ListParams::default()).await.unwrap() {
                    leases.patch(&lease.name_any(), &params, &mark).await.unwrap();
                }
            });
        });
        touching.join().unwrap();
    }
}

#[tokio::test]
async fn conflicts_on_each_write_of_the_duty_delay_and_change_nothing() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    let name = node(&case, "a", json!({}), &[]).await;
    let met: Arc<Mutex<BTreeMap<&str, usize>>> = Arc::default();
    let toucher = Toucher {
        access: case.admin(),
        namespace: case.namespace().to_owned(),
        node: name.clone(),
        pool: case.unique("p"),
        met: Arc::clone(&met),
    };
    let desk = Desk::watched(&case, &[], Box::new(toucher)).await;
    let mut blocks = duty(&case, BlockLocation::CiliumNode);
    settle(&desk, &mut blocks).await;
    assert_eq!(ranges(&case).await, [(name.clone(), vec![block(&case, 0)])]);
    remove_node(&case, &name).await;
    settle(&desk, &mut blocks).await;
    assert!(locks(&case).await.is_empty(), "its block is free again");
    let met = met.lock().unwrap().clone();
    // Each of the first tries met a conflict, or it would not have been tried again.
    assert!(OF_BLOCKS.iter().all(|kind| met.get(kind).is_some_and(|times| *times > TOUCHED)), "{met:?}");
}
