#!/bin/bash
# export: export_gpt3_126m

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

export PYTHONPATH=/opt/NeMo-Megatron-Launcher${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
export TRANSFORMERS_OFFLINE=1
cd /mount/results/gpt3_126m/jobs/001

# Step 1 of 2: convert_checkpoint
python3 -m launcher_scripts.steps.convert_checkpoint --settings /mount/results/gpt3_126m/jobs/001/export_gpt3_126m_hydra.yaml

# Step 2 of 2: write_model_repository
exec python3 -m launcher_scripts.steps.write_model_repository --settings /mount/results/gpt3_126m/jobs/001/export_gpt3_126m_hydra.yaml
