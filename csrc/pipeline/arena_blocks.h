// Blocks of this process's arena for messages on their way, used again and again. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pydist {

class ArenaBlocks {
 public:
  struct Block {
    uint8_t* data = nullptr;  // null: none
    size_t nbytes = 0;
  };

  // At most `max_nbytes` of the arena, in use or not.
  explicit ArenaBlocks(size_t max_nbytes) : max_nbytes_(max_nbytes) {}
  ~ArenaBlocks();
  ArenaBlocks(const ArenaBlocks&) = delete;

  // One of at least this size, not initialised; none where there is no room.
  Block take(size_t nbytes);
  void give_back(Block block);
  // Gives blocks that the last steps had no use for back to the arena.
  void end_step();
  size_t nbytes() const { return nbytes_; }

 private:
  struct Free {
    Block block;
    uint64_t last_step;
  };
  void deallocate(const Block& block);

  const size_t max_nbytes_;
  std::vector<Free> free_;
  uint64_t step_ = 0;
  size_t nbytes_ = 0;
};

}  // namespace pydist
