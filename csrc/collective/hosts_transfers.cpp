// What moves between hosts once all ranks have agreed on a call.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "collective/hosts_all_reduce.h"
#include "collective/hosts_broadcast.h"
#include "collective/hosts_communicator.h"
#include "collective/hosts_sum.h"

namespace pydist {

namespace {

// Of many tensors, which are broadcast in one run of bytes.
constexpr size_t kPackedNbytes = size_t{16} << 20;

int64_t sum_of(const std::vector<int64_t>& values) {
  int64_t sum = 0;
  for (const int64_t value : values) sum += value;
  return sum;
}

void copy(void* to, const void* from, size_t nbytes) {
  if (to != from && nbytes > 0) std::memmove(to, from, nbytes);
}

Buffer bytes_of(const Buffer& buffer, const HostsSpan& span) {
  return {buffer.bytes() + span.begin, span.count, DType::kUInt8, buffer.block};
}

}  // namespace

void HostsCommunicator::transfer(const Collective& collective, const Describe& operation) {
  if (HostsBlock::holds(collective)) return take_small(collective);
  switch (collective.operation) {
    case Operation::kAllReduce:
      return HostsAllReduce(team_, collective, operation).run();
    case Operation::kReduce:
      return reduce_to_root(collective, operation);
    case Operation::kReduceScatter:
      return carry_reduce_scatter(collective, operation);
    case Operation::kAllGather:
      return carry_all_gather(collective, operation);
    case Operation::kGather:
      return carry_gather(collective, operation);
    case Operation::kScatter:
      return carry_scatter(collective, operation);
    case Operation::kBroadcast:
      return HostsBroadcast(team_, collective.output, collective.root, operation).run();
    case Operation::kBroadcastMany:
      return carry_broadcast_many(collective, operation);
    case Operation::kAllToAll:
      return carry_all_to_all(collective, operation);
    case Operation::kBarrier:
    case Operation::kInvalid:
      return;
  }
}

// -- what came with the calls --------------------------------------------------------------------

void HostsCommunicator::take_small(const Collective& collective) {
  const Buffer& output = collective.output;
  if (output.num_elements == 0) return;
  switch (collective.operation) {
    case Operation::kAllReduce:
      return reduce_small(collective);
    case Operation::kReduce:
      if (collective.root == rank()) reduce_small(collective);
      return;
    case Operation::kAllGather:
      for (int r = 0; r < size(); ++r) {
        const size_t nbytes = collective.input.nbytes();
        std::memcpy(output.bytes() + static_cast<size_t>(r) * nbytes, block(r).data, nbytes);
      }
      return;
    default:  // a broadcast
      std::memcpy(output.data, block(collective.root).data, output.nbytes());
  }
}

// As HostsAllReduce does it, with the same bits.
void HostsCommunicator::reduce_small(const Collective& collective) {
  const Buffer& output = collective.output;
  HostsSum sum(team_.layout, collective, board().isa());
  const size_t stride = sum.wire_nbytes(output.num_elements);
  std::vector<uint8_t> contributions(stride * static_cast<size_t>(team_.layout.num_hosts()));
  std::vector<uint8_t> scratch(output.nbytes());
  for (int h = 0; h < team_.layout.num_hosts(); ++h) {
    std::vector<const void*> inputs;
    for (const int r : team_.layout.ranks_of(h)) inputs.push_back(block(r).data);
    sum.reduce_ranks(inputs, scratch.data(), output.num_elements);
    sum.to_wire(scratch.data(), contributions.data() + static_cast<size_t>(h) * stride,
                output.num_elements);
  }
  sum.add(contributions.data(), stride, scratch.data(), output.num_elements);
  sum.from_wire(scratch.data(), output.data, output.num_elements);
}

// -- between hosts by lanes ----------------------------------------------------------------------

void HostsCommunicator::reduce_to_root(const Collective& collective, const Describe& operation) {
  if (collective.root == rank()) return HostsAllReduce(team_, collective, operation).run();
  const Buffer& output = collective.output;
  std::vector<uint8_t> scratch(output.bytes(), output.bytes() + output.nbytes());
  Collective mine = collective;
  mine.output = {scratch.data(), output.num_elements, output.dtype};
  HostsAllReduce(team_, mine, operation).run();
}

// In one run of bytes after the other, which pieces of buffers are packed into.
void HostsCommunicator::carry_broadcast_many(const Collective& collective,
                                             const Describe& operation) {
  size_t left = 0;
  for (const Buffer& buffer : collective.buffers) left += buffer.nbytes();
  const size_t room = std::min(left, kPackedNbytes);
  const SharedBytes packed = make_shared_bytes(room);
  std::vector<Buffer> members;
  size_t filled = 0;
  for (const Buffer& buffer : collective.buffers) {
    const auto total = static_cast<int64_t>(buffer.nbytes());
    for (int64_t begin = 0; begin < total;) {
      const int64_t fits = std::min(total - begin, static_cast<int64_t>(room - filled));
      members.push_back(bytes_of(buffer, {begin, fits}));
      filled += members.back().nbytes();
      begin += fits;
      left -= members.back().nbytes();
      if (filled < room && left > 0) continue;
      broadcast_packed(members, packed.get(), collective.root, operation);
      members.clear();
      filled = 0;
    }
  }
}

void HostsCommunicator::broadcast_packed(const std::vector<Buffer>& members, uint8_t* packed,
                                         int root, const Describe& operation) {
  uint8_t* end = packed;
  for (const Buffer& member : members) {
    if (root == rank()) std::memcpy(end, member.data, member.nbytes());
    end += member.nbytes();
  }
  HostsBroadcast(team_, {packed, end - packed, DType::kUInt8}, root, operation).run();
  if (root == rank()) return;
  for (const Buffer& member : members) {
    std::memcpy(member.data, packed, member.nbytes());
    packed += member.nbytes();
  }
}

// -- between all ranks ---------------------------------------------------------------------------

// What all ranks sent to this one, in rank order. The network works on memory of its own: an
// exchange that fails may go on.
SharedBytes HostsCommunicator::exchange(const void* sent, std::vector<int64_t> sent_nbytes,
                                        std::vector<int64_t> received_nbytes,
                                        const Describe& operation) {
  const auto nbytes = static_cast<size_t>(sum_of(sent_nbytes));
  const SharedBytes from = team_.memory->take(HostsMemory::kSent, nbytes);
  const SharedBytes to =
      team_.memory->take(HostsMemory::kReceived, static_cast<size_t>(sum_of(received_nbytes)));
  copy(from.get(), sent, nbytes);
  team_.await(*team_.flat->all_to_all(from, std::move(sent_nbytes), to, std::move(received_nbytes)),
              operation);
  return to;
}

// Added in rank order.
void HostsCommunicator::carry_reduce_scatter(const Collective& collective,
                                             const Describe& operation) {
  const Buffer& output = collective.output;
  if (output.num_elements == 0) return;
  const auto nbytes = static_cast<int64_t>(output.nbytes());
  const std::vector<int64_t> equal(size(), nbytes);
  const SharedBytes parts = exchange(collective.input.data, equal, equal, operation);
  std::vector<const void*> inputs;
  for (int r = 0; r < size(); ++r) inputs.push_back(parts.get() + r * nbytes);
  void* outputs[] = {output.data};
  reduce(output.dtype, collective.op,
         {inputs.data(), size(), outputs, 1, output.num_elements, collective.divisor},
         board().isa());
}

void HostsCommunicator::carry_all_gather(const Collective& collective, const Describe& operation) {
  const Buffer& input = collective.input;
  if (input.num_elements == 0) return;
  if (team_.flat == nullptr) {
    return team_.gather_all(input.data, input.nbytes(), collective.output.bytes(), operation);
  }
  const SharedBytes from = team_.memory->take(HostsMemory::kSent, input.nbytes());
  const SharedBytes to = team_.memory->take(HostsMemory::kReceived, collective.output.nbytes());
  std::memcpy(from.get(), input.data, input.nbytes());
  team_.await(*team_.flat->all_gather(from, to, input.nbytes()), operation);
  std::memcpy(collective.output.data, to.get(), collective.output.nbytes());
}

void HostsCommunicator::carry_gather(const Collective& collective, const Describe& operation) {
  const auto nbytes = static_cast<int64_t>(collective.input.nbytes());
  if (nbytes == 0) return;
  const bool is_root = collective.root == rank();
  std::vector<int64_t> sent(size(), 0);
  sent[collective.root] = nbytes;
  const SharedBytes parts = exchange(collective.input.data, sent,
                                     std::vector<int64_t>(size(), is_root ? nbytes : 0), operation);
  if (is_root) std::memcpy(collective.output.data, parts.get(), collective.output.nbytes());
}

void HostsCommunicator::carry_scatter(const Collective& collective, const Describe& operation) {
  const auto nbytes = static_cast<int64_t>(collective.output.nbytes());
  if (nbytes == 0) return;
  const bool is_root = collective.root == rank();
  std::vector<int64_t> received(size(), 0);
  received[collective.root] = nbytes;
  const SharedBytes part =
      exchange(collective.input.data, std::vector<int64_t>(size(), is_root ? nbytes : 0), received,
               operation);
  std::memcpy(collective.output.data, part.get(), collective.output.nbytes());
}

void HostsCommunicator::carry_all_to_all(const Collective& collective, const Describe& operation) {
  const auto element_nbytes = static_cast<int64_t>(dtype_nbytes(collective.input.dtype));
  std::vector<int64_t> sent = collective.input_splits;
  std::vector<int64_t> received = collective.output_splits;
  for (int64_t& split : sent) split *= element_nbytes;
  for (int64_t& split : received) split *= element_nbytes;
  const SharedBytes parts =
      exchange(collective.input.data, std::move(sent), std::move(received), operation);
  copy(collective.output.data, parts.get(), collective.output.nbytes());
}

// Every rank checks all pairs, so all raise.
void HostsCommunicator::check_splits(const Collective& collective, const Describe& operation) {
  const auto ranks = static_cast<size_t>(size());
  std::vector<int64_t> mine = collective.input_splits;
  mine.insert(mine.end(), collective.output_splits.begin(), collective.output_splits.end());
  std::vector<int64_t> all(2 * ranks * ranks);
  team_.gather_all(mine.data(), mine.size() * sizeof(int64_t),
                   reinterpret_cast<uint8_t*>(all.data()), operation);
  for (size_t from = 0; from < ranks; ++from) {
    for (size_t to = 0; to < ranks; ++to) {
      const int64_t sent = all[2 * ranks * from + to];
      const int64_t expected = all[2 * ranks * to + ranks + from];
      PYDIST_CHECK(sent == expected, MismatchError, "all_to_all, collective number ", sequence_,
                   " of ", name(), ": ", describe(static_cast<int>(from)), " sends ", sent,
                   " elements to ", describe(static_cast<int>(to)), ", which expects ", expected,
                   "; make input_split_sizes and output_split_sizes of the two agree");
    }
  }
}

}  // namespace pydist
