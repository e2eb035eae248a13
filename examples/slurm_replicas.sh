#!/bin/bash
# One replica per element of a job array; each replica is --ntasks processes (ranks of its mesh). Submit it in this repository:
#
#   helixrt serve --replicas 2 --dp-shard 2 --host ADDRESS --storage /shared/runs > /shared/runs/variables     # on one machine
#   sbatch examples/slurm_replicas.sh
#
# VARIABLES names another file than /shared/runs/variables. A lost process ends its replica; the loop starts it again. --requeue
# does so when its machine was lost. A server that was lost is started again with --resume latest and the same file. For more replicas change --array, `replicas` in the program, and --replicas of the server.
#SBATCH --job-name=helixrt
#SBATCH --array=0-1
#SBATCH --ntasks=2
#SBATCH --cpus-per-task=4
#SBATCH --requeue
#SBATCH --open-mode=append

set -u
export HELIXRT_REPLICA=$SLURM_ARRAY_TASK_ID
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK

for attempt in {1..200}; do # as long as the server cannot be reached, one takes a minute
    # HELIXRT_STORE and HELIXRT_SECRET_FILE: a server that was started again has printed others.
    source <(grep -o 'export .*' "${VARIABLES:-/shared/runs/variables}" | grep -v HELIXRT_REPLICA)
    # srun does not take --cpus-per-task from the job (since Slurm 22.05).
    if srun --ntasks="$SLURM_NTASKS" --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 python examples/hsdp.py "$@"; then
        exit 0
    fi
    echo "replica $HELIXRT_REPLICA: attempt $attempt has ended with an error" >&2
    sleep 10
done
exit 1
