/* Containers of the default allocator: threads write, read, insert, erase and fork while all of the
 * allocator's memory in which their elements lie leaps in place, again and again. On several nodes
 * the kernel says where its pages lie. Runs with any allocator: the test preloads others. An
 * argument says how often the memory leaps at least. */
#include <pageleap.hpp>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#define CHECK(holds)                                                                               \
    do {                                                                                           \
        if (!(holds)) {                                                                            \
            std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #holds);         \
            std::fflush(stderr);                                                                   \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

namespace {

constexpr std::uint64_t KEYS = 20000;
constexpr std::size_t NUMBERS = 1 << 20;
constexpr const char *LEAPS = "20";
constexpr std::uint64_t ENOUGH = 1000; // pages that are to move

using table = std::unordered_map<std::uint64_t, std::string>;

std::string value_of(std::uint64_t key) {
    return std::to_string(key) + std::string(key % 200, 'v');
}

/* Allocates nothing: children of a process with threads must not. */
bool is_value_of(std::uint64_t key, const std::string &value) {
    char digits[24];
    const auto length = static_cast<std::size_t>(
        std::snprintf(digits, sizeof digits, "%llu", static_cast<unsigned long long>(key)));
    return value.size() == length + key % 200 && value.compare(0, length, digits) == 0 &&
           std::count(value.begin(), value.end(), 'v') == static_cast<std::ptrdiff_t>(key % 200);
}

/* What nobody changes, and everybody verifies. */
struct constant {
    table names;
    std::vector<std::uint64_t> squares;

    constant() : squares(NUMBERS) {
        for (std::uint64_t key = 0; key < KEYS; key++) {
            names[key] = value_of(key);
        }
        for (std::size_t i = 0; i < NUMBERS; i++) {
            squares[i] = i * i;
        }
    }
    bool is_whole() const {
        for (std::uint64_t key = 0; key < KEYS; key++) {
            const auto found = names.find(key);
            if (found == names.end() || !is_value_of(key, found->second)) {
                return false;
            }
        }
        for (std::size_t i = 0; i < NUMBERS; i += 64) {
            if (squares[i] != i * i) {
                return false;
            }
        }
        return true;
    }
};

/* One thread writes it, and remembers what it has written. */
struct written {
    std::unordered_map<std::uint64_t, std::uint64_t> counts;
    std::map<std::uint64_t, std::string> texts; // comes and goes
    std::vector<std::uint64_t> shadow = std::vector<std::uint64_t>(KEYS);

    written() {
        for (std::uint64_t key = 0; key < KEYS; key++) {
            counts[key] = 0;
        }
    }
    void work(std::uint64_t seed, const std::atomic<bool> &over) {
        std::uint64_t random = seed;
        while (!over) {
            for (int i = 0; i < 1000; i++) {
                random = random * 6364136223846793005u + 1442695040888963407u;
                const std::uint64_t key = (random >> 33) % KEYS;
                counts[key]++;
                shadow[key]++;
                if (i % 10 == 0) {
                    texts[key] = value_of(key);
                } else if (i % 10 == 5) {
                    texts.erase((random >> 40) % KEYS);
                }
            }
            CHECK(std::all_of(texts.begin(), texts.end(), [](const auto &text) {
                return is_value_of(text.first, text.second);
            }));
        }
    }
    bool is_right() const {
        return std::all_of(counts.begin(), counts.end(), [this](const auto &count) {
            return count.second == shadow[count.first];
        });
    }
};

/* Parts of mappings in which these addresses lie. */
std::vector<pageleap::memory_range> ranges_of(std::vector<std::uintptr_t> addresses,
                                              std::uint32_t node) {
    std::sort(addresses.begin(), addresses.end());
    std::vector<pageleap::memory_range> ranges;
    std::ifstream maps("/proc/self/maps");
    unsigned long told = 0;
    for (std::string line; std::getline(maps, line);) {
        unsigned long start = 0, end = 0;
        char access[8] = "";
        CHECK(std::sscanf(line.c_str(), "%lx-%lx %7s", &start, &end, access) == 3);
        // A mapping that grows between two reads of the file is told twice.
        start = std::max(start, told);
        told = std::max(told, end);
        const auto first = std::lower_bound(addresses.begin(), addresses.end(), start);
        const auto last = std::lower_bound(first, addresses.end(), told);
        if (first != last && std::strcmp(access, "rw-p") == 0) {
            const auto begin = *first / 4096 * 4096;
            const auto length = *(last - 1) / 4096 * 4096 + 4096 - begin;
            ranges.push_back({reinterpret_cast<void *>(begin), length,
                              pageleap::placement::on(node)});
        }
    }
    return ranges;
}

/* What the report says of each run of pages is of this process, and adds up to its figures. */
void check_runs(const pageleap::report &report) {
    const auto figures = report.figures();
    std::uint64_t migrated = 0, stayed = 0;
    for (const auto &run : report.runs()) {
        CHECK(run.source == PAGELEAP_SOURCE_PROCESS);
        CHECK(run.source_id == static_cast<std::uint64_t>(getpid()));
        const bool has_words = run.reason_text[0] != '\0';
        CHECK(has_words == (run.reason != PAGELEAP_REASON_NONE));
        const auto pages = run.length / 4096;
        migrated += run.outcome == PAGELEAP_MIGRATED ? pages : 0;
        const bool stays =
            run.outcome == PAGELEAP_BUSY || run.outcome == PAGELEAP_NOT_MOVABLE;
        stayed += stays ? pages : 0;
        CHECK(!stays || run.reason != PAGELEAP_REASON_NONE);
    }
    CHECK(migrated == figures.pages_migrated);
    CHECK(stayed == figures.pages_busy + figures.pages_not_movable);
    CHECK(report.json().find("\"kind\":\"process\"") != std::string::npos);
}

/* How many pages of the ranges lie on a node, and how many are present, as the kernel says. */
std::pair<std::size_t, std::size_t> pages_on(const std::vector<pageleap::memory_range> &ranges,
                                             std::uint32_t node) {
    std::vector<void *> pages;
    for (const auto &range : ranges) {
        for (std::size_t at = 0; at < range.length; at += 4096) {
            pages.push_back(static_cast<char *>(range.address) + at);
        }
    }
    std::vector<int> places(pages.size());
    CHECK(syscall(SYS_move_pages, 0, pages.size(), pages.data(), nullptr, places.data(), 0) == 0);
    const auto present = [](int place) { return place >= 0; };
    return {std::count(places.begin(), places.end(), static_cast<int>(node)),
            std::count_if(places.begin(), places.end(), present)};
}

/* Keeps khugepaged away from the ranges; huge pages stay huge. khugepaged chooses a node by where
 * pages lie, and copies them later, when it gets a CPU: a job may have moved them in between, and
 * the whole huge page goes back. The call and khugepaged's copy exclude each other. */
void keep_khugepaged_away(const std::vector<pageleap::memory_range> &ranges) {
    for (const auto &range : ranges) {
        // EINVAL: a kernel without transparent huge pages.
        CHECK(madvise(range.address, range.length, MADV_NOHUGEPAGE) == 0 || errno == EINVAL);
    }
}

std::vector<std::uint32_t> nodes() {
    std::uint32_t all[64];
    std::size_t found = 0;
    pageleap_topology *topology;
    pageleap::check(pageleap_topology_read(&topology));
    pageleap::check(pageleap_topology_parse_nodes(topology, "all", all, 64, &found));
    std::vector<std::uint32_t> with_memory;
    for (std::size_t i = 0; i < found; i++) {
        pageleap_node node = PAGELEAP_INIT(pageleap_node);
        pageleap::check(pageleap_topology_node(topology, i, &node));
        if (node.total_bytes > 0) {
            with_memory.push_back(node.id);
        }
    }
    pageleap_topology_free(topology);
    return with_memory;
}

} // namespace

int main(int count, char **arguments) {
    const auto least = std::strtoul(count > 1 ? arguments[1] : LEAPS, nullptr, 10);
    const auto fixed = std::make_unique<const constant>();
    const std::unique_ptr<written> own[2] = {std::make_unique<written>(),
                                             std::make_unique<written>()};
    std::atomic<bool> over = false;
    std::atomic<int> children = 0, checks = 0;
    std::mutex forking;
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < 2; i++) {
        threads.emplace_back([&, i] { own[i]->work(i + 1, over); });
        threads.emplace_back([&] {
            while (!over) {
                CHECK(fixed->is_whole());
                checks++;
            }
        });
    }
    threads.emplace_back([&] {
        while (!over) {
            {
                const std::lock_guard<std::mutex> one_child(forking);
                const pid_t child = fork();
                if (child == 0) {
                    _exit(fixed->is_whole() ? 0 : 1);
                }
                int status = 0;
                CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
            }
            children++;
            usleep(20000); // pages that a child shares do not move
        }
    });

    std::vector<std::uintptr_t> addresses;
    for (const auto &name : fixed->names) {
        addresses.push_back(reinterpret_cast<std::uintptr_t>(&name));
        addresses.push_back(reinterpret_cast<std::uintptr_t>(name.second.data()));
    }
    for (const auto &one : own) {
        for (std::uint64_t key = 0; key < KEYS; key++) {
            // The elements stay where they are; their values change.
            addresses.push_back(reinterpret_cast<std::uintptr_t>(&*one->counts.find(key)));
        }
    }
    for (std::size_t i = 0; i < NUMBERS; i += 512) {
        addresses.push_back(reinterpret_cast<std::uintptr_t>(&fixed->squares[i]));
    }
    const auto places = nodes();
    auto options = pageleap::memory_options();
    options.renew = places.size() == 1;
    std::uint64_t moved = 0, in_place = 0, left = 0;
    std::size_t leaps = 0;
    // Each thread has to do its work beside leaps once. Pages that a child shares stay.
    while (leaps < least || checks == 0 || children == 0 ||
           (moved <= ENOUGH && places.size() == 1 && in_place > 0)) {
        const auto node = places[++leaps % places.size()];
        const auto report = pageleap::job(ranges_of(addresses, node), options).wait();
        check_runs(report);
        const auto figures = report.figures();
        moved += figures.pages_migrated;
        left += figures.pages_not_movable;
        in_place += figures.engine == PAGELEAP_ENGINE_UFFD_MOVE ? figures.pages_migrated : 0;
    }
    if (places.size() > 1) {
        // From the first node, where they have to lie before, to the second one. Writers and
        // readers go on.
        const std::lock_guard<std::mutex> no_child(forking);
        keep_khugepaged_away(ranges_of(addresses, places[0]));
        for (const auto node : {places[0], places[1]}) {
            const auto ranges = ranges_of(addresses, node);
            const auto report = pageleap::job(ranges, options).wait();
            const auto figures = report.figures();
            const auto stayed = figures.pages_busy + figures.pages_not_movable;
            moved += figures.pages_migrated;
            const auto [there, present] = pages_on(ranges, node);
            std::printf("%zu of %zu present pages lie on node %u\n", there, present, node);
            if (there < present) {
                std::fprintf(stderr, "%s\n", report.text().c_str());
            }
            // The job has said of each page that lies elsewhere that it did not move.
            CHECK(there + stayed >= present && figures.pages_not_attempted == 0);
            CHECK(present > ENOUGH && there * 100 >= present * 95);
        }
    } else {
        std::puts("where pages lie is not checked: this machine has one memory node");
    }
    over = true;
    for (auto &thread : threads) {
        thread.join();
    }
    CHECK(fixed->is_whole() && own[0]->is_right() && own[1]->is_right());
    std::printf("%zu leaps moved %llu pages, %llu of them in place, %llu were in use; "
                "%d checks, %d children, 0 lost\n",
                leaps, static_cast<unsigned long long>(moved),
                static_cast<unsigned long long>(in_place), static_cast<unsigned long long>(left),
                checks.load(), children.load());
    CHECK(checks > 0 && children > 0 && (moved > ENOUGH || (places.size() == 1 && in_place == 0)));
    return 0;
}
