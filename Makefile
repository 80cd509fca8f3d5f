# `make help` lists the targets: the text after each `##`.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),$(CURDIR)/target)
VENV := $(CURDIR)/.venv

# The interpreter the environment is made from: 3.11, or `python3` when that is newer.
PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || echo python3)

# What building and running the plugin needs to find the torch and the Python of the environment.
PLUGIN_ENV = LIBTORCH_USE_PYTORCH=1 VIRTUAL_ENV=$(VENV) PYO3_PYTHON=$(VENV)/bin/python \
	PATH=$(VENV)/bin:$$PATH

# handlers/pyproject.toml rules all Python here; its own folder finds it by itself.
RUFF := $(VENV)/bin/ruff
RUFF_ELSEWHERE := --config handlers/pyproject.toml tests examples

DENY_VERSION := 0.20.2
DENY := $(TARGET)/tools/cargo-deny-$(DENY_VERSION)/bin/cargo-deny

# nextest where it is installed; without it the same tests run under `cargo test`.
NEXTEST := $(shell $(CARGO) nextest --version >/dev/null 2>&1 && echo yes)

# Tests of the real server wait more than they work.
TESTS_AT_ONCE := $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN))))

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- build ---------------------------------------------------------------------------------------

.PHONY: venv
venv: $(VENV)/.installed ## .venv with the pinned torch and the test tools

.PHONY: build
build: build-server build-plugin ## release build: server, archiver and plugin

.PHONY: build-server
build-server:
	$(CARGO) build --release --locked

.PHONY: build-plugin
build-plugin: venv
	$(PLUGIN_ENV) $(CARGO) build --release --locked -p ts-plugin

.PHONY: clean
clean: ## remove what was built, the environment included
	$(CARGO) clean
	rm -rf $(VENV) build

# --- try it --------------------------------------------------------------------------------------

.PHONY: demo
demo: build $(VENV)/.example-installed ## serve a pretrained image classifier and classify two photos
	examples/image_classifier/run.sh

.PHONY: examples
examples: build $(VENV)/.examples-installed ## make, pack, serve and ask all examples, or EXAMPLES="digits sessions"
	examples/run.py $(or $(EXAMPLES),all)

.PHONY: bench
bench: build $(VENV)/.example-installed ## what the server does beside its marks, in ten minutes
	$(CARGO) bench --locked --features ts-server/bench,ts-serving/bench --bench queue \
		--bench telemetry --no-run
	tests/bench/run.py

# --- checks --------------------------------------------------------------------------------------

.PHONY: fmt
fmt: venv ## format Rust and Python
	$(CARGO) fmt --all
	$(RUFF) format handlers
	$(RUFF) format $(RUFF_ELSEWHERE)

.PHONY: check
check: lint-rust test-rust deny ## format, lints and tests that need neither torch nor Python

.PHONY: test
test: test-rust test-plugin lint-python test-python-beside-fuzz-build fuzz-short ## every test, installing what it needs

.PHONY: lint-rust
lint-rust:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --exclude ts-plugin --all-targets \
		--features ts-server/bench,ts-serving/bench -- -D warnings
	RUSTDOCFLAGS='-D warnings' $(CARGO) doc --locked --no-deps

.PHONY: test-rust
test-rust:
ifeq ($(NEXTEST),yes)
	$(CARGO) nextest run --locked --test-threads $(TESTS_AT_ONCE)
	$(CARGO) test --locked --doc
else
	$(CARGO) test --locked
endif

# With the release profile, as `build-plugin`, so that torch's bindings are compiled once.
.PHONY: test-plugin
test-plugin: build-plugin
	$(PLUGIN_ENV) $(CARGO) clippy --release --locked -p ts-plugin --all-targets -- -D warnings
	$(PLUGIN_ENV) $(CARGO) test --release --locked -p ts-plugin

.PHONY: lint-python
lint-python: venv
	$(RUFF) format --check handlers
	$(RUFF) format --check $(RUFF_ELSEWHERE)
	$(RUFF) check handlers
	$(RUFF) check $(RUFF_ELSEWHERE)
	cd handlers && $(VENV)/bin/mypy

.PHONY: test-python
test-python: build $(VENV)/.examples-installed
	cd handlers && $(VENV)/bin/pytest tests --tb=short -q
	$(PLUGIN_ENV) $(VENV)/bin/pytest tests/python --tb=short -q

# The fuzz targets take minutes to build. The tests of Python, which wait more than they work, leave
# the processor to that; what was built is only run after them, since inputs have a time limit.
.PHONY: test-python-beside-fuzz-build
test-python-beside-fuzz-build: build
	$(call beside,nice -n 19 $(PYTHON) tests/fuzz/run.py --build-only,$(MAKE) test-python)

