# shellcheck shell=bash
# etcd, the API server, the controller manager and the scheduler, as processes in the fabric.

kubectl_admin() {
    KUBECACHEDIR=$LAB_DIR/kubectl-cache KUBECONFIG=$ADMIN_KUBECONFIG enter fabric "$kubernetes_bin/kubectl" "$@"
}

control_define() {
    local pki=$LAB_DIR/pki services=10.96.0.0/16 etcd_flags=() node_ranges=(--allocate-node-cidrs=false)
    read -ra etcd_flags <<<"${LAB_ETCD_FLAGS-}"
    if $dual_stack; then
        services+=,fd96::/112
    fi
    define etcd fabric etcd --name lab --data-dir "$LAB_DIR/etcd" \
        --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
        --listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 \
        --initial-cluster lab=http://127.0.0.1:2380 "${etcd_flags[@]}"
    # Advertised on the bridge: a loopback address would be refused for the service `kubernetes`.
    define apiserver fabric "$kubernetes_bin/kube-apiserver" \
        --etcd-servers=http://127.0.0.1:2379 --bind-address=0.0.0.0 --secure-port=6443 "--advertise-address=$API_ADDRESS" \
        "--service-cluster-ip-range=$services" --allow-privileged=true --authorization-mode=Node,RBAC \
        "--client-ca-file=$pki/ca.crt" "--tls-cert-file=$pki/apiserver.crt" "--tls-private-key-file=$pki/apiserver.key" \
        "--kubelet-client-certificate=$pki/admin.crt" "--kubelet-client-key=$pki/admin.key" \
        --kubelet-preferred-address-types=InternalIP --service-account-issuer=https://kubernetes.default.svc \
        "--service-account-key-file=$pki/sa.pub" "--service-account-signing-key-file=$pki/sa.key"
    if gives_node_cidrs; then
        node_ranges=(--allocate-node-cidrs=true "--cluster-cidr=$FIELD_CLUSTER_CIDR" --node-cidr-mask-size=24)
    fi
    # A crashed node is NotReady sooner than after the usual 50 s, and no sooner than four of kubelet's signs
    # of life are missed.
    define controller-manager fabric "$kubernetes_bin/kube-controller-manager" "--kubeconfig=$ADMIN_KUBECONFIG" --leader-elect=false \
        --use-service-account-credentials=false "--service-account-private-key-file=$pki/sa.key" "--root-ca-file=$pki/ca.crt" \
        "${node_ranges[@]}" --bind-address=127.0.0.1 --node-monitor-period=1s --node-monitor-grace-period=16s
    define scheduler fabric "$kubernetes_bin/kube-scheduler" "--kubeconfig=$ADMIN_KUBECONFIG" --leader-elect=false --bind-address=127.0.0.1
}

apiserver_ready() {
    enter fabric curl -sf --max-time 5 --cacert "$LAB_DIR/pki/ca.crt" --cert "$LAB_DIR/pki/admin.crt" --key "$LAB_DIR/pki/admin.key" \
        "https://$API_ADDRESS:6443/readyz"
}

# ready_or_dead NAME PROBE…: for a wait that must end when the component does.
ready_or_dead() {
    local name=$1
    shift
    "$@" || is_gone "$name"
}

# wait_for_component SECONDS NAME PROBE…
wait_for_component() {
    local seconds=$1 name=$2
    shift 2
    if wait_for "$seconds" "$name: its readiness" ready_or_dead "$name" "$@"; then
        ! died "$name" || return 1
        return 0
    fi
    show_log_end "$name"
    return 1
}

control_up() {
    control_define
    start_component etcd
    wait_for_component 60 etcd enter fabric curl -sf --max-time 5 http://127.0.0.1:2379/health
    start_component apiserver
    wait_for_component 120 apiserver apiserver_ready
}

# kinds_established LOG: a kind that was just made may not have conditions yet, which `kubectl wait` takes for
# an error.
kinds_established() {
    wait_for 60 "every kind: served by the API server" kubectl_admin wait --for=condition=Established crd --all --timeout=5s || {
        kubectl_admin get crd >>"$1" 2>&1 || true
        die "the API server does not serve every kind; which there are is in $1"
    }
}

managers_up() {
    start_component controller-manager
    start_component scheduler
}
