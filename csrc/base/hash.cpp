#include "base/hash.h"

#include <cstring>

namespace pydist {

namespace {

constexpr size_t kLanes = 8;
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 divided by the golden ratio

// The rotation brings the high bits down, where the multiplication spreads them.
inline uint64_t step(uint64_t state, uint64_t word) {
  state ^= word;
  return (state << 29 | state >> 35) * kOdd;
}

}  // namespace

uint64_t hash_memory(const void* data, size_t nbytes) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint64_t lanes[kLanes];
  for (size_t i = 0; i < kLanes; ++i) lanes[i] = (i + 1) * kOdd;
  constexpr size_t kBlockNbytes = kLanes * sizeof(uint64_t);
  for (; nbytes >= kBlockNbytes; nbytes -= kBlockNbytes, bytes += kBlockNbytes) {
    uint64_t words[kLanes];
    std::memcpy(words, bytes, kBlockNbytes);
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = step(lanes[i], words[i]);
  }
  // The rest, with zeros behind it; its length tells it from a rest that has these zeros.
  uint64_t rest[kLanes] = {};
  if (nbytes > 0) std::memcpy(rest, bytes, nbytes);
  uint64_t hash = step(kOdd, nbytes);
  for (size_t i = 0; i < kLanes; ++i) hash = step(hash, step(lanes[i], rest[i]));
  // A few more for the bits of the last lanes to reach all of the hash.
  for (int i = 0; i < 3; ++i) hash = step(hash, hash >> 32);
  return hash;
}

}  // namespace pydist
