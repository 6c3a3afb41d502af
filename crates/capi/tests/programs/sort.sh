# Sorts with two threads, in parts that forked children compress and decompress. It has FILEs open
# at each fork.
command -v sort > /dev/null || {
    echo "sort is missing; get it by: apt-get install coreutils"
    exit 77
}
seq 1 300000 > numbers
sort -S 4M --parallel=2 --compress-program=gzip -T "$PWD" -k 1.3 -k 1.1 -o sorted numbers
sha256sum sorted
sort -c -k 1.3 -k 1.1 sorted
ls
