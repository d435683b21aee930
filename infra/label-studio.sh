#!/bin/sh
# Prints the path of a Label Studio for its test, in a virtual environment of its own (1 GB), which is made where there is none.
# Its dependencies differ from ours, so that it never stands in .venv. TETHER_LABEL_STUDIO names a folder other than .tether's.
set -e
version=1.23.2
folder=${TETHER_LABEL_STUDIO:-.tether/label-studio-$version}
if [ ! -f "$folder/whole" ]; then
    { "${PYTHON:-python3.11}" -m venv "$folder" && "$folder/bin/pip" install -q "label-studio==$version"; } >&2
    touch "$folder/whole"
fi
echo "$folder/bin/label-studio"
