# A server under the load of redis-benchmark, filled anew, saved by a forked child, and checked.
command -v redis-server > /dev/null || {
    echo "redis-server is missing; get it by: apt-get install redis"
    exit 77
}
redis-server --port 0 --unixsocket "$PWD/socket" --save "" --dir "$PWD" --enable-debug-command yes \
    --logfile "$PWD/log" > /dev/null &
server=$!
trap 'kill "$server" 2> /dev/null' EXIT
cli() { redis-cli -s socket "$@"; }
until cli ping > /dev/null 2>&1; do
    kill -0 "$server" || exit 1
    sleep 0.1
done
redis-benchmark -s socket -q -n 20000 -P 8 -r 5000 -t set,get,lpush,lpop,sadd,hset,zadd > /dev/null
cli flushall
seq 1 60000 | awk '{ print "SET key" $1 " " $1 * 7919; print "ZADD ordered " $1 " member" $1 }' |
    cli --pipe | grep -v "^All data"
cli bgsave
while cli info persistence | grep -q rdb_bgsave_in_progress:1; do sleep 0.1; done
cli info persistence | grep rdb_last_bgsave_status
redis-check-rdb dump.rdb | grep -c "keys read"
cli debug digest
cli shutdown nosave
trap - EXIT
wait "$server"
