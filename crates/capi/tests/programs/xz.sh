# Compresses and decompresses with two threads.
command -v xz > /dev/null || {
    echo "xz is missing; get it by: apt-get install xz-utils"
    exit 77
}
seq 1 3000000 > numbers
xz -T2 -3 --keep numbers
sha256sum numbers.xz
xz -T2 -dc numbers.xz > again
cmp numbers again
