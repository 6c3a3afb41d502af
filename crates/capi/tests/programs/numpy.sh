# Multiplies and sorts in threads, and has forked children that read and write their copies.
"${PYTHON:-python3}" -c 'import numpy' 2> /dev/null || {
    echo "python3 has no numpy; get it by: apt-get install python3-numpy"
    exit 77
}
"${PYTHON:-python3}" <<PYTHON
import hashlib, json, multiprocessing, os, subprocess, threading
import numpy

sums = []

def work(seed):
    matrix = numpy.random.default_rng(seed).random((300, 300))
    whole = (matrix * 1000).astype(numpy.int64)
    ordered = numpy.sort((whole @ whole.T).ravel())
    sums.append((seed, hashlib.sha256(ordered.tobytes()).hexdigest()))

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sorted(sums))
# Large arrays, for which numpy advises huge pages.
large = numpy.arange(4 << 20)
print(int(large.sum()), int(numpy.concatenate([large, large])[::3].sum()))
table = {str(i): list(range(i % 50)) for i in range(100000)}
print(hashlib.sha256(json.dumps(table).encode()).hexdigest())
for _ in range(3):
    child = os.fork()
    if child == 0:
        right = len(table) == 100000 and table["99"] == list(range(49))
        table["more"] = [1] * 1000000
        os._exit(42 if right and len(table["more"]) == 1000000 else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(subprocess.run(["echo", "a child by vfork"], capture_output=True).stdout)
with multiprocessing.get_context("fork").Pool(3) as pool:
    print(sum(pool.map(len, [[0] * i for i in range(1000)])))
PYTHON
