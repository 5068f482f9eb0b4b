#!/usr/bin/env bash
# Keeps the processes of one API tier and its folder.
#
# Usage: keeper.sh FOLDER, with one order per line on standard input and one answer per line on standard
# output:
#   start NAME          runs the words of FOLDER/NAME.argv (NUL-separated), logs to FOLDER/logs/NAME.log;
#                       answers its pid
#   running NAME        answers yes or no
#   signal SIGNAL NAME  answers ok or gone; after STOP not before every thread stands still
#   stop NAME           kills and waits; answers ok
#
# The end of standard input is the end of the test process, however it came: everything is killed and the
# folder removed. Should the keeper itself be killed, its children go with it (pdeathsig); the folder is swept
# by the next start.
set -euo pipefail

folder=$1
declare -A pids=()

# Held by the keeper and whatever it starts: no other process sweeps the folder of a live server.
exec 9<"$folder/lock"
flock --shared 9

# A paused process is there too. No pipe: a reader that leaves early would make it a matter of luck.
running() {
    local pid=${pids[$1]:-} there
    [[ -n $pid ]] || return 1
    there=$(
        jobs -pr
        jobs -ps
    )
    [[ $'\n'$there$'\n' == *$'\n'$pid$'\n'* ]]
}

# STOP is taken by one thread, when the scheduler gets to it, and the others answer until then.
stands_still() {
    local moving
    while running "$1"; do
        # A thread that ended meanwhile is no mistake.
        moving=$(grep -L '^State:[[:space:]]*T' "/proc/${pids[$1]}/task/"*/status 2>/dev/null || true)
        [[ -n $moving ]] || return 0
        sleep 0.01
    done
    return 1
}

stop() {
    if running "$1"; then
        kill -KILL "${pids[$1]}" 2>/dev/null || true
    fi
    if [[ -n ${pids[$1]:-} ]]; then
        wait "${pids[$1]}" 2>/dev/null || true
        rm -f -- "$folder/$1.pid"
        unset "pids[$1]"
    fi
}

# Not set as a trap in the children: a child that fails before its exec must not take the folder away.
leave() {
    trap - EXIT
    local name
    for name in "${!pids[@]}"; do
        stop "$name"
    done
    cd /
    rm -rf -- "$folder"
}
trap leave EXIT
# A reader that is gone is the end of the test process too.
trap 'exit 0' PIPE
# The end of input alone ends the keeper. The kernel sends HUP to a group that lost its parent while a member
# is paused,
# which would otherwise end the keeper in the middle of clearing up.
trap '' HUP INT TERM

cd "$folder"
echo ready
while read -r order a b; do
    case $order in
    start)
        mapfile -d '' -t argv <"$a.argv"
        # Sockets and files that the process makes belong to its user alone.
        (
            trap - EXIT PIPE HUP INT TERM
            umask 077
            exec setpriv --pdeathsig KILL -- "${argv[@]}"
        ) </dev/null >>"logs/$a.log" 2>&1 &
        pids[$a]=$!
        echo "$!" >"$a.pid"
        echo "$!"
        ;;
    running) if running "$a"; then echo yes; else echo no; fi ;;
    signal)
        if running "$b" && kill -s "$a" "${pids[$b]}" && { [[ $a != STOP ]] || stands_still "$b"; }; then
            echo ok
        else
            echo gone
        fi
        ;;
    stop)
        stop "$a"
        echo ok
        ;;
    *) echo "unknown order: $order" ;;
    esac
done
