# shellcheck shell=bash
# A cgroup for each node, in every hierarchy of the machine (v1, v2 or both). A node's cgroup namespace has it
# as its root, so that nothing a node makes lies outside of it.

CGROUP_ROOT=/sys/fs/cgroup
CGROUP_NAME=$LAB_LABEL

# cgroup_hierarchies: the mount points; on v2 there is one.
cgroup_hierarchies() {
    local procs
    if [[ -e $CGROUP_ROOT/cgroup.controllers ]]; then
        echo "$CGROUP_ROOT"
        return 0
    fi
    for procs in "$CGROUP_ROOT"/*/cgroup.procs; do
        # Joint controllers have symbolic links beside them.
        [[ -L ${procs%/*} || ! -e $procs ]] || echo "${procs%/*}"
    done
}

cgroup_make() {
    local node=$1 hierarchy dir file
    while read -r hierarchy; do
        for dir in "$hierarchy/$CGROUP_NAME" "$hierarchy/$CGROUP_NAME/$node"; do
            mkdir -p "$dir"
            # An empty cpuset takes no process.
            for file in cpuset.cpus cpuset.mems; do
                if [[ -e $dir/$file && -e $hierarchy/cgroup.sane_behavior && -z $(<"$dir/$file") ]]; then
                    cat "${dir%/*}/$file" >"$dir/$file"
                fi
            done
            if [[ $hierarchy == "$CGROUP_ROOT" ]]; then
                sed 's/\(^\| \)/ +/g' "${dir%/*}/cgroup.controllers" >"${dir%/*}/cgroup.subtree_control" 2>/dev/null || true
            fi
        done
    done < <(cgroup_hierarchies)
}

# cgroup_join NODE PID. On v2 a group with children holds no processes once controllers are on, so a node's go
# to `init`.
cgroup_join() {
    local hierarchies hierarchy dir
    # In a variable: a process that feeds the loop could outlive it, and become a child of the program that
    # takes this shell's place.
    hierarchies=$(cgroup_hierarchies)
    while read -r hierarchy; do
        dir=$hierarchy/$CGROUP_NAME/$1
        [[ ! -d $dir/init ]] || dir=$dir/init
        echo "$2" >"$dir/cgroup.procs"
    done <<<"$hierarchies"
}

# cgroup_remove [NODE]: ends what is left in them and removes them.
cgroup_remove() {
    local hierarchy dir pids
    while read -r hierarchy; do
        dir=$hierarchy/$CGROUP_NAME${1:+/$1}
        [[ -d $dir ]] || continue
        pids=$(find "$dir" -name cgroup.procs -exec cat {} + 2>/dev/null) || true
        # shellcheck disable=SC2086
        [[ -z $pids ]] || kill -KILL $pids 2>/dev/null || true
        find "$dir" -depth -type d -exec rmdir {} + 2>/dev/null || true
        [[ ! -d $dir ]] || return 1
    done < <(cgroup_hierarchies)
}
