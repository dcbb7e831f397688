# Everything but help and clean starts with scripts/setup, which is quick when nothing is missing.
.DEFAULT_GOAL := help
.PHONY: help setup demo pictures test all-tests test-driver test-programs lint format bench soak fuzz clean distclean

SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
IN := .venv/bin

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile | expand -t 20

setup: ## install what is missing: Debian packages, .venv, Intel's decoder
	@scripts/setup

demo: setup ## record a real process for a few seconds and leave capture and reports in demo/
	@$(IN)/python scripts/demo.py

pictures: demo ## make the pictures of the README anew
	@install -m 644 -D -t docs/pictures demo/flame-graph.svg demo/heat-map.png

test: setup ## lint, and beside it every test, those that need root and BPF included
	@$(MAKE) --no-print-directory -j2 lint all-tests

all-tests: setup
	@scripts/test-driver >/dev/null
	@scripts/test

test-driver: setup ## tests/driver, on Intel's real runtime, which needs no GPU for this
	@scripts/test-driver >/dev/null
	@$(IN)/python -m pytest tests/driver

test-programs: setup ## tests/programs: records dpnp, pyopencl, OpenVINO and clpeak, which it downloads (0.7 GB)
	@scripts/test-programs >/dev/null
	@scripts/test tests/programs

lint: setup ## ruff, mypy --strict, import rules
	$(IN)/ruff check
	$(IN)/ruff format --check
	$(IN)/mypy
	$(IN)/lint-imports

format: setup ## let ruff put the sources into shape
	$(IN)/ruff check --fix
	$(IN)/ruff format

bench: setup ## measure: every tests/bench/bench_*.py
	@for file in tests/bench/bench_*.py; do echo "== $$file"; $(SUDO) $(IN)/python -B "$$file" || exit; done

soak: setup ## what takes too long for CI: every tests/bench/soak_*.py
	@for file in tests/bench/soak_*.py; do echo "== $$file"; $(SUDO) $(IN)/python -B "$$file" || exit; done

fuzz: setup ## ten minutes of damaged ELF files: tests/fuzz/fuzz_*.py
	@for file in tests/fuzz/fuzz_*.py; do echo "== $$file"; $(IN)/python -B "$$file" || exit; done

clean: ## remove what was built or recorded here
	rm -rf demo build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv too
	rm -rf .venv
