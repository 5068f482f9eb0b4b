//! The network configuration on standard input.

pub mod cluster;
pub mod ipam;
pub(crate) mod resolv;
pub mod sticky;

use serde_json::{Map, Value};

use crate::cni::args::CniArgs;
use crate::cni::error::{CniError, shown};
use crate::cni::fields::Fields;
use crate::cni::result::CniResult;
use crate::cni::verb::Verb;
use crate::cni::version::CniVersion;
use crate::names::{Attachment, ContainerId, IfName, NetworkName};
use ipam::IpamConf;
use sticky::StickyConf;

/// Where networks are stored by default: host-local's place.
pub(crate) const DEFAULT_DATA_DIR: &str = "/var/lib/cni/networks";

/// The attachments that GC must leave alone.
pub(crate) const VALID_ATTACHMENTS: &str = "cni.dev/valid-attachments";
/// The same under the name that the first runtimes with GC used.
pub(crate) const OLD_VALID_ATTACHMENTS: &str = "cni.dev/attachments";

/// The configuration of one plugin of one network, validated as far as the verb needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct NetConf {
    pub version: CniVersion,
    pub name: NetworkName,
    /// The `ipam` section; absent only where there is a `delegate`.
    pub ipam: Option<IpamConf>,
    /// The configuration of the plugin to run, an object with at least `type`.
    pub delegate: Option<Value>,
    /// Our settings at the top, beside `delegate`. Ask [`NetConf::sticky`] instead.
    pub(crate) top_sticky: Option<StickyConf>,
    /// What the plugins before this one answered.
    pub(crate) prev_result: Option<CniResult>,
    /// What GC must leave alone. Absent is not empty: nothing may then be freed.
    pub valid_attachments: Option<Vec<Attachment>>,
    /// Everything as it was given, for a delegate.
    pub raw: Map<String, Value>,
}

impl NetConf {
    /// Our settings, wherever they stand.
    pub fn sticky(&self) -> Option<&StickyConf> {
        self.ipam.as_ref().and_then(|ipam| ipam.sticky.as_ref()).or(self.top_sticky.as_ref())
    }

    /// Checks the name, which comes before the version in the order of checks.
    pub(crate) fn read_name(root: &Fields<'_>) -> Result<NetworkName, CniError> {
        match root.string("name")? {
            None | Some("") => Err(root.invalid("name", "the network name is missing; give it one")),
            Some(text) => NetworkName::new(text).map_err(|problem| root.invalid("name", problem)),
        }
    }

    /// Reads the rest. DEL and GC forgive what they do not need, and say so in the warnings.
    pub(crate) fn read(
        raw: &Map<String, Value>,
        name: NetworkName,
        version: CniVersion,
        verb: Verb,
        args: &CniArgs,
        warnings: &mut Vec<String>,
    ) -> Result<Self, CniError> {
        let root = Fields::root(raw);
        let delegate = read_delegate(&root)?;
        let lenient = verb.is_lenient();
        let ipam = match root.object("ipam")? {
            Some(ipam) if lenient => Some(IpamConf::read_leniently(&ipam, warnings)?),
            Some(ipam) => Some(IpamConf::read(&root, &ipam, version, verb, args, warnings)?),
            None if delegate.is_some() => None,
            None => {
                let problem = "the section is missing; write \"ipam\": {\"type\": \"sticky-ipam\", \
                               \"ranges\": …}, or \"delegate\" to run another plugin";
                return Err(root.invalid("ipam", problem));
            }
        };
        let in_ipam = ipam.as_ref().is_some_and(|ipam| ipam.sticky.is_some());
        let top_sticky = match read_top_sticky(&root, delegate.is_some(), in_ipam) {
            // As in `ipam`: DEL needs to find the store.
            Err(error) if lenient => match root.object("sticky") {
                Ok(Some(fields)) if delegate.is_some() && !in_ipam => {
                    Some(StickyConf::read_leniently(&fields, warnings)?)
                }
                _ => {
                    warnings.push(error.to_string());
                    Some(StickyConf::default())
                }
            },
            other => other?,
        };
        let prev_result = match (verb, root.get("prevResult")) {
            (Verb::Gc | Verb::Status | Verb::Version, _) | (_, None) => None,
            (_, Some(value)) => match CniResult::from_json("prevResult", value, version) {
                Err(error) if lenient => {
                    warnings.push(error.to_string());
                    None
                }
                other => Some(other?),
            },
        };
        let valid_attachments = if verb == Verb::Gc { read_valid_attachments(&root)? } else { None };
        // Only its JSON type is checked: which program runs was the runtime's choice.
        root.string("type")?;
        Ok(Self {
            version,
            name,
            ipam,
            delegate,
            top_sticky,
            prev_result,
            valid_attachments,
            raw: raw.clone(),
        })
    }
}

fn read_delegate(root: &Fields<'_>) -> Result<Option<Value>, CniError> {
    let Some(delegate) = root.object("delegate")? else { return Ok(None) };
    match delegate.string("type")? {
        // The type is the name of an executable that is looked for in CNI_PATH, never a path of its own.
        Some(text) if !text.is_empty() && !text.contains(['/', '\0']) && text != "." && text != ".." => {}
        None | Some("") => {
            let problem = "is missing; name the plugin to run, such as \"cilium-cni\"";
            return Err(delegate.invalid("type", problem));
        }
        Some(text) => {
            let problem = format!("{text:?} is not the name of a plugin; write a file name without '/'");
            return Err(delegate.invalid("type", problem));
        }
    }
    Ok(root.get("delegate").cloned())
}

fn read_top_sticky(
    root: &Fields<'_>,
    delegates: bool,
    in_ipam: bool,
) -> Result<Option<StickyConf>, CniError> {
    let Some(fields) = root.object("sticky")? else { return Ok(None) };
    let given = root.get("sticky").map(shown).unwrap_or_default();
    let problem = match (delegates, in_ipam) {
        (true, false) => return StickyConf::read(&fields).map(Some),
        (true, true) => "is there beside ipam.sticky; keep one of them",
        (false, _) => "stands at the top, where it only counts beside \"delegate\"; move it into \"ipam\"",
    };
    Err(root.invalid("sticky", format!("{given} {problem}")))
}

/// One entry that cannot be read makes the whole list unusable: what it meant to keep would be freed.
fn read_valid_attachments(root: &Fields<'_>) -> Result<Option<Vec<Attachment>>, CniError> {
    let key = if root.get(VALID_ATTACHMENTS).is_some() { VALID_ATTACHMENTS } else { OLD_VALID_ATTACHMENTS };
    let malformed = |path: &str, problem: String| {
        let problem = format!("{problem}; nothing is freed by a list that cannot be trusted");
        CniError::invalid_config(path, problem)
    };
    let list = match root.get(key) {
        None => return Ok(None),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(malformed(key, format!("{} is not a list", shown(other)))),
    };
    let read = |(i, item): (usize, &Value)| {
        let path = format!("{key}[{i}]");
        let text = |name: &str| {
            let text = item.get(name).and_then(Value::as_str);
            text.ok_or_else(|| malformed(&path, format!("{} has no text under {name:?}", shown(item))))
        };
        let (container, interface) = (ContainerId::new(text("containerID")?), IfName::new(text("ifname")?));
        Ok(Attachment {
            container: container.map_err(|problem| malformed(&path, problem))?,
            interface: interface.map_err(|problem| malformed(&path, problem))?,
        })
    };
    list.iter().enumerate().map(read).collect::<Result<_, _>>().map(Some)
}
