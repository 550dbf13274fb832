#!/bin/sh
# Stand-in of a program for a shell script in its sandbox, see run.sh.
stand_ins=${0%/*} name=${0##*/} wraps=
without=${PATH#"$stand_ins":}
case $name in
# A random port or a date in a command would make another study of each call.
shuf) PATH=$without exec shuf --random-source="$AUTOTUNE_PYTHON" "$@" ;;
date) PATH=$without exec date -d "@$AUTOTUNE_CHANGED" "$@" ;;
python*)
    name=python
    case ${1:--} in
    -|-c|-V|--version) exec "$AUTOTUNE_PYTHON" "$@" ;;  # computes a value for the script
    -m) [ "$2" != pip ] || exit 0 ;;
    esac ;;
accelerate) [ "$1" = launch ] || exit 0 ;;
srun|mpirun|mpiexec|numactl|sudo) wraps=yes ;;
*)
    case " $AUTOTUNE_LAUNCHERS " in *" $name "*) ;; *) [ "$1" = run ] || exit 0; wraps=yes ;; esac ;;
esac
if [ "$wraps" ]; then  # the command after the options
    for word do
        case ${word##*/} in
        bash|sh) exec "$@" ;;
        ?*) [ ! -e "$stand_ins/${word##*/}" ] || exec "$@" ;;
        esac
        shift
    done
    exit 0
fi
{ printf '%s\0' "$#" "$PWD" "$name" "$@"; env -0; } >"$stand_ins/../calls/$$"
