#!/bin/sh
# Writes the files that `Topology` reads on this machine to standard output. A line `path<TAB>text`
# stands for a file, with \n for line ends, and a line `path -> target` for a symbolic link. Runs in
# any POSIX shell, also in busybox. Changes nothing.
cd / || exit 1
{
    ls -d sys/devices/system/cpu/online sys/devices/system/cpu/possible proc/meminfo
    cd sys/devices/system/node && ls -d online possible has_cpu has_memory | sed 's|^|sys/devices/system/node/|' && cd /
    find sys/devices/system/node/node*/ -type f \( -name cpulist -o -name distance -o -name meminfo -o -path '*/hugepages/*' -o -path '*/access*/initiators/*' \)
    find sys/devices/system/node/node*/ -type l \( -name 'cpu*' -o -path '*/initiators/*' -o -path '*/targets/*' \)
    find sys/kernel/mm/hugepages -type f
    find sys/devices/virtual/memory_tiering -name nodelist
} 2>/dev/null | tr -s / | sort | while read -r path; do
    if [ -L "$path" ]; then
        printf '%s -> %s\n' "$path" "$(readlink "$path")"
    elif text=$(cat "$path" 2>/dev/null && echo .); then
        # The final dot keeps line ends at the end of the text.
        printf '%s\t%s\n' "$path" "$(printf %s "${text%.}" | awk '{ printf "%s\\n", $0 }')"
    fi
done
# Of the status only the lines with the nodes and CPUs that the process may use.
printf 'proc/self/status\t%s\n' "$(awk '/^(Cpus|Mems)_allowed_list/ { printf "%s\\n", $0 }' proc/self/status)"
