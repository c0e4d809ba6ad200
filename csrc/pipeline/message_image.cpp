#include "pipeline/message_image.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

#include <cstring>

#include "base/check.h"
#include "collective/stream_copy.h"

namespace pydist {

namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kWord = 8;

struct SlotRecord {
  int8_t dtype = 0;
  uint8_t defined = 0;
  uint8_t requires_grad = 0;
  uint8_t unused = 0;
  int32_t dim = 0;
};
static_assert(sizeof(SlotRecord) == kWord);

size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Its memory can be copied as it lies.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

std::vector<int64_t> dense_strides(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return tensor.strides().vec();
  return at::infer_dense_strides(tensor.sizes(), tensor.strides());
}

void append(std::vector<uint8_t>& bytes, const void* from, size_t nbytes) {
  const auto* begin = static_cast<const uint8_t*>(from);
  bytes.insert(bytes.end(), begin, begin + nbytes);
}

void append_slot(std::vector<uint8_t>& bytes, const Slot& slot) {
  SlotRecord record;
  record.requires_grad = slot.requires_grad ? 1 : 0;
  if (slot.tensor.defined()) {
    record.defined = 1;
    record.dtype = static_cast<int8_t>(slot.tensor.scalar_type());
    record.dim = static_cast<int32_t>(slot.tensor.dim());
  }
  append(bytes, &record, sizeof(record));
  if (!slot.tensor.defined()) return;
  const size_t nbytes = slot.tensor.dim() * sizeof(int64_t);
  append(bytes, slot.tensor.sizes().data(), nbytes);
  append(bytes, dense_strides(slot.tensor).data(), nbytes);
}

// The header is known last, and written in front of what follows it.
void put_header(std::vector<uint8_t>& bytes, ImageHeader header) {
  header.envelope_nbytes = bytes.size();
  std::memcpy(bytes.data(), &header, sizeof(header));
}

// A normal tensor in every mode of the calling thread: it may be wanted in a later step only.
at::Tensor make_tensor(c10::Storage storage, at::ScalarType dtype, at::IntArrayRef sizes,
                       at::IntArrayRef strides) {
  const c10::InferenceMode normal(false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
      c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

class EnvelopeReader {
 public:
  explicit EnvelopeReader(const uint8_t* at) : at_(at) {}

  const uint8_t* take(size_t nbytes) {
    const uint8_t* taken = at_;
    at_ += round_up(nbytes, kWord);
    return taken;
  }
  at::IntArrayRef take_words(size_t count) {
    return {reinterpret_cast<const int64_t*>(take(count * kWord)), count};
  }

 private:
  const uint8_t* at_;
};

}  // namespace

void check_sendable(const Message& message, at::Device device) {
  for (const Slot& slot : message.slots) {
    const at::Tensor& tensor = slot.tensor;
    if (!tensor.defined()) continue;
    PYDIST_CHECK((tensor.is_cpu() || tensor.device() == device) &&
                     tensor.layout() == at::kStrided && !tensor.is_quantized() &&
                     !tensor.is_nested() && !tensor.unsafeGetTensorImpl()->is_python_dispatch(),
                 UsageError, "a tensor of type ", tensor.toString(), " on ", tensor.device().str(),
                 " cannot cross from one stage to another; pass dense tensors on the CPU",
                 device.is_cpu() ? "" : concat(" or on ", device.str()));
  }
}

size_t image_nbytes(const Message& message) {
  size_t nbytes = 0;
  for (const Slot& slot : message.slots) {
    if (slot.tensor.defined()) nbytes = round_up(nbytes, kAlignment) + slot.tensor.nbytes();
  }
  return nbytes;
}

void write_envelope(const Message& message, const Stamp& stamp, std::vector<uint8_t>& bytes) {
  ImageHeader header;
  header.payload_nbytes = image_nbytes(message);
  header.generation = stamp.generation;
  header.step = stamp.step;
  header.step_kind = static_cast<uint8_t>(stamp.kind);
  header.structure_nbytes = message.structure.size();
  header.stage = message.key.stage;
  header.microbatch = message.key.microbatch;
  header.port = message.key.port;
  header.message_kind = static_cast<uint8_t>(message.key.kind);
  header.num_slots = static_cast<uint32_t>(message.slots.size());
  header.absent = message.absent ? 1 : 0;
  header.num_rows = message.num_rows;
  bytes.resize(sizeof(header));
  append(bytes, message.structure.data(), message.structure.size());
  bytes.resize(round_up(bytes.size(), kWord));
  for (const Slot& slot : message.slots) append_slot(bytes, slot);
  put_header(bytes, header);
}

void set_payload_offset(std::vector<uint8_t>& envelope, uint64_t offset) {
  std::memcpy(envelope.data() + offsetof(ImageHeader, payload_offset), &offset, sizeof(offset));
}

void write_end_of_step(const Stamp& stamp, std::vector<uint8_t>& bytes) {
  ImageHeader header;
  header.generation = stamp.generation;
  header.step = stamp.step;
  header.step_kind = static_cast<uint8_t>(stamp.kind);
  header.ends_step = 1;
  bytes.resize(sizeof(header));
  put_header(bytes, header);
}

void write_payload(const Message& message, uint8_t* to) {
  size_t offset = 0;
  for (const Slot& slot : message.slots) {
    const at::Tensor& tensor = slot.tensor;
    if (!tensor.defined()) continue;
    offset = round_up(offset, kAlignment);
    if (tensor.nbytes() == 0) continue;
    if (is_plain(tensor)) {
      stream_copy(to + offset, tensor.const_data_ptr(), tensor.nbytes());
    } else {
      const at::NoGradGuard no_grad;
      const auto options = at::TensorOptions(tensor.scalar_type());
      at::from_blob(to + offset, tensor.sizes(), dense_strides(tensor), options).copy_(tensor);
    }
    offset += tensor.nbytes();
  }
}

Message read_message(const uint8_t* envelope, const uint8_t* payload, StoragePool& pool) {
  ImageHeader header;
  std::memcpy(&header, envelope, sizeof(header));
  EnvelopeReader reader(envelope + sizeof(header));
  Message message;
  message.key = header.key();
  message.absent = header.absent != 0;
  message.num_rows = header.num_rows;
  message.structure.assign(reinterpret_cast<const char*>(reader.take(header.structure_nbytes)),
                           header.structure_nbytes);
  message.slots.resize(header.num_slots);
  size_t offset = 0;
  for (Slot& slot : message.slots) {
    SlotRecord record;
    std::memcpy(&record, reader.take(sizeof(record)), sizeof(record));
    slot.requires_grad = record.requires_grad != 0;
    if (record.defined == 0) continue;
    const at::IntArrayRef sizes = reader.take_words(record.dim);
    const at::IntArrayRef strides = reader.take_words(record.dim);
    const auto dtype = static_cast<at::ScalarType>(record.dtype);
    const size_t nbytes = c10::multiply_integers(sizes) * c10::elementSize(dtype);
    c10::Storage storage = pool.take(nbytes);
    offset = round_up(offset, kAlignment);
    if (nbytes > 0) std::memcpy(storage.mutable_data(), payload + offset, nbytes);
    offset += nbytes;
    slot.tensor = make_tensor(std::move(storage), dtype, sizes, strides);
  }
  return message;
}

}  // namespace pydist
