# shellcheck shell=bash
# The levers: what can go wrong with a component, a node, a link, a disk. Each acts at once and says what it
# did only when it fails.

FILL_BALLAST=.full
# Not all of /var/lib/cni: the runtime keeps results of its own beside it.
PLUGIN_STORE=/var/lib/cni/networks

# need_component NAME: a component of this lab, on a node by NAME@NODE.
need_component() {
    local name=${1-} known
    [[ -n $name && -e $LAB_DIR/run/$name.command ]] && return 0
    known=$(cd "$LAB_DIR/run" && printf '%s\n' *.command | sed 's/\.command$//' | paste -sd' ')
    bad_usage "'$name' is no component of this lab; there are: $known"
}

# with_component USAGE ARGS…
with_component() {
    local text=$1
    shift
    help_for "$text" "$@"
    need_root
    need_lab
    need_component "${1-}"
}

command_stop() {
    with_component "stop COMPONENT[@NODE]   ask it to end (SIGTERM), kill it after $STOP_SECONDS s" "$@"
    stop_component "$1"
}
command_kill() {
    with_component "kill COMPONENT[@NODE]   kill -9" "$@"
    recorded_pid "$1" >/dev/null || die "$1 is not running"
    kill_component "$1"
}
command_pause() {
    with_component "pause COMPONENT[@NODE]   SIGSTOP: it keeps its connections and locks and answers nothing; 'resume' ends it" "$@"
    signal_component STOP "$1" || die "$1 is not running"
    wait_for "$STOP_SECONDS" "the standstill of $1" stands_still "$1"
}
command_resume() {
    with_component "resume COMPONENT[@NODE]   end a pause" "$@"
    signal_component CONT "$1" || die "$1 is not running"
    kill -CONT "$(recorded_pid "$1")"
}
command_start() {
    with_component "start COMPONENT[@NODE]   start it again as 'up' did" "$@"
    start_component "$1"
}

command_crash() {
    help_for "crash NODE   power off: all processes, namespaces and memory of the node are gone, its disk stays" "$@"
    need_root
    need_lab
    need_node "${1-}"
    node_crash "$1"
}

command_reboot() {
    help_for "reboot NODE   crash it (if it runs) and boot it again with the same disk and a new boot id" "$@"
    need_root
    need_lab
    need_node "${1-}"
    node_crash "$1"
    node_boot "$1"
    node_start "$1"
    wait_for_component 120 "cilium@$1" cilium_healthy "$1"
}

command_set_ipam() {
    help_for "set-ipam NODE MODE   restart Cilium's agent on a node with --ipam=MODE (crd, cluster-pool, kubernetes), and wait until it is healthy" "$@"
    need_root
    need_lab
    need_node "${1-}"
    ! is_field || bad_usage "on the field profile the mode is a setting: tests/lab/lab cilium-values ipam.mode=${2:-MODE} …, or a CiliumNodeConfig, then restart-cilium ${1}"
    case ${2-} in
    crd | cluster-pool | kubernetes) ;;
    *) bad_usage "set-ipam takes a node and a mode: crd, cluster-pool or kubernetes" ;;
    esac
    local range
    range=$(cilium_own_range "$1")
    sed -i "s/--ipam=[a-z-]*/--ipam=$2/; s/ --ipv4-range=[0-9.]*[^ ]*//" "$LAB_DIR/run/cilium@$1.command"
    [[ -z $range ]] || sed -i "s|--ipam=$2|& --ipv4-range=$range|" "$LAB_DIR/run/cilium@$1.command"
    command_restart_cilium "$1"
}

command_cut() {
    help_for "cut NODE   off the network, silently; 'heal' puts it back" "$@"
    need_root
    need_lab
    need_node "${1-}"
    fabric_cut "$1"
}
command_heal() {
    help_for "heal NODE   on the network again: ends cut, drop and delay" "$@"
    need_root
    need_lab
    need_node "${1-}"
    fabric_heal "$1"
}

need_number() {
    [[ ${1-} =~ ^[0-9]+$ && $1 -le $2 ]] || bad_usage "'${1-}' is no number from 0 to $2"
}

command_drop() {
    help_for "drop NODE PERCENT   lose this share of the packets, both ways; 0 ends it" "$@"
    need_root
    need_lab
    need_node "${1-}"
    need_number "${2-}" 100
    fabric_drop "$1" "$2"
}
command_delay() {
    help_for "delay NODE MILLISECONDS   each packet to the node and each from it comes so much later; 0 ends it, and so does a crash" "$@"
    need_root
    need_lab
    need_node "${1-}"
    need_number "${2-}" 60000
    enter "$1" true
    delay_remove "$1"
    [[ $2 -eq 0 ]] || delay_start "$1" "$2"
}

command_fill_disk() {
    help_for "fill-disk NODE [--undo]   the plugin's store ($PLUGIN_STORE) moves to a small full file system, and back" "$@"
    need_root
    need_lab
    need_node "${1-}"
    case ${2-} in
    '')
        enter "$1" bash -euc "
            ! mountpoint -q $PLUGIN_STORE || { echo 'lab: the disk of $1 is full already' >&2; exit 1; }
            mkdir -p /run/small $PLUGIN_STORE
            mount -t tmpfs -o size=1m tmpfs /run/small
            cp -a $PLUGIN_STORE/. /run/small/
            mount --bind /run/small $PLUGIN_STORE
            dd if=/dev/zero of=$PLUGIN_STORE/$FILL_BALLAST bs=4k 2>/dev/null || true"
        ;;
    --undo)
        enter "$1" bash -euc "
            mountpoint -q $PLUGIN_STORE || { echo 'lab: the disk of $1 is not full' >&2; exit 1; }
            rm -f $PLUGIN_STORE/$FILL_BALLAST
            umount --lazy $PLUGIN_STORE
            find $PLUGIN_STORE -mindepth 1 -delete
            cp -a /run/small/. $PLUGIN_STORE/
            umount --lazy /run/small"
        ;;
    *) bad_usage "'$2' is no option of fill-disk; there is: --undo" ;;
    esac
}
