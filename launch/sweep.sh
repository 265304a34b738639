#!/usr/bin/env bash
# One run of a sweep file, as options of mclclip:
#
#     launch/sweep.sh FILE           # the runs by number
#     launch/sweep.sh FILE NUMBER    # run_dir=... and the options of that line
#
# A line of FILE is a name and key.path=value options; the run directory is RUNS/NAME (RUNS: runs/
# and the name of the file). SHARED names a run directory whose index, stage-0 export and embeddings
# are linked into the new one, and its clusters too, unless the line has options of cluster.
set -euo pipefail

fail() {
    echo "${0##*/}: $1" >&2
    exit 2
}

share() {
    local from part run_dir=$1 parts=(index stage_0/export stage_0/embeddings stage_0/text_embeddings)
    [[ $2 == *cluster.* ]] || parts+=(stage_0/clusters)
    from=$(realpath "$SHARED")
    mkdir -p "$run_dir/stage_0"
    for part in "${parts[@]}"; do
        # What lies there already stays: a run that goes on, or one that made its own.
        [[ ! -e $from/$part || -e $run_dir/$part ]] || ln -s "$from/$part" "$run_dir/$part"
    done
}

[[ $# -ge 1 && -f $1 ]] || fail "give a sweep file and the number of a run"
mapfile -t lines < <(grep -vE '^[[:space:]]*(#|$)' "$1")
if [[ $# -eq 1 ]]; then
    printf '%s\n' "${lines[@]}" | cat -n
    exit
fi
[[ $2 =~ ^[0-9]+$ && $2 -ge 1 && $2 -le ${#lines[@]} ]] ||
    fail "no run $2 in $1: wanted 1 to ${#lines[@]}"
read -r name options <<< "${lines[$2 - 1]}"
stem=$(basename "$1")
run_dir=${RUNS:-runs/${stem%.*}}/$name
if [[ -n ${SHARED:-} ]]; then
    [[ -d $SHARED ]] || fail "SHARED=$SHARED is no run directory"
    share "$run_dir" "$options"
fi
echo "run_dir=$run_dir $options"
