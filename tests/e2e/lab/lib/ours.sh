# shellcheck shell=bash
# Everything of sticky-ipam itself: where its binaries come from, its kinds, roles and credentials, what `up`
# starts of it, and its part of the CNI configuration.

# Where the agent and the plugin look by default.
OURS_NAMESPACE=kube-system
OURS_KUBECONFIG=/etc/cni/net.d/sticky-ipam.d/kubeconfig
OURS_AGENT_KUBECONFIG=/etc/sticky-ipam/agent.kubeconfig
OURS_LOG=/var/log/sticky-ipam/plugin.log
# The pods that are sticky without an annotation.
OURS_SELECTOR='{"matchLabels": {"sticky": "yes"}}'
PACKAGING=$LAB_HOME/../../../packaging

# ours_built NAME: where the Makefile leaves a binary.
ours_built() { echo "${CARGO_TARGET_DIR:-$LAB_HOME/../../../target}/x86_64-unknown-linux-gnu/release/$1"; }

# ours_find_plugin: its path, or what to do. STICKY_IPAM_BIN comes first.
ours_find_plugin() {
    local plugin=${STICKY_IPAM_BIN:-$(ours_built sticky-ipam)}
    [[ -x $plugin ]] || die "the plugin $plugin is not built; run: make plugin (or set STICKY_IPAM_BIN), or use --stock for Cilium alone"
    realpath "$plugin"
}

# ours_find_agent: the same for the agent, by STICKY_IPAM_AGENT_BIN.
ours_find_agent() {
    local agent=${STICKY_IPAM_AGENT_BIN:-$(ours_built sticky-ipam-agent)}
    [[ -x $agent ]] || die "the agent $agent is not built; run: make agent (or set STICKY_IPAM_AGENT_BIN), or set LAB_AGENT=false to do without"
    realpath "$agent"
}

# ours_needed: does this mode call our plugin?
ours_needed() { ! $stock && ! ciliums_own_blocks; }

# ours_agent_needed: LAB_STICKY is another policy, of which an agent knows nothing.
ours_agent_needed() { ours_needed && [[ -z ${LAB_STICKY-} && ${LAB_AGENT-true} == true ]]; }

# ours_binaries: copies in the lab's folder, which the nodes see.
ours_binaries() {
    local built
    ours_needed || return 0
    mkdir "$LAB_DIR/ours"
    built=$(ours_find_plugin)
    plugin_bin=$LAB_DIR/ours/sticky-ipam
    install -m 755 "$built" "$plugin_bin"
    if ours_agent_needed; then
        built=$(ours_find_agent)
        agent_bin=$LAB_DIR/ours/sticky-ipam-agent
        install -m 755 "$built" "$agent_bin"
    fi
}

# ours_installs: the agent puts plugin, conflist and credentials onto its node, as on any cluster.
ours_installs() { [[ -n $agent_bin ]]; }

# ours_install_plugin DISK: where no agent does.
ours_install_plugin() {
    if ours_needed; then
        mkdir -p "$1${OURS_LOG%/*}"
        ours_installs || install -m 755 "$plugin_bin" "$1/opt/cni/bin/sticky-ipam"
    fi
}

# ours_sticky NODE: the `sticky` object of the configuration. LAB_STICKY replaces it, for a test of another
# policy.
ours_sticky() {
    if [[ -n ${LAB_STICKY-} ]]; then
        echo "$LAB_STICKY"
    else
        cat <<JSON
{"logFile": "$OURS_LOG", "logLevel": "info",
 "cluster": {"kubeconfig": "$OURS_KUBECONFIG", "node": "$1", "selector": $OURS_SELECTOR}}
JSON
    fi
}

# ours_range_end NODE: with LAB_RANGE_SIZE only so many addresses of the block are given out, for a test that
# uses them up.
ours_range_end() {
    local prefix
    prefix=$(node_prefix "$1")
    [[ -z ${LAB_RANGE_SIZE-} ]] || printf ',"rangeStart":"%s.2","rangeEnd":"%s.%s"' "$prefix" "$prefix" "$((LAB_RANGE_SIZE + 1))"
}

# ours_objects: our kinds, accounts and roles, as packaging ships them.
ours_objects() {
    ours_needed || return 0
    if ! kubectl_admin apply --server-side -f "$PACKAGING/crds" -f "$PACKAGING/rbac.yaml" >"$LAB_DIR/log/objects.log" 2>&1; then
        tail -n 5 "$LAB_DIR/log/objects.log" >&2
        die "what is in packaging was refused by the API server"
    fi
    kinds_established "$LAB_DIR/log/objects.log"
}

# ours_kubeconfig ACCOUNT NODE FILE: a token of the account, bound to the node if one is given.
ours_kubeconfig() {
    local token bound=()
    [[ -z $2 ]] || bound=(--bound-object-kind Node --bound-object-name "$2")
    token=$(kubectl_admin create token "$1" --namespace "$OURS_NAMESPACE" --duration 24h "${bound[@]}")
    mkdir -p "${3%/*}"
    (
        umask 077
        cat >"$3" <<YAML
apiVersion: v1
kind: Config
clusters: [{name: lab, cluster: {server: "https://$API_ADDRESS:6443", certificate-authority-data: $(base64 -w0 "$LAB_DIR/pki/ca.crt")}}]
users: [{name: node, user: {token: $token}}]
contexts: [{name: lab, context: {cluster: lab, user: node, namespace: $OURS_NAMESPACE}}]
current-context: lab
YAML
    )
}

# ours_credentials NODE: on its disk, once its Node is there.
ours_credentials() {
    local disk
    ours_needed || return 0
    disk=$(node_folder "$1")/disk
    if ours_installs; then
        ours_kubeconfig sticky-ipam-agent "$1" "$disk$OURS_AGENT_KUBECONFIG"
    else
        ours_kubeconfig sticky-ipam-node "$1" "$disk$OURS_KUBECONFIG"
    fi
}

# ours_define NODE: the agent, as a component of the lab.
ours_define() {
    ours_installs || return 0
    define "sticky-agent@$1" "$1" "$agent_bin" run --node "$1" --mode "$mode" --kubeconfig "$OURS_AGENT_KUBECONFIG" \
        --network "$NETWORK" --label-selector "$OURS_SELECTOR" --plugin "$plugin_bin" \
        --plugin-service-account "$OURS_NAMESPACE/sticky-ipam-node" --log-level info
}

# ours_up_node NODE: starts what runs on a node, before kubelet.
ours_up_node() {
    ! ours_installs || start_component "sticky-agent@$1"
}

# ours_join NODE: what a running node gets of ours.
ours_join() {
    mkdir -p "$(node_folder "$1")/disk${OURS_LOG%/*}"
    ours_credentials "$1"
    ours_define "$1"
    ours_up_node "$1"
}

command_bring_ours() {
    help_for "bring-ours   our kinds, agents and controllers come to a lab of Cilium's own blocks, once it was adopted into crd" "$@"
    need_root
    need_lab
    local node name
    ciliums_own_blocks || bad_usage "bring-ours is there for cluster-pool and kubernetes; the others have them from the start"
    ! ours_installs || bad_usage "they are there already"
    # For what follows; the lab itself stays what it was started as.
    mode=crd stock=false
    ours_binaries
    controllers_binary
    for name in plugin_bin agent_bin controller_bin; do
        setting "$name" "${!name}"
    done
    ours_objects
    controllers_objects
    controllers_up
    for node in "${NODES[@]}"; do
        ours_join "$node"
    done
}
