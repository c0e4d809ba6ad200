// The arithmetic of a sum over hosts: what each host contributes, and how contributions are added.
//
// A host's contribution is its ranks' reduction, rounded once into the type that travels; for a
// mean it is the mean over its own ranks, which overflows only where the result does. Contributions
// are added in host order, half types in float32, and rounded once. Where the hosts' means do not
// count alike (hosts of different sizes, or another divisor), each is first multiplied by its
// weight. So an element's bits depend on its values on all ranks alone.
#pragma once

#include <cstdint>
#include <vector>

#include "base/cpu.h"
#include "collective/communicator.h"
#include "collective/hosts_plan.h"

namespace pydist {

class HostsSum {
 public:
  HostsSum(const HostLayout& layout, const Collective& collective, Isa isa);

  // The type that travels.
  DType wire() const { return wire_; }
  size_t wire_nbytes(int64_t num_elements) const {
    return static_cast<size_t>(num_elements) * dtype_nbytes(wire_);
  }
  // Between the buffer's type and the one that travels.
  void to_wire(const void* from, void* to, int64_t num_elements) const;
  void from_wire(const void* from, void* to, int64_t num_elements) const;
  // Host h's contribution lies at contributions + h * stride_nbytes; `to` is none of them.
  void add(const uint8_t* contributions, size_t stride_nbytes, uint8_t* to, int64_t num_elements);
  // The reduction of one host's ranks, in the buffer's type: what a ShmCommunicator gives.
  void reduce_ranks(const std::vector<const void*>& inputs, void* to, int64_t num_elements) const;

 private:
  void add_weighted(uint8_t* to, int64_t num_elements);

  const DType dtype_;
  const DType wire_;
  const ReduceOp op_;
  const Isa isa_;
  int divisor_ = 0;              // of equal hosts' means
  std::vector<double> weights_;  // empty where they are equal
  std::vector<const void*> inputs_;
  std::vector<uint8_t> scaled_;
};

}  // namespace pydist
