// A team of threads that runs one job at a time, all of them in the same code, meeting at barriers.
//
// The caller of `run` is thread 0; the others are started once and wait, first spinning, then asleep. A barrier between
// threads that are all awake costs two passes of a cache line.
#pragma once
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace spolia {

class Threads {
 public:
  // Throws std::invalid_argument for less than one, or more than the system starts.
  explicit Threads(int size);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int size() const { return size_; }

  // Call job(thread) on every thread; returns when all have returned. Jobs do not throw. Subnormal numbers are flushed to
  // zero on every thread alike, whatever the caller's mode, so that a row's result does not depend on its thread.
  template <class Job>
  void run(Job& job) {
    start([](void* context, int thread) { (*static_cast<Job*>(context))(thread); }, &job);
  }

  // Inside a job: wait until every thread is here. What any of them wrote before, all of them see after.
  void barrier();

 private:
  using Entry = void (*)(void* context, int thread);
  void start(Entry entry, void* context);
  void work(int thread);
  void stop();
  void await_change(std::atomic<uint32_t>& word, uint32_t seen);

  const int size_;
  const int num_spins_;
  Entry entry_ = nullptr;  // null: stop
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> num_jobs_{0};
  alignas(64) std::atomic<int> num_arrived_{0};
  alignas(64) std::atomic<uint32_t> num_barriers_{0};
  std::vector<std::thread> workers_;
};

}  // namespace spolia
