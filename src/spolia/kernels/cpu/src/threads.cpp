#include "threads.h"

#include <stdexcept>
#include <string>
#include <system_error>

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

namespace spolia {
namespace {

// Some tens of microseconds: longer than a barrier's usual wait, shorter than a pause between steps.
constexpr int kSpins = 2000;

inline void pause_cpu() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Round to nearest, subnormals are zero, for as long as it lives.
class FloatMode {
 public:
#if defined(__SSE2__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }  // FTZ, DAZ, all exceptions masked
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{1} << 24));  // FZ
  }
  ~FloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

}  // namespace

Threads::Threads(int size)
    : size_(size), num_spins_(unsigned(size) <= std::thread::hardware_concurrency() ? kSpins : 0) {
  if (size < 1) throw std::invalid_argument("num_threads=" + std::to_string(size) + ": at least 1");
  try {
    for (int thread = 1; thread < size; ++thread) workers_.emplace_back([this, thread] { work(thread); });
  } catch (const std::system_error& error) {
    const std::string started = std::to_string(workers_.size() + 1);
    stop();
    throw std::invalid_argument("num_threads=" + std::to_string(size) + ": the system starts no more than " + started +
                                " (" + error.code().message() + ")");
  }
}

Threads::~Threads() { stop(); }

void Threads::stop() {
  entry_ = nullptr;
  num_jobs_.fetch_add(1, std::memory_order_release);
  num_jobs_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Threads::await_change(std::atomic<uint32_t>& word, uint32_t seen) {
  for (int i = 0; i < num_spins_; ++i) {
    if (word.load(std::memory_order_acquire) != seen) return;
    pause_cpu();
  }
  while (word.load(std::memory_order_acquire) == seen) word.wait(seen, std::memory_order_acquire);
}

void Threads::work(int thread) {
  const FloatMode mode;
  for (uint32_t seen = 0;; ++seen) {
    await_change(num_jobs_, seen);
    if (!entry_) return;
    entry_(context_, thread);
    barrier();
  }
}

void Threads::start(Entry entry, void* context) {
  const FloatMode mode;
  entry_ = entry;
  context_ = context;
  num_jobs_.fetch_add(1, std::memory_order_release);
  num_jobs_.notify_all();
  entry(context, 0);
  barrier();
}

void Threads::barrier() {
  const uint32_t seen = num_barriers_.load(std::memory_order_relaxed);
  if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    num_arrived_.store(0, std::memory_order_relaxed);
    num_barriers_.fetch_add(1, std::memory_order_release);
    num_barriers_.notify_all();
  } else {
    await_change(num_barriers_, seen);
  }
}

}  // namespace spolia
