# shellcheck shell=bash
# containerd and kubelet on a node, and the image of the lab's pods.

POD_IMAGE=localhost/sticky-ipam/pod:lab
PAUSE_IMAGE=localhost/sticky-ipam/pause:lab

# image_make OUT NAME ROOT ENTRYPOINT-JSON: a docker archive of one layer.
image_make() {
    local out=$1 name=$2 root=$3 entrypoint=$4 work layer config
    work=$(mktemp -d "$LAB_DIR/image.XXXXXX")
    tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 -C "$root" -cf "$work/layer.tar" .
    layer=$(sha256sum "$work/layer.tar")
    layer=${layer%% *}
    printf '{"architecture":"amd64","os":"linux","config":{"Entrypoint":%s,"Env":["PATH=/bin"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]},"history":[{"created_by":"sticky-ipam lab"}]}' \
        "$entrypoint" "$layer" >"$work/config.json"
    config=$(sha256sum "$work/config.json")
    config=${config%% *}
    mv "$work/config.json" "$work/$config.json"
    printf '[{"Config":"%s.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$config" "$name" >"$work/manifest.json"
    tar -C "$work" -cf "$out" manifest.json "$config.json" layer.tar
    rm -rf "$work"
}

images_make() {
    local root=$LAB_DIR/image-root applet
    mkdir -p "$root"/{bin,etc,tmp,proc,sys,dev}
    cp "$pod_bin/pod" "$root/bin/pod"
    image_make "$LAB_DIR/pause.tar" "$PAUSE_IMAGE" "$root" '["/bin/pod","pause"]'
    cp /bin/busybox "$root/bin/busybox"
    for applet in sh cat ls ip ping ping6 nc wget sleep echo; do
        ln -s busybox "$root/bin/$applet"
    done
    image_make "$LAB_DIR/pod.tar" "$POD_IMAGE" "$root" '["/bin/pod"]'
    rm -rf "$root"
}

# OOM scores cannot be lowered in a container of CI; AppArmor profiles are the machine's.
# containerd_1_config: of Debian's containerd.
containerd_1_config() {
    cat <<TOML
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "$PAUSE_IMAGE"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/opt/cni/bin"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
TOML
}

# containerd_2_config: the same for containerd 2, which asks the plugins for their STATUS.
containerd_2_config() {
    local runtime="plugins.'io.containerd.cri.v1.runtime'" images="plugins.'io.containerd.cri.v1.images'"
    cat <<TOML
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = 0
[grpc]
  address = "/run/containerd/containerd.sock"
[$images]
  snapshotter = "overlayfs"
  [$images.pinned_images]
    sandbox = "$PAUSE_IMAGE"
[$runtime]
  restrict_oom_score_adj = true
  disable_apparmor = true
  [$runtime.cni]
    bin_dirs = ["/opt/cni/bin"]
    conf_dir = "/etc/cni/net.d"
  [$runtime.containerd]
    default_runtime_name = "runc"
    [$runtime.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [$runtime.containerd.runtimes.runc.options]
        SystemdCgroup = false
TOML
}

runtime_define() {
    local node=$1 number folder address
    number=$(node_number "$node")
    folder=$(node_folder "$node")
    address=172.30.0.1$number
    if $dual_stack; then
        address+=,fd30::1$number
    fi
    if [[ -n $containerd_bin ]]; then
        containerd_2_config >"$folder/containerd.toml"
    else
        containerd_1_config >"$folder/containerd.toml"
    fi
    cat >"$folder/kubelet.yaml" <<YAML
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
failCgroupV1: false
cgroupsPerQOS: false
enforceNodeAllocatable: []
cgroupDriver: cgroupfs
failSwapOn: false
oomScoreAdj: 0
localStorageCapacityIsolation: false
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
resolvConf: ""
# A node that comes back must be seen soon.
nodeStatusUpdateFrequency: 4s
nodeLeaseDurationSeconds: 12
syncFrequency: 10s
# A node's block has room for more than the usual 110, of which the node's own pods would take some.
maxPods: 200
YAML
    # Its shim is found on PATH.
    define "containerd@$node" "$node" env "PATH=${containerd_bin:+$containerd_bin:}$PATH" containerd --config "$folder/containerd.toml"
    define "kubelet@$node" "$node" "$kubernetes_bin/kubelet" "--config=$folder/kubelet.yaml" "--kubeconfig=$ADMIN_KUBECONFIG" \
        "--hostname-override=$node" "--node-ip=$address" --v=2
}

runtime_up() {
    local node=$1 image
    start_component "containerd@$node"
    wait_for_component 60 "containerd@$node" enter "$node" ctr version || return 1
    for image in pause pod; do
        enter "$node" ctr --namespace k8s.io images import "$LAB_DIR/$image.tar" >>"$LAB_DIR/log/images@$node.log" 2>&1 || {
            say "$node: the image $image cannot be loaded:"
            tail -n 3 "$LAB_DIR/log/images@$node.log" >&2
            return 1
        }
    done
    start_component "kubelet@$node"
}
