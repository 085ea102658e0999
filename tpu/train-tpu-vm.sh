#!/usr/bin/env bash
# Trains on this TPU VM, and goes on when the terminal is gone:
#
#     tpu/train-tpu-vm.sh start python train.py --my-option 3
#     tpu/train-tpu-vm.sh follow    # its output; Ctrl-C ends the following alone
#     tpu/train-tpu-vm.sh stop      # SIGTERM, and until it has ended
#
# As it stands it is for a TPU VM that is a slice of its own. train-slices.sh runs it on every host
# of larger ones, with these variables:
#
#     JOB    the job's name; its memory is found again under it
#     HOSTS  how many hosts there are in all, as for `jaxft run --hosts`
#     STORE  where they meet: etcd://host:2379
#     KEY    a file with the job's key, the same on all of them, that only you can read
#     CODE   K+M: any M hosts of K+M may be lost
#
# README.md beside this file says why each line is there.
set -euo pipefail

JOB=${JOB:-train}
HOSTS=${HOSTS:-1}
# Not below XDG_RUNTIME_DIR, which is gone at the last log-out.
export JAXFT_RUN_DIR=${JAXFT_RUN_DIR:-/tmp/jaxft-$(id -u)}
# Where `pip install --user` puts programs; a shell that ssh starts for a command does not look there.
export PATH=$HOME/.local/bin:$PATH
PLACE=${PLACE:-$HOME/jaxft-$JOB}

# tpu_metadata NAME: what this machine's metadata says of its place among the hosts. `tpu-env` has
# lines like "MEGASCALE_SLICE_ID: '1'", where there are several slices.
tpu_metadata() {
  local at=http://metadata.google.internal/computeMetadata/v1/instance/attributes
  if [ "$1" = agent-worker-number ]; then
    curl -fsS -H 'Metadata-Flavor: Google' "$at/$1"
  else
    curl -fsS -H 'Metadata-Flavor: Google' "$at/tpu-env" | sed -n "s/^ *$1: *'\\(.*\\)' *\$/\\1/p"
  fi
}

# keep COMMAND...: runs an agent, and again if it is killed (137): its snapshot process has lived on
# with the memory in it, and the next agent adopts that. SIGTERM is passed on.
keep() {
  local pid='' told='' status=143
  echo $$ >"$PLACE/pid"
  trap 'told=yes; kill -TERM "$pid" 2>/dev/null' TERM
  while [ -z "$told" ]; do
    "$@" &
    pid=$!
    while wait "$pid" && status=0 || status=$? && kill -0 "$pid" 2>/dev/null; do :; done
    [ "$status" -eq 137 ] || break
    echo "the agent was killed, and is started again" >&2
  done
  rm -f "$PLACE/pid"
  echo "$status" >"$PLACE/status"
}

start() {
  local slice worker
  local options=(--job "$JOB" --hosts "$HOSTS" --log-dir "$PLACE/logs")
  # SIGTERM: a last snapshot, then its way to storage.
  options+=(--grace-s 360)
  if [ "$HOSTS" != 1 ]; then
    worker=$(tpu_metadata agent-worker-number)
    slice=$(tpu_metadata MEGASCALE_SLICE_ID)
    # Ranks are numbered by the hosts' names, in the order in which the TPU runtime numbers its
    # workers: slice by slice. A slice does not work with fewer hosts than it has: all are waited for.
    options+=(--host "slice${slice:-0}-worker$worker" --store "$STORE" --job-key-file "$KEY")
    options+=(--code "${CODE:-3+1}" --form-timeout-s 3600)
    # A slice that is lost is lost as a whole; with one slice there is nothing to be said of it.
    [ -z "$slice" ] || options+=(--failure-domain "slice$slice")
  fi
  (umask 077 && mkdir -p "$PLACE")
  if [ -e "$PLACE/pid" ] && kill -0 "$(cat "$PLACE/pid")" 2>/dev/null; then
    echo "job $JOB runs here already: \"$0 stop\" ends it" >&2
    exit 2
  fi
  rm -f "$PLACE/status"
  # A session of its own: a terminal that is closed sends SIGHUP, which ends an agent.
  setsid --fork bash "$0" keep jaxft run "${options[@]}" -- "$@" >>"$PLACE/log" 2>&1 </dev/null
  echo "started as job $JOB; its output: $PLACE/log"
}

case ${1:-} in
  start) shift && start "$@" ;;
  keep) shift && keep "$@" ;;
  follow) tail -n 100 -F "$PLACE/log" ;;
  stop)
    kill -TERM "$(cat "$PLACE/pid")"
    until [ -e "$PLACE/status" ]; do sleep 0.2; done
    echo "ended with status $(cat "$PLACE/status")"
    ;;
  *)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
