//! From a template to this node's conflist. Pure: what is wrong is found here, before the host is touched.
//!
//! Keys that the agent does not know are kept as they are. Must never hand out what the plugin would refuse.

use std::ffi::OsString;
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value, json};

use crate::agent::install::{error::InstallError, settings::InstallSettings};
use crate::cni::config::{DEFAULT_DATA_DIR, sticky::DEFAULT_BOOT_ID_FILE};
use crate::cni::{OnUnavailable, ParsedRequest, read_request};
use crate::policy::selection::rules::{DEFAULT_EXCLUDE_KEY, Rules};
use crate::policy::selection::selector::Selector;

#[derive(Debug, Clone, Copy)]
pub(super) enum Template<'a> {
    /// The mode's example, whose addresses are only examples.
    BuiltIn,
    /// The operator's text and where it is from.
    Text { from: &'a str, text: &'a str },
}

/// The conflist of this node. `blocks` are its home blocks; those of single addresses do not count.
pub(super) fn conflist(
    template: Template<'_>,
    settings: &InstallSettings,
    blocks: &[IpNet],
) -> Result<Vec<u8>, InstallError> {
    let (from, text, built_in) = match template {
        Template::Text { from, text } => (from.to_owned(), text, false),
        Template::BuiltIn => {
            (format!("the built-in conflist for {}", settings.mode), settings.mode.example_conflist(), true)
        }
    };
    let builder = ConflistBuilder { from, built_in, settings };
    let mut list = match serde_json::from_str(text) {
        Ok(Value::Object(list)) => list,
        Ok(other) => return Err(builder.refuse("the document", format!("{other} is not a JSON object"))),
        Err(error) => return Err(builder.refuse("the document", format!("it is not JSON: {error}"))),
    };
    builder.name(&mut list)?;
    let at = builder.find(&list)?;
    let path = format!("plugins[{at}]");
    let entry = list.get_mut("plugins").and_then(|all| all.get_mut(at)).and_then(Value::as_object_mut);
    let entry = entry.ok_or_else(|| builder.refuse(&path, "is not an object".to_owned()))?;
    builder.fill(entry, &path, blocks)?;
    builder.check(&list, at)?;
    let mut written = serde_json::to_vec_pretty(&list)
        .map_err(|error| builder.refuse("the document", error.to_string()))?;
    written.push(b'\n');
    Ok(written)
}

struct ConflistBuilder<'a> {
    from: String,
    built_in: bool,
    settings: &'a InstallSettings,
}

