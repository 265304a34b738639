#!/usr/bin/env bash
# Runs mclclip on this machine under torchrun, with one rank per GPU, or one rank without a GPU:
#
#     launch/local.sh run --config launch/recipes/demo.yaml key=value ...
#     launch/local.sh 4 train --stage 1 --config ...      # on 4 ranks; or NPROC_PER_NODE=4
#
# On SIGUSR1 or SIGTERM to this script the run saves and ends with 85; the same command resumes it.
# launch/common.sh lists the other exit codes. The variable PYTHON names another interpreter.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

if [[ ${1:-} =~ ^[0-9]+$ ]]; then
    NPROC_PER_NODE=$1
    shift
fi
launch "${NPROC_PER_NODE:-$(count_devices)}" --standalone -- "$@"
