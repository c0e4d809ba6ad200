// How a Python value becomes bytes and tensors, which is how it crosses between stages, and back.
//
// The bytes say how tensors, numbers, strings and None are nested: one tag each, lengths as
// varints, classes by module and name. No code is in them, and a class is only ever looked up,
// never run: instances are made without their constructors, as copies are.
#pragma once

#include <torch/csrc/python_headers.h>

#include <string>
#include <string_view>
#include <vector>

#include "pipeline/channel.h"

namespace pydist {

// Appends to both; a tensor that occurs more than once has one slot. Raises UsageError that names
// the type of what cannot travel and its place in `object`, which messages call `what`. Needs the
// GIL, as does decode_value.
void encode_value(PyObject* object, const char* what, std::string& structure,
                  std::vector<Slot>& slots);

// A new reference; a tensor that occurs more than once is one object.
PyObject* decode_value(std::string_view structure, const std::vector<Slot>& slots);

}  // namespace pydist
