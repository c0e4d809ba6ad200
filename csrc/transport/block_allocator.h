// Divides a range of offsets into blocks: best fit, coalescing, pins. Pure; the caller locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

namespace pydist {

class BlockAllocator {
 public:
  static constexpr size_t kAlignment = 64;

  BlockAllocator() = default;
  // Offsets begin .. end; begin is a multiple of kAlignment.
  BlockAllocator(size_t begin, size_t end);

  // The smallest free block that fits, lowest offset first among equals (so that memory stays low);
  // none: nullopt.
  std::optional<size_t> allocate(size_t nbytes);
  // Gives a block back, or, where it is pinned, leaves it until its last pin goes.
  void deallocate(size_t offset);
  void pin(size_t offset);
  void unpin(size_t offset);

  bool is_block(size_t offset) const { return blocks_.count(offset) != 0; }
  // Rounded size of a live block.
  size_t block_nbytes(size_t offset) const { return blocks_.at(offset).nbytes; }
  size_t used_nbytes() const { return used_nbytes_; }
  size_t num_blocks() const { return blocks_.size(); }
  // The highest offset that a block has ever reached.
  size_t high_water() const { return high_water_; }

 private:
  struct Block {
    size_t nbytes = 0;
    uint32_t pins = 0;
    bool freed = false;  // deallocated while pinned
  };
  void insert_free(size_t offset, size_t nbytes);
  void erase_free(size_t offset, size_t nbytes);
  void release(size_t offset);

  std::map<size_t, size_t> free_by_offset_;           // offset -> nbytes
  std::set<std::pair<size_t, size_t>> free_by_size_;  // (nbytes, offset)
  std::unordered_map<size_t, Block> blocks_;          // live blocks
  size_t used_nbytes_ = 0;
  size_t high_water_ = 0;
};

}  // namespace pydist
