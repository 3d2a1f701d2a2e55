#!/bin/bash
# gateway: gateway_gpt3_126m
#SBATCH --job-name=nemo-megatron-gateway_gpt3_126m
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/mount/results/jobs/gateway/log-gateway_gpt3_126m_%j.out
#SBATCH --signal=B:USR1@120
#SBATCH --time=1-00:00:00

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

# For a launcher that was killed before it could write the id, and as the time of this start.
echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}" > /mount/results/jobs/gateway/job_id || true

export PYTHONPATH=/opt/NeMo-Megatron-Launcher
export PYTHONUNBUFFERED=1
export TRANSFORMERS_OFFLINE=1

# A time limit, a preemption or a person ends the server in order: it finishes its requests.
# The server runs in the background because only a shell that waits hears a signal.
signalled=
trap 'signalled=1; scancel --quiet --signal=TERM "$SLURM_JOB_ID" || true' USR1 TERM

# The server ends with the evaluation that it was started for, also if that was cancelled or killed.
client_ended() {
    local shown client
    client=$(cat /mount/results/jobs/gateway/client_job_id 2> /dev/null) || return
    shown=$(scontrol show job "$client" 2>&1) || {
        [[ $shown == *"Invalid job id"* ]]
        return
    }
    ! grep -qE '^ *JobState=(COMPLETING|CONFIGURING|PENDING|REQUEUED|REQUEUE_HOLD|RESIZING|RUNNING|SIGNALING|STAGE_OUT|STOPPED|SUSPENDED)\b' <<< "$shown"
}
watch_client() {
    while :; do
        if client_ended; then
            echo "the evaluation has ended: the server is stopped" >&2
            kill -USR1 $$
        fi
        read -rt 20 <> <(:) || true  # a pause without a process
    done
}
if client_ended; then
    echo "error: the evaluation has ended: the server is not started" >&2
    exit 3
fi
watch_client &
watcher=$!
trap 'kill "$watcher" 2> /dev/null || true' EXIT

# Step 1 of 1: run_gateway
srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --container-image=/images/inference.sqsh \
    --container-mounts=/opt/NeMo-Megatron-Launcher:/opt/NeMo-Megatron-Launcher,/mount/results:/mount/results \
    --container-workdir=/mount/results/jobs/gateway \
    --no-container-mount-home \
    --container-env=PYTHONPATH,PYTHONUNBUFFERED,TRANSFORMERS_OFFLINE \
    sh -c '
set -eu
cd /mount/results/jobs/gateway
python=python3
command -v "$python" > /dev/null || {
    echo "error: the container has no $python; got PATH=$PATH; change cluster.python (its path in the image)" >&2
    exit 127
}
exec python3 -m launcher_scripts.steps.run_gateway --settings /mount/results/jobs/gateway/gateway_gpt3_126m_hydra.yaml
' &
server=$!

# A signal interrupts the waiting, not the server.
while signalled= code=0; wait "$server" || code=$?; [ -n "$signalled" ]; do :; done
exit "$code"
