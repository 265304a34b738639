#!/usr/bin/env bash
# Prints one run of a sweep file as options of mclclip (use bash: other shells may not split $options):
#
#     launch/sweep.sh FILE           # the runs by number
#     launch/sweep.sh FILE NUMBER    # run_dir=... and the options of that line
#
#     options=$(launch/sweep.sh FILE NUMBER) && mclclip run --config RECIPE $options
#
# Assign the options to a variable first, as here. The exit code of a $(...) within a command is
# lost, so after an error the command would run the plain recipe without options.
#
# A line of FILE has the run's name, options key.path=value without spaces, and after ' #' a
# comment. The run directory is RUNS/NAME; the variable RUNS is by default runs/ and the name of the
# file.
#
# The variable SHARED names a run directory whose parts are linked into the new one: its index,
# stage-0 export and embeddings, and its clusters unless the line has options of cluster, which must
# be finished, since a run would write to an unfinished one through the link; and the training of stage
# 0, its text embeddings, image rows and text rows, if they are finished.
set -euo pipefail

fail() {
    echo "${0##*/}: $*" >&2
    exit 2
}

# read_runs FILE: checks all lines and fills the arrays `names` and `options`.
read_runs() {
    local line lines name words word
    names=() options=()
    mapfile -t lines < <(sed -E 's/(^|[[:space:]])#.*//; s/\r$//' "$1")
    for line in "${lines[@]}"; do
        read -ra words <<<"$line"
        [[ ${#words[@]} -gt 0 ]] || continue
        name=${words[0]} words=("${words[@]:1}")
        [[ $name =~ ^[A-Za-z0-9_-][A-Za-z0-9._-]*$ ]] ||
            fail "$1: a run is named '$name': wanted letters, digits, and . _ - (no . first)"
        [[ " ${names[*]} " != *" $name "* ]] ||
            fail "$1: two runs are named '$name': they would share a run directory"
        for word in "${words[@]}"; do
            [[ $word =~ ^[A-Za-z_][A-Za-z0-9_.]*= ]] ||
                fail "$1: run '$name' has '$word': wanted key.path=value without spaces"
        done
        names+=("$name")
        options+=("${words[*]}")
    done
    [[ ${#names[@]} -gt 0 ]] || fail "$1 has no runs"
}

# share RUN_DIR OPTIONS: checks all parts of SHARED, then links them into RUN_DIR.
share() {
    local from run_dir=$1 part verb links=()
    [[ -d $SHARED ]] || fail "SHARED=$SHARED is no run directory"
    from=$(realpath "$SHARED")
    while read -r part verb; do
        if [[ -L $run_dir/$part && ! -f $run_dir/$part/manifest.json ]]; then
            fail "$run_dir/$part is a link to $(readlink "$run_dir/$part"), and nothing finished" \
                "lies there: remove the link"
        elif [[ -e $run_dir/$part ]]; then
            continue # linked by an earlier call, or made by the run itself
        elif [[ -f $from/$part/manifest.json ]]; then
            links+=("$part")
        elif [[ $verb != - ]]; then
            fail "SHARED=$SHARED has no finished $part: 'mclclip $verb' makes it"
        fi
    done < <(parts "$2")
    mkdir -p "$run_dir/stage_0"
    for part in "${links[@]}"; do
        ln -s "$from/$part" "$run_dir/$part"
    done
}

# parts OPTIONS: prints each part that a run with these options can share, and the verb that makes
# it (-: the part is optional).
parts() {
    echo "index index"
    echo "stage_0/export export --stage 0"
    echo "stage_0/embeddings embed --stage 0"
    printf '%s -\n' stage_0/{train,text_embeddings,image_rows} text_rows
    [[ " $1" == *" cluster"[.=]* ]] || echo "stage_0/clusters cluster --stage 0"
}

[[ $# -ge 1 && -f $1 ]] || fail "give a sweep file and the number of a run"
read_runs "$1"
if [[ $# -eq 1 ]]; then
    for number in "${!names[@]}"; do
        printf '%4d  %s\n' "$((number + 1))" "${names[number]}  ${options[number]}"
    done
    exit
fi
number=$2
[[ $number =~ ^0*([1-9][0-9]{0,5})$ && ${BASH_REMATCH[1]} -le ${#names[@]} ]] ||
    fail "no run $number in $1: wanted 1 to ${#names[@]}"
number=$((BASH_REMATCH[1] - 1))
stem=${1##*/}
run_dir=${RUNS:-runs/${stem%.*}}/${names[number]}
[[ $run_dir != *[[:space:]]* ]] || fail "the run directory '$run_dir' has spaces: set RUNS"
[[ -z ${SHARED:-} ]] || share "$run_dir" "${options[number]}"
echo "run_dir=$run_dir${options[number]:+ ${options[number]}}"
