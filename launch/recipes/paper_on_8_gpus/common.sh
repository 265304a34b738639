# shellcheck shell=bash
# Sourced by the scripts beside it, which run one table of a paper each on a machine with 8 GPUs:
#
#     data=/data bash launch/recipes/paper_on_8_gpus/mcl_table3.sh
#
# They need a checkout, since the table is added to docs/pages/evidence/what-helps.md. The same command
# goes on where it was stopped. DRY_RUN=1 prints the plan of every run, with its GPU-hours, and the
# commands, and does nothing else: it needs neither data nor GPUs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
data=${data:-data}

# call COMMAND...: runs it, or only prints it.
call() {
    echo "+ ${*@Q}" >&2
    [[ -n ${DRY_RUN:-} ]] || "$@"
}

# run RECIPE SAMPLES OPTION...: a run on 8 GPUs. SAMPLES are those of its data, for the plan.
run() {
    local recipe=launch/recipes/$1.yaml samples=$2
    shift 2
    call launch/local.sh 8 run --config "$recipe" "$@"
    [[ -z ${DRY_RUN:-} ]] || python -m mclclip config --config "$recipe" --plan --nodes 1 \
        --gpus-per-node 8 --samples "$samples" "$@"
}

# table NAME ARM=RUN:ENCODER...: adds the figures to the page's table NAME.
table() {
    call python docs/what_helps.py "$@"
    call python docs/what_helps.py
}
