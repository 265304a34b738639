#!/usr/bin/env bash
# Runs mclclip on several hosts under torchrun: call it on each host, with three variables:
#
#     HEAD_ADDRESS=node1:29500    one of the hosts and a free port of it, the same everywhere
#     NUM_NODES=2                 the number of hosts, the same everywhere
#     NODE_RANK=0                 0 on the host of HEAD_ADDRESS, another number on each other one
#
#     HEAD_ADDRESS=node1:29500 NUM_NODES=2 NODE_RANK=0 \
#         launch/multinode.sh run --config launch/recipes/cc12m_vitl14.yaml key=value ...
#
# The run directory and the data lie on a file system that all hosts share. Optional variables:
#     NPROC_PER_NODE              ranks per host (default: one per GPU)
#     RDZV_ID                     a name of this run, if other runs use the same port
#     LOCAL_ADDRESS               this host's address, if other hosts cannot resolve its name
#     GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME     network interfaces: read by torch and NCCL
#
# On SIGUSR1 or SIGTERM to this script on any host, the run saves and ends with 85 on all hosts.
# launch/common.sh lists the other exit codes. The variable PYTHON names another interpreter.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

for name in HEAD_ADDRESS NUM_NODES NODE_RANK; do
    [[ -n ${!name:-} ]] || fail "$name is not set: give HEAD_ADDRESS=host:port NUM_NODES=2 NODE_RANK=0"
done
[[ $HEAD_ADDRESS == *:* ]] || fail "HEAD_ADDRESS is '$HEAD_ADDRESS': wanted host:port"
is_host=0
[[ $NODE_RANK != 0 ]] || is_host=1
launch "${NPROC_PER_NODE:-$(count_devices)}" --nnodes "$NUM_NODES" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD_ADDRESS" \
    --rdzv-id "${RDZV_ID:-mclclip}" --rdzv-conf "is_host=$is_host" \
    ${LOCAL_ADDRESS:+--local-addr "$LOCAL_ADDRESS"} -- "$@"
