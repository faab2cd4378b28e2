# `make demo` and `make test` work on a fresh machine with Python 3.11+; an active environment is reused.
ENV := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX),$(CURDIR)/.venv)
PYTHON := $(ENV)/bin/python
STAMP := $(ENV)/.selfspec-installed

.PHONY: demo serve test test-gpu test-browser format bench

demo: $(STAMP)
	$(PYTHON) -m selfspec generate --show --compare

# The demo model and its chat page on http://127.0.0.1:8000; `make serve OPTIONS="--port 9000"` passes options.
serve: $(STAMP)
	$(PYTHON) -m selfspec serve $(OPTIONS)

test: $(STAMP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(PYTHON) -m pytest -n auto --dist loadgroup

# On a machine with an NVIDIA GPU; elsewhere everything is skipped.
test-gpu: $(STAMP)
	$(PYTHON) -m pytest -m gpu

# The server's page in the system's Chromium.
test-browser: $(STAMP)
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
		{ echo "no browser: install one (apt-get install -y chromium), then run this again"; exit 1; }
	$(PYTHON) -m pytest tests/test_serve_page.py

format: $(STAMP)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: $(STAMP)
	$(PYTHON) -m bench.all

$(PYTHON):
	python3 -m venv $(ENV)

# A torch that is already there is kept; only a fresh environment takes the pinned one.
$(STAMP): pyproject.toml constraints.txt | $(PYTHON)
	if $(PYTHON) -c "import torch" 2>/dev/null; then pin=; else pin="-c constraints.txt"; fi; \
		$(PYTHON) -m pip install $$pin -e ".[dev]"
	touch $(STAMP)
