# shellcheck shell=bash
# What people and tests look at: status, kubectl, a command in a place, logs. Nothing here changes the lab.

command_status() {
    help_for "status   what runs; exit 1 when a component does not" "$@"
    need_root status
    need_lab
    local file name pid state memory failed=0
    echo "mode $mode, routing $routing, dual stack $dual_stack, stock $stock, Cilium $cilium, Kubernetes $kubernetes, containerd $containerd"
    ! is_field || echo "profile field: kube-proxy $kube_proxy, masquerading by $masquerade, ranges of Nodes from the controller manager $node_cidrs"
    echo "folder $LAB_DIR"
    for file in "$LAB_DIR"/run/*.command; do
        name=${file##*/}
        name=${name%.command}
        if pid=$(component_pid "$name"); then
            state=$(awk '/^State:/ {print $2 == "T" ? "paused" : "running"}' "/proc/$pid/status")
            memory=$(awk '/^VmRSS:/ {print int($2 / 1024)}' "/proc/$pid/status")
            printf '%-24s %-8s pid %-8s %s MB\n' "$name" "$state" "$pid" "$memory"
        else
            printf '%-24s %s\n' "$name" "not running"
            failed=1
        fi
    done
    return "$failed"
}

command_kubectl() {
    help_for "kubectl ARGS…   kubectl as administrator, in the fabric" "${1-}"
    need_root kubectl
    need_lab
    kubectl_admin "$@"
}

command_on() {
    help_for "on NODE CMD…   a command on node-1, node-2, in the fabric or outside (there only the network is another)" "${1-}"
    need_root on
    need_lab
    [[ ${1-} == fabric || (${1-} == "$OUTSIDE" && $profile == field) ]] || need_node "${1-}"
    [[ $# -ge 2 ]] || bad_usage "what must run on $1? usage: tests/lab/lab on NODE CMD…"
    # What Cilium does for sockets, it does for those of the node's cgroup.
    if is_field && ! is_network "$1" && place_pid "$1" >/dev/null; then
        cgroup_join "$1" "$BASHPID"
    fi
    PATH=${containerd_bin:+$containerd_bin:}$cilium_bin:$kubernetes_bin:$cni_bin:$PATH enter "$@"
}

command_pod_exec() {
    help_for "pod-exec NS/POD CMD…   a command in a pod (sh, ip, ping, wget, nc are there)" "${1-}"
    need_root pod-exec
    need_lab
    [[ ${1-} == ?*/?* && $# -ge 2 ]] || bad_usage "usage: tests/lab/lab pod-exec NS/POD CMD…"
    local pod=$1
    shift
    kubectl_admin exec --namespace "${pod%%/*}" "${pod#*/}" -- "$@"
}

command_logs() {
    help_for "logs [COMPONENT[@NODE]]   its whole log; without one, the list and the lines that look like errors" "$@"
    need_root logs
    need_lab
    local log
    if [[ -n ${1-} ]]; then
        [[ -e $LAB_DIR/log/$1.log ]] || bad_usage "'$1' has no log; there are: $(cd "$LAB_DIR/log" && printf '%s ' *.log)"
        cat "$LAB_DIR/log/$1.log"
        return 0
    fi
    for log in "$LAB_DIR"/log/*.log; do
        echo "$log"
        log=${log##*/}
        show_log_end "${log%.log}" 2>&1
    done
}

command_save_logs() {
    help_for "save-logs FOLDER   all logs, and what the API server knows, into FOLDER" "$@"
    need_root save-logs
    need_lab
    [[ -n ${1-} ]] || bad_usage "usage: tests/lab/lab save-logs FOLDER"
    mkdir -p "$1"
    cp "$LAB_DIR"/log/*.log "$1/"
    local node file
    for node in "${NODES[@]}"; do
        for file in "$(node_folder "$node")/disk${OURS_LOG}"*; do
            [[ ! -e $file ]] || cp "$file" "$1/plugin@$node.${file##*.}.log"
        done
    done
    command_status >"$1/status.txt" 2>&1 || true
    local kind
    for kind in nodes pods services networkpolicies configmaps events ciliumnodes ciliumnodeconfigs ciliumendpoints stickyips addressclaims \
        ippools leases; do
        kubectl_admin get "$kind" -A -o yaml --request-timeout=5s >"$1/$kind.yaml" 2>&1 || true
    done
    kubectl_admin get pods -A -o wide --request-timeout=5s >"$1/pods.txt" 2>&1 || true
}

command_what_to_try() {
    help_for "what-to-try   a few commands for the lab that is up" "$@"
    need_lab
    cat <<TEXT

The lab is up ($mode, $routing). A few things to try, with lab=tests/lab/lab:

  \$lab kubectl get nodes,ciliumnodes -o wide
  \$lab kubectl run a --image=$POD_IMAGE --image-pull-policy=Never     a pod that answers on ports 8080 and 7007
  \$lab kubectl get pod a -o wide
  \$lab pod-exec default/a ip address
  \$lab on node-1 cilium-dbg status --brief                            anything on a node
  \$lab cut node-2, \$lab heal node-2                                   off the network, and back
  \$lab reboot node-1                                                  new boot id, same disk
  \$lab logs kubelet@node-1
  \$lab logs sticky-controller-1, \$lab kubectl get lease -n kube-system  the two controllers, and which of them leads
  make lab-down                                                       no trace left

docs/lab.md, "What to try", has a StatefulSet whose pod keeps its address.

TEXT
}
