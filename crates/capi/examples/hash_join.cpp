/*
 * A hash join whose table leaps: between build and probe, and during the probe.
 *
 *     hash_join [BUILD [PROBE [FROM [TO]]]]
 *
 * BUILD and PROBE are numbers of tuples (1000000, 16000000), FROM and TO nodes (the first two that
 * may be used).
 *
 * The table is a std::pmr::unordered_map in a region. Threads, one for each CPU and at most 8,
 * probe the table while its pages move to the other node; every sum is checked. On a machine with
 * one memory node the table leaps to other frames of that node: this shows the cost of a leap, not
 * the gain of a NUMA machine.
 *
 * Exit code: 0 if all sums are right, 1 if one is wrong, 2 if a call failed.
 */
#include <pageleap.hpp>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace {

using table = std::pmr::unordered_map<std::uint64_t, std::uint64_t>;
using seconds = std::chrono::duration<double>;

seconds now() { return std::chrono::steady_clock::now().time_since_epoch(); }

/* Tuples of the build side: key k has this payload. */
std::uint64_t payload(std::uint64_t key) { return key * 0x9e3779b97f4a7c15u >> 16; }

/* The key of a tuple of the probe side: half of the tuples find a partner. */
std::uint64_t probe_key(std::uint64_t tuple, std::uint64_t build) {
    const std::uint64_t mixed = (tuple + 1) * 0xd1342543de82ef95u;
    return (mixed >> 20) % (2 * build);
}

struct joined {
    std::uint64_t matches = 0, sum = 0;
    bool operator==(const joined &other) const {
        return matches == other.matches && sum == other.sum;
    }
};

/* What a probe must find, without the table. */
joined expected(std::uint64_t build, std::uint64_t probe) {
    joined result;
    for (std::uint64_t tuple = 0; tuple < probe; tuple++) {
        const std::uint64_t key = probe_key(tuple, build);
        if (key < build) {
            result.matches++;
            result.sum += payload(key);
        }
    }
    return result;
}

joined probe(const table &built, std::uint64_t build, std::uint64_t probe) {
    const unsigned threads = std::clamp(std::thread::hardware_concurrency(), 1u, 8u);
    std::vector<joined> results(threads);
    std::vector<std::thread> workers;
    for (unsigned number = 0; number < threads; number++) {
        workers.emplace_back([&, number] {
            joined result;
            for (std::uint64_t tuple = number; tuple < probe; tuple += threads) {
                const auto found = built.find(probe_key(tuple, build));
                if (found != built.end()) {
                    result.matches++;
                    result.sum += found->second;
                }
            }
            results[number] = result;
        });
    }
    joined all;
    for (unsigned number = 0; number < threads; number++) {
        workers[number].join();
        all.matches += results[number].matches;
        all.sum += results[number].sum;
    }
    return all;
}

/* The first two nodes that this process may take memory from, or the only one twice. */
std::pair<std::uint32_t, std::uint32_t> two_nodes() {
    pageleap_topology *topology;
    pageleap::check(pageleap_topology_read(&topology));
    std::uint32_t allowed[2];
    std::size_t count;
    pageleap::check(pageleap_topology_parse_nodes(topology, "all", allowed, 2, &count));
    pageleap_topology_free(topology);
    return {allowed[0], allowed[count > 1]};
}

int run(std::uint64_t build, std::uint64_t probes, std::uint32_t from, std::uint32_t to) {
    // A node of the map and its bucket for each tuple, and some to spare.
    const std::uint64_t bytes = build * 64 + (64 << 20);
    const pageleap::pool near_pool(pageleap::placement::on(from), bytes);
    const pageleap::pool far_pool(pageleap::placement::on(to), bytes);
    pageleap::region_memory memory(2 * bytes, {&near_pool});
    std::printf("join        %" PRIu64 " tuples built, %" PRIu64 " probed; node %u -> node %u%s\n",
                build, probes, from, to,
                from == to ? ": other frames of one node; this is no NUMA speed-up" : "");

    seconds began = now();
    table built(&memory);
    built.reserve(build);
    for (std::uint64_t key = 0; key < build; key++) {
        built.emplace(key, payload(key));
    }
    std::printf("build       %7.0f ms, %.1f MiB in the region\n", (now() - began).count() * 1e3,
                memory.used() / 1048576.0);

    const joined right = expected(build, probes);
    bool all_right = true;
    double first = 0;
    const auto measure = [&](const char *name) {
        began = now();
        const joined result = probe(built, build, probes);
        const double taken = (now() - began).count();
        first = first > 0 ? first : taken;
        all_right &= result == right;
        std::printf("%-11s %7.0f ms, %.2f of the first; %" PRIu64 " matches, %s\n", name,
                    taken * 1e3, taken / first, result.matches,
                    result == right ? "sum right" : "SUM WRONG");
    };
    const auto leap = [&](const pageleap::pool &pool, const char *name, bool probing) {
        pageleap::job job({memory.all_to(pool)});
        if (probing) {
            measure("probe");
        }
        const pageleap::report report = job.wait();
        const auto figures = report.figures();
        all_right &= report.completed();
        std::printf("leap        %7.0f ms%s: %" PRIu64
                    " pages, engine %s, longest window %.2f ms%s%s\n",
                    figures.migrate_ns / 1e6, name, figures.pages_migrated,
                    pageleap_engine_name(figures.engine), figures.window_max_ns / 1e6,
                    report.completed() ? "" : "; NOT COMPLETED: ",
                    report.completed() ? "" : figures.ended_text);
    };
    measure("probe");
    leap(far_pool, " between the probes", false);
    measure("probe");
    leap(near_pool, " while it was probed (the probe above)", true);
    measure("probe");
    std::puts(all_right ? "verified    every probe found what it should" : "FAILED");
    return all_right ? 0 : 1;
}

} // namespace

int main(int count, char **arguments) {
    std::uint64_t numbers[4] = {1000000, 16000000, 0, 0};
    try {
        std::tie(numbers[2], numbers[3]) = two_nodes();
        for (int i = 1; i < count && i <= 4; i++) {
            numbers[i - 1] = std::stoull(arguments[i]);
        }
        if (count > 5 || numbers[0] == 0) {
            throw std::invalid_argument("usage: hash_join [BUILD [PROBE [FROM [TO]]]]");
        }
        return run(numbers[0], numbers[1], static_cast<std::uint32_t>(numbers[2]),
                   static_cast<std::uint32_t>(numbers[3]));
    } catch (const std::exception &error) {
        std::fprintf(stderr, "hash_join: %s\n", error.what());
        return 2;
    }
}
