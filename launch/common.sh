# Sourced by local.sh and multinode.sh: runs one torchrun and ends with one exit code for it.
# shellcheck shell=bash

# launch NPROC OPTION... -- ARGUMENT...: runs "mclclip ARGUMENT..." on NPROC ranks of this machine,
# under torchrun with its OPTIONs. Waits for it, and ends this script with
#     0    if the command finished
#     85   if the run was asked to leave (a training also by Ctrl-C) and has saved: the same command
#          resumes it (the variable PREEMPTED_CODE replaces 85)
#     130  if it was interrupted outside a training, or twice
#     the code of mclclip if it failed; if that is 2, a mistake of the user, the last line on stderr
#     says which.
# torchrun turns the codes of its workers into 0 or 1, so mclclip records how it ends in the file
# MCLCLIP_STATE_FILE (a temporary file, unless the caller names one). The file is emptied first.
#
# SIGUSR1, SIGTERM and SIGHUP ask the run to save and leave. This script passes them on to the
# workers but not to torchrun, which would end the workers and print a traceback.
launch() {
    local code=0
    [[ ${*: -1} != -- ]] || fail "no command: say what mclclip shall do, such as 'run --config FILE'"
    prepare "$1"
    request=
    trap 'request=USR1' USR1 TERM HUP
    start "$@"
    give_up_on_torchrun &
    watch=$!
    disown "$watch"
    trap interrupt INT
    trap 'disown; kill -KILL "$torchrun"; clean_up' EXIT  # the workers end with torchrun
    while kill -0 "$torchrun" 2>/dev/null; do
        if [[ -z $request ]]; then
            wait "$torchrun" 2>/dev/null || true  # returns when torchrun ends or a signal arrives
        else
            # It is sent every second, since a worker that is still starting ignores it.
            signal_workers "$request"
            (trap '' USR1 TERM HUP && exec sleep 1)  # SLURM may signal every process of a task
        fi
    done
    wait "$torchrun" 2>/dev/null || code=$?
    conclude "$code"
}

fail() {
    echo "${0##*/}: $1" >&2
    exit 2
}

# Prints the number of this machine's GPUs, or 1 if there is none; torch knows GPUs of all makers.
count_devices() {
    "${PYTHON:-python}" -c 'import torch; print(torch.cuda.device_count() or 1)'
}

# prepare NPROC: sets the environment of torchrun and its workers.
prepare() {
    local cores=${SLURM_CPUS_PER_TASK:-$(nproc)} threads
    temporary=""
    watch=""
    if [[ -z ${MCLCLIP_STATE_FILE:-} ]]; then
        temporary=$(mktemp "${TMPDIR:-/tmp}/mclclip_state.XXXXXX")
        MCLCLIP_STATE_FILE=$temporary
    fi
    export MCLCLIP_STATE_FILE
    : >"$MCLCLIP_STATE_FILE"
    # The ranks of a machine divide its cores; torchrun would give one to each, with a warning.
    threads=$((cores / $1))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
    # Only SIGINT and SIGQUIT make torchrun end; by default SIGTERM and SIGHUP would too. Its
    # workers then get 120 seconds to save (with torch before 2.14: 30).
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
    export PET_SIGNALS_TO_HANDLE=SIGINT,SIGQUIT
    # When the first host ends, torchrun on the others loses its store and would print warnings.
    export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
    export TORCH_LOGS=${TORCH_LOGS:--torch.distributed.elastic.rendezvous}
}

clean_up() {
    [[ -z $watch ]] || kill -KILL "$watch" 2>/dev/null || true
    [[ -z $temporary ]] || rm -f "$temporary"
}

# start NPROC OPTION... -- ARGUMENT...: starts torchrun in the background and sets `torchrun` to its
# process id.
start() {
    local options=(--nproc-per-node "$1") tie=()
    shift
    while [[ $1 != -- ]]; do
        options+=("$1")
        shift
    done
    shift
    # torchrun ends with this script even if the script is killed with -9.
    if setpriv --pdeathsig KILL true 2>/dev/null; then
        tie=(setpriv --pdeathsig KILL)
    fi
    (
        # In its own session torchrun gets no signals that are meant for this script (Ctrl-C,
        # SLURM's). Ignored signals stay ignored in torchrun, and in workers until they set handlers.
        trap '' USR1 TERM HUP
        exec "${tie[@]}" setsid "${PYTHON:-python}" -m torch.distributed.run "${options[@]}" \
            -m mclclip "$@"
    ) &
    torchrun=$!
}

