#!/bin/sh
# Generates the secrets of compose.yaml in deploy/secrets, unless that folder exists: the users of Redis, each with its own
# password, the URL with which each user connects, RabbitMQ's user, Grafana's password, and a token for agents.
set -eu
cd "$(dirname "$0")"
if [ -e secrets ]; then
    echo "deploy/secrets is there already" >&2
    exit 0
fi

password() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

rm -rf secrets.new
mkdir secrets.new
# The folder keeps out other users of this machine. The files in it must be readable by all, because each container reads them as a
# user of its own.
chmod 700 secrets.new
umask 022
cp users.acl secrets.new/users.acl
echo 'user administrator on PASSWORD-OF-administrator ~* &* +@all' >> secrets.new/users.acl
for user in $(sed -n 's/^user \([a-z]*\) on .*/\1/p' secrets.new/users.acl); do
    password=$(password)
    sed -i "s/PASSWORD-OF-$user />$password /" secrets.new/users.acl
    case $user in
        worker | serve) echo "redis://$user:$password@redis:6379/0" > "secrets.new/$user-redis-url" ;;
        *) echo "redis://$user:$password@127.0.0.1:6379/0" > "secrets.new/$user-url" ;;
    esac
done
password=$(password)
printf 'default_user = kp-scorer\ndefault_pass = %s\n' "$password" > secrets.new/rabbitmq.conf
# RabbitMQ has only this user, with all permissions: the workers, `serve` and the clients on this machine share it.
for user in worker serve; do echo "amqp://kp-scorer:$password@rabbitmq:5672/" > "secrets.new/$user-rabbitmq-url"; done
echo "amqp://kp-scorer:$password@127.0.0.1:5672/" > secrets.new/client-rabbitmq-url
password > secrets.new/grafana-password
password > secrets.new/serve-tokens
mv secrets.new secrets
