//! Nodes whose clocks are hours apart: no handover rests on two machines' clocks.

use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use crate::support::agent::{case, parts};
use crate::support::node::{TestNode, assert_in_step, delete_pod, sandbox, stickies, sticky_pod};

#[tokio::test]
async fn an_address_goes_to_and_fro_between_nodes_whose_clocks_are_two_hours_apart() {
    let case = case().await;
    let [one, two, ..] = parts(&case);
    let (mut early, mut late) =
        (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    early.clock("-1h");
    late.clock("+1h");
    let mut own = None;
    for (round, node) in [&late, &early, &early, &late, &early].into_iter().enumerate() {
        let pod = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
        let address = node.add(&pod).await.unwrap();
        assert_eq!(address, *own.get_or_insert(address), "round {round}");
        node.check(&pod).await.unwrap();
        let status = stickies(&case).await.remove(0).status.unwrap();
        let off = status.attachment.unwrap().since.0.as_second() - Timestamp::now().as_second();
        assert!(off.abs() > 1800, "round {round}: the plugin was not told another time: {off} s");
        assert_in_step(&case, &[&early, &late]).await;
        // A pod that another node waits for is waited for, whatever its times say.
        let other = if node.name == early.name { &late } else { &early };
        delete_pod(&case, "db-0").await;
        let next = sandbox(&sticky_pod(&case, "db-0", &other.name, json!({})).await);
        let error = other.add(&next).await.unwrap_err();
        assert_eq!(error["code"], 11, "round {round}: {error}");
        delete_pod(&case, "db-0").await;
        node.del(&pod).await;
    }
    assert!(early.pending_updates().is_empty() && late.pending_updates().is_empty());
}
