# The commands of this project. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Fully static, so that the plugin runs on any node; an explicit target keeps these flags off build scripts.
PLUGIN_TARGET ?= $(shell rustc -vV 2>/dev/null | sed -n 's/^host: //p')
TARGET_DIR ?= $(or $(CARGO_TARGET_DIR),target)
PLUGIN := $(TARGET_DIR)/$(PLUGIN_TARGET)/release/sticky-ipam
AGENT := $(PLUGIN)-agent
CONTROLLER := $(PLUGIN)-controller
PLUGIN_FLAGS := -C target-feature=+crt-static -C relocation-model=static

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sort -u | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

.PHONY: plugin
plugin: ## Build the static plugin
	@command -v cargo >/dev/null || { echo 'cargo is missing; install Rust 1.95 or newer (https://rustup.rs) and put cargo on PATH' >&2; exit 1; }
	@RUSTFLAGS='$(PLUGIN_FLAGS)' cargo build --quiet --release --no-default-features --bin sticky-ipam --target $(PLUGIN_TARGET)
	@echo "$(PLUGIN)"

.PHONY: agent
agent: ## Build the static agent
	@command -v cargo >/dev/null || { echo 'cargo is missing; install Rust 1.95 or newer (https://rustup.rs) and put cargo on PATH' >&2; exit 1; }
	@RUSTFLAGS='$(PLUGIN_FLAGS)' cargo build --quiet --release --bin sticky-ipam-agent --target $(PLUGIN_TARGET)
	@echo "$(AGENT)"

.PHONY: controller
controller: ## Build the static controller
	@command -v cargo >/dev/null || { echo 'cargo is missing; install Rust 1.95 or newer (https://rustup.rs) and put cargo on PATH' >&2; exit 1; }
	@RUSTFLAGS='$(PLUGIN_FLAGS)' cargo build --quiet --release --bin sticky-ipam-controller --target $(PLUGIN_TARGET)
	@echo "$(CONTROLLER)"

# All that the lab runs. Agent and controller come of one call: their linking, which takes one processor each,
# goes on side by side.
.PHONY: binaries
binaries: plugin
	@RUSTFLAGS='$(PLUGIN_FLAGS)' cargo build --quiet --release --bin sticky-ipam-agent --bin sticky-ipam-controller --target $(PLUGIN_TARGET)
	@printf '%s\n' "$(AGENT)" "$(CONTROLLER)"

.PHONY: demo
demo: ## Show in a table what sticky-ipam keeps and host-local does not
	@tests/demo/demo

# Servers of the tests may use more memory: with Go's own settings a quarter of their time goes to collecting
# it.
GO_MEMORY := GOGC=400 GOMEMLIMIT=1500MiB
# More than there are processors: many a test of the API tier waits for ticks, leases and watches.
TEST_THREADS ?= $(shell echo $$(($$(nproc) * 2)))

.PHONY: test
test: ## Run every test that needs no privileges, those on a real etcd and kube-apiserver included
	tests/tools/debian test check
	tests/tools/build cni kubernetes whereabouts cilium >/dev/null
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint plugin
	STICKY_IPAM_RELEASE="$$(realpath $(PLUGIN))" TMPDIR="$$(tests/tools/scratch)" $(GO_MEMORY) RUST_TEST_THREADS=$(TEST_THREADS) tests/tools/run

# What libFuzzer finds is kept beside the build; a case worth keeping goes into tests/fuzz/corpus by hand.
FUZZ_SECONDS ?= 60
FUZZ_FLAGS := -C passes=sancov-module -C llvm-args=-sanitizer-coverage-level=4 \
  -C llvm-args=-sanitizer-coverage-inline-8bit-counters -C llvm-args=-sanitizer-coverage-pc-table --cfg fuzzing

.PHONY: fuzz
fuzz: ## Let libFuzzer throw bytes at requests and store files for FUZZ_SECONDS each (needs a C++ compiler)
	@for target in request store; do \
	  found=$(abspath $(TARGET_DIR))/fuzz/found-$$target; mkdir -p "$$found"; \
	  RUSTFLAGS='$(FUZZ_FLAGS)' cargo run --quiet --release --target $(PLUGIN_TARGET) \
	    --manifest-path tests/fuzz/libfuzzer/Cargo.toml --target-dir $(TARGET_DIR)/fuzz --bin $$target -- \
	    -max_total_time=$(FUZZ_SECONDS) -artifact_prefix="$$found/" "$$found" tests/fuzz/corpus/$$target; \
	done

.PHONY: lint
lint: ## Check format, lints, docs, licences and sources of crates, shell scripts
	cargo fmt --check
	cargo clippy --all-targets --quiet -- -D warnings
	cargo clippy --test lab --test network --quiet -- -D warnings
	RUSTDOCFLAGS='-D warnings' cargo doc --no-deps --quiet --document-private-items
	cargo fetch --quiet --locked
	"$$(tests/tools/build cargo-deny)/cargo-deny" --offline check --hide-inclusion-graph licenses bans sources
	shellcheck --external-sources .ci/run install/install.sh tests/demo/demo tests/support/api_server/keeper.sh \
	  tests/tools/build tests/tools/path tests/tools/debian tests/tools/scratch tests/tools/run tests/tools/crates tests/tools/groups.sh \
	  tests/e2e/lab/lab tests/e2e/lab/prove tests/e2e/lab/lib/*.sh tests/e2e/lab/lib/node-init tests/e2e/lab/lib/with-config

.PHONY: crds
crds: ## Write packaging/crds from the types
	cargo run --quiet --bin crdgen

.PHONY: reference
reference: ## Write docs/reference from the definitions of flags and metrics
	UPDATE_REFERENCE=1 cargo test --quiet --test commands reference::

.PHONY: bench
bench: plugin controller ## Print ratios against peers and write docs/benchmarks.md (a quiet machine, some minutes): make bench [PARTS="local cluster controller"]
	tests/tools/build kubernetes whereabouts cilium >/dev/null
	HOST_LOCAL="$$(tests/tools/build cni | tail -n 1)/host-local" STICKY_IPAM="$$(realpath $(PLUGIN))" \
	  STICKY_IPAM_CONTROLLER="$$(realpath $(CONTROLLER))" \
	  cargo bench --quiet --profile measuring --bench peers -- $(PARTS)

include tests/e2e/lab/lab.mk
