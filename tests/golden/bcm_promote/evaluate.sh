#!/bin/bash
# evaluate: evaluate_gpt3_126m
#SBATCH --job-name=nemo-megatron-evaluate_gpt3_126m
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/mount/results/jobs/evaluate/log-evaluate_gpt3_126m_%j.out
#SBATCH --time=2:00:00

# The first command that fails ends the job, and its exit code is the job's.
set -euo pipefail

export PYTHONPATH=/opt/NeMo-Megatron-Launcher
export PYTHONUNBUFFERED=1
export TRANSFORMERS_OFFLINE=1

# The server is a job of its own, which must run as long as it is measured.
server=$(cat /mount/results/jobs/deploy/job_id)
server_log=/mount/results/jobs/deploy/log-deploy_gpt3_126m_"$server".out
server_state() {
    local shown
    if shown=$(scontrol --oneliner show job "$server" 2>&1); then
        sed 's/.* JobState=\([A-Z_]*\).*/\1/' <<< "$shown"
    elif [[ $shown == *"Invalid job id"* ]]; then
        echo FORGOTTEN
    else
        echo UNKNOWN
    fi
}
signal_server() {
    if [ "$1" = KILL ]; then
        scancel --quiet "$server" || true
    else
        scancel --quiet --signal="$1" "$server" || true
    fi
}
living='^(RUNNING|PENDING|CONFIGURING|COMPLETING|SUSPENDED|REQUEUED|UNKNOWN)$'
server_lives() {
    server_state | grep -qE "$living"
}
server_ended() {
    server_state | grep -qvE "$living"
}
# What is said comes last, and below the client's own words where those are the reason.
explain() {
    if server_ended; then
        echo "the end of the server's log $server_log:"
        tail -n 20 "$server_log" | sed 's/^/  | /'
    fi
    echo "error: $1 (server: $(server_state | xargs); its log: $server_log)"
} >&2

# Run a command while the server runs; the server's end is the end of the command as well.
client=
beside_server() {
    local checked=$SECONDS code=0
    "$@" &
    client=$!
    while kill -0 "$client" 2> /dev/null; do
        if ((SECONDS - checked >= 5)); then
            checked=$SECONDS
            if server_ended && kill -0 "$client" 2> /dev/null; then
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
        exit "$code"
    fi
}

# At the end, whatever the reason: no client is left, and the server is stopped in order.
clean_up() {
    local code=$?
    trap '' USR1 TERM
    if [ -n "$client" ]; then kill "$client" 2> /dev/null || true; fi
    # After GO the server goes on, and its address is published.
    if [ "$code" = 0 ]; then return; fi
    signal_server TERM
    local deadline=$((SECONDS + 50))
    while server_lives && ((SECONDS < deadline)); do
        sleep 0.5
    done
    if server_lives; then signal_server KILL; fi
}
trap clean_up EXIT
trap 'echo "error: the time limit or a preemption ends this job" >&2; exit 3' USR1
trap 'exit 143' TERM

# Step 1 of 2: measure_accuracy
beside_server srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --chdir=/mount/results/jobs/evaluate \
    python3 -m launcher_scripts.steps.measure_accuracy --settings /mount/results/jobs/evaluate/evaluate_gpt3_126m_hydra.yaml

# Step 2 of 2: judge
beside_server srun \
    --nodes=1 --ntasks=1 --ntasks-per-node=1 \
    --kill-on-bad-exit=1 --overlap --mpi=none \
    --chdir=/mount/results/jobs/evaluate \
    python3 -m launcher_scripts.steps.judge --settings /mount/results/jobs/evaluate/evaluate_gpt3_126m_hydra.yaml
