#!/bin/bash
# watch: watch_gpt3_126m

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

export PYTHONPATH=/opt/NeMo-Megatron-Launcher${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
export TRANSFORMERS_OFFLINE=1
cd /mount/results/gpt3_126m/jobs/001

# Step 1 of 1: watch
exec python3 -m launcher_scripts.steps.watch --settings /mount/results/gpt3_126m/jobs/001/watch_gpt3_126m_hydra.yaml
