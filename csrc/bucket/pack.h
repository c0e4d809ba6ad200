// Copies many small gradients into one bucket, in one pass over the bucket. No torch.
#pragma once

#include <cstddef>
#include <vector>

namespace pydist {

struct PackItem {
  const void* source = nullptr;  // null: zeros
  void* target = nullptr;
  size_t nbytes = 0;
};

void pack(const std::vector<PackItem>& items);

}  // namespace pydist
