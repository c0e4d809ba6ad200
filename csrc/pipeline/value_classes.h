// The classes of values between stages: by what name they travel, and how their instances are made.
#pragma once

#include <torch/csrc/python_headers.h>

#include <string>
#include <vector>

namespace pydist {

enum class ClassKind : uint8_t {
  kNamedTuple,
  kStructSequence,  // torch.return_types.max and the like
  kDataclass,
  kDataclassDict,  // an OrderedDict that is a dataclass too, as ModelOutput of transformers
};

// One per class, for good: it holds its class, so that the address cannot come to mean another one.
// Everything here needs the GIL.
struct ValueClass {
  PyTypeObject* type = nullptr;
  ClassKind kind = ClassKind::kDataclass;
  std::string name;               // "module:qualified.name"
  std::vector<PyObject*> fields;  // of a dataclass: names

  // Null where values of this type cannot travel. Raises UsageError where they could, but the
  // other process would not find the class under its name.
  static const ValueClass* of(PyTypeObject* type);
  // Looks the class up, each time, since a name may come to mean another class; imports its module
  // if need be, and raises what that raises.
  static const ValueClass& named(const std::string& name);
};

// "numpy.ndarray"; "int" for builtins.
std::string type_name(PyTypeObject* type);

// Takes the Python error that is set and throws it as C++; it may pass any number of frames, and
// the GIL may be given up and taken meanwhile.
[[noreturn]] void throw_python_error();

// What a call returned, which must not be null.
inline PyObject* checked(PyObject* result) {
  if (__builtin_expect(result == nullptr, 0)) throw_python_error();
  return result;
}

}  // namespace pydist
