#!/bin/sh
# Makes the passwords of infra/compose.yaml and infra/kubernetes, one file each, in a new folder that its owner alone can
# enter. The files are readable by all: a container that one is mounted into has another user. Usage: secrets.sh FOLDER
set -eu
folder=$1
[ ! -e "$folder" ] || { echo "$folder is there already: its passwords are in use where servers were started" >&2; exit 2; }
umask 077
mkdir -p "$(dirname "$folder")"
mkdir "$folder"
umask 022
word() { head -c 24 /dev/urandom | base64 | tr '+/' '-_'; }
put() { printf '%s' "$2" > "$folder/$1"; }

for name in postgres postgres-prefect postgres-mlflow postgres-mlflow-auth mlflow-admin mlflow-tether mlflow-session \
    s3-mlflow s3-tether; do
    put "$name" "$(word)"
done
put prefect-login "tether:$(word)"
put pgpass-prefect "*:*:prefect:prefect:$(cat "$folder/postgres-prefect")
"
put pgpass-mlflow "*:*:mlflow:mlflow:$(cat "$folder/postgres-mlflow")
*:*:mlflow_auth:mlflow_auth:$(cat "$folder/postgres-mlflow-auth")
"
identity() {
    printf '{"name": "%s", "credentials": [{"accessKey": "s3-%s", "secretKey": "%s"}], ' "$1" "$1" "$(cat "$folder/s3-$1")"
    printf '"actions": ["Admin:%s", "Read:%s", "Write:%s", "List:%s", "Tagging:%s"]}' "$1" "$1" "$1" "$1" "$1"
}
put s3.json "{\"identities\": [$(identity mlflow), $(identity tether)]}"
