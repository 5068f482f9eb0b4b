# shellcheck shell=bash
# A slow link, without the kernel's help: a veth pair takes the place of the node's end on the bridge, and a
# process in the fabric (tests/tools/pod/slow-link) copies frames between the two, late. It is a component of
# the lab as long as the link is slow.
#
#   node's eth0 = to-NODE  <- slow-link ->  slow-NODE = via-NODE on the bridge

delay_component() { echo "delay-$1"; }
# The two ends of the pair: one on the bridge, one for the process.
delay_port() { echo "via-$1"; }
delay_end_of_process() { echo "slow-$1"; }

is_delayed() { enter fabric ip link show "$(delay_port "$1")" >/dev/null 2>&1; }

# delay_offloads NODE LINK off|on: a frame in a packet socket must be whole. With offloads the sender leaves
# checksums and the cutting into segments to a later interface, which here is none.
delay_offloads() { enter "$1" ethtool -K "$2" tx "$3" sg "$3" tso "$3" gso "$3" >/dev/null; }

# delay_links NODE: the pair, not on the bridge yet. Frames are for the other side, so the fabric itself must
# not answer on it.
delay_links() {
    local port end
    port=$(delay_port "$1") end=$(delay_end_of_process "$1")
    enter fabric ip link add "$port" type veth peer name "$end" &&
        enter fabric ip link set "$port" addrgenmode none up &&
        enter fabric ip link set "$end" addrgenmode none arp off up &&
        delay_offloads fabric "$port" off &&
        delay_offloads "$1" eth0 off
}

# delay_process NODE MILLISECONDS
delay_process() {
    local component log
    component=$(delay_component "$1")
    log=$LAB_DIR/log/$component.log
    : >"$log"
    define "$component" fabric "$pod_bin/slow-link" "$(node_link "$1")" "$(delay_end_of_process "$1")" "$2"
    start_component "$component"
    wait_for_component 30 "$component" grep -qx forwarding "$log"
}

# delay_start NODE MILLISECONDS: of a link that is not delayed.
delay_start() {
    local link
    link=$(node_link "$1")
    [[ -x $pod_bin/slow-link ]] || die "$pod_bin/slow-link is missing; run: tests/lab/lab down, then up, which builds it"
    is_on_bridge "$link" || die "$1 is cut off; run: tests/lab/lab heal $1"
    if ! delay_links "$1" || ! delay_process "$1" "$2"; then
        delay_remove "$1"
        die "the link of $1 could not be delayed (above); it is as it was before"
    fi
    enter fabric ip link set "$link" nomaster
    enter fabric ip link set "$(delay_port "$1")" master "$BRIDGE"
}

# delay_remove NODE: the node's end on the bridge again, unless it was cut off. Nothing to do is fine, and so
# is a node that is gone.
delay_remove() {
    local node=$1 link port component
    link=$(node_link "$node") port=$(delay_port "$node") component=$(delay_component "$node")
    if is_delayed "$node"; then
        if is_on_bridge "$port" && enter fabric ip link show "$link" >/dev/null 2>&1; then
            enter fabric ip link set "$port" nomaster
            # The link of a node that ends may go at any moment.
            enter fabric ip link set "$link" master "$BRIDGE" 2>/dev/null || ! enter fabric ip link show "$link" >/dev/null 2>&1
        fi
        if place_pid "$node" >/dev/null; then
            delay_offloads "$node" eth0 on
        fi
    fi
    kill_component "$component"
    if is_delayed "$node"; then
        enter fabric ip link delete "$port"
    fi
    rm -f "$LAB_DIR/run/$component".{command,pid}
}
