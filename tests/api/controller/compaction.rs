//! etcd has compacted away what happened while nobody watched: the watches of agent and controller are told
//! 410.

use futures_util::StreamExt;
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::StickyIP;
use sticky_ipam::cluster::writer::apply::NoObserver;
use tokio::sync::OnceCell;

use crate::support::agent::Loose;
use crate::support::agent::parts;
use crate::support::agent::{decided, is_ready, loose, page};
use crate::support::api_server::{ApiServer, Weather};
use crate::support::controller::{Desk, HURRIED, rounds, until, while_at_work};
use crate::support::node::{TestNode, assert_in_step, delete_pod, sticky_pool};

/// Watches come from etcd itself: a cache in between would remember what etcd has forgotten.
static FORGETFUL: OnceCell<ApiServer> = OnceCell::const_new();

fn set(name: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name})
}

/// The container id that is attached; none if there is no StickyIP, or nobody is attached to it.
async fn attached(desk: &Desk, name: &str) -> Option<String> {
    let sticky = desk.stickies().get_opt(name).await.unwrap()?;
    Some(sticky.status?.attachment?.attachment_id.to_string())
}

async fn moves(desk: &Desk, name: &str) -> usize {
    desk.stickies().get(name).await.unwrap().status.unwrap().handovers.len()
}

/// The version at which the server's state is now.
async fn version(desk: &Desk) -> String {
    let listed = desk.stickies().list(&ListParams::default()).await.unwrap();
    listed.metadata.resource_version.unwrap()
}

/// How often the StickyIPs of all namespaces were listed. The tests themselves look at one namespace.
async fn lists(desk: &Desk) -> u64 {
    let request = http::Request::get("/metrics").body(Vec::new()).unwrap();
    let page = desk.case.client().request_text(request).await.unwrap();
    let parts = ["apiserver_request_total{", "resource=\"stickyips\"", "scope=\"cluster\"", "verb=\"LIST\""];
    let lines = page.lines().filter(|line| parts.iter().all(|part| line.contains(part)));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

#[tokio::test]
async fn history_that_was_compacted_away_is_listed_again_and_nothing_is_lost() {
    let server = FORGETFUL.get_or_init(|| ApiServer::start_with(&["--watch-cache=false"])).await;
    let desk = Desk::at(server).await;
    let [own, pool, ..] = parts(&desk.case);
    let node = TestNode::ready(&desk.case, "n1", own).await;
    sticky_pool(&desk.case, pool).await;
    let proxy = desk.case.proxy();
    let access = desk.case.agent(&node.name).await.through(&proxy);
    let (settings, pages) = loose(&node, &access, "delegated");
    let _agent = Loose::start(settings);
    until("the agent", || is_ready(pages)).await;
    let stays = desk.stateful_set("stays", 1).await;
    let going = desk.pod("going-0", &node.name, Some(&stays), json!({})).await.metadata.uid.unwrap();
    desk.stateful_set("ends", 1).await;
    desk.retained("ends-0", &desk.address(71), set("ends"), json!({})).await;
    let client = desk.case.admin().through(&proxy).client().await;
    let context = desk.context_with(client, HURRIED, Box::new(NoObserver));
    let (mut before, mut coming, mut marked) = (0, String::new(), String::new());
    while_at_work(&context, async {
        until("a decision", || async { decided(&node, &going) }).await;
        until("a look at each workload", || async { rounds(&context, "recycling") > 1 }).await;
        let known = version(&desk).await;
        proxy.set(Weather::Reset);
        // Nobody watches: for the agent a pod goes and another comes; for the controller two workloads are
        // gone, and a pod runs.
        delete_pod(&desk.case, "going-0").await;
        coming = desk.pod("coming-0", &node.name, None, json!({})).await.metadata.uid.unwrap();
        desk.delete_set("ends").await;
        desk.retained("gone-0", &desk.address(70), set("gone"), json!({})).await;
        marked = desk.pod("marked-0", "elsewhere", None, json!({})).await.metadata.uid.unwrap();
        desk.runs("marked-0", &desk.address(72)).await;
        server.compact(&version(&desk).await).await;
        let stickies: Api<StickyIP> = Api::all(desk.case.client());
        let watched = stickies.watch(&WatchParams::default(), &known).await.unwrap();
        let first = std::pin::pin!(watched).next().await;
        assert!(matches!(&first, Some(Ok(WatchEvent::Error(error))) if error.code == 410), "{first:?}");
        before = lists(&desk).await;
        proxy.heal();
        until("what the agent had not seen", || async {
            attached(&desk, "going-0").await.is_none()
                && attached(&desk, "coming-0").await == Some(format!("prepared-{coming}"))
                && decided(&node, &coming)
                && !decided(&node, &going)
        })
        .await;
        until("what the controller had not seen", || async {
            attached(&desk, "marked-0").await == Some(format!("adopted-{marked}"))
                && desk.names().await == ["coming-0", "going-0", "marked-0"]
                && desk.claims().await.len() == 3
        })
        .await;
        let mut last = (0, 0);
        until("a rest: three rounds without a write", || {
            let (writes, round) = (context.writer.count(), rounds(&context, "repair"));
            if writes != last.0 {
                last = (writes, round);
            }
            let quarantine_over = round > last.1 + 2;
            async move { quarantine_over }
        })
        .await;
    })
    .await;
    assert!(lists(&desk).await >= before + 2, "both had to list anew");
    for name in ["coming-0", "going-0", "marked-0"] {
        assert_eq!(moves(&desk, name).await, 1, "{name} was attached more than once");
    }
    let told = context.metrics.page();
    for part in ["sticky_ips_released_total{reason=\"WorkloadGone\"} 2", "controller_pods_adopted_total 1"] {
        assert!(told.contains(part), "{part} is not in {told}");
    }
    let told = tokio::task::spawn_blocking(move || page(pages, "/metrics").unwrap()).await.unwrap();
    for part in ["decisions_prepared_total{kind=\"sticky\"} 2", "decisions_withdrawn_total 1"] {
        assert!(told.contains(part), "{part} is not in {told}");
    }
    assert_in_step(&desk.case, &[&node]).await;
}
