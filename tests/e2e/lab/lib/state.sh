# shellcheck shell=bash
# The lab's folder, its settings, the lock of the machine, and the way it speaks. Nothing here starts a
# process.

LAB_DIR=${LAB_DIR:-${XDG_RUNTIME_DIR:-/tmp}/sticky-ipam-lab}
# The name that a lab has on its machine, of its lock and of its cgroups. Labs of two names have nothing in
# common and may be up at once.
LAB_LABEL=${LAB_LABEL:-sticky-ipam-lab}
# One file for all labs of that name: a lab's commands lock it, its content is the folder of the lab that is
# up.
MACHINE_FILE=/run/$LAB_LABEL
# Only a folder with this file in it is ever removed.
FOLDER_MARK=.sticky-ipam-lab
# A `down` waits this long for another command to end.
LOCK_SECONDS=180
NODES=(node-1 node-2)
TOOLS=$LAB_HOME/../../tools
lock_fd=

say() { echo "lab: $*" >&2; }
die() {
    say "$*"
    exit 1
}
bad_usage() {
    say "$*"
    exit 2
}

need_root() {
    [[ $EUID -eq 0 ]] || die "the lab makes namespaces and needs root; run: sudo --preserve-env tests/lab/lab $*"
}

# take_machine SECONDS: locks the machine for this command. 1 when another command has it for longer.
take_machine() {
    local deadline=$((SECONDS + $1))
    while :; do
        exec {lock_fd}>>"$MACHINE_FILE"
        if flock --timeout "$((deadline > SECONDS ? deadline - SECONDS : 0))" "$lock_fd"; then
            # `down` removes the file: a lock on the removed one protects nothing.
            if [[ $(stat -Lc %i "/proc/self/fd/$lock_fd") == "$(stat -c %i "$MACHINE_FILE" 2>/dev/null)" ]]; then
                return 0
            fi
        else
            exec {lock_fd}>&-
            return 1
        fi
        exec {lock_fd}>&-
    done
}

# call_of FOLDER: how the commands of the lab in that folder begin.
call_of() {
    [[ $LAB_LABEL == sticky-ipam-lab ]] || printf 'LAB_LABEL=%s ' "$LAB_LABEL"
    printf 'LAB_DIR=%s tests/lab/lab' "$1"
}

machine_owner() { cat "$MACHINE_FILE" 2>/dev/null || true; }

# need_lab: the commands that act on a lab say so when there is none.
need_lab() {
    local owner
    owner=$(machine_owner)
    if [[ -z $owner ]]; then
        die "no lab is up; run: tests/lab/lab up"
    elif [[ $owner != "$LAB_DIR" ]]; then
        die "the lab of this machine is in $owner, not in $LAB_DIR; run: $(call_of "$owner") …"
    fi
    load_settings
}

setting() { printf '%s=%q\n' "$1" "$2" >>"$LAB_DIR/settings"; }
# load_settings: mode, routing, versions and folders, as `up` wrote them.
load_settings() {
    if [[ -e $LAB_DIR/settings ]]; then
        # shellcheck source=/dev/null
        source "$LAB_DIR/settings"
    fi
    if [[ -e $LAB_DIR/more-nodes ]]; then
        mapfile -t -O "${#NODES[@]}" NODES < <(grep . "$LAB_DIR/more-nodes")
    fi
}

need_node() {
    local node
    for node in "${NODES[@]}"; do
        [[ $node == "${1-}" ]] && return 0
    done
    bad_usage "'${1-}' is no node; the nodes are: ${NODES[*]}"
}
# node_number NODE: the number that its addresses are made of.
node_number() { echo "${1#node-}"; }

# wait_for SECONDS WHAT COMMAND…: until COMMAND succeeds; false, with a message, when it does not in time.
wait_for() {
    local deadline=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        if ((SECONDS >= deadline)); then
            say "$what did not happen in time"
            return 1
        fi
        sleep 0.1
    done
}
