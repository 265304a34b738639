#!/usr/bin/env bash
# What a GPU is wanted for, in order of worth: steps of at most nine minutes, independent of each other.
#
#   tests/gpu/queue.sh DIR            every step that has no DIR/STEP.json yet
#   tests/gpu/queue.sh DIR --next     the first of them alone
#   tests/gpu/queue.sh DIR --list     what there is, and what is done
#   tests/gpu/queue.sh DIR --tiny     the same at small sizes on the CPU, with its files in DIR/tiny
#
# Each leaves its figures as DIR/STEP.json and its output as DIR/STEP.log. A step that fails leaves its
# log alone, and counts as open. Steps beside others' code want what README.md says. `papers`, and
# then its control, train on CIFAR-10 and MNIST, of which CIFAR10 and MNIST name the folders; one call
# is a piece, whose files lie below DIR/papers.
set -u
cd "$(dirname "$0")/../.." || exit 1
[ $# -ge 1 ] && [ "${1#-}" = "$1" ] || { sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 2; }
out=$(realpath -m "$1") next='' list='' device=cuda limit=530
shift
for word; do
  case $word in
    --next) next=1 ;;
    --list) list=1 ;;
    --tiny) device=cpu limit=3600 out=$out/tiny ;;
    *) echo "unknown: $word" >&2; exit 2 ;;
  esac
done
mkdir -p "$out"
export MCLCLIP_GPU_DEVICE=$device
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=${PYTHON:-.venv/bin/python}
status=0

# step NAME COMMAND...: the command writes DIR/NAME.json, or its output becomes that
step() {
  local name=$1 began=$SECONDS code
  shift
  if [ -e "$out/$name.json" ]; then
    [ -z "$list" ] || echo "done  $name"
    return
  fi
  if [ -n "$list" ]; then echo "open  $name"; return; fi
  "$@" > "$out/$name.log" 2>&1
  code=$?
  if [ $code = 0 ] && [ ! -e "$out/$name.json" ]; then
    "$python" -c 'import json, sys; json.dump({"output": sys.stdin.read().splitlines()}, sys.stdout, indent=1)' \
      < "$out/$name.log" > "$out/$name.json"
  elif [ $code != 0 ]; then
    rm -f "$out/$name.json" # of a part
    [ $code = 85 ] || status=1
  fi
  echo "$name: exit code $code after $((SECONDS - began)) s; see $out/$name.log"
  [ -z "$next" ] || exit $status
}

figures() {
  local name=$1
  shift
  step "$name" "$python" -m tests.gpu.bench --limit-s "$limit" --json "$out/$name.json" --only "$@"
}

step checks "$python" -m tests.gpu --limit-s "$limit" --only doctor 'kill -9' 'class centers' 'contrastive' 'pinned memory' \
  'embed, cluster, eval'
figures heads head attention 'near copies'
figures beside_vit_l 'in memory: ViT-L-14'
figures beside_vit_b 'in memory: ViT-B-32'
if [ -d .peers/webdataset ]; then
  figures shards_vit_l 'from shards: ViT-L-14'
  figures shards_vit_b 'from shards: ViT-B-32'
elif [ -n "$list" ]; then
  echo "open  shards_vit_l, shards_vit_b (make peers, or see README.md)"
fi
if [ -n "${PARTIAL_FC:-}" ]; then
  figures partial_fc PartialFC
elif [ -n "$list" ]; then
  echo "open  partial_fc (set PARTIAL_FC)"
fi
figures embedding embedding MFU
figures k_means k-means machine
if [ -n "${CIFAR10:-}" ] && [ -n "${MNIST:-}" ]; then
  paper=("$python" -m tests.gpu.papers --limit-s "$limit" --out "$out/papers" --only cifar_mnist-tau_0.1
    --source "cifar10=$CIFAR10" --source "mnist=$MNIST" --epochs 40 --set num_stages=1)
  step papers "${paper[@]}"
  [ ! -e "$out/papers.json" ] || step papers_control "${paper[@]}" --set 'controls=[ungrouped]'
elif [ -n "$list" ]; then
  echo "open  papers, papers_control (set CIFAR10 and MNIST)"
fi
exit $status
