#!/bin/sh
# Makes the passwords of infra/compose.yaml and infra/kubernetes, one file each, in a folder that its owner alone can enter;
# those that are there stay. The files are readable by all: a container that one is mounted into has another user.
# Usage: secrets.sh FOLDER
set -eu
folder=$1
umask 077
mkdir -p "$folder"
umask 022
word() { head -c 24 /dev/urandom | base64 | tr '+/' '-_'; }
put() { printf '%s' "$2" > "$folder/$1.new" && mv "$folder/$1.new" "$folder/$1"; }
fresh() { [ -s "$folder/$1" ] || put "$1" "$2"; }

for name in postgres postgres-prefect postgres-mlflow postgres-mlflow-auth mlflow-admin mlflow-tether mlflow-session \
    s3-mlflow s3-tether s3-backup; do
    fresh "$name" "$(word)"
done
fresh prefect-login "tether:$(word)"
# The rest holds words of these again.
prefect="*:*:prefect:prefect:$(cat "$folder/postgres-prefect")
"
mlflow="*:*:mlflow:mlflow:$(cat "$folder/postgres-mlflow")
*:*:mlflow_auth:mlflow_auth:$(cat "$folder/postgres-mlflow-auth")
"
put pgpass-prefect "$prefect"
put pgpass-mlflow "$mlflow"
put pgpass-backup "$prefect$mlflow"
identity() {  # NAME BUCKET...
    printf '{"name": "%s", "credentials": [{"accessKey": "s3-%s", "secretKey": "%s"}], ' "$1" "$1" "$(cat "$folder/s3-$1")"
    shift
    printf '"actions": ['
    for bucket in "$@"; do
        [ "$bucket" = "$1" ] || printf ', '
        printf '"Admin:%s", "Read:%s", "Write:%s", "List:%s", "Tagging:%s"' "$bucket" "$bucket" "$bucket" "$bucket" "$bucket"
    done
    printf ']}'
}
put s3.json "{\"identities\": [$(identity mlflow mlflow), $(identity tether tether), $(identity backup mlflow tether)]}"
