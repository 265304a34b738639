#!/usr/bin/env bash
# MLCD's Table 6, labels per sample l from 1 to 32: a ViT-B-32 from scratch, five epochs of LAION-400M with a
# million classes, judged by a linear probe on ImageNet. About 1,240 GPU-hours of an A100 (192 to embed once,
# and 175 a run, by the plan, at 30 % of its peak), evaluation and k-means not counted.
#
# $data holds laion400m/*.tar and imagenet; common.sh says how this is started.
# shellcheck source=launch/recipes/paper_on_8_gpus/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

file=launch/recipes/mlcd_table6.sweep
first=runs/mlcd_labels/k_1m-r_0.1-l_8 # l = 8, whose index, embeddings and clusters serve all
arms=()
for number in 4 $(launch/sweep.sh "$file" | awk '$2 ~ /^l_/ {print $1}'); do
    shared=$first
    [[ -z ${DRY_RUN:-} && $number != 4 ]] || shared=
    words=$(RUNS=runs/mlcd_labels SHARED=$shared launch/sweep.sh "$file" "$number")
    read -ra options <<<"$words"
    run mlcd_ablation_vitb32 400000000 "${options[@]}" \
        data.sources.laion.shards="$data/laion400m/*.tar" eval.suite.imagenet.path="$data/imagenet"
    folder=${options[0]#run_dir=}
    arms+=("l = ${folder##*l_}=$folder:stage_1")
done
table mlcd_labels "${arms[@]}"
