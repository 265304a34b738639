#!/usr/bin/env bash
# CIFAR-MNIST of MCL's Tables 2 and 4 at the paper's size, three temperatures and three seeds, with the seed
# ensemble: a ResNet-18, 200 epochs a stage. About 9 GPU-hours of an A100 (1 a run, by the plan, at 30 %
# of its peak), evaluation not counted.
#
# $data holds cifar and mnist, the files that `mclclip make-dataset cifar_mnist` reads; common.sh says how
# this is started.
# shellcheck source=launch/recipes/paper_on_8_gpus/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pictures=$data/cifar_mnist
call python -m mclclip make-dataset cifar_mnist --out "$pictures" --source "cifar10=$data/cifar" \
    --source "mnist=$data/mnist"
arms=()
for temperature in 0.1 0.25 0.5; do
    for seed in 1 2 3; do
        folder=runs/cifar_mnist_paper/tau_$temperature/seed_$seed
        run cifar_mnist_paper 50000 run_dir="$folder" seed="$seed" \
            data.sources.pictures.shards="$pictures/train/*.tar" eval.suite.features.path="$pictures" \
            base.objective.temperature="$temperature" train.objective.temperature="$temperature"
        arms+=("SimCLR, tau $temperature=$folder:stage_0" "MCL, tau $temperature=$folder:concat_raw"
            "seed ensemble, tau $temperature=$folder:control_ungrouped_concat_raw")
    done
done
table cifar_mnist_paper "${arms[@]}"