impl ConflistBuilder<'_> {
    fn refuse(&self, field: &str, why: String) -> InstallError {
        InstallError::Template { from: self.from.clone(), field: field.to_owned(), why }
    }

    /// The agent reads the store of this name, so the plugin must not use another.
    fn name(&self, list: &mut Map<String, Value>) -> Result<(), InstallError> {
        let network = self.settings.network.as_str();
        if let Some(name) = list.get("name").filter(|name| !self.built_in && *name != network) {
            let why = format!("{name} is not the agent's --network ({network}); make them the same");
            return Err(self.refuse("name", why));
        }
        list.insert("name".to_owned(), network.into());
        Ok(())
    }

    /// The one entry that is ours, at the place that the mode needs.
    fn find(&self, list: &Map<String, Value>) -> Result<usize, InstallError> {
        let Some(plugins) = list.get("plugins").and_then(Value::as_array) else {
            let given = list.get("plugins").map_or("nothing".to_owned(), Value::to_string);
            return Err(self.refuse("plugins", format!("{given} is not a list of plugins")));
        };
        let ours: Vec<usize> = (0..plugins.len()).filter(|at| is_ours(&plugins[*at])).collect();
        let [at] = ours[..] else {
            return Err(self.refuse("plugins", format!("{} entries use sticky-ipam; one must", ours.len())));
        };
        let entry = &plugins[at];
        let behind = plugins.get(at + 1).unwrap_or(&Value::Null);
        let field = format!("plugins[{at}].type");
        self.settings.mode.check_entry(entry, behind).map_err(|why| self.refuse(&field, why))?;
        Ok(at)
    }

    fn fill(&self, entry: &mut Map<String, Value>, path: &str, blocks: &[IpNet]) -> Result<(), InstallError> {
        // Beside a delegate there is no `ipam`: our settings and the path of the store are at the top.
        let at_top = self.settings.mode.has_settings_at_the_top();
        let (home, path) = if at_top {
            (entry, path.to_owned())
        } else {
            let path = format!("{path}.ipam");
            let ipam = self.object(entry, "ipam", &path)?;
            self.data_dir(ipam, &path)?;
            self.ranges(ipam, blocks)?;
            (ipam, path)
        };
        let path = format!("{path}.sticky");
        let sticky = self.object(home, "sticky", &path)?;
        if at_top {
            self.data_dir(sticky, &path)?;
        }
        self.pods(sticky, &path)?;
        // By another boot id each would find the other's records to be from before a reboot.
        let (boot_id_file, default) = (json!(self.settings.boot_id_file), json!(DEFAULT_BOOT_ID_FILE));
        self.same(sticky, &path, "bootIDFile", boot_id_file, &default, "--boot-id-file")?;
        let path = format!("{path}.cluster");
        let cluster = self.object(sticky, "cluster", &path)?;
        self.cluster(cluster, &path)
    }

    /// The rules, which plugin and agent share, decide who is sticky. These patterns are the plugin's alone:
    /// for a pod that they leave out the agent would prepare an address that its ADD does not take.
    fn pods(&self, sticky: &mut Map<String, Value>, path: &str) -> Result<(), InstallError> {
        for (key, all_pods) in [("pods", json!(["*/*"])), ("excludePods", json!([]))] {
            match sticky.get(key) {
                Some(given) if !self.built_in && *given != all_pods => {
                    let why = format!(
                        "{given} is for a plugin without a cluster, and the agent does not use it; select \
                         sticky pods by --label-selector or the annotations"
                    );
                    return Err(self.refuse(&format!("{path}.{key}"), why));
                }
                _ => sticky.remove(key),
            };
        }
        Ok(())
    }

    fn data_dir(&self, map: &mut Map<String, Value>, path: &str) -> Result<(), InstallError> {
        let ours = json!(self.settings.data_dir);
        self.same(map, path, "dataDir", ours, &json!(DEFAULT_DATA_DIR), "--data-dir")
    }

    fn object<'m>(
        &self,
        map: &'m mut Map<String, Value>,
        key: &str,
        path: &str,
    ) -> Result<&'m mut Map<String, Value>, InstallError> {
        let value = map.entry(key).or_insert(Value::Null);
        if value.is_null() {
            *value = json!({});
        }
        let given = value.to_string();
        value.as_object_mut().ok_or_else(|| self.refuse(path, format!("{given} is not an object")))
    }

    /// Addresses that the operator wrote stay; the node's blocks replace those of the example.
    fn ranges(&self, ipam: &mut Map<String, Value>, blocks: &[IpNet]) -> Result<(), InstallError> {
        let written =
            ["ranges", "subnet"].iter().any(|key| ipam.get(*key).is_some_and(|value| !value.is_null()));
        if written && !self.built_in {
            return Ok(());
        }
        let of = |v4: bool| -> Vec<Value> {
            let blocks = blocks.iter().filter(|block| matches!(block.addr(), IpAddr::V4(_)) == v4);
            let whole = blocks.filter(|block| block.prefix_len() < block.max_prefix_len());
            whole.map(|block| json!({"subnet": block.trunc().to_string()})).collect()
        };
        let families = [(of(true), "0.0.0.0/0"), (of(false), "::/0")];
        let present: Vec<_> = families.into_iter().filter(|(ranges, _)| !ranges.is_empty()).collect();
        if present.is_empty() {
            return Err(InstallError::NoBlocks { node: self.settings.node.clone() });
        }
        if self.built_in || ipam.get("routes").is_none() {
            let routes: Vec<Value> = present.iter().map(|(_, dst)| json!({"dst": dst})).collect();
            ipam.insert("routes".to_owned(), routes.into());
        }
        let sets: Vec<Value> = present.into_iter().map(|(ranges, _)| ranges.into()).collect();
        ipam.insert("ranges".to_owned(), sets.into());
        Ok(())
    }

    fn cluster(&self, cluster: &mut Map<String, Value>, path: &str) -> Result<(), InstallError> {
        let settings = self.settings;
        cluster.insert("kubeconfig".to_owned(), json!(settings.plugin_kubeconfig));
        cluster.insert("node".to_owned(), json!(settings.node));
        // The agent decides by the same rules as the plugin, so they have one source: the agent's flags.
        self.selector(cluster, path)?;
        let Rules { exclude_key, exclude_prefixes, .. } = &settings.rules;
        let default_key = json!(DEFAULT_EXCLUDE_KEY);
        self.same(cluster, path, "excludeKey", json!(exclude_key), &default_key, "--exclude-key")?;
        let ours = json!(exclude_prefixes);
        self.same(cluster, path, "excludePrefixes", ours, &json!([]), "--exclude-prefixes")?;
        if let Some(choice) = settings.on_unavailable {
            let word = match choice {
                OnUnavailable::Fail => "fail",
                OnUnavailable::Allocate => "allocate",
            };
            cluster.insert("onUnavailable".to_owned(), word.into());
        }
        if let Some(socket) = &settings.cilium_socket {
            cluster.insert("ciliumSocket".to_owned(), json!(socket));
        }
        Ok(())
    }

    /// Selectors are compared by what they mean.
    fn selector(&self, cluster: &mut Map<String, Value>, path: &str) -> Result<(), InstallError> {
        let ours = self.settings.rules.selector.as_ref();
        let written = ours.map_or(Value::Null, |selector| json!(selector.written()));
        if let Some(theirs) = cluster.get("selector")
            && Selector::parse(&theirs.to_string()).ok().as_ref().is_some_and(|theirs| ours == Some(theirs))
        {
            return Ok(());
        }
        self.same(cluster, path, "selector", written, &Value::Null, "--label-selector")
    }

    /// Sets a value that is not the default, and refuses a template with another one.
    fn same(
        &self,
        map: &mut Map<String, Value>,
        path: &str,
        key: &str,
        ours: Value,
        default: &Value,
        flag: &str,
    ) -> Result<(), InstallError> {
        match map.get(key).filter(|value| !value.is_null()) {
            Some(theirs) if *theirs != ours => {
                let why =
                    format!("{theirs} is not what the agent uses ({flag}: {ours}); set it by the flag alone");
                Err(self.refuse(&format!("{path}.{key}"), why))
            }
            None if ours != *default => {
                map.insert(key.to_owned(), ours);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Has the plugin's own reader check it, as the runtime would pass it.
    fn check(&self, list: &Map<String, Value>, at: usize) -> Result<(), InstallError> {
        let mut config = list.get("plugins").and_then(|all| all.get(at)).cloned().unwrap_or_default();
        for key in ["name", "cniVersion"] {
            config[key] = list.get(key).cloned().unwrap_or_default();
        }
        let env = |name: &str| -> Option<OsString> {
            let value = match name {
                "CNI_COMMAND" => "ADD",
                "CNI_CONTAINERID" => "checked-before-it-is-installed",
                // It is not entered: the reader only compares it with its own.
                "CNI_NETNS" => "/proc/0/ns/net",
                "CNI_IFNAME" => "eth0",
                "CNI_PATH" => "/",
                _ => return None,
            };
            Some(value.into())
        };
        match read_request(&env, &mut config.to_string().as_bytes()) {
            Ok(ParsedRequest::Verb(request)) => {
                for warning in &request.warnings {
                    tracing::warn!(conflist = self.from, "{warning}");
                }
                Ok(())
            }
            Ok(_) => Err(self.refuse("the document", "the plugin does not take it for a request".to_owned())),
            Err(failure) => Err(InstallError::Refused { from: self.from.clone(), error: failure.error }),
        }
    }
}

fn is_ours(entry: &Value) -> bool {
    entry["type"] == "sticky-ipam" || entry["ipam"]["type"] == "sticky-ipam"
}

#[cfg(test)]
mod tests;
