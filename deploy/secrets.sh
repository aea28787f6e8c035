#!/bin/sh
# Makes the secrets of compose.yaml in deploy/secrets, unless they are there: the users of Redis, each with a password of its own,
# the URLs by which workers, clients, operators and the administrator connect, RabbitMQ's user, and Grafana's password.
set -eu
cd "$(dirname "$0")"
if [ -e secrets ]; then
    echo "deploy/secrets is there already" >&2
    exit 0
fi

password() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }

rm -rf secrets.new
mkdir secrets.new
# Nobody else enters the directory. In it containers read the files, each as a user of its own.
chmod 700 secrets.new
umask 022
cp users.acl secrets.new/users.acl
# Flower asks workers, and counts what waits, but can neither take nor see it. Of Celery's usual queue and its index of messages in
# hand, which workers here do not have, it looks whether they are there, for which it takes a lock.
tr '\n' ' ' >> secrets.new/users.acl <<'END'
user monitor on PASSWORD-OF-monitor resetchannels ~celeryev* ~*celery.pidbox* ~_kombu.binding* %R~traces %R~traces??[369]
%R~celery %R~celery??[369] %R~unacked_index ~unacked_mutex
&/0.celery* &/0.celeryev/# &/0.celeryev/* +ping +info +llen +lpush +rpop +brpop +sadd +srem +smembers +exists +del +publish
+subscribe +psubscribe +unsubscribe +punsubscribe +multi +exec +evalsha +script|load +script|exists +get +set +zadd +zrem +zscore
+zrange +zrangebyscore +zrevrangebyscore +time
END
echo >> secrets.new/users.acl
echo 'user administrator on PASSWORD-OF-administrator ~* &* +@all' >> secrets.new/users.acl
for user in $(sed -n 's/^user \([a-z]*\) on .*/\1/p' secrets.new/users.acl); do
    password=$(password)
    sed -i "s/PASSWORD-OF-$user />$password /" secrets.new/users.acl
    case $user in
        worker | monitor) echo "redis://$user:$password@redis:6379/0" > "secrets.new/$user-redis-url" ;;
        *) echo "redis://$user:$password@127.0.0.1:6379/0" > "secrets.new/$user-url" ;;
    esac
done
password=$(password)
printf 'default_user = kp-scorer\ndefault_pass = %s\n' "$password" > secrets.new/rabbitmq.conf
# RabbitMQ has but this user, who may do everything there: workers, Flower and whoever submits on this machine.
echo "amqp://kp-scorer:$password@rabbitmq:5672/" | tee secrets.new/worker-rabbitmq-url > secrets.new/monitor-rabbitmq-url
echo "amqp://kp-scorer:$password@127.0.0.1:5672/" > secrets.new/client-rabbitmq-url
password > secrets.new/grafana-password
mv secrets.new secrets
