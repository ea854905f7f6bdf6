// A team of threads that run one job at a time, and the items of work that they share in it.
//
// The caller of `run` is thread 0; the others are started once and wait, first spinning, then asleep. Nobody waits for a
// thread, only for items: what a part of a job has is handed out to whoever comes, and whoever needs the part's results
// waits until every item is done. A thread that the system has put aside, since other programs want its core, holds up no
// more than the item it was put aside with; one that wakes late finds its parts done, and catches up; one that sleeps
// through a whole job misses it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace spolia {

class Threads {
 public:
  // The items of one part of a job. Reset before the job.
  class Part {
   public:
    void reset(int num_threads) {
      for (int run = 0; run < num_runs(num_threads); ++run) runs_[run].next.store(0, std::memory_order_relaxed);
      num_done_.store(0, std::memory_order_relaxed);
    }

   private:
    friend class Threads;
    static constexpr int kMaxRuns = 8;
    static int num_runs(int num_threads) { return std::min(num_threads, kMaxRuns); }
    struct alignas(64) Run {
      std::atomic<int64_t> next{0};  // items of this run of neighbours that have been handed out
    };
    Run runs_[kMaxRuns];
    alignas(64) std::atomic<uint32_t> num_done_{0};
  };

  // Throws std::invalid_argument for less than one, or more than the system starts.
  explicit Threads(int size);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int size() const { return size_; }

  // Call job(thread) on this thread, as thread 0, and on those of the others that come in time; returns when all that came
  // have returned. Jobs do not throw. Subnormal numbers are flushed to zero on every thread alike, whatever the caller's mode,
  // so that a row's result does not depend on its thread.
  template <class Job>
  void run(Job& job) { start(&call<Job>, &job, false); }

  // The same on every thread, however long that takes.
  template <class Job>
  void run_on_all(Job& job) { start(&call<Job>, &job, true); }

  // Inside a job: do items [0, num_items) of a part with the others, each by one thread: body(item). A thread begins with a
  // run of neighbours, which in all parts of a job are its own as long as there are as many items: what it needs is then in
  // its own cache. Then it helps the others to the end.
  template <class Body>
  void share(Part& part, int64_t num_items, int thread, Body body) {
    const int num_runs = Part::num_runs(size_), home = int(int64_t(thread) * num_runs / size_);
    uint32_t num_done = 0;
    for (int i = 0; i < num_runs; ++i) {
      const int run = (home + i) % num_runs;
      const int64_t begin = num_items * run / num_runs, end = num_items * (run + 1) / num_runs;
      for (int64_t item; (item = begin + part.runs_[run].next.fetch_add(1, std::memory_order_relaxed)) < end; ++num_done) body(item);
    }
    if (num_done && part.num_done_.fetch_add(num_done, std::memory_order_acq_rel) + num_done == uint32_t(num_items))
      part.num_done_.notify_all();
  }

  // Inside a job: wait until all items of a part are done. What was written for them before, the caller sees after.
  void await(Part& part, int64_t num_items);

 private:
  using Entry = void (*)(void* context, int thread);
  template <class Job>
  static void call(void* context, int thread) { (*static_cast<Job*>(context))(thread); }
  void start(Entry entry, void* context, bool everyone);
  void work(int thread);
  bool enter(uint32_t job);
  void leave();
  void stop();
  template <class Word, class Done>
  void await_until(std::atomic<Word>& word, Done done, int num_spins);

  const int size_;
  const bool may_spin_;
  Entry entry_ = nullptr;  // of the open job
  void* context_ = nullptr;
  std::atomic<bool> is_stopping_{false};
  alignas(64) std::atomic<uint32_t> num_jobs_{0};
  // Job number, whether it is open, how many threads entered it, how many are inside. Only who entered touches a job.
  alignas(64) std::atomic<uint64_t> door_{0};
  std::vector<std::thread> workers_;
};

}  // namespace spolia
