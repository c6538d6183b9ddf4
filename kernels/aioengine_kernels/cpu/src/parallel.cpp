// The threads. Not OpenMP's pool: its barrier waits for every thread of the team, also for one that never got a core, and on a
// machine that does other work (an event loop, say) that wait is a scheduler's time slice, once for every product. Here the
// caller works through the pieces itself, helpers join in if and when they run, and the caller waits only for pieces that a
// helper has begun. Helpers spin for a moment (the next product is microseconds away), yielding, and then sleep.
#include "common.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <list>
#include <mutex>
#include <thread>

namespace aio {
namespace {

constexpr auto kSpin = std::chrono::microseconds(100);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)
using Cores = cpu_set_t;
#else
struct Cores {};
#endif

// The cores that a thread may run on; null: nobody has said. One address for each set, kept for good: addresses are compared.
thread_local const Cores* own_cores = nullptr;
// Those that threads of whom nobody has said may run on, once somebody has said so of another.
std::atomic<const Cores*> other_cores{nullptr};

void move_to(const Cores* cores) {
  if (!cores) cores = other_cores.load(std::memory_order_acquire);
  if (cores == own_cores) return;
#if defined(__linux__)
  sched_setaffinity(0, sizeof(Cores), cores);  // the caller is there: where it cannot go a helper stays where it is
#endif
  own_cores = cores;
}

struct Job {
  void (*body)(void*, i64, i64);
  void* context;
  i64 num_tasks, chunk;
  int helpers;         // helper i takes part if i < helpers
  const Cores* cores;  // the caller's
};

class Pool {
 public:
  // False if another thread is using the pool.
  bool run(const Job& job) {
    std::unique_lock<std::mutex> one_at_a_time(user_, std::try_to_lock);
    if (!one_at_a_time.owns_lock()) return false;
    while (started_ < job.helpers) {
      try {
        // A thread starts on the cores of the one that starts it.
        std::thread(&Pool::help, this, started_, own_cores).detach();
      } catch (...) {
        break;  // no more threads to be had: the caller does the work
      }
      started_++;
    }
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    open_.store(true);
    epoch_.fetch_add(1);
    if (sleeping_.load() > 0) {
      std::lock_guard<std::mutex> lock(sleep_);
      wake_.notify_all();
    }
    take_pieces();
    open_.store(false);
    for (int i = 0; inside_.load() != 0; i++) i % 64 == 63 ? (void)sched_yield() : relax();
    return true;
  }

 private:
  void take_pieces() {
    for (;;) {
      const i64 begin = next_.fetch_add(job_.chunk, std::memory_order_relaxed);
      if (begin >= job_.num_tasks) return;
      const i64 end = begin + job_.chunk;
      job_.body(job_.context, begin, end < job_.num_tasks ? end : job_.num_tasks);
    }
  }

  void help(int number, const Cores* cores) {
    own_cores = cores;
    uint64_t seen = 0;
    for (;;) {
      wait_for_job(seen);
      seen = epoch_.load();
      inside_.fetch_add(1);  // before looking whether the job is open: the caller closes it, then waits for inside_ == 0
      if (open_.load() && number < job_.helpers) {
        move_to(job_.cores);
        take_pieces();
      }
      inside_.fetch_sub(1);
    }
  }

  void wait_for_job(uint64_t seen) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    for (;;) {
      for (int i = 0; i < 64; i++) {
        if (epoch_.load() != seen) return;
        relax();
      }
      if (std::chrono::steady_clock::now() > deadline) break;
      sched_yield();
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleeping_.fetch_add(1);
    wake_.wait(lock, [&] { return epoch_.load() != seen; });
    sleeping_.fetch_sub(1);
  }

  std::mutex user_;
  int started_ = 0;
  Job job_ = {};
  alignas(64) std::atomic<uint64_t> epoch_{0};
  alignas(64) std::atomic<i64> next_{0};
  alignas(64) std::atomic<int> inside_{0};
  std::atomic<bool> open_{false};
  std::atomic<int> sleeping_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
};

// Never freed: helpers may sleep on it while the process ends.
std::atomic<Pool*> pool{nullptr};

Pool& the_pool() {
  Pool* current = pool.load(std::memory_order_acquire);
  if (current) return *current;
  static std::mutex making;
  std::lock_guard<std::mutex> lock(making);
  current = pool.load();
  if (!current) {
    // A forked child has none of the helpers: it makes a pool of its own.
    static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
    (void)registered;
    current = new Pool;
    pool.store(current, std::memory_order_release);
  }
  return *current;
}

}  // namespace

void parallel_for(int num_threads, i64 num_tasks, i64 chunk, void (*body)(void*, i64, i64), void* context) {
  if (num_tasks <= 0) return;
  if (chunk < 1) chunk = 1;
  const i64 pieces = (num_tasks + chunk - 1) / chunk;
  if (num_threads > pieces) num_threads = (int)pieces;
  if (num_threads > 1 && the_pool().run({body, context, num_tasks, chunk, num_threads - 1, own_cores})) return;
  body(context, 0, num_tasks);
}

namespace {
struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
};
}  // namespace

void* scratch(int slot, size_t num_bytes) {
  static thread_local Buffer buffers[5];
  Buffer& buffer = buffers[slot];
  if (buffer.size < num_bytes) {
    std::free(buffer.data);
    const size_t size = (num_bytes + num_bytes / 2 + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(64, size);
    buffer.size = buffer.data ? size : 0;
    if (!buffer.data) std::abort();  // out of memory inside a kernel: nothing sensible can be returned
  }
  return buffer.data;
}

#if defined(__linux__)
namespace {

// The one address of a set.
const Cores* keep(const Cores& cores) {
  static std::mutex keeping;
  static std::list<Cores>* kept = new std::list<Cores>;  // never freed: helpers may look at it while the process ends
  std::lock_guard<std::mutex> lock(keeping);
  for (const Cores& one : *kept)
    if (CPU_EQUAL(&one, &cores)) return &one;
  kept->push_back(cores);
  return &kept->back();
}

}  // namespace

bool pin_thread(const int32_t* cores, i64 count) {
  Cores before, wanted;
  CPU_ZERO(&wanted);
  for (i64 i = 0; i < count; i++) {
    if (cores[i] < 0 || cores[i] >= CPU_SETSIZE) return false;
    CPU_SET(cores[i], &wanted);
  }
  if (sched_getaffinity(0, sizeof before, &before) || sched_setaffinity(0, sizeof wanted, &wanted)) return false;
  const Cores* nobody = nullptr;
  if (!own_cores) other_cores.compare_exchange_strong(nobody, keep(before));
  own_cores = keep(wanted);
  return true;
}
#else
bool pin_thread(const int32_t*, i64) { return false; }
#endif

PanelLayout panel_layout(int32_t format, i64 k) {
  PanelLayout p = {0, 0, 0};
  const i64 groups = k / kGroup;
  switch (format) {
    case kF32: p.bytes = k * kPanelRows * 4; return p;
    case kF16:
    case kBF16: p.bytes = k * kPanelRows * 2; break;
    case kQ4_0: p.quants_per_group = 256, p.scales_per_group = 32; break;
    case kQ4_1: p.quants_per_group = 256, p.scales_per_group = 64; break;
    case kQ8_0: p.quants_per_group = 512, p.scales_per_group = 32; break;
    case kQ4_K: p.quants_per_group = 256, p.scales_per_group = 128; break;
    case kQ6_K:
    case kQ5_K: p.quants_per_group = 512, p.scales_per_group = 128; break;
    default: break;
  }
  if (p.quants_per_group) p.bytes = groups * (p.quants_per_group + p.scales_per_group);
  p.bytes = (p.bytes + 63) / 64 * 64;
  return p;
}

}  // namespace aio
