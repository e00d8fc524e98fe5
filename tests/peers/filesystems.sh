#!/usr/bin/env bash
# Runs in a guest: a cluster on files in memory, an image on /dev/nbd0, a file system made, filled, remounted and
# checked. $1 is the loligo executable.
set -euo pipefail
loligo=$1
dir=$(mktemp -d /dev/shm/cluster.XXXXXX)
trap '"$loligo" dev stop --dir "$dir" >/dev/null 2>&1 || true' EXIT

# Direct I/O needs a file system on a block device: a loop device with ext4.
truncate -s 1800M "$dir/disk"
mkfs.ext4 -q -F "$dir/disk"
mkdir "$dir/mnt"
mount -o loop "$dir/disk" "$dir/mnt"
"$loligo" dev start --dir "$dir/mnt/cluster" --osds 3 --size 500M --sparse
export LOLIGO_CONF=$dir/mnt/cluster/loligo.toml
"$loligo" pool create pool --size 3 --pg-count 8 --failure-domain osd
trap '"$loligo" dev stop --dir "$dir/mnt/cluster" >/dev/null 2>&1 || true' EXIT

for system in ext4 xfs; do
    "$loligo" rbd create "pool/$system" --size 384M
    "$loligo" nbd "pool/$system" --socket "$dir/$system.sock" &
    server=$!
    for _ in $(seq 100); do [ -S "$dir/$system.sock" ] && break; sleep 0.2; done
    nbd-client -unix "$dir/$system.sock" -N "pool/$system" /dev/nbd0 >/dev/null
    "mkfs.$system" -q /dev/nbd0
    mkdir -p "$dir/fs"
    mount /dev/nbd0 "$dir/fs"
    for n in $(seq 40); do head -c $((n * 10007)) /dev/urandom >"$dir/fs/file.$n"; done
    (cd "$dir/fs" && sha256sum file.* >"$dir/$system.sums" && rm file.7)
    fstrim "$dir/fs"
    grep -v ' file.7$' "$dir/$system.sums" >"$dir/$system.expected"
    sync -f "$dir/fs"
    umount "$dir/fs"
    if [ "$system" = ext4 ]; then e2fsck -fn /dev/nbd0 >/dev/null; else xfs_repair -n /dev/nbd0 >/dev/null 2>&1; fi
    nbd-client -d /dev/nbd0 >/dev/null
    nbd-client -unix "$dir/$system.sock" -N "pool/$system" /dev/nbd0 >/dev/null
    mount -o ro /dev/nbd0 "$dir/fs"
    (cd "$dir/fs" && sha256sum --quiet -c "$dir/$system.expected")
    umount "$dir/fs"
    nbd-client -d /dev/nbd0 >/dev/null
    kill "$server"
    wait "$server" || true
    echo "$system: files are as written"
done
