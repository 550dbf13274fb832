# Run a shell script with stand-ins first in its path: bash run.sh FOLDER LAUNCHERS PYTHON SECONDS COMMAND…
# Each call of a launcher or Python leaves a file in FOLDER/calls: number of arguments, folder, name, arguments, variables.
here=$(realpath "$(dirname "$0")") folder=$1 seconds=$4
export AUTOTUNE_STAND_INS=$folder/bin AUTOTUNE_LAUNCHERS="$2 accelerate" AUTOTUNE_PYTHON=$3 AUTOTUNE_CHANGED=0
# Programs that run another command, and those that change something outside of the overlay.
others="apptainer apt apt-get aws az brew conda curl date docker gcloud halt huggingface-cli hf kill killall kubectl mail mamba
mpiexec mpirun numactl pdsh pip pip3 pkill podman poetry poweroff pssh rclone reboot rsync sbatch scancel scp sftp shuf shutdown
singularity sleep srun ssh sudo systemctl uv wandb wget yum"
shift 4
mkdir "$folder/bin" "$folder/calls"
cp "$here/stand_in.sh" "$folder/stand_in"
chmod +x "$folder/stand_in"
for name in $AUTOTUNE_LAUNCHERS python $(compgen -c python) $others; do ln -sf ../stand_in "$folder/bin/$name"; done
for word do [ ! -f "$word" ] || AUTOTUNE_CHANGED=$(stat -c %Y "$word"); done
export BASH_ENV=$here/bash_env.sh PATH=$AUTOTUNE_STAND_INS:$PATH
exec timeout --kill-after 1 "$seconds" "$@" </dev/null >/dev/null 2>&1
