/*
 * pageleap.hpp - pageleap.h for C++17: handles that free themselves, errors as exceptions, and
 * memory for containers that can leap.
 *
 *     pageleap::pool near_pool(pageleap::placement::on(0), 1 << 30);
 *     pageleap::pool far_pool(pageleap::placement::on(1), 1 << 30);
 *     pageleap::region_memory memory(8ull << 30, {&near_pool}); // addresses for 8 GB
 *
 *     std::pmr::unordered_map<std::pmr::string, int> table(&memory); // its addresses never change
 *     ...
 *     pageleap::job job({memory.all_to(far_pool)});                  // threads go on using it
 *     std::cout << job.wait().text();
 *
 * Everything is in this file; link with -lpageleap. The rules of pageleap.h for threads, handles,
 * fork and signals hold here, too. Functions throw pageleap::error where those of pageleap.h return
 * a status, and std::bad_alloc where containers expect it. Handles can be moved, but not copied; a
 * handle that was moved from holds nothing.
 */

#ifndef PAGELEAP_HPP
#define PAGELEAP_HPP

#include <pageleap.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pageleap {

/* The error of a call. what() is the text of pageleap_last_error(). */
class error : public std::runtime_error {
public:
    explicit error(const pageleap_error &detail)
        : std::runtime_error(detail.message), detail_(detail) {
        detail_.message = nullptr; // what() has its own
    }

    pageleap_status status() const noexcept { return detail_.status; }
    /* The system call that failed; NULL if none did. Constant. */
    const char *call() const noexcept { return detail_.call; }
    /* Its errno, or 0. */
    int error_number() const noexcept { return detail_.error_number; }
    /* The first byte that the error is about, and how many; 0 and 0 if it is about no bytes. */
    std::size_t start() const noexcept { return detail_.start; }
    std::size_t length() const noexcept { return detail_.length; }

private:
    pageleap_error detail_;
};

/* Throws the error of the last call of this thread, unless the call has succeeded. */
inline void check(pageleap_status status) {
    if (status != PAGELEAP_OK) {
        pageleap_error detail{};
        detail.size = sizeof detail;
        if (pageleap_last_error_detail(&detail) != PAGELEAP_OK || detail.status != status) {
            // The thread is ending, and its place for errors is gone.
            detail = {};
            detail.status = status;
            detail.message = pageleap_status_name(status);
        }
        throw error(detail);
    }
}

namespace detail {

template <typename T> T sized() noexcept {
    T made{};
    made.size = sizeof(T);
    return made;
}

template <typename T, void (*Free)(T *)> struct freed {
    void operator()(T *handle) const noexcept { Free(handle); }
};
template <typename T, void (*Free)(T *)> using handle = std::unique_ptr<T, freed<T, Free>>;

} // namespace detail

/* Options of pools and jobs, with the library's defaults. */
inline pageleap_pool_options pool_options() noexcept {
    return detail::sized<pageleap_pool_options>();
}
inline pageleap_job_options job_options() noexcept { return detail::sized<pageleap_job_options>(); }
inline pageleap_memory_options memory_options() noexcept {
    return detail::sized<pageleap_memory_options>();
}

/* How pages are spread over nodes. */
class placement {
public:
    /* All on one node. */
    static placement on(std::uint32_t node) { return placement({node}, {}); }
    /* On each of these nodes in turn. */
    static placement interleave(std::vector<std::uint32_t> nodes) {
        return placement(std::move(nodes), {});
    }
    /* On each node in turn, in as many stripes as its weight says: pairs of node and weight. */
    static placement weighted(const std::vector<std::pair<std::uint32_t, std::uint32_t>> &weights) {
        placement made({}, {});
        for (auto [node, weight] : weights) {
            made.nodes_.push_back(node);
            made.weights_.push_back(weight);
        }
        return made;
    }
    /* Bytes of a stripe. */
    placement &stripe_bytes(std::size_t bytes) {
        stripe_bytes_ = bytes;
        return *this;
    }
    /* The node for page tables, if they are not to go where the data goes. */
    placement &page_tables(std::uint32_t node) {
        page_tables_ = node;
        return *this;
    }

