#!/bin/bash
#SBATCH --signal=B:USR1@120
#SBATCH --no-kill
#SBATCH --job-name=a|b
#SBATCH --comment="it is \"odd\" $HOME \\ "
#SBATCH --nice
#SBATCH --mail-user=a@b.c
#SBATCH --ntasks-per-node=1

# The key of this job's processes. It is passed on in the environment, never on a command line.
RLMESH_KEY=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n')
export RLMESH_KEY

# The first node runs this script. When that node is lost, a task on another node takes this action.
export RLMESH_FIRST_NODE_LOST=cancel

srun --kill-on-bad-exit=0 --wait=0 --no-kill rlmesh launch 'my job.py' -- 'x y' '$z' &
step=$!

# Slurm signals this shell before the time limit (--signal). All ranks then stop at the same step.
trap 'kill -USR1 "$step"' USR1
trap 'kill -TERM "$step"' TERM
code=0
while wait "$step"; code=$?; kill -0 "$step" 2>/dev/null; do :; done
exit "$code"
