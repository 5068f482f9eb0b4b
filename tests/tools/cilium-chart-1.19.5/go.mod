// Of Cilium v1.19.5: its Helm chart, and the responder of its health checks. They are apart from the other programs,
// so that neither group is built again for the other.
module sticky-ipam/tests/tools/cilium-chart

go 1.26.0

tool github.com/cilium/cilium/cilium-health/responder

require (
	github.com/cilium/cilium v1.19.5 // indirect
	github.com/spf13/pflag v1.0.10 // indirect
	github.com/vishvananda/netlink v1.3.2-0.20260109214200-c6faf428e8f8 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
	golang.org/x/sys v0.45.0 // indirect
)
