# Read by each bash of a shell script in its sandbox.
set -T  # functions and subshells have the trap, too
trap 'PATH=$AUTOTUNE_STAND_INS:${PATH#"$AUTOTUNE_STAND_INS":}' DEBUG  # also after `source venv/bin/activate`
trap wait EXIT  # for trainings in the background
RANDOM=1
command_not_found_handle() { :; }  # such as `module load`
