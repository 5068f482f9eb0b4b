# The commands of this project. `make help` lists them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

# Fully static, so that the plugin runs on any node; an explicit target keeps these flags off build scripts.
PLUGIN_TARGET ?= $(shell rustc -vV | sed -n 's/^host: //p')
TARGET_DIR ?= $(or $(CARGO_TARGET_DIR),target)
PLUGIN := $(TARGET_DIR)/$(PLUGIN_TARGET)/release/sticky-ipam
PLUGIN_FLAGS := -C target-feature=+crt-static -C relocation-model=static

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort -u | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

.PHONY: plugin
plugin: ## Build the static plugin
	@RUSTFLAGS='$(PLUGIN_FLAGS)' cargo build --quiet --release --no-default-features --bin sticky-ipam --target $(PLUGIN_TARGET)
	@echo "$(PLUGIN)"

include tests/lab/lab.mk
