# shellcheck shell=bash
# The cluster's controller: two replicas in the fabric, each with credentials of its own for the very roles
# that packaging ships, and the command that restarts them with other flags.

CONTROLLERS=(sticky-controller-1 sticky-controller-2)
CONTROLLER_ACCOUNT=sticky-ipam-controller
# Where the Lease is that they elect one on.
CONTROLLER_NAMESPACE=kube-system
# Where the locks of blocks are.
BLOCK_NAMESPACE=sticky-ipam-blocks
# Blocks that are not configured come from here, as those of the lab's nodes do.
CONTROLLER_CIDR=$NATIVE_CIDR

# controllers_find: its path, or what to do. STICKY_IPAM_CONTROLLER_BIN comes first.
controllers_find() {
    local controller=${STICKY_IPAM_CONTROLLER_BIN:-$(ours_built sticky-ipam-controller)}
    [[ -x $controller ]] || die "the controller $controller is not built; run: make controller (or set STICKY_IPAM_CONTROLLER_BIN), or set LAB_CONTROLLERS=false to do without"
    realpath "$controller"
}

# controllers_needed: where there are agents.
controllers_needed() { ours_agent_needed && [[ ${LAB_CONTROLLERS-true} == true ]]; }

controllers_binary() {
    local built
    controllers_needed || return 0
    built=$(controllers_find)
    controller_bin=$LAB_DIR/ours/sticky-ipam-controller
    install -m 755 "$built" "$controller_bin"
}

# controllers_are_there: did `up` install them?
controllers_are_there() { [[ -n ${controller_bin-} ]]; }

# controllers_objects: account and roles of packaging/controller.yaml, and not the Deployment: there is no
# image of it here.
controllers_objects() {
    controllers_are_there || return 0
    kubectl_admin create --dry-run=client -o json -f "$PACKAGING/controller.yaml" |
        jq 'if .kind == "List" then .items[] else . end | select(.kind != "Deployment")' |
        kubectl_admin apply --server-side -f - >>"$LAB_DIR/log/objects.log" 2>&1 || {
        tail -n 5 "$LAB_DIR/log/objects.log" >&2
        die "the roles of packaging/controller.yaml were refused by the API server"
    }
}

controllers_credentials() {
    local name
    for name in "${CONTROLLERS[@]}"; do
        ours_kubeconfig "$CONTROLLER_ACCOUNT" '' "$LAB_DIR/ours/$name.kubeconfig"
    done
}

# controllers_port NAME: of its pages, on the fabric's loopback.
controllers_port() { echo $((9977 + ${1##*-})); }

# controllers_define FLAG…: both, with these flags after the lab's own.
controllers_define() {
    local name ipam=$mode families=()
    [[ $mode == crd ]] || ipam=delegated
    ! $dual_stack || families=(--enable-ipv6=true --enable-static-pod-ipv6=true)
    for name in "${CONTROLLERS[@]}"; do
        define "$name" fabric "$controller_bin" --kubeconfig "$LAB_DIR/ours/$name.kubeconfig" \
            --metrics-address "127.0.0.1:$(controllers_port "$name")" --leader-election-namespace "$CONTROLLER_NAMESPACE" \
            --block-namespace "$BLOCK_NAMESPACE" \
            --label-selector "$OURS_SELECTOR" --cilium-ipam "$ipam" --cluster-pool-ipv4-cidr "$CONTROLLER_CIDR" \
            "${families[@]}" "$@" run
    done
}

# controllers_page NAME PAGE
controllers_page() { enter fabric curl -sf --max-time 5 "http://127.0.0.1:$(controllers_port "$1")/$2"; }

controllers_lead() {
    local name
    for name in "${CONTROLLERS[@]}"; do
        ! controllers_page "$name" metrics | grep -qx 'leader_election_status 1' || return 0
    done
    return 1
}

# controllers_start: and wait until one leads and has listed everything.
controllers_start() {
    local name
    for name in "${CONTROLLERS[@]}"; do
        start_component "$name"
    done
    wait_for 60 "one of the controllers leading" controllers_lead || {
        show_log_end "${CONTROLLERS[0]}"
        return 1
    }
    for name in "${CONTROLLERS[@]}"; do
        wait_for_component 60 "$name" controllers_page "$name" readyz
    done
}

# controllers_up: LAB_CONTROLLER_FLAGS are parted at spaces.
controllers_up() {
    local flags=()
    controllers_are_there || return 0
    read -ra flags <<<"${LAB_CONTROLLER_FLAGS-}"
    controllers_credentials
    controllers_define "${flags[@]}"
    controllers_start
}

command_controllers() {
    help_for "controllers [FLAG…]   restart both controllers, with these flags after the lab's own, and wait until one leads" "${1-}"
    need_root
    need_lab
    controllers_are_there || die "this lab has no controllers; they come with: tests/lab/lab up, without --stock, in crd, delegated or chained"
    local name
    for name in "${CONTROLLERS[@]}"; do
        stop_component "$name"
    done
    controllers_define "$@"
    controllers_start
}
