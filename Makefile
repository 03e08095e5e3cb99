PYTHON ?= python3

train: .venv/installed
	.venv/bin/python train_ppo.py --config recipes/chain_sum.yaml

test: .venv/installed
	.venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests

bench: .venv/installed
	.venv/bin/python bench/run.py

.venv/installed: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet -r requirements.txt
	touch $@

.PHONY: train test bench