    /* For functions of pageleap.h; valid while this object is not changed. */
    pageleap_placement c() const noexcept {
        auto made = detail::sized<pageleap_placement>();
        made.nodes = nodes_.data();
        made.node_count = nodes_.size();
        made.weights = weights_.empty() ? nullptr : weights_.data();
        made.stripe_bytes = stripe_bytes_;
        made.has_page_tables_node = page_tables_.has_value();
        made.page_tables_node = page_tables_.value_or(0);
        return made;
    }

private:
    placement(std::vector<std::uint32_t> nodes, std::vector<std::uint32_t> weights)
        : nodes_(std::move(nodes)), weights_(std::move(weights)) {}

    std::vector<std::uint32_t> nodes_, weights_;
    std::size_t stripe_bytes_ = 0;
    std::optional<std::uint32_t> page_tables_;
};

/* Memory of one or several nodes, faulted in and verified: pageleap_pool. */
class pool {
public:
    pool(const placement &place, std::uint64_t bytes,
         const pageleap_pool_options &options = pool_options()) {
        pageleap_pool *made;
        const pageleap_placement where = place.c();
        check(pageleap_pool_new(&where, bytes, &options, &made));
        handle_.reset(made);
    }

    std::uint64_t bytes() const noexcept { return pageleap_pool_bytes(c()); }
    std::uint64_t free_bytes() const noexcept { return pageleap_pool_free_bytes(c()); }
    std::uint64_t free_bytes_on(std::uint32_t node) const noexcept {
        return pageleap_pool_free_bytes_on(c(), node);
    }
    std::uint32_t page_size() const noexcept { return pageleap_pool_page_size(c()); }
    pageleap_verification verify() const {
        auto found = detail::sized<pageleap_verification>();
        check(pageleap_pool_verify(c(), &found));
        return found;
    }
    const pageleap_pool *c() const noexcept { return handle_.get(); }

private:
    detail::handle<pageleap_pool, pageleap_pool_free> handle_;
};

/* Keeps pages of a region in their frames for as long as it lives: pageleap_region_pin(). */
class guard {
public:
    explicit guard(pageleap_guard *handle) noexcept : handle_(handle) {}

private:
    detail::handle<pageleap_guard, pageleap_guard_drop> handle_;
};

/* A range of addresses that never changes, while its pages change their frames: pageleap_region. */
class region {
public:
    /* A region of `length` bytes, all zero, of frames of a pool. */
    region(const pool &from, std::size_t length) : region(from, nullptr, length) {}
    region(const pool &from, const placement &place, std::size_t length)
        : region(from, &place, length) {}
    /* A region of no bytes, which can grow. */
    static region reserve(std::size_t capacity, std::uint32_t page_size = PAGELEAP_PAGE_4K) {
        pageleap_region *made;
        check(pageleap_region_reserve(capacity, page_size, &made));
        return region(made);
    }

    void *data() const noexcept { return pageleap_region_start(c()); }
    std::size_t size() const noexcept { return pageleap_region_length(c()); }
    void grow(std::size_t length, const pool &from) {
        check(pageleap_region_grow(c(), length, from.c(), nullptr));
    }
    void grow(std::size_t length, const pool &from, const placement &place) {
        const pageleap_placement where = place.c();
        check(pageleap_region_grow(c(), length, from.c(), &where));
    }
    /* Grows without memory: the new part must not be touched before back(). */
    void extend(std::size_t length) { check(pageleap_region_grow(c(), length, nullptr, nullptr)); }
    void discard(std::size_t offset, std::size_t length) {
        check(pageleap_region_discard(c(), offset, length));
    }
    void back(std::size_t offset, std::size_t length, const pool &from) {
        check(pageleap_region_back(c(), offset, length, from.c(), nullptr));
    }
    /* discard() and back() that wait, for at most `timeout`, until no job moves pages of the part. */
    void discard_within(std::size_t offset, std::size_t length, std::chrono::nanoseconds timeout) {
        check(pageleap_region_discard_within(c(), offset, length, wait_ns(timeout)));
    }
    void back_within(std::size_t offset, std::size_t length, const pool &from,
                     std::chrono::nanoseconds timeout) {
        check(pageleap_region_back_within(c(), offset, length, from.c(), nullptr,
                                          wait_ns(timeout)));
    }
    [[nodiscard]] guard pin(std::size_t offset, std::size_t length) const {
        pageleap_guard *made;
        check(pageleap_region_pin(c(), offset, length, &made));
        return guard(made);
    }
    pageleap_verification verify() const {
        auto found = detail::sized<pageleap_verification>();
        check(pageleap_region_verify(c(), &found));
        return found;
    }
    pageleap_region_info describe() const {
        auto info = detail::sized<pageleap_region_info>();
        check(pageleap_region_describe(c(), &info));
        return info;
    }
    const pageleap_region *c() const noexcept { return handle_.get(); }

private:
    static std::uint64_t wait_ns(std::chrono::nanoseconds timeout) {
        return timeout.count() > 0 ? static_cast<std::uint64_t>(timeout.count()) : 0;
    }
    explicit region(pageleap_region *handle) noexcept : handle_(handle) {}
    region(const pool &from, const placement *place, std::size_t length) {
        pageleap_region *made;
        const pageleap_placement where = place ? place->c() : pageleap_placement{};
        check(pageleap_region_new(from.c(), place ? &where : nullptr, length, &made));
        handle_.reset(made);
    }

