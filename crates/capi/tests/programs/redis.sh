# A server under the load of redis-benchmark, filled anew, saved by a forked child, checked, and
# loaded by a second server.
command -v redis-server > /dev/null || {
    echo "redis-server is missing; get it by: apt-get install redis"
    exit 77
}
# Starts a server, which loads dump.rdb if there is one.
begin() {
    redis-server --port 0 --unixsocket "$PWD/socket$1" --save "" --dir "$PWD" \
        --dbfilename dump.rdb --enable-debug-command yes --logfile "$PWD/log$1" > /dev/null &
    server=$!
    trap 'kill "$server" 2> /dev/null' EXIT
    socket="socket$1"
    until cli ping 2> /dev/null | grep -q PONG; do
        kill -0 "$server" || exit 1
        sleep 0.1
    done
}
end() {
    cli shutdown nosave
    trap - EXIT
    wait "$server"
}
cli() { redis-cli -s "$socket" "$@"; }

begin 1
redis-benchmark -s "$socket" -q -n 20000 -P 8 -r 5000 -t set,get,lpush,lpop,sadd,hset,zadd > /dev/null
cli flushall
seq 1 60000 > numbers
awk '{ print "SET key" $1 " " $1 * 7919; print "ZADD ordered " $1 " member" $1 }' numbers > commands
cli --pipe < commands > answers
grep errors: answers
cli bgsave
while cli info persistence | grep -q rdb_bgsave_in_progress:1; do sleep 0.1; done
cli info persistence > saved
grep rdb_last_bgsave_status saved
redis-check-rdb dump.rdb > checked
grep -c "keys read" checked
cli debug digest > digest1
end

begin 2
cli debug digest > digest2
end
cat digest1
cmp digest1 digest2
