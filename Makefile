# make course   set up, then run the course's notebooks
# make test     set up, then run all tests
# make lab      set up, then open JupyterLab
# make help     the rest
# A .venv that works is asked first, so that another python3 on the path changes nothing once all is there.
PYTHON ?= $(shell .venv/bin/python -c '' 2>/dev/null && echo .venv/bin/python || echo python3)
ERAS ?= today $(patsubst eras/%.in,%,$(filter-out eras/today.in,$(wildcard eras/*.in)))
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help setup course test browser lab lint lock outputs evidence tables site site-lock site-test

help:
	@echo "make course    set up what is missing, then run the notebooks (results in .course/runs)"
	@echo "make test      set up what is missing, then run all tests"
	@echo "make browser   try JupyterLab in a real browser (needs Chromium; pictures in .course/browser)"
	@echo "make lab       set up what is missing, then open JupyterLab"
	@echo "make setup     set up only: .venv and the eras"
	@echo "make outputs   run the notebooks and store their outputs in them"
	@echo "make evidence  measure everything again into evidence/cpu.json, and the README's tables from it"
	@echo "make tables    write the README's tables from evidence/cpu.json"
	@echo "make site      build the course's pages from the stored outputs into .site/html; runs nothing"
	@echo "make site-test open them in a browser: links, search, narrow screens, without JavaScript"
	@echo "make lint      ruff"
	@echo "make lock      compile eras/*.in into eras/*.txt, and docs/requirements.in"

# Does nothing, and needs no network, once all is there.
setup:
	@test -f eras/torch.txt || { echo "ERROR run make in the repository's root: eras/torch.txt is not here" >&2; exit 1; }
	@PYTHONPATH=helpers $(PYTHON) -m failurelab.eras create $(ERAS)

course: setup
	@$(BIN)/failurelab run

# One thread a process: as fast for small models, and two processes at once do not slow each other down.
test: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# In an environment of its own, so that the course's locks hold no browser driver. Without a Chromium: exit status 3.
browser: setup
	@test -x .browser/bin/pytest || { $(BIN)/uv venv -q --clear --python $(BIN)/python .browser && \
		UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}" $(BIN)/uv pip install -q --python .browser/bin/python \
		--require-hashes -r tests/browser/requirements.txt; }
	@.browser/bin/python -m pytest tests/browser

lab: setup
	@$(BIN)/jupyter lab --notebook-dir=.

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

lock: site-lock
	@UV=$(BIN)/uv UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}" $(BIN)/python eras/compile.py

site-lock:
	@mkdir -p .site; { echo "# Made by make lock from docs/requirements.in."; UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}" \
	  $(BIN)/uv pip compile docs/requirements.in --universal --python-version 3.11 --no-header --no-annotate -q; } \
	  > .site/lock.txt && mv .site/lock.txt docs/requirements.txt

outputs: setup
	@$(BIN)/failurelab outputs

evidence: setup
	@$(BIN)/failurelab evidence record --out evidence/cpu.json
	@$(BIN)/failurelab evidence tables

tables:
	@$(BIN)/failurelab evidence tables

# The site has an environment of its own, .site/env: neither .venv nor an era is needed, or changed.
site:
	@$(PYTHON) docs/make_site.py

site-test:
	@$(PYTHON) docs/make_site.py --test
