// What a monitored barrier raises on rank 0.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace pydist {

class MissingRanks : public TimeoutError {
 public:
  MissingRanks(const std::string& text, std::vector<int> ranks)
      : TimeoutError(text), ranks(std::move(ranks)) {}

  const std::vector<int> ranks;
};

}  // namespace pydist
