#!/bin/bash
# deploy: deploy $(touch x) "it's" ü
#SBATCH --account=4711
#SBATCH --comment='it is "#1"'
#SBATCH --cpus-per-task=9
#SBATCH --gpus-per-node=8
#SBATCH --job-name='nemo-megatron-deploy $(touch x) "it'"'"'s" ü'
#SBATCH --mem=0
#SBATCH --nodelist='n[1-2]'
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output='/mount/results/gpt3_126m/jobs/001/log-deploy $(touch x) "it'"'"'s" ü_%j.out'
#SBATCH --partition=luna
#SBATCH --qos=high
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --time=1-00:00:00

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

# For a launcher that was killed before it could write the id, and as the time of this start.
echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}" > /mount/results/gpt3_126m/jobs/001/job_id || true

export PYTHONPATH=/opt/NeMo-Megatron-Launcher
export PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR=/mount/results/gpt3_126m/deploy_tp16_pp1_auto_auto/triton_cache
export NCCL_DEBUG='INFO; rm -rf $HOME'
export TRANSFORMERS_OFFLINE=1

# A time limit, a preemption or a person ends the server in order: it finishes its requests.
# The server runs in the background because only a shell that waits hears a signal.
signalled=
trap 'signalled=1; scancel --quiet --signal=TERM "$SLURM_JOB_ID" || true' USR1 TERM

# Step 1 of 1: start_server
srun \
    --nodes=2 --ntasks=2 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=pmix --label \
    --cpus-per-task=9 \
    --container-image='/images/launcher inference.sqsh' \
    --container-mounts=/models/gpt:/models:ro,/lustre:/lustre,/opt/NeMo-Megatron-Launcher:/opt/NeMo-Megatron-Launcher,/mount/results:/mount/results \
    --container-workdir=/mount/results/gpt3_126m/jobs/001 \
    --no-container-mount-home \
    --container-env=PYTHONPATH,PYTHONUNBUFFERED,TRITON_CACHE_DIR,NCCL_DEBUG,TRANSFORMERS_OFFLINE \
    --container-writable \
    sh -c '
set -eu
cd /mount/results/gpt3_126m/jobs/001
python=python3
command -v "$python" > /dev/null || {
    echo "error: the container has no $python; got PATH=$PATH; change cluster.python (its path in the image)" >&2
    exit 127
}
exec python3 -m launcher_scripts.steps.start_server --settings '"'"'/mount/results/gpt3_126m/jobs/001/deploy $(touch x) "it'"'"'"'"'"'"'"'"'s" ü_hydra.yaml'"'"'
' &
server=$!

# A signal interrupts the waiting, not the server.
while signalled= code=0; wait "$server" || code=$?; [ -n "$signalled" ]; do :; done
exit "$code"
