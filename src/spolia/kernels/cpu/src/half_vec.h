// float16 to float32 for levels that have no instruction for it: four at a time, in the compiler's 128-bit vectors.
#pragma once
#include <cstdint>

namespace spolia::SPOLIA_LEVEL {
namespace {

typedef float Floats4 __attribute__((vector_size(16)));
typedef uint32_t Words4 __attribute__((vector_size(16)));

// No float32 subnormal on the way: threads flush those to zero, and the scales of many files, and small KV, are subnormal float16.
[[gnu::always_inline]] inline Floats4 half_to_float(Words4 h) {
  const Words4 magnitude = h & 0x7fff, shifted = magnitude << 13;
  const Words4 normal = shifted + (112u << 23);                                    // the exponent re-biased
  const Words4 subnormal = (Words4)((Floats4)(shifted + (113u << 23)) - 0x1p-14f);  // 2^-14 + x, less 2^-14
  const Words4 is_subnormal = (Words4)(magnitude < 0x400), is_special = (Words4)(magnitude >= 0x7c00);
  return (Floats4)((h & 0x8000) << 16 | (subnormal & is_subnormal) | ((normal + (is_special & (112u << 23))) & ~is_subnormal));
}

}  // namespace
}  // namespace spolia::SPOLIA_LEVEL
