// What carries bytes between hosts: the operations of one network of processes, each with a rank in
// it. All ranks start the same operations in the same order, and may have several under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/error.h"

namespace pydist {

// The first byte of a run of memory, and its owner: a network that has broken down may keep it.
using SharedBytes = std::shared_ptr<uint8_t>;

// An operation under way. It may be dropped at any time, and goes on then.
class Exchange {
 public:
  virtual ~Exchange() = default;
  // True once it has ended, well or not: its memory is the caller's again.
  virtual bool test() = 0;
  // After that: raises NetworkError if it did not end well.
  virtual void finish() = 0;
};

class Network {
 public:
  using Started = std::unique_ptr<Exchange>;

  // One whose operations will never end is not destroyed but left behind.
  virtual ~Network() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Part r of `from` becomes part rank() of `to` on rank r; all parts are equally long.
  virtual Started all_to_all(const SharedBytes& from, const SharedBytes& to,
                             size_t part_nbytes) = 0;
  // The same with parts of any length, in bytes by rank.
  virtual Started all_to_all(const SharedBytes& from, std::vector<int64_t> sent,
                             const SharedBytes& to, std::vector<int64_t> received) = 0;
  // `to` becomes the `from` of all ranks, in rank order.
  virtual Started all_gather(const SharedBytes& from, const SharedBytes& to, size_t nbytes) = 0;
  // Everybody's `data` becomes the root's.
  virtual Started broadcast(const SharedBytes& data, size_t nbytes, int root) = 0;
};

// An operation of a network failed, so all of it has: a connection broke, as when a peer dies.
class NetworkError : public Error {
 public:
  using Error::Error;
};

}  // namespace pydist
