# One entry for people and for CI. `.venv/.installed` marks a finished install, so nothing is done twice.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# A file's tests run in one process, one after the other: what they share is made once.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder
# What is checked and formatted: not the envs that users keep beside it.
SOURCES := benchmarks docs examples flatout simcard tests tools
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: install train test test-all test-gpu check browser card format walk pictures wheel site chaos bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || command -v $(PYTHON) >/dev/null || { \
		echo "flatout: there is no $(PYTHON); install it, or name another: make train PYTHON=python3.12 (docs/training.md#platforms)"; exit 1; }
	@echo "flatout: installing into $(VENV) (first time: a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch
	@$(PIP_INSTALL) -e ".[dev]"
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	@$(PIP_INSTALL) -e ".[bench]"
	@touch $@

train: install
	@$(BIN)/flatout train snake

check: install
	@$(BIN)/ruff format --check --quiet $(SOURCES) || { echo "run 'make format'"; exit 1; }
	@$(BIN)/ruff check --quiet $(SOURCES)
	@$(BIN)/mypy

format: install
	@$(BIN)/ruff format --quiet $(SOURCES)
	@$(BIN)/ruff check --quiet --fix $(SOURCES)

# The page that a run leaves is tested in a real browser.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || { \
		echo "flatout: installing chromium for the browser tests"; sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
		$$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive \
			apt-get install -y -qq --no-install-recommends chromium chromium-driver >/dev/null; }

# The simulated card of the tests is C++, built once.
card: install
	@command -v g++ >/dev/null && command -v ninja >/dev/null || { \
		echo "flatout: installing a compiler for the simulated card"; sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
		$$sudo apt-get update -qq && $$sudo env DEBIAN_FRONTEND=noninteractive \
			apt-get install -y -qq --no-install-recommends g++ ninja-build >/dev/null; }
	@$(BIN)/python -c "from simcard import build; build.library()"

test: check browser card
	@$(PYTEST) -m "not slow"

# Before a release: whole runs with ranks that die, clusters, searches and other tests of 20 s and more, too.
test-all: check browser card
	@$(PYTEST)

# For a machine with a card: the tests that need one, two minutes of benchmark, and a text to paste into an issue.
test-gpu: install
	@$(BIN)/python -m benchmarks.on_a_card --tests

# The files and functions that a short training enters, in order.
walk: install
	@$(BIN)/python tools/walk.py

# The README's pictures, from real runs.
pictures: install browser
	@$(BIN)/python tools/pictures.py

# The wheel and the sdist in dist/; then a training with the wheel alone, in a new environment and an empty folder.
wheel:
	@rm -rf build dist; set -e; new=$$(mktemp -d); trap 'rm -rf "$$new"' EXIT; \
	$(PYTHON) -m venv "$$new/build"; "$$new/build/bin/python" -m pip install --quiet --disable-pip-version-check build; \
	"$$new/build/bin/python" -m build --outdir dist . >/dev/null; rm -rf build *.egg-info; \
	$(PYTHON) -m venv "$$new/clean"; echo "flatout: installing $$(ls dist/*.whl) into a clean environment"; \
	"$$new/clean/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl; \
	mkdir "$$new/empty"; cd "$$new/empty"; "$$new/clean/bin/flatout" train snake --timesteps 20000; \
	"$$new/clean/bin/flatout" report runs/* >/dev/null; "$$new/clean/bin/flatout" list >/dev/null

# The documentation as a site, in site/; a broken link or any other warning is an error. To read it: python -m http.server -d site
site: install
	@PYTHONPATH=. $(BIN)/mkdocs build --quiet --strict

# Short trainings with seeded faults of every kind; a failure prints the seed that repeats it.
SECONDS ?= 600
SEED ?= 1
chaos: install
	@$(BIN)/python -m tests.chaos --seconds $(SECONDS) --seed $(SEED)

bench: $(VENV)/.installed-bench
	@$(BIN)/python -m benchmarks.returns
	@$(BIN)/python -m benchmarks.training
	@$(BIN)/python -m benchmarks.choosing
	@$(BIN)/python -m benchmarks.lag
	@$(BIN)/python -m benchmarks.stepping

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache
