// A 64-bit hash of memory, near the speed at which memory is read; not cryptographic.
//
// Eight lanes take eight words at a time. A lane's step (see hash.cpp) is a bijection of its state
// for a given word, and of the word for a given state; so is each step of the end, where the lanes
// are folded into one. Hence memory that differs within one word only, by a single flipped bit for
// example, certainly has another hash; any other difference is missed by accident only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pydist {

uint64_t hash_memory(const void* data, size_t nbytes);

}  // namespace pydist
