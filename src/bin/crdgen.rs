//! Writes the CustomResourceDefinitions to `packaging/crds` (or to the folder given).

use std::path::PathBuf;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args_os().nth(1).map_or_else(|| PathBuf::from("packaging/crds"), PathBuf::from);
    std::fs::create_dir_all(&folder)?;
    for (name, text) in sticky_ipam::cluster::objects::crds::files()? {
        std::fs::write(folder.join(name), text)?;
    }
    Ok(())
}
