# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow test-web lint bench clean

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "vat needs Python 3.11 or newer")'
	@echo "Setting up $(VENV) (once; a few minutes and about 6 GB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,export,web,video]'
	@touch $@

demo: $(READY)
	@$(BIN)/vat demo --out out/demo.png

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: lint
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile

test-slow: $(READY)
	@$(BIN)/python -m pytest -q -m slow

# The page in a real browser: Debian's chromium, or one that is installed already. Pictures go to out/web.
test-web: $(READY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[web,web-test]'
	@command -v chromium >/dev/null || { echo "Installing chromium"; apt-get install -y -qq chromium >/dev/null; }
	@$(BIN)/python -m pytest -q -m web tests/web

bench: $(READY)
	@$(BIN)/vat bench

clean:
	rm -rf $(VENV) out
