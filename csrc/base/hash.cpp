#include "base/hash.h"

#include <cstring>

namespace pydist {

namespace {

constexpr size_t kLanes = 8;
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;  // 2^64 divided by the golden ratio
constexpr uint64_t kOther = 0xd6e8feb86659fd93;

// Multiplication spreads a bit upwards only. With one alone, a flip of the highest bit would stay
// one bit, which a second flip in the lane's next word would undo: hence the shift and another.
inline uint64_t step(uint64_t state, uint64_t word) {
  state = (state ^ word) * kOdd;
  return (state ^ state >> 32) * kOther;
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
#pragma GCC unroll 8  // so that lanes stay in registers
    for (size_t i = 0; i < kLanes; ++i) lanes[i] = step(lanes[i], words[i]);
  }
  // The rest, with zeros behind it; its length tells it from a rest that has these zeros.
  uint64_t rest[kLanes] = {};
  if (nbytes > 0) std::memcpy(rest, bytes, nbytes);
  uint64_t hash = step(kOdd, nbytes);
  for (size_t i = 0; i < kLanes; ++i) hash = step(hash, step(lanes[i], rest[i]));
  return hash ^ hash >> 32;
}

}  // namespace pydist
