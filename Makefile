# Everything but help, clean and test-distributions starts with scripts/setup, which is quick when nothing is missing.
.DEFAULT_GOAL := help
.PHONY: help setup lock wheel demo pictures bytecode check unit test test-thorough test-repeat test-driver test-programs test-kernels test-image test-distributions lint format bench soak fuzz clean distclean

SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
IN := .venv/bin
EVERY_BCC := for release in bookworm trixie unstable; do scripts/debian-bcc $$release >/dev/null || exit; done

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' Makefile | expand -t 28

setup: ## install what is missing: packages, .venv, Intel's decoder
	@scripts/setup

lock: ## choose the newest Python packages that pyproject.toml allows, with hashes: scripts/requirements.txt
	@scripts/lock

wheel: setup ## build the wheel of the current commit into dist/: the same commit gives the same bytes
	@scripts/wheel

demo: setup ## record a real process for a few seconds and leave capture and reports in demo/
	@$(IN)/python scripts/demo.py

pictures: demo ## make the pictures of the docs anew
	@install -m 644 -D -t docs/pictures demo/flame-graph.svg demo/heat-map.png demo/interactive.png
	@sed -i 's#$(CURDIR)/##g' docs/pictures/flame-graph.svg

bytecode: setup ## compile the BPF programs, after their C files changed
	@scripts/debian-bcc bookworm >/dev/null
	@$(SUDO) env XDG_CACHE_HOME="$${XDG_CACHE_HOME:-$$HOME/.cache}" $(IN)/python -B scripts/bytecode.py

check: lint ## run the linters, and the unit tests that belong to FILES="cli/verbs/top.py ..."
	@scripts/check $(FILES)

unit: setup ## run the quick unit tests, which need no root: in less than two minutes
	@.venv/bin/python -m pytest -q tests/unit -m "not slow and not root and not thorough and not driver" --numprocesses 4 --dist loadfile

test: setup ## run the tests, those that need root and BPF included, but for those of the next targets
	@$(EVERY_BCC)
	@scripts/test

test-repeat: ## run make test twenty times: also under stress, among idle processes, with half the memory, in random order
	@scripts/test-repeat

test-thorough: setup ## the tests that `make test` leaves out: of more inputs, or those that take longest
	@$(EVERY_BCC)
	@scripts/test --thorough

test-driver: setup ## tests/driver, on Intel's real runtime and Mesa's Vulkan driver, which need no GPU for this
	@scripts/test-driver >/dev/null
	@scripts/test-vulkan >/dev/null
	@scripts/test --driver

test-programs: setup ## download dpnp, pyopencl, OpenVINO, clpeak, Go, Java, TensorBoard's plugin, Mesa, ncnn and wgpu (1.7 GB), and run tests/programs
	@scripts/test-programs >/dev/null
	@scripts/test-languages >/dev/null
	@scripts/test-tensorboard >/dev/null
	@scripts/test-vulkan >/dev/null
	@scripts/test-vulkan-programs >/dev/null
	@scripts/test tests/programs

test-kernels: setup ## boot Debian's kernels under QEMU, and load BPF and see launches there (docs/platforms.md)
	@$(IN)/python scripts/test_kernels.py

test-image: setup ## build the container's image with podman, without a registry, and record with it (docs/continuous.md)
	@$(IN)/python scripts/test_image.py

test-distributions: ## run make demo and make test on Debian 13 in a folder, and unit tests with unstable's Pythons (docs/platforms.md)
	@scripts/test-distribution trixie root user python3.13
	@scripts/test-distribution unstable python3.14 python3.15

lint: setup ## run ruff, mypy --strict and the import rules, and check that the compiled BPF programs match their C files
	$(IN)/ruff check
	$(IN)/ruff format --check
	$(IN)/mypy
	$(IN)/lint-imports
	$(IN)/python scripts/bytecode.py --check

format: setup ## let ruff put the sources into shape
	$(IN)/ruff check --fix
	$(IN)/ruff format

bench: setup ## measure: every tests/bench/bench_*.py
	@for file in tests/bench/bench_*.py; do echo "== $$file"; $(SUDO) $(IN)/python -B "$$file" || exit; done

soak: setup ## what takes too long for CI: every tests/soak/soak_*.py
	@for file in tests/soak/soak_*.py; do echo "== $$file"; $(SUDO) $(IN)/python -B "$$file" || exit; done

fuzz: setup ## ten minutes each of damaged ELF files, call frame information, structures of Python and columns of records: tests/fuzz/fuzz_*.py
	@for file in tests/fuzz/fuzz_*.py; do echo "== $$file"; $(IN)/python -B "$$file" || exit; done

clean: ## remove what was built or recorded here
	rm -rf demo build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and remove .venv too
	rm -rf .venv
