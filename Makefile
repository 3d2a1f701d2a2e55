# make quickstart   set up everything and run the main job on a real model
# make check        set up everything and run what CI runs: format, lint, types, tests
# make setup        .venv in this checkout (make setup TORCH=... for a machine's own torch)
# make cluster      start a two-node Slurm on this machine, for tests and trials (NODES=4: of four
#                   nodes; ACCOUNTING=1: with slurmdbd); make cluster-stop ends it
# make image-check  build the image for jobs as a folder, and run the whole job in it (root)
# make sbom         write results/sbom.json: every package of .venv, as CycloneDX
# make licences     bring requirements/licences.csv up to date with .venv
# make format       bring the code into the format that make check asks for

BIN = .venv/bin
CLUSTER = $(CURDIR)/results/cluster

.PHONY: setup check-setup quickstart check cluster cluster-stop image-check sbom licences format clean

setup:
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" HASHES="$(HASHES)" sh requirements/install.sh

check-setup:
	@PYTHON="$(PYTHON)" TORCH="$(TORCH)" HASHES="$(HASHES)" sh requirements/install.sh check

quickstart: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" exec $(BIN)/python3 -m launcher_scripts.steps.quickstart

# Tests start a thousand processes. Where bytecode may not be written, each compiles all modules anew.
check: check-setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python3 -m mypy
	PATH="$(CURDIR)/$(BIN):$$PATH" PYTHONDONTWRITEBYTECODE= \
		$(BIN)/python3 -m pytest -m "not slow and not gpu" \
		-n 4 --dist loadfile --timeout 900

cluster:
	@$(or $(PYTHON),python3) -m tests.slurm.cluster start --root $(CLUSTER) \
		--nodes $(or $(NODES),2) $(if $(ACCOUNTING),--accounting)

cluster-stop:
	@$(or $(PYTHON),python3) -m tests.slurm.cluster stop --root $(CLUSTER)

image-check: check-setup
	@$(BIN)/python3 requirements/image/check.py --torch "$(TORCH_WHEEL)"

sbom: check-setup
	@mkdir -p results
	@$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-file results/sbom.json $(BIN)/python3
	@echo results/sbom.json

# Packages of other Pythons, and names that a package's metadata lack, keep their lines.
licences: check-setup
	@{ cat requirements/licences.csv; \
		$(BIN)/pip-licenses --with-system --no-version --format=csv | tail -n +2 | \
		sed -E ':a; s/^("[^",]*)[_.]/\1-/; ta; s/^"[^"]*"/\L&/'; } | \
		sort -s -u -t, -k1,1 >requirements/licences.csv.partial
	@mv requirements/licences.csv.partial requirements/licences.csv

format: check-setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv results outputs .mypy_cache .ruff_cache .pytest_cache .hypothesis
