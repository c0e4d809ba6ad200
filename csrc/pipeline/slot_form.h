// What a receiver must know of a slot to make room for it, as bytes that two of a kind share.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/channel.h"

namespace pydist {

enum class Way : uint8_t { kNone, kHost, kDevice };

struct SlotForm {
  Way way = Way::kNone;  // that the tensor goes; kNone: there is none
  bool requires_grad = false;
  // Of a tensor that goes from device to device.
  at::ScalarType dtype = at::ScalarType::Undefined;
  std::vector<int64_t> sizes = {};
  std::vector<int64_t> strides = {};
};

// Appends to `forms`.
void append_slot_form(const Slot& slot, Way way, std::string& forms);
std::vector<SlotForm> read_slot_forms(std::string_view forms);

}  // namespace pydist
