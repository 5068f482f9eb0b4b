# The lab and what is proved on it. Included by the Makefile; docs/lab.md explains it.
MODE ?= crd
LAB_OPTIONS ?=
T ?=
# Tests have labs of their own, never the one that someone works with.
E2E_DIR ?= $(or $(XDG_RUNTIME_DIR),/tmp)/sticky-ipam-e2e
# Labs at once. A lab uses less than one processor for most of its time: on two processors three labs take 12
# minutes for all proofs, two take 17.
LABS ?= 3

LAB_BINARIES = STICKY_IPAM_BIN=$(abspath $(PLUGIN)) STICKY_IPAM_AGENT_BIN=$(abspath $(AGENT)) STICKY_IPAM_CONTROLLER_BIN=$(abspath $(CONTROLLER))

.PHONY: tools lab lab-down e2e e2e-network e2e-lab bench-lab bench-burst

tools: ## Build the pinned third-party tools into the user's cache
	tests/tools/debian --check test
	tests/tools/build

lab: binaries ## Start the lab: make lab MODE=crd|delegated|chained|cluster-pool|kubernetes LAB_OPTIONS=--stock
	tests/tools/debian e2e
	$(LAB_BINARIES) tests/lab/lab up --mode $(MODE) $(LAB_OPTIONS)
	@tests/lab/lab what-to-try

lab-down: ## Remove every trace of the lab
	tests/lab/lab down

# The two parts run side by side: both wait most of their time.
e2e: binaries ## Prove it in real namespaces and on the lab (root): make e2e [T=part of a test's name]
	tests/tools/debian e2e
	tests/tools/build cni cni-suites pod kubernetes cilium helm kube-proxy cilium-chart containerd >/dev/null
	@$(MAKE) --no-print-directory --jobs=2 e2e-network e2e-lab

# The plugin under cnitool and ptp, and in the suites of ptp and bridge.
e2e-network:
	STICKY_IPAM_CNI_BIN="$$(tests/tools/path cni)" STICKY_IPAM_CNI_SUITES="$$(tests/tools/path cni-suites)" \
	  $(LAB_BINARIES) RUST_TEST_THREADS=$(TEST_THREADS) cargo test --test network $(T)

e2e-lab:
	@E2E_DIR=$(E2E_DIR) LABS=$(LABS) $(LAB_BINARIES) $(GO_MEMORY) LAB_ETCD_FLAGS=--unsafe-no-fsync tests/e2e/lab/prove $(T)

# A benchmark on the lab of its own: bench-lab has one part of the page, bench-burst another.
bench-lab: ## Print how pods start and move beside stock Cilium, and write docs/benchmarks.md (root, a quiet machine)
bench-burst: ## Print how many pods at once start beside stock Cilium, and write docs/benchmarks.md (root, a quiet machine)
bench-lab bench-burst: bench-%: binaries
	tests/tools/debian e2e
	tests/tools/build cni pod kubernetes cilium >/dev/null
	LAB_DIR=$(E2E_DIR) tests/lab/lab down
	@status=0; LAB_DIR=$(E2E_DIR) $(LAB_BINARIES) cargo bench --quiet --profile measuring --bench peers -- $* || status=$$?; \
	LAB_DIR=$(E2E_DIR) tests/lab/lab down || status=1; exit $$status
