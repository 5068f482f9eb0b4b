#!/usr/bin/env bash
# Installs sticky-ipam on one node without Kubernetes. See --help.
set -euo pipefail

PROJECT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BIN_DIR=/opt/cni/bin
CONF_DIR=/etc/cni/net.d
# A release has the plugin beside this script, a build has it where `make plugin` leaves it.
PLUGIN=
CONFLIST=
DATA_DIR=
FORCE=false

usage() {
    cat <<USAGE
usage: install.sh install|upgrade|uninstall|status [OPTION…]

  install    puts the plugin into the folder of CNI plugins, then a conflist beside the others
  upgrade    replaces the plugin, also while it is in use; the conflist only with --conflist
  uninstall  removes the conflist, then the plugin, if they are as they were installed
  status     tells what is installed and whether it was changed; exit 1 when it is not there or not whole

  --bin-dir DIR      where CNI plugins are            (default $BIN_DIR)
  --conf-dir DIR     where the runtime's conflists are (default $CONF_DIR)
  --plugin FILE      the plugin to install            (default: beside this script, else what \`make plugin\` built)
  --conflist FILE    the conflist to install          (default conflist/10-ptp-cnitool.conflist)
  --data-dir DIR     where the store is               (default: dataDir of the conflist, else /var/lib/cni/networks)
  --force            replaces what is not ours or was changed (a conflist is kept as NAME.bak); uninstalls although
                     containers have addresses

What was installed is written down in CONF-DIR/.sticky-ipam.installed, a line of sha256sum for each file. A file that
is not in it is not ours. The store (who has which address) is never touched.
USAGE
}

say() { echo "install.sh: $*"; }
fail() {
    echo "install.sh: $*" >&2
    exit 1
}
misused() {
    echo "install.sh: $*; see install.sh --help" >&2
    exit 2
}

temporary=
trap '[[ -z $temporary ]] || rm -f "$temporary"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# put FROM TO MODE: TO is the old file or the new one at every instant, and a process that runs the old one keeps it.
put() {
    local from=$1 to=$2 mode=$3
    temporary=$(dirname "$to")/.sticky-ipam.new.$$
    cp "$from" "$temporary" || fail "cannot write into $(dirname "$to"); run this as root, or name a folder of yours"
    chmod "$mode" "$temporary"
    sync "$temporary"
    mv -fT "$temporary" "$to"
    temporary=
    sync "$(dirname "$to")"
}

hash_of() { sha256sum "$1" | cut -d ' ' -f 1; }
# The hash under which a file was installed; empty when it is not ours.
written_hash() { [[ ! -e $RECORD ]] || awk -v path="$1" 'substr($0, 67) == path {print $1}' "$RECORD"; }
is_ours() { [[ -n $(written_hash "$1") ]]; }
is_unchanged() { [[ -e $1 && $(hash_of "$1") == "$(written_hash "$1")" ]]; }

# write_down FILE…: replaces the record by these files, as they are.
write_down() {
    local list
    list=$(mktemp)
    # The record is of files with their full paths, so that sha256sum --check works from anywhere.
    sha256sum "$@" >"$list"
    put "$list" "$RECORD" 644
    rm -f "$list"
}

installed_conflist() { [[ ! -e $RECORD ]] || awk 'substr($0, 67) ~ /\.conflist$/ {print substr($0, 67)}' "$RECORD"; }

check_plugin() {
    local version
    if [[ -n $PLUGIN ]]; then
        [[ -f $PLUGIN ]] || fail "there is no plugin $PLUGIN; build one with 'make plugin', or name another with --plugin"
    else
        for PLUGIN in "$PROJECT/install/sticky-ipam" "${CARGO_TARGET_DIR:-$PROJECT/target}"/*/release/sticky-ipam; do
            [[ ! -f $PLUGIN ]] || break
        done
    fi
    [[ -f $PLUGIN ]] || fail "there is no plugin to install; build it with 'make plugin', or name it with --plugin"
    [[ -x $PLUGIN ]] || fail "$PLUGIN cannot be executed; chmod +x it, or name another with --plugin"
    version=$(env -u CNI_COMMAND "$PLUGIN" --version 2>/dev/null) || true
    [[ $version == "sticky-ipam "* ]] || fail "$PLUGIN does not run here, or is not sticky-ipam; name the right one with --plugin"
}

check_conflist() {
    [[ -f $CONFLIST ]] || fail "there is no conflist $CONFLIST; name one with --conflist"
    [[ $CONFLIST == *.conflist ]] || fail "$CONFLIST does not end with .conflist; runtimes would not read it"
    grep -q '"sticky-ipam"' "$CONFLIST" || fail "$CONFLIST does not use sticky-ipam; name another with --conflist"
}

# may_replace FILE NEW: whether FILE may become NEW.
may_replace() {
    local file=$1 new=$2
    [[ -e $file || -L $file ]] || return 0
    cmp -s "$file" "$new" && return 0
    $FORCE && return 0
    is_ours "$file" || fail "$file is there and not ours; nothing is changed. Move it away, or use --force"
    is_unchanged "$file" || fail "$file was changed since it was installed; nothing is changed. Use --force to replace it (a conflist is kept as .bak)"
}

put_conflist() {
    local from=$1 to=$2
    if [[ -e $to ]] && ! cmp -s "$from" "$to" && ! is_unchanged "$to"; then
        cp -p "$to" "$to.bak"
        say "kept the old $to as $to.bak"
    fi
    put "$from" "$to" 644
}

# remove_conflist FILE: what a person changed in it is kept.
remove_conflist() {
    local file=$1
    [[ -e $file ]] || return 0
    if is_unchanged "$file"; then
        rm -f "$file"
        say "removed $file"
    else
        mv -fT "$file" "$file.bak"
        say "removed $file, which was changed, and kept it as $file.bak"
    fi
}

name_other_conflists() {
    local other
    for other in "$CONF_DIR"/*; do
        case $other in
        *.conf | *.conflist | *.json)
            [[ $other == "$CONF" ]] || say "note: $other is there too; runtimes use the file that sorts first"
            ;;
        esac
    done
}

install_plugin() {
    if is_ours "$BIN"; then
        local old
        old=$(installed_conflist)
        [[ -z $old || $old == "$CONF" ]] || fail "$old is installed already; use upgrade --conflist, or uninstall first"
        cmp -s "$PLUGIN" "$BIN" || [[ ! -e $BIN ]] || $FORCE || fail "another plugin of ours is installed; use upgrade"
    fi
    may_replace "$BIN" "$PLUGIN"
    may_replace "$CONF" "$CONFLIST"
    mkdir -p "$BIN_DIR" "$CONF_DIR" || fail "cannot make $BIN_DIR and $CONF_DIR; run this as root"
    # The plugin first: a runtime must not see a conflist whose plugin is not there.
    cmp -s "$PLUGIN" "$BIN" || put "$PLUGIN" "$BIN" 755
    put_conflist "$CONFLIST" "$CONF"
    write_down "$BIN" "$CONF"
    say "installed $BIN and $CONF"
    name_other_conflists
}

upgrade() {
    local conf files
    is_ours "$BIN" || fail "nothing of ours is installed in $BIN_DIR; use install"
    may_replace "$BIN" "$PLUGIN"
    conf=$(installed_conflist)
    if [[ -n $CONFLIST ]]; then
        check_conflist
        CONF=$CONF_DIR/$(basename "$CONFLIST")
        may_replace "$CONF" "$CONFLIST"
        if [[ -n $conf && $conf != "$CONF" ]]; then
            [[ ! -e $conf ]] || is_unchanged "$conf" || $FORCE || fail "$conf was changed since it was installed; nothing is changed. Use --force to remove it (it is kept as .bak)"
        fi
    fi
    put "$PLUGIN" "$BIN" 755
    files=("$BIN")
    if [[ -n $CONFLIST ]]; then
        put_conflist "$CONFLIST" "$CONF"
        files+=("$CONF")
        if [[ -n $conf && $conf != "$CONF" ]]; then
            remove_conflist "$conf"
        fi
        write_down "${files[@]}"
        name_other_conflists
    else
        # The conflist's line stays as it was: whether it was changed since is still to be seen.
        local list
        list=$(mktemp)
        {
            sha256sum "$BIN"
            awk -v path="$BIN" 'substr($0, 67) != path' "$RECORD"
        } >"$list"
        put "$list" "$RECORD" 644
        rm -f "$list"
    fi
    say "upgraded $BIN to $("$BIN" --version)"
}

data_dir() {
    local conf=$1 dir=
    if [[ -z $DATA_DIR && -f $conf ]]; then
        dir=$(sed -n 's/.*"dataDir"[[:space:]]*:[[:space:]]*"\([^"]*\)".*/\1/p' "$conf" | head -n 1)
    fi
    echo "${DATA_DIR:-${dir:-/var/lib/cni/networks}}"
}

uninstall() {
    local conf data attached=0
    [[ -e $RECORD ]] || fail "nothing of ours is installed (there is no $RECORD)"
    conf=$(installed_conflist)
    data=$(data_dir "$conf")
    for file in "$conf" "$BIN"; do
        if [[ -n $file && -e $file ]] && ! is_unchanged "$file" && ! $FORCE; then
            fail "$file was changed since it was installed; nothing is removed. Use --force to remove it (a conflist is kept as .bak)"
        fi
    done
    if [[ -x $BIN && -d $data ]]; then
        attached=$("$BIN" store list --dir "$data" -o json | grep -c '"state": "attached"') || true
    fi
    if ((attached > 0)) && ! $FORCE; then
        fail "containers still have addresses ($attached), and their removal needs the plugin; remove those containers first, or use --force"
    fi
    [[ -z $conf ]] || remove_conflist "$conf"
    if is_ours "$BIN" && [[ -e $BIN ]]; then
        rm -f "$BIN"
        say "removed $BIN"
    fi
    rm -f "$RECORD"
    if [[ -d $data ]]; then
        say "kept the store in $data (remove it by hand if no other plugin uses it)"
    fi
}

status() {
    local conf file whole=true
    [[ -e $RECORD ]] || {
        say "not installed (there is no $RECORD)"
        return 1
    }
    conf=$(installed_conflist)
    for file in "$BIN" "$conf"; do
        [[ -n $file ]] || continue
        if [[ ! -e $file ]]; then
            say "$file is missing"
            whole=false
        elif is_unchanged "$file"; then
            say "$file is as it was installed"
        elif is_ours "$file"; then
            say "$file was changed since it was installed"
        else
            say "$file is not ours"
            whole=false
        fi
    done
    [[ ! -x $BIN ]] || say "version: $(env -u CNI_COMMAND "$BIN" --version)"
    say "store: $(data_dir "$conf")"
    $whole
}

action=
while (($# > 0)); do
    case $1 in
    -h | --help)
        usage
        exit 0
        ;;
    install | upgrade | uninstall | status)
        [[ -z $action ]] || misused "only one of install, upgrade, uninstall, status"
        action=$1
        ;;
    --force) FORCE=true ;;
    --bin-dir | --conf-dir | --plugin | --conflist | --data-dir)
        [[ -n ${2-} ]] || misused "$1 needs a value"
        name=${1#--}
        name=${name^^}
        declare "${name//-/_}=$2"
        shift
        ;;
    *) misused "'$1' is not understood" ;;
    esac
    shift
done
[[ -n $action ]] || misused "which of install, upgrade, uninstall, status?"
BIN_DIR=$(realpath -ms "$BIN_DIR")
CONF_DIR=$(realpath -ms "$CONF_DIR")
BIN=$BIN_DIR/sticky-ipam
RECORD=$CONF_DIR/.sticky-ipam.installed

case $action in
install)
    CONFLIST=${CONFLIST:-$PROJECT/conflist/10-ptp-cnitool.conflist}
    check_plugin
    check_conflist
    CONF=$CONF_DIR/$(basename "$CONFLIST")
    install_plugin
    ;;
upgrade)
    check_plugin
    upgrade
    ;;
uninstall) uninstall ;;
status) status ;;
esac
