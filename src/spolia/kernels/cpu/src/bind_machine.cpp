// What the machine can do at most, measured: see `measure_machine` in roofline.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <chrono>
#include <tuple>
#include <vector>

#include "isa.h"
#include "memory.h"
#include "threads.h"

namespace nb = nanobind;

namespace spolia {
namespace {

constexpr size_t kBytesAThread = size_t{128} << 20;  // beyond what caches hold for long
constexpr int64_t kTurns = 1 << 16;
constexpr int kTries = 5;

using Clock = std::chrono::steady_clock;

// Units a second: the best of some tries of `work(thread)`, which returns how many units it did, on all threads at once.
template <class Work>
double best_rate(Threads& threads, Work work) {
  double best = 0;
  std::vector<int64_t> done(size_t(threads.size()) * 16);  // a line each
  auto job = [&](int thread) { done[size_t(thread) * 16] = work(thread); };
  for (int i = 0; i < kTries; ++i) {
    const Clock::time_point start = Clock::now();
    threads.run_on_all(job);
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    int64_t total = 0;
    for (int thread = 0; thread < threads.size(); ++thread) total += done[size_t(thread) * 16];
    best = std::max(best, double(total) / seconds);
  }
  return best;
}

std::tuple<double, double, double> machine_limits(const std::string& level, int num_threads) {
  const LinearKernels& linear = kernels(level).linear;
  nb::gil_scoped_release unlocked;
  Threads threads(num_threads);
  const Memory memory(kBytesAThread * size_t(num_threads));
  std::vector<float> sinks(size_t(num_threads) * 64);
  std::vector<uint64_t> sums(size_t(num_threads) * 16);
  auto touch = [&](int thread) { std::fill_n(memory.data() + kBytesAThread * size_t(thread), kBytesAThread, uint8_t(1)); };
  threads.run_on_all(touch);
  const double bytes = best_rate(threads, [&](int thread) {
    const auto* words = reinterpret_cast<const uint64_t*>(memory.data() + kBytesAThread * size_t(thread));
    uint64_t sum = 0;
    for (size_t i = 0; i < kBytesAThread / sizeof(uint64_t); ++i) sum += words[i];
    sums[size_t(thread) * 16] = sum;
    return int64_t(kBytesAThread);
  });
  const double int8 = best_rate(threads, [&](int thread) { return linear.int8_peak(kTurns, sinks.data() + 64 * thread); });
  const double floats = best_rate(threads, [&](int thread) { return linear.float_peak(8 * kTurns, sinks.data() + 64 * thread); });
  return {bytes, int8, floats};
}

}  // namespace
}  // namespace spolia

void bind_machine(nb::module_& m) {
  m.def("machine_limits", &spolia::machine_limits, nb::arg("level"), nb::arg("num_threads"),
        "Bytes read from memory, int8 operations and float32 operations, each a second, on so many threads.");
}