# Kills torchrun six seconds after all ranks of this machine have failed and ended. Otherwise, if
# another host cannot be reached, torchrun would wait for it in a call that ignores signals and the
# end of its ranks, until the kernel gives the connection up after a quarter of an hour.
give_up_on_torchrun() {
    local looks=0 never
    trap - INT EXIT
    trap '' USR1 TERM HUP
    exec {never}<> <(:)
    while ((looks++ < 3)) && kill -0 "$torchrun" 2>/dev/null; do
        read -rt 2 -u "$never" || true  # a sleep that leaves no process behind
        [[ $(recorded state) == failed ]] && all_ended || looks=0
    done
    kill -0 "$torchrun" 2>/dev/null || return 0
    # Printed before the kill: when torchrun is gone, the script ends and prints its own last line.
    echo "${0##*/}: the ranks of this host have ended, torchrun waited for another host: killed" >&2
    kill -KILL "$torchrun" 2>/dev/null || true
}

# Prints the process ids of torchrun's children, which are the ranks of this machine.
workers() {
    cat "/proc/$torchrun/task/"*/children 2>/dev/null || true
}

# signal_workers NAME: sends the signal NAME to all ranks of this machine.
signal_workers() {
    local name=$1 pid pids
    read -ra pids <<<"$(workers)"
    for pid in "${pids[@]}"; do
        kill -s "$name" "$pid" 2>/dev/null || true
    done
}

# Handles Ctrl-C: a training saves and ends, another verb ends at once. torchrun is stopped
# (SIGSTOP) because it would print a traceback. A second Ctrl-C kills torchrun, and the workers end
# with it.
interrupt() {
    trap 'exit 130' INT
    kill -STOP "$torchrun" 2>/dev/null || true
    signal_workers INT
    until all_ended; do
        sleep 0.2
    done
    [[ $(recorded state) != preempted ]] || exit "${PREEMPTED_CODE:-85}"
    exit 130
}

# Succeeds if all workers have ended: children of a stopped torchrun stay zombies (state Z or X).
all_ended() {
    local pid pids
    read -ra pids <<<"$(workers)"
    for pid in "${pids[@]}"; do
        [[ $(cat "/proc/$pid/stat" 2>/dev/null) =~ \)\ [ZX]\  ]] || return 1
    done
}

# recorded FIELD: prints the word or number of FIELD in the state file, or nothing.
recorded() {
    sed -nE "s/.*\"$1\": \"?([a-z0-9]+).*/\1/p" "$MCLCLIP_STATE_FILE" 2>/dev/null || true
}

# Prints the user's mistake again as the last line: torchrun's report of forty lines has hidden it.
repeat_reason() {
    "${PYTHON:-python}" -c 'import json, sys; print(json.load(open(sys.argv[1]))["reason"])' \
        "$MCLCLIP_STATE_FILE" 2>/dev/null | sed 's/^/mclclip: /' >&2 || true
}

# conclude CODE: ends this script with the right code, after torchrun has ended with CODE.
conclude() {
    local code=$1
    trap clean_up EXIT
    case $(recorded state) in
        finished) exit 0 ;;
        # If a rank dies, torchrun sends SIGTERM to the others, which then record a pre-emption that
        # nobody asked for: that is a failure.
        preempted) [[ $code != 0 && -z $request ]] || exit "${PREEMPTED_CODE:-85}" ;;
        failed)
            code=$(recorded exit_code)
            [[ $code != 2 ]] || repeat_reason
            ;;
        running) ;;            # it was killed
        *) exit "$code" ;;     # the verb records nothing, or ended before it could
    esac
    exit "$((code > 0 ? code : 1))"
}
