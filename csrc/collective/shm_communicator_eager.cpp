// The eager way: small data lies beside the call, so that agreeing is all the synchronisation there
// is.
#include <cstring>

#include "collective/shm_communicator.h"

namespace pydist {

// What one rank contributes in bytes; 0 where the operation goes another way. Depends on nothing
// that may differ by rank.
size_t ShmCommunicator::eager_nbytes(const Call& call) const {
  size_t nbytes = static_cast<size_t>(call.num_elements) * dtype_nbytes(call.dtype);
  switch (call.operation) {
    case Operation::kAllReduce:
    case Operation::kReduce:
    case Operation::kAllGather:
    case Operation::kGather:
    case Operation::kBroadcast:
      break;
    case Operation::kReduceScatter:
    case Operation::kScatter:
      nbytes *= static_cast<size_t>(size_);
      break;
    case Operation::kBroadcastMany:
      nbytes = static_cast<size_t>(call.num_elements);
      break;
    default:
      return 0;
  }
  return nbytes <= PayloadLayout::kEagerNbytes ? nbytes : 0;
}

void ShmCommunicator::fill_eager(const Collective& collective, size_t nbytes) {
  uint8_t* area = const_cast<uint8_t*>(eager_data(rank_, nbytes));
  switch (collective.operation) {
    case Operation::kAllReduce:
    case Operation::kReduce:
      std::memcpy(area, collective.output.data, nbytes);
      break;
    case Operation::kReduceScatter:
    case Operation::kAllGather:
    case Operation::kGather:
      std::memcpy(area, collective.input.data, nbytes);
      break;
    case Operation::kScatter:
      if (rank_ == collective.root) std::memcpy(area, collective.input.data, nbytes);
      break;
    case Operation::kBroadcast:
      if (rank_ == collective.root) std::memcpy(area, collective.output.data, nbytes);
      break;
    case Operation::kBroadcastMany:
      // Never in the line, which carries the layout.
      area = board_->payload() + layout_.eager(sequence_, rank_);
      if (rank_ != collective.root) break;
      for (const Buffer& buffer : collective.buffers) {
        if (buffer.num_elements > 0) std::memcpy(area, buffer.data, buffer.nbytes());
        area += buffer.nbytes();
      }
      break;
    default:
      break;
  }
}

const uint8_t* ShmCommunicator::eager_data(int r, size_t nbytes) const {
  if (nbytes <= CallLine::kInlineNbytes) return line(r).data;
  return board_->payload() + layout_.eager(sequence_, r);
}

void ShmCommunicator::transfer_eager(const Collective& collective, size_t nbytes) {
  const Buffer& output = collective.output;
  const bool is_reduce_scatter = collective.operation == Operation::kReduceScatter;
  const bool is_root = rank_ == collective.root;
  switch (collective.operation) {
    case Operation::kAllReduce:
    case Operation::kReduce:
    case Operation::kReduceScatter: {
      if (collective.operation == Operation::kReduce && !is_root) break;
      const size_t offset = is_reduce_scatter ? rank_ * output.nbytes() : 0;
      for (int r = 0; r < size_; ++r) inputs_[r] = eager_data(r, nbytes) + offset;
      outputs_[0] = output.data;
      reduce(output.dtype, collective.op,
             {inputs_.data(), size_, outputs_.data(), 1, output.num_elements}, board_->isa());
      break;
    }
    case Operation::kAllGather:
    case Operation::kGather:
      if (collective.operation == Operation::kGather && !is_root) break;
      for (int r = 0; r < size_; ++r) {
        std::memcpy(output.bytes() + r * nbytes, eager_data(r, nbytes), nbytes);
      }
      break;
    case Operation::kScatter:
      std::memcpy(output.data, eager_data(collective.root, nbytes) + rank_ * output.nbytes(),
                  output.nbytes());
      break;
    case Operation::kBroadcast:
      if (!is_root) {
        std::memcpy(output.data, eager_data(collective.root, nbytes), nbytes);
      }
      break;
    case Operation::kBroadcastMany: {
      if (is_root) break;
      const uint8_t* area = board_->payload() + layout_.eager(sequence_, collective.root);
      for (const Buffer& buffer : collective.buffers) {
        if (buffer.num_elements > 0) std::memcpy(buffer.data, area, buffer.nbytes());
        area += buffer.nbytes();
      }
      break;
    }
    default:
      break;
  }
}

}  // namespace pydist
