#include "bucket/pack.h"

#include <cstring>

namespace pydist {

void pack(const std::vector<PackItem>& items) {
  for (const PackItem& item : items) {
    if (item.source == nullptr) {
      std::memset(item.target, 0, item.nbytes);
    } else {
      std::memcpy(item.target, item.source, item.nbytes);
    }
  }
}

}  // namespace pydist
