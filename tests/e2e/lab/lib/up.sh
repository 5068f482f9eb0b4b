# shellcheck shell=bash
# `up`. The process that the user started (the supervisor) holds the machine's lock and waits; a worker in a
# session of its own does everything. So a Ctrl-C reaches the supervisor alone, whatever the worker is doing,
# and a worker that fails because of it can never decide the exit status. If the supervisor is killed, the
# kernel kills the worker.

# Free space that images, logs and etcd need.
NEEDED_MEGABYTES=2000

up_usage() {
    cat <<'USAGE'
usage: tests/lab/lab up [OPTIONS]

  --mode crd|delegated|chained|cluster-pool|kubernetes   how Cilium gets addresses (default crd)
       crd           from CiliumNode pools, with sticky-ipam in front of cilium-cni
       delegated     cilium-cni calls sticky-ipam (host-local with --stock)
       chained       ptp with sticky-ipam (host-local with --stock), then cilium-cni
       cluster-pool  Cilium's own operator gives each node a block
       kubernetes    from the block that the Node names; no operator
  --routing vxlan|native        default vxlan; delegated and chained are native only
  --dual-stack                  IPv4 and IPv6 (crd and cluster-pool with vxlan; delegated, chained)
  --endpoint-routes             with vxlan too, a route for each pod on its node (native has them always): what addresses need
                                that are of no block, or of a node's further block
  --nodes 2|3|…|9               default 2
  --profile lean|field          default lean: as few parts of Cilium as the mode needs, for speed. field: Cilium with the settings and
                                roles of its own chart, its operator in every mode, and what stands beside it on a cluster:
    --kube-proxy iptables|nftables|none   default iptables; none: Cilium does its work
    --masquerade iptables|bpf             default iptables
    --node-cidrs on|off                   default on: the controller manager gives Nodes their ranges
  --stock                       Cilium alone, nothing of ours
  --cilium v1.19.5|v1.18.3      --kubernetes v1.36.3|v1.34.4
  --containerd debian|v2.4.2    default debian, which is 1.6

Builds missing tools first (tests/tools/build). Interrupted or failed, it removes what it made; logs of a failed start stay in
LAB_DIR-failed. Exit status: 0 up, 1 failed, 2 bad usage, 130 or 143 interrupted.
USAGE
}