# Runs the first command in the background of the second; fails if one of them does. What the first
# one says comes in one piece, at its end.
beside = said=$$(mktemp); ($(1)) >"$$said" 2>&1 & first=$$!; \
	trap 'kill $$first 2>/dev/null || true; rm -f "$$said"' EXIT; \
	second=0; $(2) || second=$$?; \
	failed=0; wait $$first || failed=$$?; cat "$$said"; \
	exit $$((second | failed))

.PHONY: chaos
chaos: build ## ten minutes of faults under load; CHAOS_SECONDS and CHAOS_SEED as in test_chaos.py
	$(PLUGIN_ENV) CHAOS_SECONDS=$${CHAOS_SECONDS:-600} $(VENV)/bin/pytest tests/python/test_chaos.py \
		--tb=short

.PHONY: soak
soak: SOAK_SECONDS ?= 3600
soak: soak-run ## an hour of mixed traffic in which nothing may grow; SOAK_SECONDS, SOAK_SEED

.PHONY: soak-short
soak-short: SOAK_SECONDS ?= 300
soak-short: soak-run ## five minutes of it

.PHONY: soak-run
soak-run: build
	$(PLUGIN_ENV) SOAK_SECONDS=$(SOAK_SECONDS) $(VENV)/bin/pytest tests/python/test_soak.py \
		--tb=short

.PHONY: fuzz-short
fuzz-short: FUZZ_SECONDS ?= 60
fuzz-short: FUZZ_JOBS ?= --jobs 12
fuzz-short: fuzz-run ## a minute of each fuzz target, as in CI

.PHONY: fuzz
fuzz: FUZZ_SECONDS ?= 600
fuzz: fuzz-run ## ten minutes of each fuzz target; FUZZ_SECONDS and FUZZ_TARGETS choose others

.PHONY: fuzz-run
fuzz-run:
	$(PYTHON) tests/fuzz/run.py --seconds $(FUZZ_SECONDS) $(FUZZ_JOBS) $(FUZZ_TARGETS)

.PHONY: deny
deny: $(DENY) ## licences, banned crates and sources of the dependencies
	$(DENY) --log-level error --locked check bans licenses sources

.PHONY: advisories
advisories: $(DENY) ## known vulnerabilities in the dependencies (fetches the advisory database)
	$(DENY) --locked check advisories

# --- what the targets above install --------------------------------------------------------------

# Unoptimised: it builds in half the time, and the check itself takes a second.
$(DENY):
	@echo 'building cargo-deny $(DENY_VERSION), once; about two minutes'
	CARGO_TARGET_DIR=$(TARGET)/tools/build $(CARGO) install cargo-deny --version $(DENY_VERSION) \
		--locked --debug --root $(TARGET)/tools/cargo-deny-$(DENY_VERSION)
	rm -rf $(TARGET)/tools/build

# What the plugin needs of an interpreter, said before minutes of downloads and not after.
define PYTHON_CHECK
import importlib.util, os, sys, sysconfig

def need(met, what):
    if not met:
        sys.exit(f"{sys.executable} cannot carry the server's plugin: {what}.\n"
                 "Debian: apt-get install python3.11-dev python3.11-venv. "
                 "pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install 3.11. "
                 "Another interpreter: make PYTHON=/path/to/python3.11 ...")

need(sys.version_info >= (3, 11), f"it is Python {sys.version.split()[0]}, not 3.11 or newer")
need(sysconfig.get_config_var("Py_ENABLE_SHARED"), "it was built without a shared libpython")
header = os.path.join(sysconfig.get_path("include"), "Python.h")
need(os.path.exists(header), f"its headers are not installed ({header})")
need(importlib.util.find_spec("ensurepip"), "it has no venv support (ensurepip)")
endef
export PYTHON_CHECK

PIP_INSTALL = $(VENV)/bin/python -m pip install --disable-pip-version-check

$(VENV)/.installed: requirements.txt requirements-dev.txt
	@$(PYTHON) -c "$$PYTHON_CHECK"
	$(PYTHON) -m venv $(VENV)
	@echo 'installing torch and the test tools into .venv: about 2 GB of downloads'
	$(PIP_INSTALL) -r requirements.txt -r requirements-dev.txt
	touch $@

$(VENV)/.example-installed: examples/image_classifier/requirements.txt $(VENV)/.installed
	$(PIP_INSTALL) -r examples/image_classifier/requirements.txt
	touch $@

# Without what they depend on: the file names all that is needed, and leaves out what is not.
$(VENV)/.examples-installed: examples/requirements.txt $(VENV)/.installed
	$(PIP_INSTALL) --no-deps -r examples/requirements.txt
	touch $@
