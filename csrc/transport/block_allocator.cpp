#include "transport/block_allocator.h"

#include <algorithm>

#include "base/check.h"

namespace pydist {

BlockAllocator::BlockAllocator(size_t begin, size_t end) : high_water_(begin) {
  insert_free(begin, (end - begin) / kAlignment * kAlignment);
}

std::optional<size_t> BlockAllocator::allocate(size_t nbytes) {
  const size_t rounded = std::max(kAlignment, (nbytes + kAlignment - 1) / kAlignment * kAlignment);
  if (rounded < nbytes) return std::nullopt;  // overflow
  auto found = free_by_size_.lower_bound({rounded, 0});
  if (found == free_by_size_.end()) return std::nullopt;
  const auto [available, offset] = *found;
  erase_free(offset, available);
  if (available > rounded) insert_free(offset + rounded, available - rounded);
  blocks_[offset].nbytes = rounded;
  used_nbytes_ += rounded;
  high_water_ = std::max(high_water_, offset + rounded);
  return offset;
}

void BlockAllocator::deallocate(size_t offset) {
  Block& block = blocks_.at(offset);
  PYDIST_CHECK(!block.freed, Error, "block at ", offset, " was given back twice");
  block.freed = true;
  if (block.pins == 0) release(offset);
}

void BlockAllocator::pin(size_t offset) { ++blocks_.at(offset).pins; }

void BlockAllocator::unpin(size_t offset) {
  Block& block = blocks_.at(offset);
  PYDIST_CHECK(block.pins > 0, Error, "block at ", offset, " is not pinned");
  if (--block.pins == 0 && block.freed) release(offset);
}

// Merges the block with its free neighbours.
void BlockAllocator::release(size_t offset) {
  const auto block = blocks_.find(offset);
  size_t nbytes = block->second.nbytes;
  used_nbytes_ -= nbytes;
  blocks_.erase(block);
  auto next = free_by_offset_.lower_bound(offset);
  if (next != free_by_offset_.end() && next->first == offset + nbytes) {
    const auto [next_offset, next_nbytes] = *next;
    nbytes += next_nbytes;
    erase_free(next_offset, next_nbytes);
  }
  auto after = free_by_offset_.lower_bound(offset);
  if (after != free_by_offset_.begin()) {
    const auto [previous_offset, previous_nbytes] = *std::prev(after);
    if (previous_offset + previous_nbytes == offset) {
      erase_free(previous_offset, previous_nbytes);
      offset = previous_offset;
      nbytes += previous_nbytes;
    }
  }
  insert_free(offset, nbytes);
}

void BlockAllocator::insert_free(size_t offset, size_t nbytes) {
  free_by_offset_.emplace(offset, nbytes);
  free_by_size_.emplace(nbytes, offset);
}

void BlockAllocator::erase_free(size_t offset, size_t nbytes) {
  free_by_offset_.erase(offset);
  free_by_size_.erase({nbytes, offset});
}

}  // namespace pydist
