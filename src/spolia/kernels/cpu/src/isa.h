// The levels that kernels are compiled for, and the one table of entry points that each level fills.
//
// linear.cpp, attend.cpp and rowwise.cpp are compiled once per level and define, in `namespace spolia::SPOLIA_LEVEL`,
// `LinearKernels linear_kernels()`, `AttendKernels attend_kernels()` and `RowwiseKernels rowwise_kernels()`. Everything
// else is compiled once, without any -m flag, and reaches them through `Kernels`.
//
// A per-level file must not emit code that the linker could merge with another level's: everything in it is static or in
// the level's namespace, and it includes no standard header whose inline functions it would instantiate.
#pragma once
#include <string>
#include <vector>

#include "attend.h"
#include "linear.h"
#include "rowwise.h"

namespace spolia {

struct Kernels {
  const char* name;  // "generic", "avx2", "avx512", "avx512_bf16", "avx512_amx", "neon"
  LinearKernels linear;
  AttendKernels attend;
  RowwiseKernels rowwise;
};

// The levels that this CPU has, best first. Never empty.
const std::vector<Kernels>& levels();

// The level of that name; "" means the one that SPOLIA_ISA names, else the best. Throws std::invalid_argument, listing
// the levels that this CPU has, where the name is not one of them.
const Kernels& kernels(const std::string& name = "");

}  // namespace spolia
