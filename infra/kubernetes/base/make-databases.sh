#!/bin/sh
# Run once by the image of PostgreSQL, when its cluster is new: a role and a database each for Prefect, MLflow and MLflow's
# users. No other role may connect to them. Passwords are files of /run/secrets (SECRETS names another folder).
set -eu
for role in prefect mlflow mlflow_auth; do
    file=${SECRETS:-/run/secrets}/postgres-$(echo "$role" | tr _ -)
    # The password goes in on standard input: a command line is seen by every process.
    psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username "${POSTGRES_USER:-postgres}" --dbname postgres <<SQL
CREATE ROLE $role LOGIN PASSWORD '$(cat "$file")';
CREATE DATABASE $role OWNER $role;
REVOKE ALL ON DATABASE $role FROM PUBLIC;
SQL
done
psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username "${POSTGRES_USER:-postgres}" --dbname postgres <<SQL
REVOKE ALL ON DATABASE postgres FROM PUBLIC;
REVOKE ALL ON DATABASE template1 FROM PUBLIC;
SQL
