#!/bin/bash
# deploy: deploy_gpt3_126m
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --job-name=nemo-megatron-deploy_gpt3_126m
#SBATCH --mem=0
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/mount/results/jobs/deploy/log-deploy_gpt3_126m_%j.out
#SBATCH --signal=B:USR1@60
#SBATCH --time=1-00:00:00

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

# For a launcher that was killed before it could write the id, and as the time of this start.
echo "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}" > /mount/results/jobs/deploy/job_id || true

export PYTHONPATH=/opt/NeMo-Megatron-Launcher${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1
export TRANSFORMERS_OFFLINE=1

# The server is a step of this job; the result of the client is the result of the job.
server_log=/mount/results/jobs/deploy/server-deploy_gpt3_126m_"$SLURM_JOB_ID".out
server_state() {
    if kill -0 "$server" 2> /dev/null; then echo RUNNING; else echo ENDED; fi
}
signal_server() {
    if [ "$1" = KILL ]; then
        # A signal to srun kills its tasks.
        kill "$server" 2> /dev/null || true
    else
        # To every step: which of them is the server's is not known from their numbers.
        scancel --quiet --signal="$1" "$SLURM_JOB_ID" || true
    fi
}
living='^(COMPLETING|CONFIGURING|PENDING|REQUEUED|REQUEUE_HOLD|RESIZING|RUNNING|SIGNALING|STAGE_OUT|STOPPED|SUSPENDED|UNKNOWN)$'
server_lives() {
    server_state | grep -qE "$living"
}
server_ended() {
    server_state | grep -qvE "$living"
}
# A handler runs to its end: none of its commands decides the exit code.
stop_client() {
    set +e
    if [ -n "$client" ]; then
        kill "$client" 2> /dev/null
        wait "$client"
    fi
    client=
}
# Print why the job fails, as its last words: below those of the client where it has failed.
explain() {
    set +e
    local log
    if server_ended; then
        for log in "$server_log"; do
            if [ -e "$log" ]; then
                echo "the end of the server's log $log:"
                tail -n 20 "$log" | sed 's/^/  | /'
            else
                echo "the server has not started: there is no log $log"
            fi
        done
    fi
    echo "error: $1 (server: $(echo $(server_state)); its log: $server_log)"
} >&2
# True if this run of the job has reached a verdict: the exit codes 1 and 2 of a program that
# failed are none.
has_verdict() {
    [ /mount/results/verdict.json -nt /mount/results/jobs/deploy/job_id ]
}

# Run a command while the server runs; the server's end is the end of the command as well.
client=
beside_server() {
    local checked=$SECONDS code=0
    if server_ended; then
        explain "the server ended before the evaluation started"
        exit 3
    fi
    "$@" &
    client=$!
    while kill -0 "$client" 2> /dev/null; do
        if ((SECONDS - checked >= 1)); then
            checked=$SECONDS
            if server_ended && kill -0 "$client" 2> /dev/null; then
                stop_client
                explain "the server ended before the evaluation did"
                exit 3
            fi
        fi
        sleep 0.2
    done
    wait "$client" || code=$?
    client=
    if [ "$code" != 0 ]; then
        explain "the evaluation ended with exit code $code"
        if ((code <= 2)) && ! has_verdict; then
            echo "error: it reached no verdict" >&2
            exit 3
        fi
        exit "$code"
    fi
}

# At the end, whatever the reason: no client is left, and the server is stopped in order.
clean_up() {
    set +e
    trap '' USR1 TERM
    if [ -n "$client" ]; then kill "$client" 2> /dev/null; fi
    signal_server TERM
    local deadline=$((SECONDS + 50))
    while server_lives && ((SECONDS < deadline)); do
        sleep 0.2
    done
    if server_lives; then signal_server KILL; fi
}
trap clean_up EXIT
trap 'echo "error: the time limit or a preemption ends this job" >&2; exit 3' USR1
trap 'exit 143' TERM

# The server
srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --gpus-per-node=2 \
    --output=/mount/results/jobs/deploy/server-deploy_gpt3_126m_%j.out --open-mode=append \
    --chdir=/mount/results/jobs/deploy \
    python3 -m launcher_scripts.steps.start_server --settings /mount/results/jobs/deploy/deploy_gpt3_126m_hydra.yaml &
server=$!

# Step 1 of 3: measure_accuracy
beside_server srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --chdir=/mount/results/jobs/evaluate \
    python3 -m launcher_scripts.steps.measure_accuracy --settings /mount/results/jobs/evaluate/evaluate_gpt3_126m_hydra.yaml

# Step 2 of 3: measure_speed
beside_server srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --chdir=/mount/results/jobs/evaluate \
    python3 -m launcher_scripts.steps.measure_speed --settings /mount/results/jobs/evaluate/evaluate_gpt3_126m_hydra.yaml

# Step 3 of 3: judge
beside_server srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --chdir=/mount/results/jobs/evaluate \
    python3 -m launcher_scripts.steps.judge --settings /mount/results/jobs/evaluate/evaluate_gpt3_126m_hydra.yaml
