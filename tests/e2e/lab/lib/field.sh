# shellcheck shell=bash
# The field profile: Cilium as operators run it, with the settings and roles of its own chart, and what stands
# beside it on a cluster: kube-proxy, Nodes whose ranges the controller manager gives, a host beyond the
# nodes.

# What kubeadm calls the pod network. It lies in NATIVE_CIDR, as all blocks of the lab do.
FIELD_CLUSTER_CIDR=10.244.0.0/16
# A host that knows no pod network: what is not masqueraded gets no answer from it.
OUTSIDE=outside
OUTSIDE_ADDRESS=192.0.2.10
OUTSIDE_ROUTER=192.0.2.1
OUTSIDE_SERVER=outside-server
# What the chart mounts into cilium-agent's container.
HUBBLE_CERTIFICATES=/var/lib/cilium/tls/hubble
# What of the chart is not applied: the lab starts the programs itself.
CHART_WORKLOADS='["DaemonSet", "Deployment"]'
# Settings that were given by `cilium-values`, one to a line.
FURTHER_VALUES=$LAB_DIR/cilium-values

is_field() { [[ $profile == field ]]; }
has_kube_proxy() { is_field && [[ $kube_proxy != none ]]; }
# Are the ranges of Nodes the controller manager's to give?
gives_node_cidrs() { is_field && [[ $node_cidrs == on ]]; }

# ciliums_own_conflist: does cilium-agent write the CNI configuration that is used, as the chart has it?
ciliums_own_conflist() { is_field && { ciliums_own_blocks || { $stock && [[ $mode == crd ]]; }; }; }

# chart_values: what differs from the chart's defaults, one to a line. docs/lab.md says why, in this order.
chart_values() {
    echo securityContext.privileged=true
    echo cni.hostConfDirMountPath=/etc/cni/net.d
    case $mode in
    crd | cluster-pool | kubernetes) echo "ipam.mode=$mode" ;;
    delegated | chained)
        echo ipam.mode=delegated-plugin
        echo endpointHealthChecking.enabled=false
        echo "extraConfig.local-router-ipv4=$ROUTER"
        echo cni.customConf=true
        ;;
    esac
    [[ $mode != chained ]] || echo cni.chainingMode=generic-veth
    if [[ $mode == crd ]] && ! $stock; then
        echo cni.exclusive=false
    fi
    if ! ciliums_own_blocks && [[ $masquerade == iptables ]]; then
        echo egressMasqueradeInterfaces=eth0
    fi
    if [[ $routing == native ]]; then
        echo routingMode=native
        echo autoDirectNodeRoutes=true
        echo "ipv4NativeRoutingCIDR=$(field_native_cidr)"
    fi
    if $endpoint_routes || { [[ $routing == native ]] && ! ciliums_own_blocks; }; then
        echo endpointRoutes.enabled=true
    fi
    [[ $kube_proxy != none ]] || echo kubeProxyReplacement=true
    [[ $masquerade != bpf ]] || echo bpf.masquerade=true
    cat "$FURTHER_VALUES" 2>/dev/null || true
}

# The chart's own pool is 10.0.0.0/8.
field_native_cidr() {
    if [[ $mode == cluster-pool ]]; then
        echo 10.0.0.0/8
    else
        echo "$NATIVE_CIDR"
    fi
}

# chart_render: the objects of the chart, as Helm would apply them.
chart_render() {
    local value flags=()
    while read -r value; do
        flags+=(--set "$value")
    done < <(chart_values)
    HELM_CACHE_HOME=$LAB_DIR/helm HELM_CONFIG_HOME=$LAB_DIR/helm HELM_DATA_HOME=$LAB_DIR/helm "$helm_bin/helm" template cilium \
        "${chart_bin%/bin}/chart" --namespace kube-system --kube-version "$kubernetes" "${flags[@]}"
}

# chart_apply KIND-FILTER: of the chart, the objects that this jq expression lets pass.
chart_apply() {
    chart_render >"$LAB_DIR/chart.yaml" 2>"$LAB_DIR/log/chart.log" || {
        tail -n 5 "$LAB_DIR/log/chart.log" >&2
        die "Helm does not render Cilium's chart with these values: $(chart_values | paste -sd' ')"
    }
    kubectl_admin create --dry-run=client -o json -f "$LAB_DIR/chart.yaml" |
        jq "if .kind == \"List\" then .items[] else . end | select($1)" |
        kubectl_admin apply --server-side --force-conflicts -f - >>"$LAB_DIR/log/chart.log" 2>&1 || {
        tail -n 5 "$LAB_DIR/log/chart.log" >&2
        die "objects of Cilium's chart were refused by the API server"
    }
}

# field_objects: everything that the chart brings, and what its pods would get of it.
field_objects() {
    local name
    is_field || return 0
    chart_apply ".kind as \$kind | $CHART_WORKLOADS | index(\$kind) | not"
    for name in cilium cilium-operator; do
        ours_kubeconfig "$name" '' "$LAB_DIR/$name.kubeconfig"
    done
    mkdir "$LAB_DIR/hubble"
    for name in tls.crt:server.crt tls.key:server.key ca.crt:client-ca.crt; do
        kubectl_admin get secret --namespace kube-system hubble-server-certs -o json |
            jq -re ".data[\"${name%:*}\"] | @base64d" >"$LAB_DIR/hubble/${name#*:}"
    done
}

