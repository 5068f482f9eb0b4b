# shellcheck shell=bash
# Everything of sticky-ipam itself: where its binaries come from, what `up` starts of it, and its part of the CNI configuration.
# The one place to extend when the agent and the controller exist.

# ours_find_plugin: its path, or what to do. STICKY_IPAM_BIN comes first.
ours_find_plugin() {
    local built=${CARGO_TARGET_DIR:-$LAB_HOME/../../target}/x86_64-unknown-linux-gnu/release/sticky-ipam
    local plugin=${STICKY_IPAM_BIN:-$built}
    [[ -x $plugin ]] || die "the plugin $plugin is not built; run: make plugin (or set STICKY_IPAM_BIN), or use --stock for Cilium alone"
    realpath "$plugin"
}

# ours_needed: does this mode call our plugin?
ours_needed() { ! $stock && [[ $mode == delegated || $mode == chained ]]; }

# ours_install_plugin DISK
ours_install_plugin() {
    if ours_needed; then
        install -m 755 "$plugin_bin" "$1/opt/cni/bin/sticky-ipam"
    fi
}

# ours_ipam_settings: the `sticky` object of the `ipam` section. LAB_STICKY replaces it, for a test of another policy.
ours_ipam_settings() {
    echo "\"sticky\": ${LAB_STICKY:-{\"pods\": [\"*/*\"], \"retention\": \"Forever\"\}}"
}

# ours_range_end NODE: with LAB_RANGE_SIZE only so many addresses of the block are given out, for a test that uses them up.
ours_range_end() {
    local number
    number=$(node_number "$1")
    [[ -z ${LAB_RANGE_SIZE-} ]] || printf ',"rangeStart":"10.24%s.0.2","rangeEnd":"10.24%s.0.%s"' "$number" "$number" "$((LAB_RANGE_SIZE + 1))"
}

# ours_define: `define sticky-controller fabric …` and `define sticky-agent@NODE NODE …` go here.
ours_define() { :; }

# ours_up_fabric: starts what runs beside the control plane, once CRDs are there.
ours_up_fabric() { :; }

# ours_up_node NODE: starts what runs on a node, before kubelet.
ours_up_node() { :; }
