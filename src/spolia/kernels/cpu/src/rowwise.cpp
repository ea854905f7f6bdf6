// See rowwise.h. One vector is `kLanes` float32, the widest that the level has; a row's last, partial vector goes through
// the same arithmetic, padded with zeros, so a column's result never depends on where it lies in the row.
#include "rowwise.h"

#include <string.h>

namespace spolia::SPOLIA_LEVEL {
namespace {

#if defined(SPOLIA_LEVEL_avx512)
constexpr int64_t kLanes = 16;
#elif defined(SPOLIA_LEVEL_avx2)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

using Vec = float __attribute__((vector_size(kLanes * 4)));
using VecInt = int32_t __attribute__((vector_size(kLanes * 4)));

inline Vec splat(float x) { return x - Vec{}; }

// Lanes beyond `count` are `padding`.
inline Vec load(const float* p, int64_t count, float padding = 0.0f) {
  Vec v = splat(padding);
  if (count >= kLanes) memcpy(&v, p, sizeof v);
  else memcpy(&v, p, size_t(count) * sizeof(float));
  return v;
}

inline void store(float* p, Vec v, int64_t count) {
  if (count >= kLanes) memcpy(p, &v, sizeof v);
  else memcpy(p, &v, size_t(count) * sizeof(float));
}

inline float sum(Vec v) {
  float lanes[kLanes];
  memcpy(lanes, &v, sizeof v);
  for (int64_t step = kLanes / 2; step > 0; step /= 2)
    for (int64_t i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  return lanes[0];
}

inline float sqrt_of(float x) { return __builtin_sqrtf(x); }

// e^x for x clamped to [-87.3, 88.7], where float32 has normal results: e^x = 2^n * e^r, |r| <= ln(2) / 2, by Taylor's
// series to r^7 (its rest is below 6e-9).
inline Vec exp_of(Vec x) {
  x = x < splat(-87.3f) ? splat(-87.3f) : x;
  x = x > splat(88.7f) ? splat(88.7f) : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const Vec n = (x * 1.44269504f + magic) - magic;
  const Vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln(2) in two parts: the first product is exact
  Vec p = splat(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // In two factors, because 2^128 is no float32.
  const VecInt exponent = __builtin_convertvector(n, VecInt);
  const VecInt first = exponent >> 1;
  return p * Vec((first + 127) << 23) * Vec((exponent - first + 127) << 23);
}

// Series to x^11 where |x| < 0.4 (1 - 2 / (e^2x + 1) would cancel there).
inline Vec tanh_of(Vec x) {
  const Vec square = x * x;
  Vec p = splat(-1382.0f / 155925);
  p = p * square + 62.0f / 2835;
  p = p * square + -17.0f / 315;
  p = p * square + 2.0f / 15;
  p = p * square + -1.0f / 3;
  const Vec small = x + x * square * p;
  const Vec large = 1.0f - 2.0f / (exp_of(x + x) + 1.0f);
  return square < splat(0.16f) ? small : large;
}

// Phi(x): for |x| <= 14, 1 - Phi(|x|) = e^(-x^2/2) * t * P(t) with t = 1 / (1 + 0.35 |x|), P fitted by us to a relative
// error of 3e-8; beyond, it is below float32. Half of erfc, so that negative x does not cancel.
inline Vec normal_cdf(Vec x) {
  const Vec magnitude = x < splat(0.0f) ? -x : x;
  const Vec t = 1.0f / (1.0f + 0.35f * magnitude);
  Vec p = splat(-0.0291461395f);
  p = p * t + 0.143972708f;
  p = p * t - 0.25571632f;
  p = p * t + 0.159176493f;
  p = p * t - 0.0231114184f;
  p = p * t + 0.105508663f;
  p = p * t + 0.119832704f;
  p = p * t + 0.139861892f;
  p = p * t + 0.139621403f;
  const Vec upper = exp_of(x * x * -0.5f) * t * p;
  return x < splat(0.0f) ? upper : 1.0f - upper;
}

inline Vec act_of(Vec x, Act act) {
  switch (act) {
    case Act::Silu: return x / (1.0f + exp_of(-x));
    // 0.5 * (1 + tanh(u)) = 1 / (1 + e^-2u)
    case Act::GeluTanh: return x / (1.0f + exp_of(x * (1.0f + 0.044715f * x * x) * -1.5957691216f));
    case Act::Gelu: return x * normal_cdf(x);
  }
  return x;
}

// out[i] = f(i-th vector): `f(column, count)` loads its own operands.
template <class F>
inline void map(int64_t width, float* out, F f) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) store(out + i, f(i, kLanes), kLanes);
  if (i < width) store(out + i, f(i, width - i), width - i);
}

// Sum of f over the row: four interleaved partial vectors, added in one fixed order.
template <class F>
inline float reduce(int64_t width, F f) {
  Vec partial[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes)
    for (int64_t j = 0; j < 4; ++j) partial[j] += f(i + j * kLanes, kLanes);
  for (int64_t j = 0; i < width; i += kLanes, ++j) partial[j] += f(i, width - i < kLanes ? width - i : kLanes);
  return sum((partial[0] + partial[1]) + (partial[2] + partial[3]));
}

void rms_norm(const float* x, const float* weight, int64_t width, int64_t group, float eps, float* out) {
  for (int64_t begin = 0; begin < width; begin += group) {
    const float* in = x + begin;
    const float squares = reduce(group, [=](int64_t i, int64_t n) {
      const Vec v = load(in + i, n);
      return v * v;
    });
    const float inverse = 1.0f / sqrt_of(squares / float(group) + eps);
    map(group, out + begin, [=](int64_t i, int64_t n) { return load(in + i, n) * inverse * load(weight + i, n); });
  }
}

void layer_norm(const float* x, const float* weight, const float* bias, int64_t width, float eps, float* out) {
  const float mean = reduce(width, [=](int64_t i, int64_t n) { return load(x + i, n); }) / float(width);
  const float squares = reduce(width, [=](int64_t i, int64_t n) {
    const Vec v = load(x + i, n, mean) - mean;
    return v * v;
  });
  const float inverse = 1.0f / sqrt_of(squares / float(width) + eps);
  map(width, out, [=](int64_t i, int64_t n) {
    const Vec v = (load(x + i, n) - mean) * inverse * load(weight + i, n);
    return bias ? v + load(bias + i, n) : v;
  });
}

void rope(const float* x, const float* cos, const float* sin, int64_t half, int64_t head_dim, int64_t width, float* out) {
  for (int64_t begin = 0; begin < width; begin += head_dim) {
    const float *low = x + begin, *high = low + half;
    float *out_low = out + begin, *out_high = out_low + half;
    for (int64_t i = 0; i < half; i += kLanes) {
      const int64_t n = half - i;
      const Vec a = load(low + i, n), b = load(high + i, n), c = load(cos + i, n), s = load(sin + i, n);
      store(out_low + i, a * c - b * s, n);
      store(out_high + i, b * c + a * s, n);
    }
    if (out != x) memcpy(out + begin + 2 * half, x + begin + 2 * half, size_t(head_dim - 2 * half) * sizeof(float));
  }
}

template <Act act>
void glu_of(const float* gate, const float* up, int64_t width, float* out) {
  map(width, out, [=](int64_t i, int64_t n) { return act_of(load(gate + i, n), act) * load(up + i, n); });
}

template <Act act>
void activation_of(const float* x, int64_t width, float* out) {
  map(width, out, [=](int64_t i, int64_t n) { return act_of(load(x + i, n), act); });
}

void glu(const float* gate, const float* up, int64_t width, Act act, float* out) {
  switch (act) {
    case Act::Silu: return glu_of<Act::Silu>(gate, up, width, out);
    case Act::GeluTanh: return glu_of<Act::GeluTanh>(gate, up, width, out);
    case Act::Gelu: return glu_of<Act::Gelu>(gate, up, width, out);
  }
}

void activation(const float* x, int64_t width, Act act, float* out) {
  switch (act) {
    case Act::Silu: return activation_of<Act::Silu>(x, width, out);
    case Act::GeluTanh: return activation_of<Act::GeluTanh>(x, width, out);
    case Act::Gelu: return activation_of<Act::Gelu>(x, width, out);
  }
}

void add(const float* a, const float* b, int64_t width, float* out) {
  map(width, out, [=](int64_t i, int64_t n) { return load(a + i, n) + load(b + i, n); });
}

void scale(const float* x, float factor, int64_t width, float* out) {
  map(width, out, [=](int64_t i, int64_t n) { return load(x + i, n) * factor; });
}

// Two looks: at maxima of pieces, and then into the piece that has the largest.
int64_t argmax(const float* x, int64_t width) {
  constexpr int64_t kPiece = 4096;
  float largest = -__builtin_inff();
  int64_t piece = 0;
  for (int64_t begin = 0; begin < width; begin += kPiece) {
    const int64_t end = begin + kPiece < width ? begin + kPiece : width;
    Vec most = splat(-__builtin_inff());
    VecInt nans{};
    for (int64_t i = begin; i < end; i += kLanes) {
      const Vec v = load(x + i, end - i, most[0]);
      most = v > most ? v : most;
      nans |= v != v;
    }
    float most_here = most[0];
    bool has_nan = false;
    for (int64_t i = 0; i < kLanes; ++i) {
      most_here = most[i] > most_here ? most[i] : most_here;
      has_nan |= nans[i] != 0;
    }
    if (has_nan) {
      for (int64_t i = begin;; ++i)
        if (x[i] != x[i]) return i;
    }
    if (most_here > largest) largest = most_here, piece = begin;
  }
  for (int64_t i = piece; i < width; ++i)
    if (x[i] == largest) return i;
  return 0;
}

void softcap(float* x, int64_t width, float scale_by, float cap) {
  if (cap == 0.0f) return scale(x, scale_by, width, x);
  map(width, x, [=](int64_t i, int64_t n) { return tanh_of(load(x + i, n) * scale_by / cap) * cap; });
}

}  // namespace

RowwiseKernels rowwise_kernels() { return {rms_norm, layer_norm, rope, glu, activation, add, scale, argmax, softcap}; }

}  // namespace spolia::SPOLIA_LEVEL
