# Two commands do everything: `make demo` and `make test`. Both set up .venv first, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test suite quick check fix lock matrix image install clean

install: $(VENV)/.installed

# Any Python can parse this.
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
	@echo "installing into $(VENV): some 1.7 GB with torch's CPU wheel, which takes minutes"
	$(PIP) install --constraint constraints.txt --editable '.[embedded,embedding,dev]'
	touch $@

demo: install
	@$(BIN)/kp-scorer demo

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Four files at a time: tests wait for servers and workers more than they compute. More would measure how busy the machine is.
PYTEST := $(BIN)/python -m pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

quick: check
	$(PYTEST) -m "not slow"

# Side by side: mypy takes a minute of one core.
test: install
	@$(MAKE) --no-print-directory --jobs 2 check suite

suite: install
	$(PYTEST)

# Debian 13 and unstable, each made anew, with their own servers; as root, on a Debian.
matrix:
	.ci/debian trixie
	.ci/debian sid

# Resolves everything anew, in an environment of its own, and writes down what came of it. Only torch keeps its version, which is
# changed by hand: by itself pip would take the newest, with gigabytes of CUDA. The pin admits local builds such as +cpu.
LOCK := build/lock

lock:
	rm -rf $(LOCK)
	mkdir -p $(LOCK)
	grep '^torch==' constraints.txt > $(LOCK)/torch.txt
	$(PYTHON) -m venv $(LOCK)/venv
	$(LOCK)/venv/bin/python -m pip --disable-pip-version-check install --quiet --constraint $(LOCK)/torch.txt '.[embedded,embedding,dev]'
	sed -n '/^#/p' constraints.txt > $(LOCK)/constraints.txt
	$(LOCK)/venv/bin/python -m pip --disable-pip-version-check freeze --all --exclude kp-scorer --exclude pip \
		| sed 's/+[a-z0-9.]*$$//' >> $(LOCK)/constraints.txt
	mv $(LOCK)/constraints.txt constraints.txt
	rm -rf $(LOCK)

# The container image: buildah makes it where it is installed, without a daemon, else docker. IMAGE_FLAGS go to whichever it is;
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