    detail::handle<pageleap_region, pageleap_region_free> handle_;
};

/* A range of a job: bytes of a region, in whole pages, and their destination. Without offset and
 * length it is the whole region. */
class range {
public:
    range(const region &what, const pool &to, std::size_t offset = 0, std::size_t length = 0)
        : region_(what.c()), pool_(to.c()), offset_(offset), length_(length) {}
    range(const region &what, const pool &to, placement place, std::size_t offset = 0,
          std::size_t length = 0)
        : region_(what.c()), pool_(to.c()), offset_(offset), length_(length),
          place_(std::move(place)) {}

private:
    friend class job;
    const pageleap_region *region_;
    const pageleap_pool *pool_;
    std::size_t offset_, length_;
    std::optional<placement> place_;
};

/* The report of a job: pageleap_report. */
class report {
public:
    explicit report(pageleap_report *handle) noexcept : handle_(handle) {}

    /* The texts in the figures are valid while the report lives. */
    pageleap_report_figures figures() const {
        auto found = detail::sized<pageleap_report_figures>();
        check(pageleap_report_get_figures(c(), &found));
        return found;
    }
    bool completed() const { return figures().ended == PAGELEAP_COMPLETED; }
    std::string text() const { return pageleap_report_text(c()); }
    std::string json() const { return pageleap_report_json(c()); }
    std::vector<pageleap_page_run> runs() const {
        std::vector<pageleap_page_run> all(figures().run_count, detail::sized<pageleap_page_run>());
        for (std::size_t i = 0; i < all.size(); i++) {
            check(pageleap_report_run(c(), i, &all[i]));
        }
        return all;
    }
    /* How often each system call was made. */
    std::map<std::string, std::uint64_t> calls() const {
        std::map<std::string, std::uint64_t> all;
        const std::size_t count = figures().call_use_count;
        for (std::size_t i = 0; i < count; i++) {
            auto use = detail::sized<pageleap_call_use>();
            check(pageleap_report_get_call_use(c(), i, &use));
            all.emplace(use.name, use.count);
        }
        return all;
    }
    /* Warnings with the call that failed and its errno; the texts are valid while the report lives. */
    std::vector<pageleap_warning> warning_details() const {
        std::vector<pageleap_warning> all(figures().warning_count,
                                          detail::sized<pageleap_warning>());
        for (std::size_t i = 0; i < all.size(); i++) {
            check(pageleap_report_get_warning(c(), i, &all[i]));
        }
        return all;
    }
    std::vector<std::string> warnings() const {
        std::vector<std::string> all;
        while (const char *next = pageleap_report_warning(c(), all.size())) {
            all.emplace_back(next);
        }
        return all;
    }
    const pageleap_report *c() const noexcept { return handle_.get(); }

private:
    detail::handle<pageleap_report, pageleap_report_free> handle_;
};

/* Populated memory of a node, for leaps of memory that no pool owns: pageleap_reserve. */
class reserve {
public:
    reserve(std::uint32_t node, std::size_t bytes, pageleap_page_size size = PAGELEAP_PAGE_4K) {
        pageleap_reserve *made;
        check(pageleap_reserve_new(node, bytes, size, &made));
        handle_.reset(made);
    }

    std::size_t free_bytes() const noexcept { return pageleap_reserve_free_bytes(c()); }
    void refill() { check(pageleap_reserve_refill(c())); }
    const pageleap_reserve *c() const noexcept { return handle_.get(); }

private:
    detail::handle<pageleap_reserve, pageleap_reserve_free> handle_;
};

/* Memory that no pool owns, such as the elements of a std::vector, and the destination of its whole
 * pages. The rules for the program stand at pageleap_leap_memory(). */
struct memory_range {
    void *address;
    std::size_t length;
    placement place;
};

/* Keeps threads and descriptors of a job for the next job: pageleap_migration_context. When a
 * context is destroyed, jobs that use it keep their threads and descriptors until they end. */
class migration_context {
public:
    migration_context() {
        pageleap_migration_context *made;
        check(pageleap_migration_context_new(&made));
        handle_.reset(made);
    }

    /* For the field context of pageleap_job_options. */
    const pageleap_migration_context *c() const noexcept { return handle_.get(); }

private:
    detail::handle<pageleap_migration_context, pageleap_migration_context_free> handle_;
};

/* A job, which moves pages or has ended: pageleap_job. Destroying a job cancels it, and waits
 * until its ranges are whole. */
class job {
public:
    explicit job(const std::vector<range> &wanted,
                 const pageleap_job_options &options = job_options()) {
        const listed all(wanted);
        pageleap_job *made;
        check(pageleap_job_start(all.ranges.data(), all.ranges.size(), &options, &made));
        handle_.reset(made);
    }
    /* Moves all ranges in the calling thread, and returns when the job has ended:
     * pageleap_job_run(). */
    static report run(const std::vector<range> &wanted,
                      const pageleap_job_options &options = job_options()) {
        const listed all(wanted);
        pageleap_report *made;
        check(pageleap_job_run(all.ranges.data(), all.ranges.size(), &options, &made));
        return report(made);
    }
    /* Moves memory that no pool owns: pageleap_leap_memory(). */
    explicit job(const std::vector<memory_range> &wanted,
                 const pageleap_memory_options &options = memory_options()) {
        std::vector<pageleap_placement> places;
        places.reserve(wanted.size()); // their addresses are taken
        std::vector<pageleap_memory_range> ranges;
        for (const memory_range &one : wanted) {
            auto made = detail::sized<pageleap_memory_range>();
            made.address = one.address;
            made.length = one.length;
            made.place = &places.emplace_back(one.place.c());
            ranges.push_back(made);
        }
        pageleap_job *made;
        check(pageleap_leap_memory(ranges.data(), ranges.size(), &options, &made));
        handle_.reset(made);
    }

    pageleap_progress progress() const {
        auto now = detail::sized<pageleap_progress>();
        check(pageleap_job_progress(c(), &now));
        return now;
    }
    void cancel() { check(pageleap_job_cancel(c())); }
    bool finished() const noexcept { return pageleap_job_is_finished(c()); }
    /* A descriptor that is readable once the job has ended; do not read from it or close it. */
    int fd() const noexcept { return pageleap_job_fd(c()); }
    void wait_until_moved() const { check(pageleap_job_wait_until_moved(c())); }
    report wait() const {
        pageleap_report *made;
        check(pageleap_job_wait(c(), &made));
        return report(made);
    }
    const pageleap_job *c() const noexcept { return handle_.get(); }

private:
    /* Ranges for functions of pageleap.h; valid while the given ranges do not change. */
    struct listed {
        explicit listed(const std::vector<range> &wanted) {
            places.reserve(wanted.size()); // their addresses are taken
            for (const range &one : wanted) {
                auto made = detail::sized<pageleap_range>();
                made.region = one.region_;
                made.pool = one.pool_;
                made.offset = one.offset_;
                made.length = one.length_;
                if (one.place_) {
                    made.place = &places.emplace_back(one.place_->c());
                }
                ranges.push_back(made);
            }
        }

        std::vector<pageleap_placement> places;
        std::vector<pageleap_range> ranges;
    };

    detail::handle<pageleap_job, pageleap_job_free> handle_;
};

/* Pieces of a region, in multiples of 4 KB, for other memory resources, such as the pools of the
 * standard library. The search is first fit, and pieces that are given back join their
 * neighbours. The region grows when no hole has room, over frames of the first pool that has
 * enough, and does not shrink. Threads that allocate while it grows wait: some 50 ms per GB if its
 * frames are still being recycled. The list of holes is kept outside of the region. Several
 * threads may use it. The pools must live as long as the region may grow. */
class region_pages : public std::pmr::memory_resource {
public:
    /* `capacity` is the size in bytes that the region can grow to; it takes addresses only. The
     * region grows by `step` bytes, or by the piece that is asked for, if that is larger. */
    region_pages(std::size_t capacity, std::vector<const pool *> pools, std::size_t step = 16 << 20)
        : pools_(std::move(pools)), page_(page_bytes(pools_)),
          step_(rounded(std::max(step, page_), page_)), capacity_(rounded(capacity, page_)),
          region_(region::reserve(capacity_, pools_.front()->page_size())) {}

    const region &memory() const noexcept { return region_; }
    /* Sets the pools from which the region grows from now on. Their page size must stay the
     * same. */
    void grow_from(std::vector<const pool *> pools) {
        if (page_bytes(pools) != page_) {
            throw std::invalid_argument("pageleap: pools of another page size");
        }
        std::lock_guard lock(mutex_);
        pools_ = std::move(pools);
    }
    /* Bytes of all pieces that are in use. */
    std::size_t used() const {
        std::lock_guard lock(mutex_);
        std::size_t free = 0;
        for (auto [offset, length] : free_) {
            free += length;
        }
        return region_.size() - free;
    }

protected:
    void *do_allocate(std::size_t bytes, std::size_t alignment) override {
        if (bytes > capacity_ || alignment > most_aligned) {
            throw std::bad_alloc();
        }
        const std::size_t length = rounded(std::max<std::size_t>(bytes, 1), granule);
        std::lock_guard lock(mutex_);
        auto place = find(length, alignment);
        if (!place) {
            grow(length + (alignment > granule ? alignment : 0));
            place = find(length, alignment);
        }
        if (!place) {
            throw std::bad_alloc();
        }
        take(place->first, place->second, length);
        return static_cast<char *>(region_.data()) + place->second;
    }

    void do_deallocate(void *piece, std::size_t bytes, std::size_t) override {
        const std::size_t offset = static_cast<std::size_t>(static_cast<char *>(piece) -
                                                            static_cast<char *>(region_.data()));
        std::lock_guard lock(mutex_);
        try {
            join(free_.emplace(offset, rounded(std::max<std::size_t>(bytes, 1), granule)).first);
        } catch (const std::bad_alloc &) {
            // Destructors call this, so it must not throw. Without memory for its entry in the list
            // of holes, the piece stays out of use until the region is gone.
        }
    }

    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override {
        return this == &other;
    }

private:
    static constexpr std::size_t granule = 4096;
    /* A region begins at a multiple of this. */
    static constexpr std::size_t most_aligned = 2 << 20;
    using holes = std::map<std::size_t, std::size_t>; // offset, length

    static std::size_t page_bytes(const std::vector<const pool *> &pools) {
        if (pools.empty()) {
            throw std::invalid_argument("pageleap: name at least one pool");
        }
        for (const pool *one : pools) {
            if (one->page_size() != pools.front()->page_size()) {
                throw std::invalid_argument("pageleap: pools of different page sizes");
            }
        }
        return pageleap_page_bytes(pools.front()->page_size());
    }
    static std::size_t rounded(std::size_t bytes, std::size_t unit) {
        if (bytes > SIZE_MAX - unit) {
            throw std::bad_alloc();
        }
        return (bytes + unit - 1) / unit * unit;
    }
    /* The first hole with room, and the place in it. */
    std::optional<std::pair<holes::iterator, std::size_t>> find(std::size_t length,
                                                                std::size_t alignment) {
        for (auto hole = free_.begin(); hole != free_.end(); ++hole) {
            const std::size_t start = (hole->first + alignment - 1) / alignment * alignment;
            if (start + length <= hole->first + hole->second) {
                return std::pair(hole, start);
            }
        }
        return std::nullopt;
    }
    /* Takes a part out of a hole. If it throws, nothing has changed. */
    void take(holes::iterator hole, std::size_t start, std::size_t length) {
        const std::size_t end = hole->first + hole->second;
        if (start + length < end) {
            free_.emplace(start + length, end - start - length);
        }
        if (start > hole->first) {
            hole->second = start - hole->first;
        } else {
            free_.erase(hole);
        }
    }
    /* Joins a hole with its neighbours. */
    void join(holes::iterator hole) {
        if (auto next = std::next(hole);
            next != free_.end() && hole->first + hole->second == next->first) {
            hole->second += next->second;
            free_.erase(next);
        }
        if (hole != free_.begin()) {
            if (auto before = std::prev(hole); before->first + before->second == hole->first) {
                before->second += hole->second;
                free_.erase(hole);
            }
        }
    }
    /* Grows the region so that the hole at its end has `length` bytes, or more if a pool has
     * them. Throws std::bad_alloc if no pool has `length` bytes. */
    void grow(std::size_t length) {
        const std::size_t old = region_.size();
        const bool ends_free =
            !free_.empty() && free_.rbegin()->first + free_.rbegin()->second == old;
        const std::size_t there_already =
            ends_free ? std::min(free_.rbegin()->second, length - 1) : 0;
        const std::size_t least = rounded(length - there_already, page_);
        if (least > capacity_ - old) {
            throw std::bad_alloc();
        }
        const auto hole = free_.emplace(old, 0).first; // first, because it may throw
        const std::size_t most = std::min(std::max(least, step_), capacity_ - old);
        for (const pool *from : pools_) {
            const std::size_t there = static_cast<std::size_t>(from->free_bytes()) / page_ * page_;
            // Free frames may be taken by now, or lie on nodes where the pool does not place them.
            for (const std::size_t wanted : {std::min(most, there), least}) {
                if (wanted >= least && wanted <= there &&
                    pageleap_region_grow(region_.c(), old + wanted, from->c(), nullptr) ==
                        PAGELEAP_OK) {
                    hole->second = wanted;
                    join(hole);
                    return;
                }
            }
        }
        free_.erase(hole);
        throw std::bad_alloc();
    }

    mutable std::mutex mutex_;
    std::vector<const pool *> pools_;
    std::size_t page_, step_, capacity_;
    region region_;
    holes free_;
};

/* Memory for containers, in a region that can leap: a pool of the standard library over
 * region_pages, behind one lock. (Pools of each thread would allocate when a thread ends, and
 * nothing could catch std::bad_alloc there.) Several threads may use it. Containers and other
 * users of the memory must be gone before it is destroyed. */
class region_memory : public std::pmr::memory_resource {
public:
    region_memory(std::size_t capacity, std::vector<const pool *> pools,
                  std::size_t step = 16 << 20)
        : pages_(capacity, std::move(pools), step), blocks_(options(), &pages_) {}

    const region &memory() const noexcept { return pages_.memory(); }
    /* The whole region, as it is now, for a job. Parts by which it grows during the job stay
     * where they are: see grow_from(). */
    range all_to(const pool &to) const { return range(memory(), to); }
    range all_to(const pool &to, placement place) const {
        return range(memory(), to, std::move(place));
    }
    /* Sets the pools from which the region grows from now on. */
    void grow_from(std::vector<const pool *> pools) { pages_.grow_from(std::move(pools)); }
    /* Takes all memory back, including memory that containers still have. */
    void release() {
        std::lock_guard lock(mutex_);
        blocks_.release();
    }
    /* Bytes of the region that are in use, in multiples of 4 KB. */
    std::size_t used() const { return pages_.used(); }

protected:
    void *do_allocate(std::size_t bytes, std::size_t alignment) override {
        std::lock_guard lock(mutex_);
        return blocks_.allocate(bytes, alignment);
    }
    void do_deallocate(void *piece, std::size_t bytes, std::size_t alignment) override {
        std::lock_guard lock(mutex_);
        blocks_.deallocate(piece, bytes, alignment);
    }
    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override {
        return this == &other;
    }

private:
    /* Larger blocks get pieces of their own, and the pool takes little more than it needs. */
    static std::pmr::pool_options options() noexcept {
        std::pmr::pool_options options{};
        options.largest_required_pool_block = 8 << 10;
        options.max_blocks_per_chunk = 128;
        return options;
    }

    std::mutex mutex_;
    region_pages pages_;
    std::pmr::unsynchronized_pool_resource blocks_;
};

} // namespace pageleap

#endif /* PAGELEAP_HPP */
