# shellcheck shell=bash
# The lab's processes: how they are defined, started, found and signalled. Each is recorded by pid and start
# time, and each carries PROCESS_MARK with the lab's folder in its environment, so that `down` finds it even
# when it was never recorded.

PROCESS_MARK=STICKY_IPAM_LAB_PROCESS
# A component that ignores SIGTERM is killed after this.
STOP_SECONDS=10
# One that was killed may wait for the disk of a busy machine before it is gone.
DEATH_SECONDS=60

# start_time PID: the kernel's start time, which tells a process from a later one with the same pid.
start_time() {
    local line
    read -r line <"/proc/$1/stat" || return 1
    # The name in parentheses may hold spaces: count from behind it.
    # shellcheck disable=SC2086
    set -- ${line##*) }
    # A zombie is dead.
    [[ $1 != Z ]] || return 1
    echo "${20}"
} 2>/dev/null

record() { echo "$2 $(start_time "$2" || echo gone)" >"$LAB_DIR/run/$1.pid"; }

# recorded_pid NAME: the pid that was started under this name, while it lives.
recorded_pid() {
    local pid started
    read -r pid started 2>/dev/null <"$LAB_DIR/run/$1.pid" || return 1
    [[ $(start_time "$pid") == "$started" ]] || return 1
    echo "$pid"
}

# inner_pid PID: on a node the recorded process is nsenter or unshare, which waits for the one in the node's
# pid namespace. Before it is,
# it is a shell with children of its own, and one of those may stay its child for ever: a zombie.
inner_pid() {
    local children child namespace name
    read -r name 2>/dev/null <"/proc/$1/comm" || return 1
    [[ $name == nsenter || $name == unshare ]] || return 1
    read -r -a children 2>/dev/null <"/proc/$1/task/$1/children" || true
    for child in "${children[@]}"; do
        namespace=$(readlink "/proc/$child/ns/pid" 2>/dev/null) || continue
        if [[ $namespace != "$(readlink /proc/self/ns/pid)" ]]; then
            echo "$child"
            return 0
        fi
    done
    return 1
}

# is_network PLACE: the fabric and the host outside have only a network of their own.
is_network() { [[ $1 == fabric || $1 == outside ]]; }

# place_pid PLACE: the process that holds the namespaces of `fabric`, of `outside` or of a node.
place_pid() {
    local pid
    pid=$(recorded_pid "$1") || return 1
    if is_network "$1"; then
        echo "$pid"
    else
        inner_pid "$pid"
    fi
}

# component_pid NAME: the component itself.
component_pid() {
    local pid
    pid=$(recorded_pid "$1") || return 1
    if [[ $1 == *@* ]]; then
        inner_pid "$pid"
    else
        echo "$pid"
    fi
}

# enter PLACE COMMAND…: runs COMMAND in the namespaces of a place.
enter() {
    local place=$1 pid
    shift
    pid=$(place_pid "$place") || {
        say "$place is not running; run: tests/lab/lab reboot $place, or up"
        return 1
    }
    if is_network "$place"; then
        nsenter --target "$pid" --net "$@"
    else
        nsenter --target "$pid" --mount --net --uts --ipc --pid --cgroup --wd=/ "$@"
    fi
}

# spawn NAME PLACE COMMAND…: starts COMMAND in a session of its own, in the cgroup of PLACE, and records it.
spawn() {
    local name=$1 place=$2 go_memory=() variable
    shift 2
    # How Go's programs treat memory is the caller's to say; nothing else of the environment comes along.
    for variable in GOGC GOMEMLIMIT; do
        [[ -z ${!variable-} ]] || go_memory+=("$variable=${!variable}")
    done
    (
        cd /
        [[ -z $lock_fd ]] || exec {lock_fd}>&-
        if ! is_network "$place"; then
            cgroup_join "$place" "$BASHPID"
        fi
        exec setsid env -i "PATH=$PATH" HOME=/root LANG=C.UTF-8 "$PROCESS_MARK=$LAB_DIR" "${go_memory[@]}" "$@"
    ) </dev/null >>"$LAB_DIR/log/$name.log" 2>&1 &
    record "$name" $!
}

# define NAME PLACE COMMAND…: how a component is started, now and by `lab start`.
define() {
    local name=$1 place=$2
    shift 2
    {
        printf 'component_place=%q\n' "$place"
        printf 'component_command=('
        printf ' %q' "$@"
        printf ' )\n'
    } >"$LAB_DIR/run/$name.command"
}

start_component() {
    local name=$1 component_place component_command pid
    if recorded_pid "$name" >/dev/null; then
        return 0
    fi
    # shellcheck source=/dev/null
    source "$LAB_DIR/run/$name.command"
    pid=$(place_pid "$component_place") || die "$component_place is not running, $name cannot start; run: tests/lab/lab reboot $component_place"
    local namespaces=(--net)
    is_network "$component_place" || namespaces+=(--mount --uts --ipc --pid --cgroup --wd=/)
    spawn "$name" "$component_place" nsenter --target "$pid" "${namespaces[@]}" "${component_command[@]}"
}

# is_settled NAME: it is gone, or the component itself is there. In between, nsenter has not started it yet,
# and a signal would be lost.
is_settled() { is_gone "$1" || component_pid "$1"; }

# signal_component SIGNAL NAME
signal_component() {
    local pid
    wait_for "$STOP_SECONDS" "the start of $2" is_settled "$2" || return 1
    pid=$(component_pid "$2") || return 1
    kill "-$1" "$pid"
}

# stands_still NAME: every thread is paused. STOP is taken by one of them, and the others go on until then.
stands_still() {
    local pid moving
    pid=$(component_pid "$1") || return 1
    moving=$(grep -L '^State:[[:space:]]*T' "/proc/$pid/task/"*/status 2>/dev/null || true)
    [[ -z $moving ]]
}

is_gone() { ! recorded_pid "$1" >/dev/null; }

stop_component() {
    local name=$1
    signal_component CONT "$name" 2>/dev/null || true
    signal_component TERM "$name" 2>/dev/null || return 0
    wait_for "$STOP_SECONDS" "the end of $name" is_gone "$name" || kill_component "$name"
}

# is_dead NAME: the signal is repeated while it is not. A paused nsenter must wake to see that its child is
# gone, and it may pause itself late.
is_dead() {
    local pid
    is_gone "$1" && return 0
    pid=$(component_pid "$1") && kill -KILL "$pid" 2>/dev/null
    pid=$(recorded_pid "$1") && kill -CONT "$pid" 2>/dev/null
    return 1
}

kill_component() {
    signal_component KILL "$1" 2>/dev/null || return 0
    wait_for "$DEATH_SECONDS" "the death of $1" is_dead "$1"
}

# died NAME: says so, with the end of its log; a wait for a component must not outlive it.
died() {
    if is_gone "$1"; then
        say "$1 has ended; the last lines of its log that matter:"
        show_log_end "$1"
        return 0
    fi
    return 1
}

# show_log_end NAME: errors first; without any, simply the end.
show_log_end() {
    local log=$LAB_DIR/log/$1.log lines
    [[ -s $log ]] || return 0
    lines=$(grep -iE 'fatal|panic|error|fail|cannot|denied|refused|^E[0-9]{4}' "$log" | tail -n 8) || true
    [[ -n $lines ]] || lines=$(tail -n 8 "$log")
    cut -c1-400 <<<"$lines" | sed "s/^/    /" >&2
}

# marked_processes: every process of this lab, recorded or not.
marked_processes() {
    local file
    { grep -lzsxF "$PROCESS_MARK=$LAB_DIR" /proc/[0-9]*/environ || true; } | while IFS=/ read -r _ _ file _; do
        [[ $file == "$$" || $file == "$BASHPID" ]] || echo "$file"
    done
}

no_marked_processes() {
    local pids
    pids=$(marked_processes)
    [[ -n $pids ]] || return 0
    # shellcheck disable=SC2086
    kill -KILL $pids 2>/dev/null || true
    return 1
}
