# Every target sets up .venv by itself: a fresh clone needs Python >= 3.11, make and PyPI, nothing else.
BIN := .venv/bin
RANKS ?= 4
TOKENS ?=
COMPILE_ARCHS ?= sm_80,sm_90a,sm_100a
PYTEST_ARGS ?=
BENCH_ARGS ?=

.PHONY: demo test beside-tests prove bench bench-check lint typecheck pytest coverage compile format docs wheel-size clean venv

## demo: four ranks generate text with a mixture-of-experts model, checked against a single-process reference
demo: venv
	$(BIN)/mpirun -n $(RANKS) $(BIN)/nvep demo $(if $(TOKENS),--tokens $(TOKENS))

## test: lint, types, all tests this machine can run with coverage, every benchmark once, every kernel compiled, and prove
test: lint typecheck
	$(MAKE) --no-print-directory -j2 --output-sync=target coverage beside-tests

# Most tests keep one core busy; these find work on the other.
beside-tests: venv
	$(MAKE) --no-print-directory bench-check
	$(MAKE) --no-print-directory compile
	$(MAKE) --no-print-directory prove

## bench: figure, floor, ratio and target of every case on this machine's GPUs; without one, small cases on CPU cores
bench: venv
	$(BIN)/nvep bench $(BENCH_ARGS)

## bench-check: every benchmark's case once, for correctness
bench-check: venv
	$(BIN)/python -m pytest perf --benchmark-disable -q

## lint: ruff
lint: venv
	$(BIN)/ruff check .

## typecheck: mypy --strict
typecheck: venv
	$(BIN)/mypy

## pytest: tests without coverage, e.g. make pytest PYTEST_ARGS='tests/host -k layers'
pytest: venv
	$(BIN)/python -m pytest $(PYTEST_ARGS)

## coverage: tests with the coverage of host code printed; fails below the gate in pyproject.toml
coverage: venv
	rm -f .coverage .coverage.*
	$(BIN)/coverage run -m pytest $(PYTEST_ARGS)
	$(BIN)/coverage combine -q
	$(BIN)/coverage report

## prove: the true protocols under the simulated memory model, then every planted bug, which must be caught
prove: venv
	$(BIN)/nvep simulate --protocol fence --seeds 0:250
	$(BIN)/nvep simulate --protocol sentinel --seeds 0:250
	$(BIN)/nvep simulate --protocol mixed --seeds 0:250
	$(BIN)/nvep simulate --protocol sentinel --no-axiom --strict-ptx --seeds 0:50
	$(BIN)/nvep simulate --mutate all --seeds 0:2000 --jobs 2

## compile: every kernel to cubins, with no driver
compile: venv
	$(BIN)/nvep compile --arch $(COMPILE_ARCHS)

## format: Python and kernels
format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files 'nvep_kernels/*.cu' 'nvep_kernels/*.cuh' 'nvep_kernels/*.h' 'nvep_kernels/*.cpp' | xargs -r $(BIN)/clang-format -i

## docs: docs/api.md from the docstrings
docs: venv
	$(BIN)/python tools/api_docs.py

## wheel-size: downloads what `pip install .` needs and adds it up against the budget of 120 MB
wheel-size: venv
	$(BIN)/python tools/wheel_size.py

venv:
	@tools/bootstrap.sh

## clean: everything that is not source
clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
