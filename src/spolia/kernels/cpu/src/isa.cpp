#include "isa.h"

#include <cstdlib>
#include <stdexcept>

#ifdef SPOLIA_AMX
#include <cpuid.h>
#endif
#if defined(SPOLIA_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(SPOLIA_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(SPOLIA_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace spolia {

#define SPOLIA_DECLARE_LEVEL(level)   \
  namespace level {                   \
  LinearKernels linear_kernels();     \
  AttendKernels attend_kernels();     \
  RowwiseKernels rowwise_kernels();   \
  }

SPOLIA_DECLARE_LEVEL(generic)
#ifdef SPOLIA_X86
SPOLIA_DECLARE_LEVEL(avx2)
SPOLIA_DECLARE_LEVEL(avx512)
SPOLIA_DECLARE_LEVEL(avx512_bf16)
#elif defined(SPOLIA_ARM)
SPOLIA_DECLARE_LEVEL(neon)
#endif
#ifdef SPOLIA_AMX
namespace avx512_amx {
AttendKernels attend_kernels();
}

// Linux keeps the tiles' 8 KiB out of every thread's state until a process asks for them.
static bool may_use_tiles() {
#ifdef __linux__
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

static bool has_tiles() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  return (edx & kBf16) && (edx & kTiles) && may_use_tiles();
}
#endif

#define SPOLIA_LEVEL_TABLE(level) Kernels{#level, level::linear_kernels(), level::attend_kernels(), level::rowwise_kernels()}

#ifdef SPOLIA_ARM
static bool has_dot_products() {  // int8, Armv8.2
#if defined(__linux__)
  constexpr unsigned long kAsimdDp = 1 << 20;
  return getauxval(AT_HWCAP) & kAsimdDp;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
#endif

static std::vector<Kernels> find_levels() {
  std::vector<Kernels> found;
#ifdef SPOLIA_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  // Intel's vdpbf16ps takes four times as long as a fused multiply-add, and does twice as much; AMD's is as quick.
  const bool slow_bf16 = __builtin_cpu_is("intel");
#ifdef SPOLIA_AMX
  if (bf16 && has_tiles())
    found.push_back({"avx512_amx", avx512::linear_kernels(), avx512_amx::attend_kernels(), avx512::rowwise_kernels()});
#endif
  if (avx512 && slow_bf16) found.push_back(SPOLIA_LEVEL_TABLE(avx512));
  if (bf16) found.push_back(SPOLIA_LEVEL_TABLE(avx512_bf16));
  if (avx512 && !slow_bf16) found.push_back(SPOLIA_LEVEL_TABLE(avx512));
  if (avx2) found.push_back(SPOLIA_LEVEL_TABLE(avx2));
#elif defined(SPOLIA_ARM)
  if (has_dot_products()) found.push_back(SPOLIA_LEVEL_TABLE(neon));
#endif
  found.push_back(SPOLIA_LEVEL_TABLE(generic));
  return found;
}

const std::vector<Kernels>& levels() {
  static const std::vector<Kernels> found = find_levels();
  return found;
}

const Kernels& kernels(const std::string& name) {
  const char* forced = std::getenv("SPOLIA_ISA");
  const std::string wanted = !name.empty() ? name : forced ? forced : "";
  if (wanted.empty()) return levels().front();
  std::string have;
  for (const Kernels& level : levels()) {
    if (wanted == level.name) return level;
    have += std::string(have.empty() ? "" : ", ") + level.name;
  }
  throw std::invalid_argument((name.empty() ? "SPOLIA_ISA=" : "level ") + wanted + ": this CPU has " + have);
}

}  // namespace spolia
