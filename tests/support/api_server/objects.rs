//! Kinds that a test needs on its server: ours, Cilium's, whereabouts'. Each set is installed once a server.

use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, Patch, PatchParams};

use super::keeper::comes_true;
use super::server::ApiServer;
use super::tools;

const ESTABLISHED_DEADLINE: Duration = Duration::from_secs(60);
/// How many sets there are.
pub const SETS: usize = 3;

impl ApiServer {
    /// StickyIP, AddressClaim and IPPool, as packaging ships them.
    pub async fn install_our_kinds(&self) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/crds");
        self.installed[0].get_or_init(|| self.install_kinds(&folder)).await;
    }

    /// Every kind of Cilium.
    pub async fn install_cilium_kinds(&self) {
        let folder = tools::group("cilium").join("crds");
        self.installed[1].get_or_init(|| self.install_kinds(&folder)).await;
    }

    /// Both kinds of whereabouts.
    pub async fn install_whereabouts_kinds(&self) {
        let folder = tools::group("whereabouts").join("crds");
        self.installed[2].get_or_init(|| self.install_kinds(&folder)).await;
    }

    /// Applies every CustomResourceDefinition under a folder and waits until the server serves them.
    pub async fn install_kinds(&self, folder: &Path) {
        let definitions = definitions_under(folder);
        assert!(!definitions.is_empty(), "{} holds no CustomResourceDefinition", folder.display());
        let api: Api<CustomResourceDefinition> = Api::all(self.admin("default").client().await);
        let params = PatchParams::apply("bench").force();
        for definition in &definitions {
            let name = definition["metadata"]["name"].as_str().expect("every definition has a name");
            let applied = api.patch(name, &params, &Patch::Apply(definition)).await;
            applied.unwrap_or_else(|why| {
                panic!("the server does not take {name} from {}: {why}", folder.display())
            });
        }
        for definition in &definitions {
            let name = definition["metadata"]["name"].as_str().expect("every definition has a name");
            let established = comes_true(ESTABLISHED_DEADLINE, || async {
                is_established(&api.get(name).await.expect("it was just applied"))
            });
            assert!(established.await, "{name} is not established after {ESTABLISHED_DEADLINE:?}");
        }
    }
}

fn is_established(definition: &CustomResourceDefinition) -> bool {
    let conditions = definition.status.as_ref().and_then(|status| status.conditions.as_ref());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| condition.type_ == "Established" && condition.status == "True")
}

/// The definitions of all YAML files under a folder; other objects in the same files are left alone.
fn definitions_under(folder: &Path) -> Vec<serde_json::Value> {
    let mut files = yaml_files(folder);
    files.sort();
    let documents = files.iter().flat_map(|file| {
        let text = std::fs::read_to_string(file).unwrap_or_else(|why| panic!("{}: {why}", file.display()));
        let parsed: Result<Vec<serde_json::Value>, _> = serde_saphyr::from_multiple(&text);
        parsed.unwrap_or_else(|why| panic!("{} is not YAML: {why}", file.display()))
    });
    documents.filter(|document| document["kind"] == "CustomResourceDefinition").collect()
}

fn yaml_files(folder: &Path) -> Vec<PathBuf> {
    let entries =
        std::fs::read_dir(folder).unwrap_or_else(|why| panic!("cannot read {}: {why}", folder.display()));
    let paths = entries.map(|entry| entry.expect("the folder is readable").path());
    let found = paths.map(|path| match path.extension() {
        _ if path.is_dir() => yaml_files(&path),
        Some(ending) if ending == "yaml" => vec![path],
        _ => Vec::new(),
    });
    found.flatten().collect()
}