# field_prepare: the programs of the nodes find what starts them in the lab's folder.
field_prepare() {
    is_field || return 0
    install -m 755 "$LAB_HOME/lib/with-config" "$LAB_DIR/with-config"
    ln -s "$chart_bin/cilium-health-responder" "$LAB_DIR/path/cilium-health-responder"
}

# field_node_disk NODE: what the chart mounts.
field_node_disk() {
    local disk
    is_field || return 0
    disk=$(node_folder "$1")/disk
    mkdir -p "$disk$HUBBLE_CERTIFICATES"
    cp "$LAB_DIR"/hubble/* "$disk$HUBBLE_CERTIFICATES/"
}

# field_node_mounts NODE: after each boot, what the chart mounts beside: networks of pods, which cilium-agent
# enters.
field_node_mounts() {
    is_field || return 0
    enter "$1" bash -euc "
        mkdir -p /run/netns /run/cilium/netns
        mount --rbind /run/netns /run/cilium/netns"
}

# field_cilium_define NODE: its settings come from the ConfigMap and from CiliumNodeConfigs, at each start.
# The flags only say where things are, because there is no container around it.
field_cilium_define() {
    local kubeconfig=$LAB_DIR/cilium.kubeconfig
    define "cilium@$1" "$1" env "K8S_NODE_NAME=$1" CILIUM_K8S_NAMESPACE=kube-system "PATH=$LAB_DIR/path:$PATH" \
        "$LAB_DIR/with-config" "$cilium_bin/cilium-dbg" "$kubeconfig" /tmp/cilium/config-map \
        config-map:kube-system/cilium-config,cilium-node-config:kube-system \
        "$cilium_bin/cilium-agent" "--k8s-kubeconfig-path=$kubeconfig" "--lib-dir=$LAB_DIR/lib"
}

# field_operator_define: in every mode. Without a socket path of its own it would use the machine's /run.
field_operator_define() {
    local kubeconfig=$LAB_DIR/cilium-operator.kubeconfig
    define operator fabric env CILIUM_K8S_NAMESPACE=kube-system K8S_NODE_NAME=fabric "$LAB_DIR/with-config" "$cilium_bin/cilium-dbg" \
        "$LAB_DIR/cilium.kubeconfig" "$LAB_DIR/run/operator-config" config-map:kube-system/cilium-config \
        "$cilium_bin/cilium-operator-generic" "--k8s-kubeconfig-path=$kubeconfig" \
        "--shell-sock-path=$LAB_DIR/run/operator-shell.sock"
}

# kube_proxy_define NODE: it must not set what belongs to the machine, the size of the table of connections.
kube_proxy_define() {
    local cidr=$NATIVE_CIDR
    has_kube_proxy || return 0
    ! gives_node_cidrs || cidr=$FIELD_CLUSTER_CIDR
    define "kube-proxy@$1" "$1" "$kube_proxy_bin/kube-proxy" "--kubeconfig=$ADMIN_KUBECONFIG" "--hostname-override=$1" \
        "--proxy-mode=$kube_proxy" "--cluster-cidr=$cidr" --conntrack-max-per-core=0 --conntrack-min=0 --v=2
}

kube_proxy_start() {
    ! has_kube_proxy || start_component "kube-proxy@$1"
}

# outside_up: the host beyond the nodes, and the way to it through the fabric.
outside_up() {
    is_field || return 0
    spawn "$OUTSIDE" fabric unshare --net sleep infinity
    wait_for 30 "the network namespace of the host outside" has_own_network "$OUTSIDE" || exit 1
    enter fabric ip link add to-outside type veth peer name eth0 netns "$(place_pid "$OUTSIDE")"
    enter fabric bash -euc "
        ip address add $OUTSIDE_ROUTER/24 dev to-outside
        ip link set to-outside up
        sysctl -qw net.ipv4.ip_forward=1"
    enter "$OUTSIDE" bash -euc "
        ip link set lo up
        ip address add $OUTSIDE_ADDRESS/24 dev eth0
        ip link set eth0 up
        ip route add default via $OUTSIDE_ROUTER"
    define "$OUTSIDE_SERVER" "$OUTSIDE" "$pod_bin/pod" outside
    start_component "$OUTSIDE_SERVER"
}

command_cilium_values() {
    help_for "cilium-values NAME=VALUE…   render Cilium's chart again, with these values after the lab's own and those given before, and apply its ConfigMap, as helm upgrade does; restart-cilium makes it count" "${1-}"
    need_root
    need_lab
    is_field || bad_usage "cilium-values is there on the field profile: tests/lab/lab up --profile field"
    [[ $# -gt 0 ]] || bad_usage "usage: tests/lab/lab cilium-values NAME=VALUE…"
    local before=
    before=$(cat "$FURTHER_VALUES" 2>/dev/null) || true
    printf '%s\n' "$@" >>"$FURTHER_VALUES"
    (chart_apply '.kind == "ConfigMap" and .metadata.name == "cilium-config"') || {
        # A wrong value must not stay in the way of the next one.
        printf '%s' "${before:+$before$'\n'}" >"$FURTHER_VALUES"
        exit 1
    }
}

command_restart_cilium() {
    help_for "restart-cilium NODE   restart Cilium's agent on a node, as a rolling restart of its DaemonSet does, and wait until it is healthy" "$@"
    need_root
    need_lab
    need_node "${1-}"
    stop_component "cilium@$1"
    start_component "cilium@$1"
    wait_for_component 120 "cilium@$1" cilium_healthy "$1"
}
