#!/bin/bash
# gateway: gateway_gpt3_126m
#SBATCH --job-name=nemo-megatron-gateway_gpt3_126m
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/mount/results/gpt3_126m/jobs/001/log-gateway_gpt3_126m_%j.out
#SBATCH --signal=B:USR1@60
#SBATCH --time=1-00:00:00

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

# For a launcher that was killed before it could write the id, and as the time of this start.
echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}" > /mount/results/gpt3_126m/jobs/001/job_id || true

export PYTHONPATH=/opt/NeMo-Megatron-Launcher${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
export TRANSFORMERS_OFFLINE=1

# A time limit, a preemption or a person ends the server in order: it finishes its requests.
# The server runs in the background because only a shell that waits hears a signal.
signalled=
trap 'signalled=1; scancel --quiet --signal=TERM "$SLURM_JOB_ID" || true' USR1 TERM

# Step 1 of 1: run_gateway
srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --chdir=/mount/results/gpt3_126m/jobs/001 \
    python3 -m launcher_scripts.steps.run_gateway --settings /mount/results/gpt3_126m/jobs/001/gateway_gpt3_126m_hydra.yaml &
server=$!

# A signal interrupts the waiting, not the server.
while signalled= code=0; wait "$server" || code=$?; [ -n "$signalled" ]; do :; done
exit "$code"
