#!/bin/bash
# evaluate: evaluate_gpt3_126m

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

export PYTHONPATH=/opt/NeMo-Megatron-Launcher${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
export TRANSFORMERS_OFFLINE=1
cd /mount/results/gpt3_126m/jobs/001

# Step 1 of 3: measure_accuracy
python3 -m launcher_scripts.steps.measure_accuracy --settings /mount/results/gpt3_126m/jobs/001/evaluate_gpt3_126m_hydra.yaml

# Step 2 of 3: measure_speed
python3 -m launcher_scripts.steps.measure_speed --settings /mount/results/gpt3_126m/jobs/001/evaluate_gpt3_126m_hydra.yaml

# Step 3 of 3: judge
exec python3 -m launcher_scripts.steps.judge --settings /mount/results/gpt3_126m/jobs/001/evaluate_gpt3_126m_hydra.yaml
