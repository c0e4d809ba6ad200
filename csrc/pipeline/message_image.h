// A message as bytes: a header, the description of the value, and an image of its tensors' memory.
//
//   | ImageHeader | structure | {SlotRecord, sizes, strides} per slot |    the envelope
//   | memory of slot 0 | memory of slot 1 | ...                        |    the payload
//
// The payload of a dense tensor is its memory as it lies, so strides are kept (channels_last, say);
// others are made dense in the order of their strides, as clone() does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pipeline/channel.h"
#include "pipeline/storage_pool.h"

namespace pydist {

// Which step a message belongs to. A generation ends with a step that fails; steps are counted from
// its begin.
struct Stamp {
  uint64_t generation = 1;
  uint64_t step = 0;
  StepKind kind = StepKind::kTrain;

  bool same_step(const Stamp& other) const {
    return generation == other.generation && step == other.step;
  }
};

struct ImageHeader {
  static constexpr uint64_t kInline = UINT64_MAX;

  uint64_t envelope_nbytes = 0;  // this header included
  uint64_t payload_nbytes = 0;
  uint64_t payload_offset = kInline;  // in the sender's arena; kInline: it follows the envelope
  uint64_t generation = 0;
  uint64_t step = 0;
  uint64_t structure_nbytes = 0;
  int32_t stage = 0;
  int32_t microbatch = 0;
  int32_t port = 0;
  uint32_t num_slots = 0;
  uint8_t step_kind = 0;
  uint8_t message_kind = 0;
  uint8_t absent = 0;
  uint8_t ends_step = 0;  // no message: its sender has ended the step
  int32_t num_rows = -1;

  Stamp stamp() const { return {generation, step, static_cast<StepKind>(step_kind)}; }
  MessageKey key() const {
    return {static_cast<MessageKind>(message_kind), stage, microbatch, port};
  }
};

// Raises UsageError where a tensor cannot be sent: it must be an ordinary one on the CPU, or on
// `device`.
void check_sendable(const Message& message, at::Device device = at::kCPU);

// Of the payload.
size_t image_nbytes(const Message& message);

// Fills `bytes` with the envelope; the payload is said to follow it.
void write_envelope(const Message& message, const Stamp& stamp, std::vector<uint8_t>& bytes);
void set_payload_offset(std::vector<uint8_t>& envelope, uint64_t offset);
void write_end_of_step(const Stamp& stamp, std::vector<uint8_t>& bytes);

// `to` is aligned to 64 bytes where it is read by another core next.
void write_payload(const Message& message, uint8_t* to);

// The message, its tensors copied into memory from the pool.
Message read_message(const uint8_t* envelope, const uint8_t* payload, StoragePool& pool);

}  // namespace pydist
