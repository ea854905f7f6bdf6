#include "threads.h"

#include <stdexcept>
#include <string>
#include <system_error>

#ifdef __SSE2__
#include <xmmintrin.h>
#endif

namespace spolia {
namespace {

// Some tens of microseconds: longer than the usual wait for an item.
constexpr int kSpins = 2000;
// About a millisecond, longer than the usual pause between two steps: a core that has slept takes a while to be itself again.
constexpr int kSpinsBetweenJobs = 20 * kSpins;

// Fields of the door.
constexpr uint64_t kMaxThreads = 1 << 15, kInside = 1, kEntered = kMaxThreads, kOpen = kEntered * kMaxThreads;
constexpr int kJobShift = 32;

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
    : size_(size), may_spin_(unsigned(size) <= std::thread::hardware_concurrency()) {
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
  is_stopping_.store(true, std::memory_order_relaxed);
  num_jobs_.fetch_add(1, std::memory_order_release);
  num_jobs_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

// Wait until done(word's value): spinning at first.
template <class Word, class Done>
void Threads::await_until(std::atomic<Word>& word, Done done, int num_spins) {
  for (int i = 0; may_spin_ && i < num_spins; ++i) {
    if (done(word.load(std::memory_order_acquire))) return;
    pause_cpu();
  }
  for (Word seen; !done(seen = word.load(std::memory_order_acquire));) word.wait(seen, std::memory_order_acquire);
}

void Threads::await(Part& part, int64_t num_items) {
  await_until(part.num_done_, [num_items](uint32_t num_done) { return num_done == uint32_t(num_items); }, kSpins);
}

bool Threads::enter(uint32_t job) {
  uint64_t door = door_.load(std::memory_order_acquire);
  do
    if (uint32_t(door >> kJobShift) != job || !(door & kOpen)) return false;
  while (!door_.compare_exchange_weak(door, door + kEntered + kInside, std::memory_order_acq_rel, std::memory_order_acquire));
  return true;
}

void Threads::leave() {
  door_.fetch_sub(kInside, std::memory_order_acq_rel);
  door_.notify_all();
}

void Threads::work(int thread) {
  const FloatMode mode;
  for (uint32_t seen = 0;;) {
    await_until(num_jobs_, [seen](uint32_t num_jobs) { return num_jobs != seen; }, kSpinsBetweenJobs);
    if (is_stopping_.load(std::memory_order_relaxed)) return;
    seen = num_jobs_.load(std::memory_order_acquire);
    if (!enter(seen)) continue;
    entry_(context_, thread);
    leave();
  }
}

void Threads::start(Entry entry, void* context, bool everyone) {
  const FloatMode mode;
  entry_ = entry;
  context_ = context;
  const uint32_t job = num_jobs_.load(std::memory_order_relaxed) + 1;
  door_.store(uint64_t(job) << kJobShift | kOpen, std::memory_order_release);
  num_jobs_.store(job, std::memory_order_release);
  num_jobs_.notify_all();
  entry(context, 0);
  if (everyone) await_until(door_, [this](uint64_t door) { return int(door / kEntered % kMaxThreads) == size_ - 1; }, kSpins);
  door_.fetch_and(~kOpen, std::memory_order_acq_rel);
  await_until(door_, [](uint64_t door) { return door % kMaxThreads == 0; }, kSpins);
}

}  // namespace spolia
