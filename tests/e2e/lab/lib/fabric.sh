# shellcheck shell=bash
# The network between the nodes: a bridge in a namespace that a sleeping process holds. The control plane
# lives there too.
# The machine's own network is never touched: links are made inside the fabric and moved into nodes.

BRIDGE=br0
# Fixed: else it would change with the bridge's ports, and nodes would send to the old one for a while.
BRIDGE_MAC=02:00:ac:1e:00:01

fabric_up() {
    spawn fabric fabric unshare --net sleep infinity
    # Until unshare has run, the namespace is the machine's.
    wait_for 30 "the network namespace of the fabric" has_own_network fabric || exit 1
    enter fabric ip link set lo up
    enter fabric ip link add "$BRIDGE" address "$BRIDGE_MAC" type bridge
    enter fabric ip address add "$API_ADDRESS/24" dev "$BRIDGE"
    if $dual_stack; then
        enter fabric ip address add fd30::1/64 dev "$BRIDGE" nodad
    fi
    enter fabric ip link set "$BRIDGE" up
}

has_own_network() {
    local pid
    pid=$(place_pid "$1") && [[ $(readlink "/proc/$pid/ns/net") != "$(readlink /proc/self/ns/net)" ]]
}

# node_link NODE: its end on the bridge.
node_link() { echo "to-$1"; }

# fabric_connect NODE: eth0 of the node, on the bridge.
fabric_connect() {
    local node=$1 number pid link
    number=$(node_number "$node")
    pid=$(place_pid "$node")
    link=$(node_link "$node")
    # A machine has the same address after a reboot; with another, its neighbours would send to the old one
    # for a while.
    enter fabric ip link add "$link" type veth peer name eth0 address "02:00:ac:1e:00:1$number" netns "$pid"
    # Off the bridge, when the node is cut off or delayed, the fabric itself must not answer on it.
    enter fabric ip link set "$link" arp off
    enter fabric ip link set "$link" master "$BRIDGE"
    enter fabric ip link set "$link" up
    enter "$node" bash -euc "
        ip link set lo up
        ip address add 172.30.0.1$number/24 dev eth0
        ip link set eth0 up
        ip route add default via $API_ADDRESS
        sysctl -qw net.ipv4.ip_forward=1
        if $dual_stack; then
            sysctl -qw net.ipv6.conf.all.forwarding=1
            ip address add fd30::1$number/64 dev eth0 nodad
            ip route add default via fd30::1
        fi"
}

# node_port NODE: what stands for the node on the bridge.
node_port() {
    if is_delayed "$1"; then
        delay_port "$1"
    else
        node_link "$1"
    fi
}
is_on_bridge() { [[ $(enter fabric ip -oneline link show "$1" 2>/dev/null) == *" master $BRIDGE "* ]]; }

fabric_cut() { enter fabric ip link set "$(node_port "$1")" nomaster; }
# fabric_heal NODE: whatever was done to the link.
fabric_heal() {
    fabric_drop "$1" 0
    delay_remove "$1"
    enter fabric ip link set "$(node_link "$1")" master "$BRIDGE"
}

# fabric_drop NODE PERCENT: in the bridge, both ways, so that the node and Cilium's programs know nothing of
# it.
fabric_drop() {
    local table=drop-$1 links
    # Either may be on the bridge, now or later.
    links="{ $(node_link "$1"), $(delay_port "$1") }"
    enter fabric nft delete table bridge "$table" 2>/dev/null || true
    [[ $2 -gt 0 ]] || return 0
    enter fabric nft -f - <<RULES
table bridge $table {
    chain from { type filter hook prerouting priority 0; iifname $links numgen random mod 100 <= $(($2 - 1)) drop; }
    chain to { type filter hook postrouting priority 0; oifname $links numgen random mod 100 <= $(($2 - 1)) drop; }
}
RULES
}
