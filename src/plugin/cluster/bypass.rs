//! The bypass: while a file lies beside the plugin's kubeconfig, pods that this node does not know as
//! sticky are not looked up. They start without the API server, the credentials and the agent
//! (docs/operate/bypass.md).
//!
//! Must never look at anything but whether the file is there: whatever else is broken, it works.

use crate::cni::ClusterConf;

/// Whether the file is there; its content does not matter here.
pub(crate) fn is_on(conf: &ClusterConf) -> bool {
    conf.bypass_file().symlink_metadata().is_ok()
}
