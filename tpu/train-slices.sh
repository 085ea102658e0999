#!/usr/bin/env bash
# Trains on all hosts of one TPU slice or of several, from your own machine:
#
#     export ZONE=us-east5-a STORE=etcd://10.0.0.5:2379 KEY=job.key
#     export SLICES="my-slice-0 my-slice-1" HOSTS=8
#     (umask 077; openssl rand -hex 32 >"$KEY")
#     tpu/train-slices.sh start python train.py --my-option 3
#     tpu/train-slices.sh status    # of each host: the last line of its output
#     tpu/train-slices.sh stop
#
# jaxft and your code are on the hosts already (README.md says how they get there). Variables:
#
#     SLICES  names of the TPU VMs, one a slice: those that `gcloud compute tpus tpu-vm list` says
#     ZONE    where they are
#     HOSTS   how many hosts they have in all
#     STORE   an etcd that all of them reach; not on one of them, so that any may be lost
#     KEY     a file here with the job's key; it is copied to the hosts, for your user alone
#     JOB     the job's name (train); CODE  K+M (3+1): K+M = the number of slices, or of hosts of
#             the one slice, survives the loss of any M of them
#
# README.md beside this file says why each line is there.
set -euo pipefail

: "${SLICES:?names of TPU VMs}" "${ZONE:?}" "${HOSTS:?how many in all}" "${STORE:?}" "${KEY:?}"
JOB=${JOB:-train}
HERE=$(dirname "$(realpath "$0")")

# on_all COMMAND: on every host of every slice, all slices at once.
on_all() {
  local slice pids=() failed=0
  for slice in $SLICES; do
    gcloud compute tpus tpu-vm ssh "$slice" --zone "$ZONE" --worker=all --command="$1" &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=$?; done
  return "$failed"
}

# copied FILE NAME: to every host's home, as NAME; before that there, nobody else can read it.
copied() {
  local slice
  for slice in $SLICES; do
    gcloud compute tpus tpu-vm scp "$1" "$slice:$2" --zone "$ZONE" --worker=all
  done
}

host="bash jaxft-$JOB/train-tpu-vm.sh"
variables=(JOB="$JOB" HOSTS="$HOSTS" STORE="$STORE" CODE="${CODE:-3+1}")
case ${1:-} in
  start)
    shift
    on_all "mkdir -p -m 700 jaxft-$JOB"
    copied "$HERE/train-tpu-vm.sh" "jaxft-$JOB/train-tpu-vm.sh"
    copied "$KEY" "jaxft-$JOB/key"
    on_all "chmod 600 jaxft-$JOB/key && $(printf '%q ' "${variables[@]}")KEY=jaxft-$JOB/key $host start$(printf ' %q' "$@")"
    ;;
  status) on_all "tail -n 1 jaxft-$JOB/log" ;;
  stop) on_all "JOB=$(printf %q "$JOB") $host stop" ;;
  *)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
