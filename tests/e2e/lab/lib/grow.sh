# shellcheck shell=bash
# Nodes that join a lab which is up, and leave it for good: a third one, as a cluster grows and shrinks.

# The most nodes; addresses are made of one digit.
MOST_NODES=9

# grow_note: nodes beyond the first, so that every command knows them.
grow_note() { printf '%s\n' "${NODES[@]:2}" >"$LAB_DIR/more-nodes"; }

command_add_node() {
    help_for "add-node NODE [--without-range] [LABEL=VALUE…]   a further node (node-3 to node-$MOST_NODES) joins; in crd mode its block is the controller's to give, in cluster-pool the operator's; --without-range: its Node names none" "$@"
    need_root
    need_lab
    [[ ${1-} =~ ^node-[3-$MOST_NODES]$ ]] || bad_usage "'${1-}' is no further node; there can be: node-3 to node-$MOST_NODES"
    [[ ! -e $(node_folder "$1") ]] || bad_usage "$1 is there already"
    local node=$1 without_range=false
    shift
    if [[ ${1-} == --without-range ]]; then
        # shellcheck disable=SC2034 # node_register looks at it.
        without_range=true
        shift
    fi
    node_make "$node"
    [[ $# -eq 0 ]] || kubectl_admin label node "$node" "$@" >/dev/null
    NODES+=("$node")
    grow_note
    # Without our controller it gets no block; Cilium's agent makes the object itself otherwise.
    controllers_are_there || cilium_node "$node"
    node_start "$node"
    wait_for_component 180 "cilium@$node" cilium_healthy "$node"
    wait_for 120 "$node: ready" node_is_ready "$node"
}

command_remove_node() {
    help_for "remove-node NODE   a node that joined leaves for good: power off, Node and CiliumNode deleted, disk gone" "$@"
    need_root
    need_lab
    need_node "${1-}"
    [[ $1 != node-1 && $1 != node-2 ]] || bad_usage "$1 is one of the lab's own; only nodes that joined can leave"
    local node kept=()
    node_crash "$1"
    kubectl_admin delete --ignore-not-found node "$1" >/dev/null
    kubectl_admin delete --ignore-not-found ciliumnode "$1" >/dev/null
    rm -f "$LAB_DIR"/run/*@"$1".{command,pid} "$LAB_DIR/run/$1.pid"
    rm -rf --one-file-system "$(node_folder "$1")"
    for node in "${NODES[@]}"; do
        [[ $node == "$1" ]] || kept+=("$node")
    done
    NODES=("${kept[@]}")
    grow_note
}
