#!/usr/bin/env bash
# MCL's Table 3 on MMVP, with the control that the paper does not have: OpenAI's ViT-L-14 and RN50, three
# stages of 20 and 10 epochs on CC12M. About 1,010 GPU-hours of an A100 (964 and 42, by the plan, at 30 % of
# its peak), evaluation and k-means not counted.
#
# $data holds cc12m/*.tar, MMVP_VLM and coco; common.sh says how this is started.
# shellcheck source=launch/recipes/paper_on_8_gpus/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

arms=()
for tower in vitl14 rn50; do
    folder=runs/mcl_table3/$tower
    run cc12m_${tower}_paper 10968539 run_dir="$folder" 'controls=[ungrouped]' \
        data.sources.cc12m.shards="$data/cc12m/*.tar" eval.suite.mmvp.path="$data/MMVP_VLM" \
        eval.suite.coco.path="$data/coco"
    for encoder in stage_0 stage_1 stage_2 stage_3 concat_raw soup_uniform \
        control_ungrouped_concat_raw control_ungrouped_soup_uniform; do
        arms+=("$tower $encoder=$folder:$encoder")
    done
done
table mcl_table3 "${arms[@]}"
