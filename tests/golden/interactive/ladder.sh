#!/bin/bash
# ladder: ladder_gpt3_126m

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

export PYTHONPATH=/opt/NeMo-Megatron-Launcher${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
export TRANSFORMERS_OFFLINE=1
cd /mount/results/jobs/ladder

# Step 1 of 1: write_ladder
exec python3 -m launcher_scripts.steps.write_ladder --settings /mount/results/jobs/ladder/ladder_gpt3_126m_hydra.yaml
