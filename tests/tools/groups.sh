# shellcheck shell=bash
# What is built from which pinned module, and where it goes. Sourced by `build` and `path`; it must never
# build or write anything.

TOOLS_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TOOLS_CACHE=${XDG_CACHE_HOME:-${HOME:?is not set; set XDG_CACHE_HOME to a folder of yours}/.cache}/sticky-ipam/tools
# In the order in which someone is likely to wait for them.
DEFAULT_GROUPS=(cni pod kubernetes-1.36.3 cilium-1.19.5 whereabouts cni-suites helm kube-proxy-1.36.3 cilium-chart-1.19.5 containerd-2.4.2)
ALL_GROUPS=("${DEFAULT_GROUPS[@]}" kubernetes-1.34.4 cilium-1.18.3 cargo-deny-0.20.2)
# No C library and no paths of this machine in a binary; no symbols, they would double the size.
GO_BUILD_FLAGS=(-trimpath -buildvcs=false -mod=readonly)

# group_name NAME: the full name of a group; `kubernetes` and `cilium` alone mean the default version.
group_name() {
    local group
    for group in "${ALL_GROUPS[@]}"; do
        if [[ $group == "$1" || ${group%-[0-9]*} == "$1" ]]; then
            echo "$group"
            return 0
        fi
    done
    echo "there is no group of tools '$1'; there are: ${ALL_GROUPS[*]} (kubernetes and cilium alone mean the default version)" >&2
    return 2
}

# group_recipe GROUP: one line per binary: its name, its package, then the flags of its own, or `tests` for
# the program of the package's tests.
group_recipe() {
    local group=$1 version=${1##*-} name
    case $group in
    cni)
        echo "cnitool github.com/containernetworking/cni/cnitool"
        echo "host-local github.com/containernetworking/plugins/plugins/ipam/host-local"
        for name in bridge loopback ptp; do
            echo "$name github.com/containernetworking/plugins/plugins/main/$name"
        done
        echo "portmap github.com/containernetworking/plugins/plugins/meta/portmap"
        ;;
    cni-suites)
        for name in bridge ptp; do
            echo "$name.test github.com/containernetworking/plugins/plugins/main/$name tests"
        done
        ;;
    pod)
        echo "pod ."
        echo "slow-link ./slow-link"
        ;;
    containerd-*)
        for name in containerd containerd-shim-runc-v2 ctr; do
            echo "$name github.com/containerd/containerd/v2/cmd/$name -tags=no_btrfs,no_devmapper,no_zfs"
        done
        ;;
    helm) echo "helm helm.sh/helm/v4/cmd/helm" ;;
    kube-proxy-*)
        echo "kube-proxy k8s.io/kubernetes/cmd/kube-proxy -X=k8s.io/component-base/version.gitVersion=v$version"
        ;;
    kubernetes-*)
        for name in kube-apiserver kubectl kube-controller-manager kube-scheduler kubelet; do
            echo "$name k8s.io/kubernetes/cmd/$name -X=k8s.io/component-base/version.gitVersion=v$version"
        done
        ;;
    cilium-chart-*)
        echo "cilium-health-responder github.com/cilium/cilium/cilium-health/responder"
        ;;
    cilium-*)
        echo "cilium-cni github.com/cilium/cilium/plugins/cilium-cni"
        echo "cilium-agent github.com/cilium/cilium/daemon"
        echo "cilium-dbg github.com/cilium/cilium/cilium-dbg"
        echo "cilium-operator-generic github.com/cilium/cilium/operator -tags=ipam_provider_operator"
        ;;
    whereabouts)
        echo "whereabouts github.com/k8snetworkplumbingwg/whereabouts/cmd"
        ;;
    esac
}

# group_files GROUP: one line for each folder kept beside the binaries: its name, the module, the path in the
# module.
group_files() {
    case $1 in
    cilium-chart-*) echo "chart github.com/cilium/cilium install/kubernetes/cilium" ;;
    cilium-*)
        echo "bpf github.com/cilium/cilium bpf"
        echo "crds github.com/cilium/cilium pkg/k8s/apis/cilium.io/client/crds"
        ;;
    whereabouts) echo "crds github.com/k8snetworkplumbingwg/whereabouts doc/crds" ;;
    esac
}

# group_crate GROUP: the crate and version of a group that is built from crates.io; nothing for the groups of
# Go modules.
group_crate() {
    case $1 in
    cargo-deny-*) echo "cargo-deny ${1##*-}" ;;
    esac
}

# group_dir GROUP: the folder of this exact group: it changes with the module files, the packages and the
# flags.
group_dir() {
    local group=$1 hash
    hash=$({
        # go.sum, and source of our own, only where a group has them. A crate has its version in the group's
        # name.
        [[ ! -d $TOOLS_DIR/$group ]] || find "$TOOLS_DIR/$group" -type f \( -name 'go.*' -o -name '*.go' \) -print0 | LC_ALL=C sort -z | xargs -0 cat
        echo "${GO_BUILD_FLAGS[*]}"
        group_recipe "$group"
        group_files "$group"
    } | sha256sum)
    echo "$TOOLS_CACHE/$group-${hash:0:16}"
}

# group_is_built GROUP: the stamp is written last, before the folder gets its name.
group_is_built() { [[ -e $(group_dir "$1")/built ]]; }
