// The levels that kernels are compiled for, and the one table of entry points that each level fills.
//
// linear.cpp, attend.cpp and rowwise.cpp are compiled once per level inside `namespace spolia::SPOLIA_LEVEL`; everything
// else is compiled once, without any -m flag, and reaches them through `Kernels`.
#pragma once
#include <cstddef>
#include <cstdint>

#include "attend.h"
#include "linear.h"
#include "rowwise.h"

namespace spolia {

struct Kernels {
  const char* name;  // "generic", "avx2", "avx512"
  LinearKernels linear;
  AttendKernels attend;
  RowwiseKernels rowwise;
};

// The best level that this CPU has, or the one that SPOLIA_ISA names (throws std::runtime_error where the CPU lacks it).
const Kernels& kernels();

}  // namespace spolia