up_parse() {
    local option node nodes=2
    mode=crd routing='' dual_stack=false endpoint_routes=false stock=false cilium=v1.19.5 kubernetes=v1.36.3 containerd=debian
    profile=lean kube_proxy='' masquerade='' node_cidrs=''
    while [[ $# -gt 0 ]]; do
        case $1 in
        --help | -h)
            up_usage
            exit 0
            ;;
        --dual-stack) dual_stack=true ;;
        --endpoint-routes) endpoint_routes=true ;;
        --stock) stock=true ;;
        --mode | --routing | --cilium | --kubernetes | --containerd | --nodes | --profile | --kube-proxy | --masquerade | --node-cidrs)
            [[ $# -ge 2 ]] || bad_usage "$1 needs a value; see: tests/lab/lab up --help"
            option=${1#--}
            printf -v "${option//-/_}" %s "$2"
            shift
            ;;
        *) bad_usage "'$1' is no option of up; see: tests/lab/lab up --help" ;;
        esac
        shift
    done
    case $mode in
    crd | cluster-pool | kubernetes) routing=${routing:-vxlan} ;;
    delegated | chained)
        routing=${routing:-native}
        [[ $routing == native ]] || bad_usage "$mode needs native routing: with a tunnel Cilium's agent does not start (delegated) or cannot reach a moved address (chained)"
        ;;
    *) bad_usage "'$mode' is no mode; there are: crd delegated chained cluster-pool kubernetes" ;;
    esac
    [[ $routing == vxlan || $routing == native ]] || bad_usage "'$routing' is no routing; there are: vxlan native"
    if $dual_stack && [[ $mode == kubernetes || $mode/$routing == crd/native || $mode/$routing == cluster-pool/native ]]; then
        bad_usage "--dual-stack is there for crd and cluster-pool with vxlan, for delegated and for chained"
    fi
    [[ $nodes =~ ^[2-$MOST_NODES]$ ]] || bad_usage "'$nodes' is no number of nodes; there can be 2 to $MOST_NODES"
    for ((node = 3; node <= nodes; node++)); do
        NODES+=("node-$node")
    done
    up_parse_profile
    [[ -d $TOOLS/cilium-${cilium#v} ]] || bad_usage "Cilium $cilium is not pinned; there are: v1.19.5 v1.18.3"
    [[ $containerd == debian || -d $TOOLS/containerd-${containerd#v} ]] || bad_usage "containerd $containerd is not pinned; there are: debian v2.4.2"
    [[ -d $TOOLS/kubernetes-${kubernetes#v} ]] || bad_usage "Kubernetes $kubernetes is not pinned; there are: v1.36.3 v1.34.4"
}

# up_parse_profile: what the field profile has beside the lean one.
up_parse_profile() {
    case $profile in
    lean)
        [[ -z $kube_proxy$masquerade$node_cidrs ]] || bad_usage "--kube-proxy, --masquerade and --node-cidrs are there with --profile field"
        return 0
        ;;
    field) ;;
    *) bad_usage "'$profile' is no profile; there are: lean field" ;;
    esac
    kube_proxy=${kube_proxy:-iptables} masquerade=${masquerade:-iptables} node_cidrs=${node_cidrs:-on}
    [[ $kube_proxy == iptables || $kube_proxy == nftables || $kube_proxy == none ]] || bad_usage "'$kube_proxy' is no way of kube-proxy; there are: iptables nftables none"
    [[ $masquerade == iptables || $masquerade == bpf ]] || bad_usage "'$masquerade' is no way to masquerade; there are: iptables bpf"
    [[ $node_cidrs == on || $node_cidrs == off ]] || bad_usage "--node-cidrs is on or off, not '$node_cidrs'"
    ! $dual_stack || bad_usage "--dual-stack is there on the lean profile"
    [[ -d $TOOLS/cilium-chart-${cilium#v} && -d $TOOLS/kube-proxy-${kubernetes#v} ]] || bad_usage "the field profile is there for Cilium v1.19.5 and Kubernetes v1.36.3"
}

# up_refuse_second: one lab a machine, never two mixed.
up_refuse_second() {
    local owner
    if [[ $(machine_owner) != "$LAB_DIR" && -n $(marked_processes) ]]; then
        die "$LAB_DIR holds a lab of another LAB_LABEL; set LAB_DIR to another folder, or remove that lab under its own label first"
    fi
    if ! take_machine 0; then
        die "another lab command is under way on this machine; wait for it, then try again"
    fi
    owner=$(machine_owner)
    if [[ -n $owner ]]; then
        say "a lab is up already, in $owner"
        die "use it, or remove it first: $(call_of "$owner") down"
    fi
    if [[ -e $LAB_DIR && ! -e $LAB_DIR/$FOLDER_MARK && -n $(ls -A "$LAB_DIR" 2>/dev/null) ]]; then
        die "$LAB_DIR exists and is not a lab's folder; set LAB_DIR to another one"
    fi
}

command_up() {
    up_parse "$@"
    need_root up "$@"
    # From here on no failure ends this process by itself: each path looks at `interrupted` before it decides.
    set +e
    (up_refuse_second) || exit 1
    take_machine 5 || exit 1
    ((interrupted == 0)) || exit "$interrupted"
    echo "$LAB_DIR" >"$MACHINE_FILE"
    say "starting: $mode, $routing, Cilium $cilium, Kubernetes $kubernetes, in $LAB_DIR"
    LAB_SUPERVISOR=$$ setsid setpriv --pdeathsig KILL env "$PROCESS_MARK=$LAB_DIR" "LAB_DIR=$LAB_DIR" \
        bash "$LAB_HOME/lab" worker "$@" </dev/null {lock_fd}>&- &
    worker=$!
    # A signal between the two lines above found no worker to end.
    ((interrupted == 0)) || note_interruption "$interrupted"
    wait "$worker"
    local status=$?
    # `wait` also returns for the signal itself.
    while ((status > 128)) && kill -0 "$worker" 2>/dev/null; do
        wait "$worker"
        status=$?
    done
    if ((interrupted == 0 && status == 0)); then
        exit 0
    fi
    # A second Ctrl-C must not leave half of it behind.
    trap '' INT TERM HUP
    if ((interrupted != 0)); then
        say "interrupted: removing what was started"
    else
        say "the start failed: removing it"
        rm -rf "$LAB_DIR-failed"
        # Nothing was started yet: nothing to keep.
        if [[ -n $(ls -A "$LAB_DIR/log" 2>/dev/null) ]] && cp -r "$LAB_DIR/log" "$LAB_DIR-failed" 2>/dev/null; then
            say "the logs of all components are in $LAB_DIR-failed"
        fi
    fi
    down_everything
    ((interrupted == 0)) || exit "$interrupted"
    exit 1
}

# up_check_machine: what is missing, and which command cures it.
up_check_machine() {
    local free program
    "$TOOLS/debian" --check e2e || exit 1
    for program in nsenter unshare setpriv ip jq openssl curl; do
        command -v "$program" >/dev/null || die "$program is missing; run: tests/tools/debian e2e"
    done
    grep -qw bpf /proc/filesystems || die "this kernel has no BPF file system (CONFIG_BPF_SYSCALL); Cilium cannot run here. Use another kernel"
    [[ -e /sys/kernel/btf/vmlinux ]] || die "this kernel has no BTF (CONFIG_DEBUG_INFO_BTF); Cilium cannot run here. Use another kernel"
    grep -qw overlay /proc/filesystems || modprobe overlay 2>/dev/null || die "this kernel has no overlayfs, which containerd needs; run: modprobe overlay"
    [[ -n $(cgroup_hierarchies) ]] || die "no cgroups are mounted on $CGROUP_ROOT; mount them: mount -t cgroup2 cgroup2 $CGROUP_ROOT"
    free=$(df --output=avail -m "$LAB_DIR" | tail -n 1)
    [[ $free -ge $NEEDED_MEGABYTES ]] || die "$LAB_DIR has $free MB left, the lab needs $NEEDED_MEGABYTES; free some, or set LAB_DIR to another disk"
}

# up_tool GROUP: the folder of its binaries, built if they are not there.
up_tool() { "$TOOLS/build" "$1" || die "the tools of $1 are not there"; }

up_tools() {
    cni_bin=$(up_tool cni)
    pod_bin=$(up_tool pod)
    kubernetes_bin=$(up_tool "kubernetes-${kubernetes#v}")
    cilium_bin=$(up_tool "cilium-${cilium#v}")
    [[ $containerd == debian ]] || containerd_bin=$(up_tool "containerd-${containerd#v}")
    if is_field; then
        helm_bin=$(up_tool helm)
        chart_bin=$(up_tool "cilium-chart-${cilium#v}")
        kube_proxy_bin=$(up_tool "kube-proxy-${kubernetes#v}")
    fi
    # One folder that holds them all, to be seen on the nodes too.
    tools_cache=$(dirname "$(dirname "$cni_bin")")
    cni_bin=$(realpath "$cni_bin")
}

# node_make NODE: booted and known to the API server, with nothing started yet.
node_make() {
    mkdir -p "$(node_folder "$1")"
    node_disk_make "$1"
    field_node_disk "$1"
    node_register "$1"
    cni_install "$1"
    node_boot "$1"
    ours_credentials "$1"
    cilium_define "$1"
    kube_proxy_define "$1"
    ours_define "$1"
    runtime_define "$1"
}

# node_start NODE: the components of a booted node, in the order in which they need each other.
node_start() {
    field_node_mounts "$1"
    kube_proxy_start "$1"
    start_component "cilium@$1"
    ours_up_node "$1"
    runtime_up "$1"
}

up_node_make() {
    node_make "$1"
    cilium_node "$1"
}

# beside COMMAND…: runs a part of the start while the rest goes on; all_done waits for every such part, and
# fails with the first.
beside() {
    ("$@") &
    parts+=("$!")
}
all_done() {
    local part
    for part in "${parts[@]}"; do
        wait "$part" || exit 1
    done
    parts=()
}

# command_worker: what `up` runs; not for people.
command_worker() {
    local node started=$SECONDS name parts=()
    [[ -n ${LAB_SUPERVISOR-} && $PPID == "$LAB_SUPERVISOR" ]] || die "'worker' is a part of 'up'; run: tests/lab/lab up"
    up_parse "$@"
    # A command that fails without a word of its own is named, wherever it is.
    set -E
    trap 'say "failed at ${BASH_SOURCE[0]##*/}:$LINENO: $BASH_COMMAND"' ERR
    rm -rf "$LAB_DIR"
    mkdir -p "$LAB_DIR"
    : >"$LAB_DIR/$FOLDER_MARK"
    mkdir "$LAB_DIR"/{run,log}
    up_check_machine
    plugin_bin='' agent_bin='' controller_bin='' containerd_bin='' helm_bin='' chart_bin='' kube_proxy_bin=''
    ours_binaries
    controllers_binary
    up_tools
    for name in mode routing dual_stack endpoint_routes stock cilium kubernetes containerd profile kube_proxy masquerade node_cidrs \
        cni_bin pod_bin kubernetes_bin cilium_bin containerd_bin helm_bin chart_bin kube_proxy_bin tools_cache plugin_bin agent_bin controller_bin; do
        setting "$name" "${!name}"
    done
    [[ ${#NODES[@]} -eq 2 ]] || grow_note

    say "control plane"
    pki_make
    fabric_up
    outside_up
    # Much of a start is waiting for one program: what does not need it goes on beside it.
    beside cilium_prepare
    beside images_make
    control_up
    say "Cilium's CRDs, images, nodes"
    cilium_crds
    field_objects
    ours_objects
    controllers_objects
    all_done
    managers_up
    for node in "${NODES[@]}"; do
        beside up_node_make "$node"
    done
    all_done
    if is_field || [[ $mode == cluster-pool ]]; then
        operator_define
        start_component operator
    fi
    say "Cilium, containerd and kubelet on the nodes"
    for node in "${NODES[@]}"; do
        beside node_start "$node"
    done
    controllers_up
    all_done
    for node in "${NODES[@]}"; do
        wait_for_component 180 "cilium@$node" cilium_healthy "$node"
        wait_for 120 "$node: ready" node_is_ready "$node" || {
            show_log_end "kubelet@$node"
            exit 1
        }
    done
    wait_for 60 "the service account of the namespace default" kubectl_admin get serviceaccount default || {
        show_log_end controller-manager
        exit 1
    }
    say "up after $((SECONDS - started)) s"
}

node_is_ready() { [[ $(kubectl_admin get node "$1" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}') == True ]]; }
