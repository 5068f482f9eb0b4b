//! The node's own addresses as ranges, from the conflist that the plugin reads. Must never give a network,
//! broadcast or gateway address to a pod.

use serde_json::Value;

use crate::alloc::{Range, RangeSet, range::RangeSpec};

/// The range sets of the plugin's own configuration, from the text of a conflist; none if no entry has our
/// `ipam`.
pub(crate) fn sets_of_conflist(text: &str) -> Result<Vec<RangeSet>, String> {
    let list: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let plugins = list["plugins"].as_array().map(Vec::as_slice).unwrap_or_default();
    let Some(ipam) = plugins.iter().map(|plugin| &plugin["ipam"]).find(|ipam| ipam["type"] == "sticky-ipam")
    else {
        return Ok(Vec::new());
    };
    let one = |value: &Value| -> Result<Range, String> {
        let text = |key: &str| value[key].as_str();
        let spec = RangeSpec {
            subnet: text("subnet").unwrap_or_default(),
            range_start: text("rangeStart"),
            range_end: text("rangeEnd"),
            gateway: text("gateway"),
        };
        Range::from_spec(&spec).map_err(|error| error.to_string())
    };
    let mut sets = Vec::new();
    if ipam["subnet"].is_string() {
        sets.push(vec![one(ipam)?]);
    }
    for set in ipam["ranges"].as_array().into_iter().flatten() {
        sets.push(set.as_array().into_iter().flatten().map(one).collect::<Result<_, _>>()?);
    }
    sets.into_iter().map(|ranges| RangeSet::new(ranges).map_err(|error| error.to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_conflists_of_the_manual_are_read() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("conflist");
        for (name, count) in [("delegated", 1), ("chained", 1), ("crd", 0)] {
            let text = std::fs::read_to_string(folder.join(format!("{name}.conflist"))).unwrap();
            assert_eq!(sets_of_conflist(&text).unwrap().len(), count, "{name}");
        }
        assert!(sets_of_conflist("{").is_err());
        let broken = r#"{"plugins":[{"ipam":{"type":"sticky-ipam","subnet":"ten"}}]}"#;
        assert!(sets_of_conflist(broken).is_err());
    }
}
