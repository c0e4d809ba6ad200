#include "pipeline/slot_form.h"

#include <cstring>

#include "base/check.h"

namespace pydist {

namespace {

// Sizes and strides follow where the tensor goes from device to device.
struct Record {
  Way way = Way::kNone;
  uint8_t requires_grad = 0;
  int8_t dtype = 0;
  uint8_t dim = 0;
};

void take(std::string_view& forms, void* to, size_t nbytes) {
  PYDIST_CHECK(nbytes <= forms.size(), Error, "a peer's description of tensors is cut off");
  if (nbytes > 0) std::memcpy(to, forms.data(), nbytes);
  forms.remove_prefix(nbytes);
}

std::vector<int64_t> take_words(std::string_view& forms, size_t count) {
  std::vector<int64_t> words(count);
  take(forms, words.data(), count * sizeof(int64_t));
  return words;
}

void append_words(at::IntArrayRef words, std::string& forms) {
  forms.append(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int64_t));
}

}  // namespace

void append_slot_form(const Slot& slot, Way way, std::string& forms) {
  Record record;
  record.way = way;
  record.requires_grad = slot.requires_grad ? 1 : 0;
  if (way == Way::kDevice) {
    record.dtype = static_cast<int8_t>(slot.tensor.scalar_type());
    record.dim = static_cast<uint8_t>(slot.tensor.dim());
  }
  forms.append(reinterpret_cast<const char*>(&record), sizeof(record));
  if (way != Way::kDevice) return;
  append_words(slot.tensor.sizes(), forms);
  append_words(slot.tensor.strides(), forms);
}

std::vector<SlotForm> read_slot_forms(std::string_view forms) {
  std::vector<SlotForm> found;
  while (!forms.empty()) {
    Record record;
    take(forms, &record, sizeof(record));
    SlotForm& form = found.emplace_back();
    form.way = record.way;
    form.requires_grad = record.requires_grad != 0;
    if (record.way != Way::kDevice) continue;
    form.dtype = static_cast<at::ScalarType>(record.dtype);
    form.sizes = take_words(forms, record.dim);
    form.strides = take_words(forms, record.dim);
  }
  return found;
}

}  // namespace pydist
