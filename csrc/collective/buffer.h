// A contiguous piece of the caller's memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collective/dtype.h"

namespace pydist {

struct Buffer {
  void* data = nullptr;
  int64_t num_elements = 0;
  DType dtype = DType::kUInt8;
  // Start of the arena block that holds it, where it lies in one: kept from reuse if an operation
  // fails while a peer may still write there.
  void* block = nullptr;
  // How the elements are ordered in memory: 0 for rows, else a hash of the strides. Compared
  // between ranks by broadcast_many.
  uint64_t order = 0;

  size_t nbytes() const { return static_cast<size_t>(num_elements) * dtype_nbytes(dtype); }
  uint8_t* bytes() const { return static_cast<uint8_t*>(data); }
};

}  // namespace pydist
