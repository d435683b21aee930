#!/bin/sh
# Prints the path of a Chromium or Chrome for the browser tests; installs Debian's or Ubuntu's by apt-get if there is none.
# Exit status 1: there is none, and none can be installed here. TETHER_CHROMIUM names one that is not on the PATH.
find_chromium() {
    for name in "${TETHER_CHROMIUM:-chromium}" chromium chromium-browser google-chrome google-chrome-stable; do
        command -v "$name" && return 0
    done
    return 1
}

find_chromium && exit 0
command -v apt-get >/dev/null || { echo "no Chromium, and no apt-get to install it with" >&2; exit 1; }
as_root=
[ "$(id -u)" -eq 0 ] || as_root="sudo -n"
{ $as_root apt-get update -q && DEBIAN_FRONTEND=noninteractive $as_root apt-get install -q -y --no-install-recommends chromium; } >&2
find_chromium
