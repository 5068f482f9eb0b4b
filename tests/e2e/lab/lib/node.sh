# shellcheck shell=bash
# A node: its own network, mount, pid, host name, IPC and cgroup namespaces, held by the process with pid 1 in
# them. When that process dies, so does everything on the node. /var, /etc and /opt are the node's disk and
# outlive it; /run and /tmp do not.

node_folder() { echo "$LAB_DIR/$1"; }

# node_disk_make NODE: once a lab. /etc is a copy, for the tools that look into it; CNI's folders start empty.
node_disk_make() {
    local disk
    disk=$(node_folder "$1")/disk
    mkdir -p "$disk"/{etc,opt/cni/bin,var/{cache,lib/{cni,containerd,kubelet},log/{containers,pods},tmp}}
    # What this cannot read, no tool needs.
    cp -a /etc/. "$disk/etc/" 2>/dev/null || true
    rm -rf "$disk/etc/cni"
    mkdir -p "$disk/etc/cni/net.d"
    ln -s /run "$disk/var/run"
    ln -s /run/lock "$disk/var/lock"
}

# node_boot NODE: a fresh machine with the disk of before and a boot id of its own.
node_boot() {
    local node=$1 folder
    folder=$(node_folder "$node")
    cat /proc/sys/kernel/random/uuid >"$folder/boot_id"
    rm -f "$folder/booted"
    cgroup_make "$node"
    spawn "$node" "$node" unshare --net --mount --uts --ipc --pid --cgroup --fork --kill-child=KILL --propagation private \
        bash "$LAB_HOME/lib/node-init" "$node" "$folder" "$LAB_DIR" "$tools_cache"
    wait_for 60 "$node: its boot" ready_or_dead "$node" test -e "$folder/booted"
    ! died "$node" || return 1
    fabric_connect "$node"
}

# node_crash NODE: power off. The kernel ends every process of the pid namespace with its first one.
node_crash() {
    local node=$1 pid file
    if pid=$(place_pid "$node"); then
        kill -KILL "$pid"
    fi
    wait_for 30 "the end of $node" is_gone "$node"
    delay_remove "$node"
    for file in "$LAB_DIR"/run/*@"$node".pid; do
        [[ -e $file ]] || continue
        file=${file##*/}
        wait_for 30 "the end of ${file%.pid}" is_gone "${file%.pid}"
    done
    wait_for 30 "the end of the cgroups of $node" cgroup_remove "$node"
    # The kernel clears a namespace some time after its last process; the next boot must not meet its link.
    wait_for 30 "the end of the link of $node" node_unplug "$node"
}

# node_unplug NODE: no end of its link on the fabric.
node_unplug() {
    enter fabric ip link delete "$(node_link "$1")" 2>/dev/null || true
    ! enter fabric ip link show "$(node_link "$1")" 2>/dev/null
}

# node_cidr NODE: given by the controller manager, once that did; otherwise the lab's own.
node_cidr() { cat "$(node_folder "$1")/cidr" 2>/dev/null || echo "10.24$(node_number "$1").0.0/24"; }
# node_prefix NODE: what all addresses of the block begin with.
node_prefix() {
    local cidr
    cidr=$(node_cidr "$1")
    echo "${cidr%.0/24}"
}
node_cidr6() { echo "fd24:$(node_number "$1")::/96"; }

# json_list ITEM…
json_list() {
    local IFS=,
    printf '[%s]' "$(printf '"%s"\n' "$@" | paste -sd,)"
}

node_cidrs_json() {
    if $dual_stack; then
        json_list "$(node_cidr "$1")" "$(node_cidr6 "$1")"
    else
        json_list "$(node_cidr "$1")"
    fi
}

# node_register NODE: before kubelet does, because Cilium's `crd` mode takes the node's range from
# spec.podCIDR at its start. With
# `without_range` the Node names none, and Cilium makes one up. On the field profile it names what an
# operator's would: nothing in `cluster-pool`, unless the controller manager gives ranges, and then those.
node_register() {
    local node=$1 number addresses spec
    number=$(node_number "$node")
    spec="{\"podCIDR\": \"$(node_cidr "$node")\", \"podCIDRs\": $(node_cidrs_json "$node")}"
    if ${without_range:-false} || gives_node_cidrs || { is_field && [[ $mode == cluster-pool ]]; }; then
        spec={}
    fi
    addresses="{\"type\":\"InternalIP\",\"address\":\"172.30.0.1$number\"},{\"type\":\"Hostname\",\"address\":\"$node\"}"
    if $dual_stack; then
        addresses+=",{\"type\":\"InternalIP\",\"address\":\"fd30::1$number\"}"
    fi
    kubectl_admin create -f - >/dev/null <<JSON
{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "$node", "labels": {"kubernetes.io/hostname": "$node"}},
 "spec": $spec}
JSON
    kubectl_admin patch node "$node" --subresource=status --type=merge -p "{\"status\":{\"addresses\":[$addresses]}}" >/dev/null
    if gives_node_cidrs; then
        wait_for 60 "$node: a range of the controller manager" node_cidr_note "$node"
    fi
}

# node_cidr_note NODE: writes down which range the Node has.
node_cidr_note() {
    local cidr
    cidr=$(kubectl_admin get node "$1" -o 'jsonpath={.spec.podCIDR}')
    [[ -n $cidr ]] && echo "$cidr" >"$(node_folder "$1")/cidr"
}
