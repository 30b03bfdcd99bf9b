# `make demo` and `make test` are the whole set-up, with a GPU or without: each makes .venv and installs what it needs.
#   make PYTHON=python3.12 ...    another interpreter
#   make MLX_EXTRA=cuda12 ...     another MLX backend than the driver suggests: cuda13, cuda12 or cpu

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
comma   := ,
KERNELS := $(wildcard kernels/*.cu kernels/*.cuh)

ifndef MLX_EXTRA
CUDA_MAJOR := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Z ]* Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1)
MLX_EXTRA  := $(shell [ 0$(CUDA_MAJOR) -ge 13 ] && echo cuda13 || { [ 0$(CUDA_MAJOR) -ge 12 ] && echo cuda12 || echo cpu; })
endif

# One stamp for each set of packages that is in place. A new pyproject.toml installs them again.
FOR_DEMO := $(VENV)/ready-demo-$(MLX_EXTRA)
FOR_TEST := $(VENV)/ready-test-$(MLX_EXTRA)
FOR_LINT := $(VENV)/ready-lint-$(MLX_EXTRA)
EMPTY    := $(VENV)/empty-$(MLX_EXTRA)

.PHONY: demo test lint format clean
.NOTPARALLEL:

demo: $(FOR_DEMO)
	$(BIN)/python scripts/demo.py

test: $(FOR_TEST)
	$(BIN)/python -m pytest
ifneq ($(MLX_EXTRA),cpu)
	$(BIN)/python -m pytest -m gpu
endif

lint: $(FOR_LINT)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(KERNELS)

format: $(FOR_LINT)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(KERNELS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(FOR_DEMO): EXTRAS := $(MLX_EXTRA)
# Where no GPU can run the kernels, the tests compile them all the same.
$(FOR_TEST): EXTRAS := $(if $(filter cpu,$(MLX_EXTRA)),cpu$(comma)nvrtc,$(MLX_EXTRA)),test
$(FOR_LINT): EXTRAS := $(MLX_EXTRA),dev

$(FOR_DEMO) $(FOR_TEST) $(FOR_LINT): pyproject.toml $(EMPTY)
	$(BIN)/python -m pip install -q -e ".[$(EXTRAS)]"
	touch $@

# A change of backend starts over: two of MLX's backends in one environment overwrite each other's files.
$(EMPTY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'mlx_moe_fast needs Python 3.11 or newer, and "$(PYTHON)" is not that. Name one: make PYTHON=python3.12' >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	touch $@
