# make course   set up, then run the course's notebooks
# make test     set up, then run all tests; make test-fast, the quick ones
# make lab      set up, then open JupyterLab
# make help     the rest
# A .venv that works is asked first, so that another python3 on the path changes nothing once all is there.
PYTHON ?= $(shell .venv/bin/python -c '' 2>/dev/null && echo .venv/bin/python || echo python3)
ERAS ?= today $(patsubst eras/%.in,%,$(filter-out eras/today.in,$(wildcard eras/*.in)))
BIN := .venv/bin
LAB ?= $(BIN)/failurelab notebooks --open
# What make evidence runs, on what, and where it writes: make evidence ONLY="learning qlora" DEVICE=cuda OUT=evidence/h100
BENCHMARKS = $(patsubst benchmarks/%.py,%,$(shell grep -l 'recording\.begin' benchmarks/*.py))
DEVICE ?= cpu
EVIDENCE = $(or $(OUT),evidence/cpu)
.DEFAULT_GOAL := help
.PHONY: atlas drift size ceilings help setup course test test-fast nightly verify here browser hosted lab lint rooms lock outputs evidence tables gpu corpus runs-corpus planted site site-lock pack-test goldens faults pack release

help:
	@echo "make course    set up what is missing, then run the notebooks (results in .course/runs)"
	@echo "make test      set up what is missing, then run all tests"
	@echo "make test-fast while you change something: without what runs notebooks, labs, trainings or other eras"
	@echo "make verify    prove all labs in three states, and keep which passed in labs/verified.json"
	@echo "make nightly   run the notebooks again: with four other seeds, with other models, and by nbval"
	@echo "make faults    make faults happen for real: killed processes, full disks, bad networks (root for all)"
	@echo "make planted   plant known defects, one at a time: does its test find each? (ONLY=ID for one)"
	@echo "make goldens   what preflight and the guards answer, beside what was written down (PARTS=guards, ONLY=text)"
	@echo "make browser   try JupyterLab in a real browser (needs Chromium; pictures in .course/browser)"
	@echo "make hosted    open notebooks alone, as on Colab or Kaggle, in a stand-in for such a runtime (docs/hosted.md)"
	@echo "make lab       set up what the first notebook needs, then open JupyterLab; the rest is made meanwhile"
	@echo "make setup     set up only: .venv and the eras"
	@echo "make outputs   run the notebooks and store their outputs in them; NAME=02 for one"
	@echo "make evidence  run the benchmarks into evidence/cpu (ONLY=names, DEVICE=cuda, OUT=folder), and the tables from it"
	@echo "make runs-corpus  diagnose runs whose cause is known (a minute)"
	@echo "make corpus    judge a corpus of training scripts by failurelab preflight, with repairs tried (hours)"
	@echo "make gpu       all that has a GPU tier, on this card, into evidence/NAME (NAME=h100, PART=3, PYTHON=one with torch, SITES=stacks)"
	@echo "make tables    write the tables of README and pages, and the picture, from evidence/"
	@echo "make pack OUT=DIR  pack the course and its wheels for a room without a network (docs/offline.md)"
	@echo "make pack-test pack the course for a room without a network, install it with the network cut, use it"
	@echo "make site      build the course's pages from the stored outputs into .site/html; runs nothing"
	@echo "make slides    make slides from the notebooks' stored outputs into .slides; runs nothing; NAME=02 for one"
	@echo "make release   build both distributions, check them, and try the take-home wheel in each era; uploads nothing"
	@echo "make lint      ruff, the contracts of imports, what is imported against what is asked for, types, notebooks, ceilings"
	@echo "make size      each room beside its ceiling and its goal; make size REV='OLD NEW' for what became of them"
	@echo "make ceilings  lower tools/ceilings.toml to what the rooms hold now; to begin anew, remove that file first"
	@echo "make rooms     draw the rooms of the code into docs/architecture.md; no class name twice"
	@echo "make lock      compile eras/*.in into eras/*.txt, and docs/requirements.in"

# Does nothing, and needs no network, once all is there.
setup: here
	@PYTHONPATH=helpers $(PYTHON) -m failurelab_course.eras create $(ERAS)

here:
	@test -f eras/torch.txt || { echo "ERROR run make in the repository's root: eras/torch.txt is not here" >&2; exit 1; }

# What runs once the first notebook's eras are there, while the others are made.
course: here
	@PYTHONPATH=helpers $(PYTHON) -m failurelab_course.eras begin --finish $(BIN)/failurelab run

# One thread a process: as fast for small models, and two processes at once do not slow each other down. Two files of
# tests at a time, each in its order: a file's tests share what was run once. Files in their order too (tests/conftest.py).
# Where a stack cannot be made the other tests run all the same, and those that need it are told as ENVIRONMENT.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder --durations=25
test: here
	@status=0; $(MAKE) --no-print-directory setup || status=1; $(PYTEST) || status=$$?; exit $$status

# At most three minutes on two idle cores.
test-fast: setup
	@$(PYTEST) -m "not slow and not nightly"

# Hosted CI runs it by a schedule. A notebook is run by papermill in the test, and by nbval in the second command.
nightly: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m nightly
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --nbval-lax --nbval-current-env \
		--nbval-cell-timeout=900 --nbval-kernel-startup-timeout=180 notebooks

# make test proves only the labs that changed since this was written.
verify: setup
	@$(BIN)/failurelab verify --write

# Full disks are small file systems that are mounted: without root these are NOT RUN.
faults: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile tests/faults

# Two tests at a time. The tree is copied, and changed only there.
planted: setup
	@$(BIN)/python tools/planted.py $(addprefix --only ,$(ONLY))

# Two hours of a core for all of it: PARTS="guards labs", ONLY=text, OPTIONS="--once" or "--write".
goldens: setup
	@$(BIN)/python -m tools.goldens $(PARTS) $(addprefix --only ,$(ONLY)) $(OPTIONS)

# In an environment of its own, so that the course's locks hold no browser driver. Without a Chromium: exit status 3.
browser: setup .browser/bin/pytest
	@.browser/bin/python -m pytest --confcutdir=tests/browser tests/browser

.browser/bin/pytest: | setup
	@$(BIN)/uv venv -q --clear --python $(BIN)/python .browser && \
		UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}" $(BIN)/uv pip install -q --python .browser/bin/python \
		--require-hashes -r tests/browser/requirements.txt

# Resumable: what was judged is kept in .course/preflight_corpus; AGAIN=--again judges it anew.
corpus: setup
	@$(BIN)/python benchmarks/preflight_corpus.py --out $(EVIDENCE) $(AGAIN)

# Judges runs whose cause is known; HALF=fresh for those that no rule was written on, which are graded once.
runs-corpus: setup
	@$(BIN)/python benchmarks/diagnose_grading.py $(or $(HALF),first)

# Every failure in every release of trl and transformers: what evidence/atlas lacks, and the table and picture made of it.
# ONLY=trl-0.19.1,trl-1.16.0 for these, JOBS=1 for one at a time. It needs a package index.
atlas: setup
	@$(BIN)/python benchmarks/atlas/measure.py --only $(or $(ONLY),new) --jobs $(or $(JOBS),2)
	@$(BIN)/python benchmarks/atlas/summary.py

# Notebooks opened alone, in a stand-in for a hosted runtime; it needs a package index.
hosted: setup
	@$(BIN)/python benchmarks/hosted.py --out $(EVIDENCE) --add $(if $(NAME),--notebooks $(NAME))
	@$(MAKE) --no-print-directory tables

# What the newest releases, and trl's main branch, changed; status 1 for a silent failure that is new, for what denies
# the registry, and for a library's loss that differs where it did not. MAIN=FOLDER has the main branch of a git
# repository on this machine, as of its last commit.
drift: setup
	@$(BIN)/python benchmarks/atlas/drift.py --main $(MAIN); status=$$?; \
	$(BIN)/python benchmarks/known_gradients.py --parts drift && exit $$status

lab: here
	@PYTHONPATH=helpers $(PYTHON) -m failurelab_course.eras begin $(LAB)

# OPTIONS="--python 3.12 --glibc 28 --eras trl-0.14 --torch-index URL"
pack: setup
	@$(BIN)/python tools/pack.py $(or $(OUT),grpo-failure-lab-offline) $(OPTIONS)

# As root, with the network for packing; installing has none.
pack-test: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -rA tests/offline

# Nothing is uploaded. ERAS="today trl-0.14" for some eras only.
release: setup
	@$(BIN)/python tools/release.py --eras $(ERAS)

lint: setup
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/deptry helpers/failurelab_course benchmarks tools
	@$(BIN)/deptry helpers/failurelab helpers/failurelab_preflight --config helpers/pyproject.toml
	@$(BIN)/mypy
	@$(BIN)/python -m tools.notebook_lint
	@$(BIN)/python -m tools.badges --check
	@$(BIN)/python tools/size.py --check

# Standard library alone; any commit of this repository, without checking it out.
size: here
	@$(PYTHON) tools/size.py $(REV)

# A number that is above its ceiling stays: nothing is raised, and the exit status is 1.
ceilings: here
	@$(PYTHON) tools/size.py --lower

rooms: setup
	@$(BIN)/python tools/rooms.py

lock: site-lock
	@UV=$(BIN)/uv UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}" $(BIN)/python eras/compile.py

site-lock:
	@mkdir -p .site; { echo "# Made by make lock from docs/requirements.in."; UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}" \
	  $(BIN)/uv pip compile docs/requirements.in --universal --python-version 3.11 --no-header --no-annotate -q; } \
	  > .site/lock.txt && mv .site/lock.txt docs/requirements.txt

outputs: setup
	@$(BIN)/python -m tools.store_outputs $(NAME)
	@$(BIN)/python -m tools.notebook_lint $(NAME)

# Each writes its own file when it has run in all its eras; 4 says that it cannot run here, and fails nothing.
evidence: setup
	@status=0; for name in $(or $(ONLY),$(BENCHMARKS)); do \
	  $(BIN)/python benchmarks/$$name.py --device $(DEVICE) --out $(EVIDENCE) || test $$? = 4 || status=1; \
	done; exit $$status
	@$(MAKE) --no-print-directory tables

tables:
	@$(BIN)/python -m tools.tables

# Resumable, in parts of nine minutes. With PYTHON= nothing is installed, and what that Python lacks is NOT RUN.
gpu: $(if $(findstring command,$(origin PYTHON)),here,setup)
	@$(PYTHON) tools/gpu.py $(addprefix --name ,$(NAME)) $(addprefix --part ,$(PART)) $(addprefix --sites ,$(SITES))

# The site has an environment of its own, .site/env: neither .venv nor an era is needed, or changed. A warning of Sphinx,
# such as a link that leads nowhere, is an error. Nothing is kept from an earlier build.
site: .site/env/lock
	@rm -rf .site/source .site/html .site/doctrees && .site/env/bin/python tools/site_pages.py .site/source && \
	  .site/env/bin/sphinx-build -q -W --keep-going -c docs -d .site/doctrees .site/source .site/html && \
	  echo "site: open .site/html/index.html"

.site/env/lock: docs/requirements.txt
	@rm -rf .site/env && $(PYTHON) -m venv .site/env && .site/env/bin/pip install -q -r $< && cp $< $@

SLIDES ?= .slides
slides: setup
	@$(BIN)/jupyter nbconvert --to slides --output-dir $(SLIDES) --log-level ERROR \
		--SlidesExporter.exclude_input_prompt=True --SlidesExporter.exclude_output_prompt=True \
		notebooks/$(or $(NAME),[0-9])*.ipynb && echo "slides: open $(SLIDES)"
