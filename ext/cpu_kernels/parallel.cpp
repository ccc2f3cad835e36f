#include "llmserve/parallel.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

namespace llmserve {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpinTime = std::chrono::microseconds(50);
// More ranges than threads, so that a thread that the system takes off its core delays little.
constexpr int64_t kRangesPerThread = 4;
constexpr uint64_t kRemainingMask = 0xffffffffu;

thread_local bool is_inside_loop = false;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <typename Condition>
bool spin_until(Condition condition) {
  const Clock::time_point deadline = Clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 32; ++i) {
      if (condition()) return true;
      pause();
    }
  } while (Clock::now() < deadline);
  return condition();
}

int default_num_threads() { return std::max(1u, std::thread::hardware_concurrency()); }

// A loop is published as a ticket: its number above, the count of ranges not yet claimed below. A
// range is claimed by decrementing the ticket. As the ticket changes with every loop, a worker that
// woke up late cannot claim a range with the fields of an older loop.
class Pool {
 public:
  int num_threads() {
    std::lock_guard<std::mutex> lock(loop_mutex_);
    return num_threads_;
  }

  void set_num_threads(int num_threads) {
    std::lock_guard<std::mutex> lock(loop_mutex_);
    if (num_threads == num_threads_) return;
    stop_workers();
    num_threads_ = num_threads;
  }

  void run(int64_t n, int64_t grain, RangeFunction function, void* context) {
    std::unique_lock<std::mutex> lock(loop_mutex_, std::try_to_lock);
    const int64_t num_grains = (n + grain - 1) / grain;
    if (!lock.owns_lock() || num_threads_ == 1 || num_grains == 1) {
      function(context, 0, n);
      return;
    }
    start_workers();
    const int64_t max_ranges = std::min<int64_t>(num_grains, kRangesPerThread * num_threads_);
    const int64_t range = (num_grains + max_ranges - 1) / max_ranges * grain;
    publish(n, range, function, context);
    is_inside_loop = true;
    while (run_one_range()) {
    }
    is_inside_loop = false;
    const auto is_done = [this] { return num_unfinished_.load(std::memory_order_acquire) == 0; };
    if (spin_until(is_done)) return;
    while (!is_done()) std::this_thread::yield();
  }

 private:
  void publish(int64_t n, int64_t range, RangeFunction function, void* context) {
    const int64_t num_ranges = (n + range - 1) / range;
    n_.store(n, std::memory_order_release);
    range_.store(range, std::memory_order_release);
    function_.store(function, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    num_unfinished_.store(num_ranges, std::memory_order_relaxed);
    const uint64_t loop = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(loop << 32 | static_cast<uint64_t>(num_ranges));
    if (num_sleeping_.load() == 0) return;
    std::lock_guard<std::mutex> lock(sleep_mutex_);
    wake_.notify_all();
  }

  bool has_range() const { return (ticket_.load() & kRemainingMask) != 0; }

  bool run_one_range() {
    uint64_t ticket = ticket_.load();
    while ((ticket & kRemainingMask) != 0) {
      const int64_t n = n_.load(std::memory_order_acquire);
      const int64_t range = range_.load(std::memory_order_acquire);
      const RangeFunction function = function_.load(std::memory_order_acquire);
      void* const context = context_.load(std::memory_order_acquire);
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1)) continue;
      // Counted from the back of the ticket, so that ranges are claimed in ascending order.
      const int64_t num_ranges = (n + range - 1) / range;
      const int64_t begin = (num_ranges - static_cast<int64_t>(ticket & kRemainingMask)) * range;
      function(context, begin, std::min(n, begin + range));
      num_unfinished_.fetch_sub(1, std::memory_order_release);
      return true;
    }
    return false;
  }

  void work() {
    is_inside_loop = true;
    const auto is_wanted = [this] { return has_range() || is_stopping_.load(); };
    while (!is_stopping_.load()) {
      if (!spin_until(is_wanted)) {
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        num_sleeping_.fetch_add(1);
        wake_.wait(lock, is_wanted);
        num_sleeping_.fetch_sub(1);
      }
      run_one_range();
    }
  }

  void start_workers() {
    while (static_cast<int>(workers_.size()) < num_threads_ - 1) {
      workers_.emplace_back([this] { work(); });
    }
  }

  void stop_workers() {
    {
      std::lock_guard<std::mutex> lock(sleep_mutex_);
      is_stopping_.store(true);
      wake_.notify_all();
    }
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    is_stopping_.store(false);
  }

  std::mutex loop_mutex_;  // held by the thread whose loop is running
  int num_threads_ = default_num_threads();
  std::vector<std::thread> workers_;

  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> n_{0};
  std::atomic<int64_t> range_{1};
  std::atomic<RangeFunction> function_{nullptr};
  std::atomic<void*> context_{nullptr};
  std::atomic<int64_t> num_unfinished_{0};

  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<int> num_sleeping_{0};
  std::atomic<bool> is_stopping_{false};
};

// Never destroyed: workers may still look at it while the process exits.
std::atomic<Pool*> current_pool{nullptr};

// A child of fork() has none of its parent's workers. It gets a pool of its own.
void replace_pool_after_fork() { current_pool.store(new Pool); }

Pool& pool() {
  static const bool is_made = [] {
    current_pool.store(new Pool);
    pthread_atfork(nullptr, nullptr, replace_pool_after_fork);
    return true;
  }();
  (void)is_made;
  return *current_pool.load();
}

}  // namespace

int get_num_threads() { return pool().num_threads(); }

void set_num_threads(int num_threads) {
  if (num_threads < 1) throw std::invalid_argument("num_threads must be at least 1");
  pool().set_num_threads(num_threads);
}

void parallel_for_ranges(int64_t n, int64_t grain, RangeFunction function, void* context) {
  if (n <= 0) return;
  if (is_inside_loop) {
    function(context, 0, n);
    return;
  }
  pool().run(n, std::max<int64_t>(1, grain), function, context);
}

}  // namespace llmserve
