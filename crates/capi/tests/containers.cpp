/* Containers of the standard library in a region that leaps, while threads change them; and what
 * becomes of their memory. */
#include <pageleap.hpp>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define CHECK(holds)                                                                               \
    do {                                                                                           \
        if (!(holds)) {                                                                            \
            std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #holds);         \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

namespace {

constexpr std::size_t MB = 1 << 20;

std::uint32_t a_node() {
    pageleap_topology *topology;
    pageleap::check(pageleap_topology_read(&topology));
    pageleap_node node = PAGELEAP_INIT(pageleap_node);
    std::size_t i = 0;
    do {
        pageleap::check(pageleap_topology_node(topology, i++, &node));
    } while (node.total_bytes == 0 || !node.is_allowed);
    pageleap_topology_free(topology);
    return node.id;
}

bool inside(const pageleap::region &region, const void *address) {
    const char *start = static_cast<const char *>(region.data()),
               *place = static_cast<const char *>(address);
    return place >= start && place < start + region.size();
}

/* Two threads change containers of their own in the same memory. Meanwhile the memory leaps to
 * and fro and grows. */
void containers_leap(std::uint32_t node) {
    const pageleap::pool near_pool(pageleap::placement::on(node), 64 * MB),
        far_pool(pageleap::placement::on(node), 64 * MB);
    pageleap::region_memory memory(1024 * MB, {&near_pool, &far_pool}, MB);
    const pageleap::migration_context context;
    std::atomic<bool> stop{false};
    std::atomic<int> ready{0};
    auto work = [&](int number) {
        std::pmr::unordered_map<std::pmr::string, std::size_t> map(&memory);
        std::pmr::vector<std::size_t> vector(&memory);
        std::pmr::deque<std::pmr::string> deque(&memory);
        std::size_t rounds = 0;
        for (; !stop || rounds < 20000; rounds++) {
            const std::string name =
                "a key that is too long to be kept in the object itself, number " +
                std::to_string(rounds % 3000) + " of thread " + std::to_string(number);
            map[std::pmr::string(name, &memory)] += 1;
            vector.push_back(rounds);
            deque.emplace_back(name);
            if (deque.size() > 500) {
                deque.pop_front();
            }
            if (vector.size() > 200000) {
                vector.clear();
                vector.shrink_to_fit();
            }
            if (rounds == 1000) {
                ready++;
            }
        }
        std::size_t sum = 0;
        for (const auto &[name, count] : map) {
            CHECK(inside(memory.memory(), name.data()) && inside(memory.memory(), &count));
            sum += count;
        }
        CHECK(sum == rounds && map.size() == 3000 && deque.size() == 500);
        CHECK((vector.empty() || inside(memory.memory(), vector.data())) &&
              inside(memory.memory(), &deque.front()));
        for (std::size_t i = 1; i < vector.size(); i++) {
            CHECK(vector[i] == vector[i - 1] + 1);
        }
    };
    std::thread first(work, 1), second(work, 2);
    while (ready < 2) {
        std::this_thread::yield();
    }
    for (int i = 0; i < 20; i++) {
        const pageleap::pool &to = i % 2 ? near_pool : far_pool;
        memory.grow_from({&to, i % 2 ? &far_pool : &near_pool});
        auto options = pageleap::job_options();
        options.context = context.c();
        const pageleap::report report = i % 4 < 2
                                            ? pageleap::job({memory.all_to(to)}).wait()
                                            : pageleap::job::run({memory.all_to(to)}, options);
        CHECK(report.completed());
        CHECK(report.json().find("\"completed\"") != std::string::npos && !report.runs().empty());
    }
    stop = true;
    first.join();
    second.join();
    memory.release();
    CHECK(memory.used() == 0);
}

/* Pages that are given back are used again, and neighbours are joined. If no pool has enough,
 * the result is std::bad_alloc, and nothing is lost. */
void pages_come_back(std::uint32_t node) {
    const pageleap::pool small(pageleap::placement::on(node), 4 * MB),
        other(pageleap::placement::on(node), 8 * MB);
    pageleap::region_pages pages(64 * MB, {&small, &other}, MB);
    std::vector<void *> all;
    for (int i = 0; i < 12; i++) {
        all.push_back(pages.allocate(MB));
    }
    CHECK(small.free_bytes() == 0 && other.free_bytes() == 0 && pages.used() == 12 * MB);
    const auto refuses = [&](std::size_t bytes) {
        try {
            (void)pages.allocate(bytes);
            return false;
        } catch (const std::bad_alloc &) {
            return true;
        }
    };
    CHECK(refuses(1) && refuses(65 * MB) && refuses(SIZE_MAX) && pages.used() == 12 * MB);
    for (std::size_t i = 0; i < all.size(); i += 2) {
        pages.deallocate(all[i], MB);
    }
    for (std::size_t i = 1; i < all.size(); i += 2) {
        pages.deallocate(all[i], MB);
    }
    CHECK(pages.used() == 0);
    void *whole = pages.allocate(12 * MB);
    CHECK(whole == pages.memory().data());
    pages.deallocate(whole, 12 * MB);
    void *aligned = pages.allocate(4096, 2 * MB), *next = pages.allocate(1, 64 << 10);
    CHECK(reinterpret_cast<std::uintptr_t>(aligned) % (2 * MB) == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(next) % (64 << 10) == 0 && next != aligned);
    pages.deallocate(aligned, 4096, 2 * MB);
    pages.deallocate(next, 1, 64 << 10);
    CHECK(pages.used() == 0);
}

/* After all memory was used up the containers can be destroyed, and most of the memory was of
 * use. Free pages at the end of the region count when it grows. */
void memory_is_used_up(std::uint32_t node) {
    for (std::size_t pages : {30, 40, 172, 414, 4096}) {
        const pageleap::pool pool(pageleap::placement::on(node), pages * 4096);
        pageleap::region_memory memory(64 * MB, {&pool}, 4096);
        std::size_t bytes = 0;
        std::thread filler([&] {
            std::vector<void *> pieces;
            try {
                for (std::size_t i = 0;; i++) {
                    pieces.push_back(memory.allocate(16 << i % 10));
                    bytes += 16 << i % 10;
                }
            } catch (const std::bad_alloc &) {
            }
        });
        filler.join();
        CHECK(pages < 4096 || bytes * 4 > pages * 4096 * 3); // chunks have at most 1 MB
    }
    const pageleap::pool pool(pageleap::placement::on(node), 12 * MB);
    pageleap::region_pages all(12 * MB, {&pool}, MB);
    all.deallocate(all.allocate(10 * MB), 10 * MB);
    all.deallocate(all.allocate(11 * MB), 11 * MB);
    CHECK(all.used() == 0 && all.memory().size() <= 12 * MB);
}

/* Containers with the default allocator leap where they are, while threads use them. */
void ordinary_memory_leaps(std::uint32_t node) {
    std::vector<std::uint64_t> numbers(MB);
    std::unordered_map<std::uint64_t, std::string> names;
    for (std::uint64_t i = 0; i < 20000; i++) {
        names[i] = std::string(100, static_cast<char>('a' + i % 26));
    }
    std::atomic<bool> over = false;
    std::uint64_t rounds = 0;
    std::thread writer([&] {
        while (!over) {
            for (auto &number : numbers) {
                number++;
            }
            rounds++;
        }
    });
    const pageleap::reserve reserve(node, 8 * MB);
    const pageleap_reserve *reserves[] = {reserve.c()};
    auto options = pageleap::memory_options();
    options.renew = true;
    options.reserves = reserves;
    options.reserve_count = 1;
    for (int leap = 0; leap < 4; leap++) {
        const auto to = pageleap::placement::on(node);
        pageleap::job job({pageleap::memory_range{numbers.data(), numbers.size() * 8, to}}, options);
        const auto report = job.wait();
        CHECK(report.figures().pages_busy == 0);
    }
    over = true;
    writer.join();
    for (const auto number : numbers) {
        CHECK(number == rounds);
    }
    try {
        pageleap::job job(std::vector<pageleap::memory_range>{}, options);
        CHECK(false);
    } catch (const pageleap::error &error) {
        CHECK(error.status() == PAGELEAP_BAD_ARGUMENT);
    }
    CHECK(names.size() == 20000 && names[25] == std::string(100, 'z'));
}

void errors_are_thrown(std::uint32_t node) {
    try {
        const pageleap::pool nowhere(pageleap::placement::on(4000), MB);
        CHECK(false);
    } catch (const pageleap::error &error) {
        CHECK(error.status() == PAGELEAP_UNKNOWN_NODE &&
              std::string(error.what()).find("4000") != std::string::npos);
    }
    const pageleap::pool pool(
        pageleap::placement::interleave({node}).stripe_bytes(8192).page_tables(node), MB);
    pageleap::region region(pool, pageleap::placement::weighted({{node, 3}}), 8 * 4096);
    {
        const auto guard = region.pin(0, 1);
        try {
            region.discard(0, 4096);
            CHECK(false);
        } catch (const pageleap::error &error) {
            CHECK(error.status() == PAGELEAP_PINNED && error.length() == 4096);
        }
    }
    region.discard(0, 4096);
    region.back_within(0, 4096, pool, std::chrono::seconds(1));
    region.discard_within(4096, 4096, std::chrono::seconds(1));
    region.back(4096, 4096, pool);
    CHECK(region.verify().misplaced == 0 && pool.verify().pages == 256 &&
          region.describe().length == 8 * 4096);
    pageleap::region moved = std::move(region);
    CHECK(moved.size() == 8 * 4096 && region.data() == nullptr && region.size() == 0);
    auto options = pageleap::job_options();
    options.rate_limit_bytes_per_s = 4096;
    const pageleap::pool far_pool(pageleap::placement::on(node), MB);
    pageleap::job job({pageleap::range(moved, far_pool), }, options);
    job.cancel();
    CHECK(!job.wait().text().empty() && job.finished() && job.fd() >= 0);
    try {
        pageleap::job::run({pageleap::range(moved, far_pool, 0, 1)});
        CHECK(false);
    } catch (const pageleap::error &error) {
        CHECK(error.status() == PAGELEAP_BAD_RANGE);
    }
}

} // namespace

int main() {
    const std::uint32_t node = a_node();
    containers_leap(node);
    pages_come_back(node);
    memory_is_used_up(node);
    ordinary_memory_leaps(node);
    errors_are_thrown(node);
    return 0;
}
