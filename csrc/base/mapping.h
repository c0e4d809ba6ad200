// Owns one range of mapped memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace pydist {

// What a forked child sees of a mapping of shared memory.
enum class ForkBehavior { kInherit, kHide };

class Mapping {
 public:
  Mapping() = default;
  // Maps `nbytes` of the file read-write and shared. Raises ResourceError.
  Mapping(int fd, size_t nbytes, ForkBehavior fork_behavior);
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        nbytes_(std::exchange(other.nbytes_, 0)),
        hidden_in_child_(other.hidden_in_child_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(nbytes_, other.nbytes_);
    std::swap(hidden_in_child_, other.hidden_in_child_);
    return *this;
  }
  ~Mapping();

  uint8_t* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t nbytes_ = 0;
  bool hidden_in_child_ = false;
};

}  // namespace pydist
