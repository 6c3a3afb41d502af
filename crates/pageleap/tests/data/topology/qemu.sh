#!/bin/sh
# Records trees from Linux booted in QEMU, by software emulation and without privileges:
# qemu.sh KERNEL DIRECTORY [NAME...]
#
# Needs qemu-system-x86_64, a static busybox and cpio. KERNEL is a bzImage that needs no modules,
# such as those of Debian's packages linux-image-*-cloud-amd64. Without NAME all machines are
# recorded.
set -eu
kernel=$(realpath "$1")
out=$(realpath "$2")
shift 2
here=$(dirname "$(realpath "$0")")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$work/root/bin" "$work/root/proc" "$work/root/sys" "$work/root/dev"
cp "$(command -v busybox)" "$work/root/bin/busybox"
cp "$here/record.sh" "$work/root/record.sh"
cat >"$work/root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
nodes=/sys/devices/system/node
for word in $(cat /proc/cmdline); do
    case $word in
    # reserve=NODE:SIZE:PAGES reserves huge pages of SIZE kB on a node.
    reserve=*) IFS=:= read -r _ node size pages <<WORD
$word
WORD
        echo "$pages" >$nodes/node$node/hugepages/hugepages-${size}kB/nr_hugepages ;;
    cpuoff=*) echo 0 >/sys/devices/system/cpu/cpu${word#cpuoff=}/online ;;
    # cpuset=NODES:CPUS puts the recorder into this cpuset.
    cpuset=*) IFS=:= read -r _ mems cpus <<WORD
$word
WORD
        mount -t cgroup2 cgroup /sys/fs/cgroup
        echo +cpuset >/sys/fs/cgroup/cgroup.subtree_control
        mkdir /sys/fs/cgroup/few
        echo $mems >/sys/fs/cgroup/few/cpuset.mems
        echo $cpus >/sys/fs/cgroup/few/cpuset.cpus
        echo 0 >/sys/fs/cgroup/few/cgroup.procs ;;
    esac
done
sh /record.sh >/dev/ttyS1
reboot -f
INIT
chmod +x "$work/root/init"
(cd "$work/root" && find . | cpio --quiet -o -H newc) >"$work/initramfs"

# boot NAME KERNEL-OPTIONS QEMU-OPTIONS... records one machine, if its name was asked for.
boot() {
    name=$1
    options=$2
    shift 2
    case " $names " in *" $name "* | "  ") ;; *) return 0 ;; esac
    rm -f "$work/tree"
    timeout 300 qemu-system-x86_64 -accel tcg,thread=multi -cpu max -nodefaults -no-user-config -display none -no-reboot \
        -kernel "$kernel" -initrd "$work/initramfs" -append "console=ttyS0 quiet panic=-1 $options" \
        -serial "file:$work/console" -serial "file:$work/tree" "$@"
    tr -d '\r' <"$work/tree" >"$out/$name.tree"
    echo "$name: $(wc -l <"$out/$name.tree") lines"
}

# node ID MEGABYTES [CPUS] prints the QEMU options of one node.
node() {
    echo "-object memory-backend-ram,size=$2M,id=m$1 -numa node,nodeid=$1,memdev=m$1${3:+,cpus=$3}"
}

names=$*
# The output of `node` is meant to be split into words.
# shellcheck disable=SC2046
{
    boot two "reserve=1:2048:20" -m 512M -smp 4 $(node 0 256 0-1) $(node 1 256 2-3) -numa dist,src=0,dst=1,val=21
    # A square: the diagonal is longer than the sides. One CPU is offline. The process has a cpuset.
    boot four "reserve=0:2048:4 cpuoff=7 cpuset=1-2:2-4" -m 1024M -smp 8 \
        $(node 0 256 0-1) $(node 1 256 2-3) $(node 2 256 4-5) $(node 3 256 6-7) \
        -numa dist,src=0,dst=1,val=16 -numa dist,src=0,dst=2,val=22 -numa dist,src=0,dst=3,val=16 \
        -numa dist,src=1,dst=2,val=16 -numa dist,src=1,dst=3,val=22 -numa dist,src=2,dst=3,val=16
    # Two sockets with four nodes each.
    boot eight "" -m 1024M -smp 8 $(for i in 0 1 2 3 4 5 6 7; do node $i 128 $i; done) \
        $(for i in 0 1 2 3 4 5 6 7; do for j in 0 1 2 3 4 5 6 7; do
            [ $i -lt $j ] || continue
            [ $((i / 4)) -eq $((j / 4)) ] && val=12 || val=32
            echo "-numa dist,src=$i,dst=$j,val=$val"
        done; done)
    # Nodes 1 and 3 belong to CPUs that are not plugged in. Nodes 0, 2 and 4 are online.
    boot sparse "" -m 768M -smp 1,maxcpus=5,sockets=5,cores=1,threads=1 \
        $(node 0 256) -numa node,nodeid=1 $(node 2 256) -numa node,nodeid=3 $(node 4 256) \
        $(for i in 0 1 2 3 4; do echo "-numa cpu,node-id=$i,socket-id=$i"; done) \
        $(for i in 2 4; do echo "-device max-x86_64-cpu,socket-id=$i,core-id=0,thread-id=0"; done) \
        $(for i in 0 1 2 3 4; do for j in 0 1 2 3 4; do
            [ $i -lt $j ] && echo "-numa dist,src=$i,dst=$j,val=$((10 + 5 * (j - i)))"
        done; done)
    # Two sockets with fast memory each, and a slow node without CPUs, described by HMAT.
    hmat() {
        echo "-numa hmat-lb,initiator=$1,target=$2,hierarchy=memory,data-type=access-latency,latency=$3"
        echo "-numa hmat-lb,initiator=$1,target=$2,hierarchy=memory,data-type=access-bandwidth,bandwidth=$4M"
    }
    boot tiers "reserve=2:2048:8" -machine q35,hmat=on -m 768M -smp 2,sockets=2,cores=1,threads=1 \
        $(node 0 256),initiator=0 $(node 1 256),initiator=1 $(node 2 256),initiator=0 \
        -numa cpu,node-id=0,socket-id=0 -numa cpu,node-id=1,socket-id=1 \
        -numa dist,src=0,dst=1,val=21 -numa dist,src=0,dst=2,val=17 -numa dist,src=1,dst=2,val=28 \
        $(hmat 0 0 90 20000) $(hmat 0 1 150 10000) $(hmat 0 2 300 5000) \
        $(hmat 1 0 150 10000) $(hmat 1 1 90 20000) $(hmat 1 2 400 4000)
    # One node has only CPUs, the other only memory.
    boot apart "" -m 512M -smp 2 -numa node,nodeid=0,cpus=0-1 $(node 1 512)
}
