#!/bin/sh
# Finds Prometheus, which one server test asks the dashboard's queries, or installs Debian's by apt-get (.ci/run does so).
# Exit status 1: there is none, and none can be installed here; the test is then skipped.
command -v prometheus && exit 0
command -v apt-get >/dev/null || { echo "no Prometheus, and no apt-get to install it with" >&2; exit 1; }
as_root=
[ "$(id -u)" -eq 0 ] || as_root="sudo -n"
{ $as_root apt-get update -q && DEBIAN_FRONTEND=noninteractive $as_root apt-get install -q -y --no-install-recommends prometheus; } >&2
command -v prometheus
