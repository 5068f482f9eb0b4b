//! What one test has of a shared server: a namespace, unique names, addresses, identities, proxies.
//!
//! Cluster-scoped objects are seen by every test of the binary. A test names them by `unique` and takes
//! addresses from its own `range`; a test of something that acts on all objects of a kind takes a server of
//! its own.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use k8s_openapi::api::authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, ServiceAccount};
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, PolicyRule};
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, PostParams};
use serde_json::json;
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::cluster::objects::{AddressClaim, StickyIP};

use super::access::{Access, Credentials};
use super::front::Front;
use super::proxy::Proxy;
use super::roles;
use super::server::ApiServer;
use super::tokens;

/// One test's share of a server.
pub struct Case<'a> {
    server: &'a ApiServer,
    number: usize,
    namespace: String,
    client: kube::Client,
}

impl<'a> Case<'a> {
    pub(super) async fn open(server: &'a ApiServer, number: usize) -> Self {
        let namespace = format!("case-{number}");
        let client = server.admin(&namespace).client().await;
        let case = Self { server, number, namespace, client };
        let mut namespace = Namespace::default();
        namespace.metadata.name = Some(case.namespace.clone());
        create(Api::all(case.client.clone()), namespace).await;
        // A controller would make it; without it no pod is admitted.
        case.make_service_account("default").await;
        case
    }

    /// The test's own namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// A name for a cluster-scoped object that no other test of this server has.
    pub fn unique(&self, name: &str) -> String {
        format!("{name}-{}", self.number)
    }

    /// Every kind of Cilium, on this test's server.
    pub async fn install_cilium_kinds(&self) {
        self.server.install_cilium_kinds().await;
    }

    /// Addresses that no other test of this server uses.
    pub fn range(&self) -> Ipv4Net {
        let [_, _, high, low] = u32::try_from(self.number).expect("not so many tests").to_be_bytes();
        Ipv4Net::new(Ipv4Addr::new(10, high, low, 0), 24).expect("24 is a length")
    }

    /// The administrator's client, of this test's runtime.
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// May do everything.
    pub fn admin(&self) -> Access {
        self.server.admin(&self.namespace)
    }

    /// Known to the server, but without any role.
    pub fn nobody(&self) -> Access {
        self.server.user("nobody", None, &self.namespace)
    }

    /// The agent of a node: a service account of this test with the agent's roles and a token bound to the
    /// Node, which is created if it is not there.
    pub async fn agent(&self, node: &str) -> Access {
        self.of_node("agent", node, roles::agent(node)).await
    }

    /// The plugin of a node, as its agent gives it credentials.
    pub async fn plugin(&self, node: &str) -> Access {
        self.of_node("plugin", node, roles::plugin(node)).await
    }

    async fn of_node(&self, part: &str, node: &str, rules: Vec<PolicyRule>) -> Access {
        let bound = self.bound_to(node).await;
        let account = format!("{part}-{node}");
        self.service_account(&account, rules).await;
        self.token(&account, Some(bound)).await
    }

