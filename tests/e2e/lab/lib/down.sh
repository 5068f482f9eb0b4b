# shellcheck shell=bash
# `down`: everything that carries this lab's mark, then what it leaves: cgroups and files. Mounts and networks
# go with the processes,
# because none of them was ever made outside of the lab's own namespaces.

command_down() {
    help_for "down   remove every trace of the lab, also of one that half started or was killed" "$@"
    need_root down
    local owner
    owner=$(machine_owner)
    if [[ -n $owner && $owner != "$LAB_DIR" ]]; then
        die "the lab of this machine is in $owner; run: $(call_of "$owner") down"
    fi
    take_machine "$LOCK_SECONDS" || die "another lab command still runs after $LOCK_SECONDS s; interrupt it, then try again"
    down_everything
}

# down_everything: under the machine's lock.
down_everything() {
    local failed=false
    wait_for 60 "the end of the lab's processes" no_marked_processes || failed=true
    wait_for 30 "the end of the lab's cgroups" cgroup_remove || failed=true
    if [[ -e $LAB_DIR/$FOLDER_MARK ]]; then
        rm -rf --one-file-system "$LAB_DIR" || failed=true
    fi
    if $failed; then
        say "something of the lab is left (above); the lab stays registered, try again: tests/lab/lab down"
        return 1
    fi
    rm -f "$MACHINE_FILE"
}
