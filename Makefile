# Short names for the scripts, which work without make too.
SHELL := /bin/bash
.PHONY: setup checks test quickstart format

setup:
	./scripts/setup.sh

checks:
	./scripts/test.sh --checks

test:
	./scripts/test.sh

quickstart:
	./scripts/quickstart.sh

format:
	. scripts/setup.sh && set_up dev "then formatting" && ruff format . && ruff check --fix .