    /// What binds a token to a Node, which is created if it is not there.
    pub async fn bound_to(&self, node: &str) -> BoundObjectReference {
        let nodes: Api<Node> = Api::all(self.client());
        let node = match nodes.get_opt(node).await.expect("the administrator may look") {
            Some(node) => node,
            None => {
                let mut fresh = Node::default();
                fresh.metadata.name = Some(node.to_owned());
                create(nodes, fresh).await
            }
        };
        BoundObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Node".to_owned()),
            name: node.metadata.name,
            uid: node.metadata.uid,
        }
    }

    /// Creates everything of a manifest under packaging/ but for workloads, with this test's namespaces in
    /// the place of its own and names of its own for what is cluster-scoped.
    pub async fn shipped(&self, manifest: &str) {
        for mut object in roles::manifest(manifest) {
            if object["kind"] == "Deployment" {
                continue;
            }
            let of_the_cluster =
                |kind: &str| kind.starts_with("Cluster") || kind.starts_with("ValidatingAdmission");
            if object["kind"].as_str().is_some_and(of_the_cluster) {
                let name = self.unique(object["metadata"]["name"].as_str().expect("every object has one"));
                object["metadata"]["name"] = name.into();
            }
            if object["roleRef"]["kind"] == "ClusterRole" {
                let name = self.unique(object["roleRef"]["name"].as_str().expect("every role has one"));
                object["roleRef"]["name"] = name.into();
            }
            if let Some(policy) = object["spec"]["policyName"].as_str() {
                object["spec"]["policyName"] = self.unique(policy).into();
            }
            let text = object.to_string().replace("kube-system", &self.namespace);
            let text = text.replace("sticky-ipam-blocks", &self.block_namespace());
            let object: DynamicObject = serde_json::from_str(&text).expect("an object");
            let api = roles::api_of(self.client(), &object);
            let created = api.create(&PostParams::default(), &object).await;
            created.unwrap_or_else(|why| panic!("the server does not take {text}: {why}"));
        }
    }

    /// Everything of packaging/rbac.yaml.
    pub async fn shipped_roles(&self) {
        self.shipped("rbac.yaml").await;
    }

    /// The namespace of block locks; there once the controller's roles are.
    pub fn block_namespace(&self) -> String {
        format!("{}-blocks", self.namespace)
    }

    /// The controller: a service account of this test with the very roles that are shipped.
    pub async fn controller(&self) -> Access {
        self.shipped("controller.yaml").await;
        self.token("sticky-ipam-controller", None).await
    }

    /// A service account of this test that may do what the rules say, in every namespace.
    pub async fn service_account(&self, name: &str, rules: Vec<PolicyRule>) -> Access {
        self.make_service_account(name).await;
        let role_name = format!("{}-{name}", self.namespace);
        let mut role = ClusterRole { rules: Some(rules), ..ClusterRole::default() };
        role.metadata.name = Some(role_name.clone());
        create(Api::all(self.client()), role).await;
        let binding: ClusterRoleBinding = serde_json::from_value(json!({
            "metadata": {"name": role_name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role_name},
            "subjects": [{"kind": "ServiceAccount", "namespace": self.namespace, "name": name}],
        }))
        .expect("a binding");
        create(Api::all(self.client()), binding).await;
        self.token(name, None).await
    }

    /// A fresh token of a service account of this test, bound to an object if one is given.
    pub async fn token(&self, account: &str, bound: Option<BoundObjectReference>) -> Access {
        let spec = TokenRequestSpec { bound_object_ref: bound, ..TokenRequestSpec::default() };
        let request = TokenRequest { spec, ..TokenRequest::default() };
        let accounts: Api<ServiceAccount> = Api::namespaced(self.client(), &self.namespace);
        let made = accounts.create_token_request(account, &PostParams::default(), &request).await;
        let made = made.unwrap_or_else(|why| panic!("no token for {account}: {why}"));
        let token = made.status.expect("a token was asked for").token;
        self.server.access(Credentials::Token(token), &self.namespace)
    }

    /// The same as of so many seconds before. Tokens live for an hour.
    pub async fn token_of_before(
        &self,
        account: &str,
        bound: Option<BoundObjectReference>,
        seconds: i64,
    ) -> Access {
        let Credentials::Token(fresh) = self.token(account, bound).await.credentials else {
            panic!("a token was asked for")
        };
        self.given_out_earlier(&fresh, seconds)
    }

    /// A token of this server as it would be, had it been given out so many seconds before.
    pub fn given_out_earlier(&self, token: &str, seconds: i64) -> Access {
        let key = std::fs::read_to_string(self.server.folder().join("accounts.key")).expect("it was written");
        let earlier = tokens::given_out_earlier(token, seconds, &key);
        self.server.access(Credentials::Token(earlier), &self.namespace)
    }

    /// A token that nobody gave out.
    pub fn forged_token(&self) -> Access {
        self.server.access(Credentials::Token("made.up.token".to_owned()), &self.namespace)
    }

    /// A proxy of this test's own in front of the server.
    pub fn proxy(&self) -> Proxy {
        Proxy::before(self.server.address())
    }

    /// A stand-in of this test's own in front of the server, on this test's runtime.
    pub async fn front(&self) -> Front {
        Front::before(self.server.address(), self.server.folder()).await
    }

    /// Creates a pod that is bound to `node`, if one is given. Nothing runs it.
    pub async fn pod(&self, name: &str, labels: &[(&str, &str)], node: Option<&str>) -> Pod {
        let labels: BTreeMap<&str, &str> = labels.iter().copied().collect();
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": name, "labels": labels},
            "spec": {"nodeName": node, "containers": [{"name": "main", "image": "none"}]},
        }))
        .expect("a pod");
        create(Api::namespaced(self.client(), &self.namespace), pod).await
    }

    async fn make_service_account(&self, name: &str) {
        let mut account = ServiceAccount::default();
        account.metadata.name = Some(name.to_owned());
        create(Api::namespaced(self.client(), &self.namespace), account).await;
    }
}

/// Every question by a field or label is answered by reading all objects of the kind, so what a test leaves
/// on the shared server makes those after it slower.
impl Drop for Case<'_> {
    fn drop(&mut self) {
        if !self.server.is_shared() {
            return;
        }
        let (access, namespace) = (self.admin(), self.namespace.clone());
        // Nobody waits for it, and a test that has failed has more to say than this.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async { leave(&access.client().await, &namespace).await });
        });
    }
}

/// Takes away what is read by such questions: pods, StickyIPs and claims of a namespace, and the nodes that
/// bear its label.
async fn leave(client: &kube::Client, namespace: &str) {
    let at_once = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
    let every = ListParams::default();
    let of_case = ListParams::default().labels(&format!("case={namespace}"));
    let held = ListParams::default().fields(&format!("spec.stickyRef.namespace={namespace}"));
    // Kinds that no test has installed are not found.
    let _ = Api::<Pod>::namespaced(client.clone(), namespace).delete_collection(&at_once, &every).await;
    let _ = Api::<StickyIP>::namespaced(client.clone(), namespace).delete_collection(&at_once, &every).await;
    let _ = Api::<AddressClaim>::all(client.clone()).delete_collection(&at_once, &held).await;
    let _ = Api::<CiliumNode>::all(client.clone()).delete_collection(&at_once, &of_case).await;
    let _ = Api::<Node>::all(client.clone()).delete_collection(&at_once, &of_case).await;
}

async fn create<K>(api: Api<K>, object: K) -> K
where
    K: kube::Resource<DynamicType = ()>
        + Clone
        + serde::Serialize
        + serde::de::DeserializeOwned
        + std::fmt::Debug,
{
    let created = api.create(&PostParams::default(), &object).await;
    created.unwrap_or_else(|why| panic!("the administrator cannot create {}: {why}", K::kind(&())))
}
