#!/bin/bash
#SBATCH --job-name=job
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --time=30
#SBATCH --signal=B:USR1@300
#SBATCH --ntasks-per-node=1

# The key of this job's processes. It is passed on in the environment, never on a command line.
RLMESH_KEY=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
export RLMESH_KEY

# The first node runs this script. When that node is lost, a task on another node takes this action.
export RLMESH_FIRST_NODE_LOST=requeue

srun --kill-on-bad-exit=0 --wait=0 --no-kill rlmesh launch --run-dir runs/long --grace 60 job.py -- --lr 1e-3 &
step=$!

# Slurm signals this shell before the time limit (--signal). All ranks then stop at the same step.
trap 'kill -USR1 "$step"' USR1
trap 'kill -TERM "$step"' TERM
code=0
while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done

# 75: stopped with a checkpoint before its time limit, or because a node was lost. A cancelled job is not running
# any more. The number of an array's last element is also the whole array's, so elements are named ARRAY_INDEX; of a
# heterogeneous job all components are listed.
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
if [ "$code" -eq 75 ] && [ "$(squeue -h -j "$job" -o %T | sort -u)" = RUNNING ]; then
  scontrol requeue "$job"
fi
exit "$code"
