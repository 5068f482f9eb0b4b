# shellcheck shell=bash
# Cilium, unpatched: its CRDs, its agents and operator, the CNI configuration of each mode, and the CiliumNode
# that the mode needs.

# The blocks of all nodes lie in this.
NATIVE_CIDR=10.240.0.0/12
NATIVE_CIDR6=fd24::/16
# What Cilium's router has where it may not take an address of the node's block.
ROUTER=169.254.23.0
ROUTER6=fe80::23
# The name of the network, and of the store's folder.
NETWORK=lab
# Addresses of a node's block that the harness offers to Cilium in `crd` mode; with the agent only those for a
# start.
STOCK_POOL_SIZE=30

cilium_prepare() {
    local program
    mkdir -p "$LAB_DIR/path" "$LAB_DIR/lib"
    for program in clang llc; do
        ln -s "$(command -v "$program-19")" "$LAB_DIR/path/$program"
    done
    # The agent writes beside its sources.
    cp -r "${cilium_bin%/bin}/bpf" "$LAB_DIR/lib/bpf"
    field_prepare
}

cilium_crds() {
    local file files=()
    for file in "${cilium_bin%/bin}"/crds/v2*/*.yaml; do
        files+=(-f "$file")
    done
    kubectl_admin apply --server-side "${files[@]}" >"$LAB_DIR/log/crds.log" 2>&1 || {
        tail -n 5 "$LAB_DIR/log/crds.log" >&2
        die "Cilium's CRDs were refused by the API server"
    }
    kinds_established "$LAB_DIR/log/crds.log"
}

# cilium_pool NODE: the keys of a pool, without owners.
cilium_pool() {
    local number index prefix
    number=$(node_number "$1")
    prefix=$(node_prefix "$1")
    for ((index = 2; index < 2 + STOCK_POOL_SIZE; index++)); do
        printf '"%s.%s":{},' "$prefix" "$index"
        ! $dual_stack || printf '"fd24:%s::%x":{},' "$number" "$index"
    done | sed 's/,$//'
}

# ciliums_own_blocks: does Cilium give out addresses of a node's block by itself?
ciliums_own_blocks() { [[ $mode == cluster-pool || $mode == kubernetes ]]; }

# cilium_node NODE: in `cluster-pool` Cilium's operator fills it, in `kubernetes` the agent does, from the
# Node.
cilium_node() {
    local pool=
    case $mode in
    cluster-pool | kubernetes) return 0 ;;
    crd) pool="\"pool\": {$(cilium_pool "$1")}," ;;
    esac
    kubectl_admin create -f - >/dev/null <<JSON
{"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": "$1"},
 "spec": {"ipam": {$pool "podCIDRs": $(node_cidrs_json "$1")}}}
JSON
}

# cilium_router6 NODE: in `chained` the gateway that ptp gives to the pods. Cilium answers a pod that looks
# for its router, and drops what looks for any other neighbour that is no pod of the node.
cilium_router6() {
    if [[ $mode == chained ]]; then
        echo "fd24:$(node_number "$1")::1"
    else
        echo "$ROUTER6"
    fi
}

cilium_define() {
    local node=$1 flags
    if is_field; then
        field_cilium_define "$node"
        return 0
    fi
    flags=("--k8s-kubeconfig-path=$ADMIN_KUBECONFIG" "--lib-dir=$LAB_DIR/lib" --devices=eth0 --identity-allocation-mode=crd
        --enable-l7-proxy=false --enable-envoy-config=false --kube-proxy-replacement=false --bpf-lb-sock=false
        --enable-health-checking=false --enable-endpoint-health-checking=false --enable-hubble=false --enable-ipv4-masquerade=false
        --cgroup-root=/run/cilium/cgroupv2 --bpf-root=/sys/fs/bpf --state-dir=/var/run/cilium
        --socket-path=/var/run/cilium/cilium.sock --cni-exclusive=false --write-cni-conf-when-ready=)
    case $mode in
    crd | cluster-pool | kubernetes) flags+=("--ipam=$mode") ;;
    delegated) flags+=(--ipam=delegated-plugin) ;;
    chained) flags+=(--ipam=delegated-plugin --cni-chaining-mode=generic-veth) ;;
    esac
    if [[ $mode == delegated || $mode == chained ]]; then
        flags+=("--local-router-ipv4=$ROUTER")
        ! $dual_stack || flags+=("--local-router-ipv6=$(cilium_router6 "$node")")
    fi
    if [[ $routing == vxlan ]]; then
        flags+=(--routing-mode=tunnel --tunnel-protocol=vxlan "--enable-endpoint-routes=$endpoint_routes")
    else
        flags+=(--routing-mode=native --auto-direct-node-routes=true --enable-endpoint-routes=true "--ipv4-native-routing-cidr=$NATIVE_CIDR")
    fi
    if $dual_stack; then
        flags+=(--enable-ipv6=true --enable-ipv6-masquerade=false)
        [[ $routing == vxlan ]] || flags+=("--ipv6-native-routing-cidr=$NATIVE_CIDR6")
    else
        flags+=(--enable-ipv6=false)
    fi
    define "cilium@$node" "$node" env "K8S_NODE_NAME=$node" "PATH=$LAB_DIR/path:$PATH" "$cilium_bin/cilium-agent" "${flags[@]}"
}

# cilium_own_range NODE: the range that CiliumNodeConfigs name for a node, as Cilium's own program reads them
# before cilium-agent starts; nothing where none does.
cilium_own_range() {
    local settings=$LAB_DIR/$1-settings
    rm -rf "$settings"
    enter "$1" "$cilium_bin/cilium-dbg" build-config "--k8s-kubeconfig-path=$ADMIN_KUBECONFIG" "--node-name=$1" "--dest=$settings" \
        --source=cilium-node-config:kube-system >"$LAB_DIR/log/settings@$1.log" 2>&1 || {
        tail -n 5 "$LAB_DIR/log/settings@$1.log" >&2
        die "cilium-dbg cannot read the CiliumNodeConfigs"
    }
    cat "$settings/ipv4-range" 2>/dev/null || true
}

cilium_healthy() { enter "$1" curl -sf --max-time 5 -H 'brief: true' http://127.0.0.1:9879/healthz; }

operator_define() {
    local families=(--enable-ipv6=false)
    if is_field; then
        field_operator_define
        return 0
    fi
    if $dual_stack; then
        families=(--enable-ipv6=true --cluster-pool-ipv6-cidr=fd20::/104 --cluster-pool-ipv6-mask-size=120)
    fi
    # Without a socket path of its own it would use the machine's /run.
    define operator fabric env CILIUM_K8S_NAMESPACE=kube-system K8S_NODE_NAME=fabric "$cilium_bin/cilium-operator-generic" \
        "--k8s-kubeconfig-path=$ADMIN_KUBECONFIG" --ipam=cluster-pool --cluster-pool-ipv4-cidr=10.200.0.0/16 \
        --cluster-pool-ipv4-mask-size=24 --enable-ipv4=true "${families[@]}" --identity-allocation-mode=crd \
        --operator-api-serve-addr=127.0.0.1:9234 "--shell-sock-path=$LAB_DIR/run/operator-shell.sock" --skip-crd-creation=true
}

# cni_install NODE: the plugins and the network configuration of the mode, on the node's disk.
cni_install() {
    local node=$1 disk plugin ranges routes sticky ipam plugins
    disk=$(node_folder "$node")/disk
    cp "$cilium_bin/cilium-cni" "$cni_bin"/{loopback,host-local,ptp,bridge} "$disk/opt/cni/bin/"
    ranges="[{\"subnet\":\"$(node_cidr "$node")\"$(ours_range_end "$node")}]"
    routes='{"dst":"0.0.0.0/0"}'
    if $dual_stack; then
        ranges+=",[{\"subnet\":\"$(node_cidr6 "$node")\"}]"
        routes+=',{"dst":"::/0"}'
    fi
    plugin=host-local
    ipam=
    if ! $stock; then
        plugin='sticky-ipam'
        ours_install_plugin "$disk"
        sticky=$(ours_sticky "$node")
        ipam=", \"sticky\": $sticky"
    fi
    ipam="{\"type\":\"$plugin\",\"dataDir\":\"/var/lib/cni/networks\",\"ranges\":[$ranges],\"routes\":[$routes]$ipam}"
    plugins='{"type":"cilium-cni","enable-debug":false}'
    case $mode in
    cluster-pool | kubernetes) ;;
    crd) $stock || plugins="{\"type\":\"sticky-ipam\",\"delegate\":$plugins,\"sticky\":$sticky}" ;;
    delegated) plugins="{\"type\":\"cilium-cni\",\"enable-debug\":false,\"ipam\":$ipam}" ;;
    chained) plugins="{\"type\":\"ptp\",\"ipMasq\":false,\"mtu\":1500,\"ipam\":$ipam},{\"type\":\"cilium-cni\",\"chaining-mode\":\"generic-veth\",\"enable-debug\":false}" ;;
    esac
    ours_installs || ciliums_own_conflist || jq . <<<"{\"cniVersion\":\"1.0.0\",\"name\":\"$NETWORK\",\"plugins\":[$plugins]}" >"$disk/etc/cni/net.d/05-lab.conflist"
}
