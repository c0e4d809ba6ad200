#include "bucket/pack.h"

#include <cstring>

#include "base/cpu.h"
#include "collective/convert.h"

namespace pydist {

void pack(const PackItem& item) {
  static const Isa isa = detect_isa();  // any gives the same bits
  const size_t nbytes = static_cast<size_t>(item.num_elements) * dtype_nbytes(item.to);
  if (item.source == nullptr) {
    std::memset(item.target, 0, nbytes);
  } else if (item.from == item.to) {
    std::memcpy(item.target, item.source, nbytes);
  } else {
    convert(item.from, item.source, item.to, item.target, item.num_elements, isa);
  }
}

void pack(const std::vector<PackItem>& items) {
  for (const PackItem& item : items) pack(item);
}

}  // namespace pydist
