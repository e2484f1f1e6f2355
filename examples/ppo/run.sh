#!/usr/bin/env bash
# Run the job with a live view; arguments go to main.py: ./run.sh --steps 20 --seed 1
set -euo pipefail
exec rlmesh launch "$(dirname "${BASH_SOURCE[0]}")/main.py" -- --job_name demo "$@"
