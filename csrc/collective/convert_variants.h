// One function per instruction set; convert() chooses. A variant that this architecture lacks does
// not exist.
#pragma once

#include <cstdint>

#include "collective/dtype.h"

namespace pydist {

// Types differ, and are floating.
struct ConvertArgs {
  DType from;
  const void* source;
  DType to;
  void* target;
  int64_t num_elements;
};

void convert_baseline(const ConvertArgs& args);
#if defined(__x86_64__)
void convert_avx2(const ConvertArgs& args);
void convert_avx512(const ConvertArgs& args);
#endif

}  // namespace pydist
