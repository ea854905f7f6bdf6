// Ops on one row at a time: norms, rope, activations, sums. Every reduction has one fixed order for a given width.
#pragma once
#include <cstddef>
#include <cstdint>

namespace spolia {

enum class Act : int32_t { Silu = 0, GeluTanh = 1, Gelu = 2 };

struct RowwiseKernels {
  // Each group of `group` consecutive columns of the row: x / sqrt(mean(x^2) + eps) * weight[0..group).
  void (*rms_norm)(const float* x, const float* weight, int64_t width, int64_t group, float eps, float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, int64_t width, float eps, float* out);
  // Rotate-half of the first 2 * half columns of each head; the rest is copied. cos and sin are [half].
  void (*rope)(const float* x, const float* cos, const float* sin, int64_t half, int64_t head_dim, int64_t width, float* out);
  void (*glu)(const float* gate, const float* up, int64_t width, Act act, float* out);
  void (*activation)(const float* x, int64_t width, Act act, float* out);
  void (*add)(const float* a, const float* b, int64_t width, float* out);
  void (*scale)(const float* x, float factor, int64_t width, float* out);
  int64_t (*argmax)(const float* x, int64_t width);  // the first of the largest; the first NaN, if there is one, as numpy has it
  void (*softcap)(float* x, int64_t width, float scale, float cap);  // in place; cap 0: only scale
};

}  // namespace spolia
