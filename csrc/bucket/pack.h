// Copies gradients into buckets and out of them, in one pass, converting where they travel in
// another type. No torch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/dtype.h"

namespace pydist {

// Types differ only where both are floating.
struct PackItem {
  const void* source = nullptr;  // null: zeros
  DType from = DType::kUInt8;
  void* target = nullptr;
  DType to = DType::kUInt8;
  int64_t num_elements = 0;

  bool operator==(const PackItem& other) const {
    return source == other.source && from == other.from && target == other.target &&
           to == other.to && num_elements == other.num_elements;
  }
};

enum class CopyDirection : uint8_t { kToUnit, kFromUnit };

void pack(const PackItem& item);
void pack(const std::vector<PackItem>& items);

}  // namespace pydist
