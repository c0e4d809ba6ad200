#include "pipeline/value_classes.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include <memory>
#include <optional>
#include <unordered_map>

#include "base/check.h"

namespace pydist {

namespace {

using Registry = std::unordered_map<PyTypeObject*, std::unique_ptr<ValueClass>>;

// Never destroyed: the interpreter may be gone by then.
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

std::string text_of(PyObject* text) {
  const char* utf8 = PyUnicode_AsUTF8(text);
  if (utf8 == nullptr) throw_python_error();
  return utf8;
}

std::string text_attribute(PyTypeObject* type, const char* name) {
  THPObjectPtr text(checked(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name)));
  return PyUnicode_Check(text.get()) ? text_of(text.get()) : "?";
}

bool has_attribute(PyTypeObject* type, const char* name) {
  return PyObject_HasAttrString(reinterpret_cast<PyObject*>(type), name) == 1;
}

std::optional<ClassKind> kind_of(PyTypeObject* type) {
  if (PyType_IsSubtype(type, &PyTuple_Type) != 0) {
    if (has_attribute(type, "_fields")) return ClassKind::kNamedTuple;
    if (has_attribute(type, "n_sequence_fields")) return ClassKind::kStructSequence;
    return std::nullopt;
  }
  if (!has_attribute(type, "__dataclass_fields__")) return std::nullopt;
  if (PyType_IsSubtype(type, &PyODict_Type) != 0) return ClassKind::kDataclassDict;
  for (PyTypeObject* builtin :
       {&PyDict_Type, &PyList_Type, &PyUnicode_Type, &PyLong_Type, &PyFloat_Type, &PyBytes_Type}) {
    if (PyType_IsSubtype(type, builtin) != 0) return std::nullopt;
  }
  return ClassKind::kDataclass;
}

// Walks from the module to the class, which must be there.
THPObjectPtr find(const std::string& name) {
  const size_t colon = name.find(':');
  THPObjectPtr module(checked(PyUnicode_FromStringAndSize(name.data(), colon)));
  THPObjectPtr found(PyImport_GetModule(module.get()));
  if (found == nullptr) found = checked(PyImport_Import(module.get()));
  for (size_t begin = colon + 1; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    found = checked(PyObject_GetAttrString(found.get(), name.substr(begin, end - begin).c_str()));
    begin = end + 1;
  }
  return found;
}

void check_is_found(PyTypeObject* type, const std::string& name) {
  THPObjectPtr found;
  if (name.find("<locals>") == std::string::npos) {
    try {
      found = find(name);
    } catch (const python_error&) {
      found = nullptr;
    }
  }
  PYDIST_CHECK(found.get() == reinterpret_cast<PyObject*>(type), UsageError, "the class ",
               type_name(type),
               " cannot be found under this name by another process; define it at the top level "
               "of a module to pass its instances between stages");
}

std::vector<PyObject*> field_names(PyTypeObject* type) {
  THPObjectPtr dataclasses(checked(PyImport_ImportModule("dataclasses")));
  THPObjectPtr fields(checked(
      PyObject_CallMethod(dataclasses.get(), "fields", "O", reinterpret_cast<PyObject*>(type))));
  std::vector<PyObject*> names;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fields.get()); ++i) {
    PyObject* name = checked(PyObject_GetAttrString(PyTuple_GET_ITEM(fields.get(), i), "name"));
    PyUnicode_InternInPlace(&name);
    names.push_back(name);
  }
  return names;
}

}  // namespace

void throw_python_error() {
  python_error error;
  error.persist();
  throw error;
}

std::string type_name(PyTypeObject* type) {
  const std::string module = text_attribute(type, "__module__");
  const std::string name = text_attribute(type, "__qualname__");
  return module == "builtins" ? name : module + "." + name;
}

const ValueClass* ValueClass::of(PyTypeObject* type) {
  const auto known = registry().find(type);
  if (known != registry().end()) return known->second.get();
  const auto kind = kind_of(type);
  if (!kind) return nullptr;
  auto made = std::make_unique<ValueClass>();
  made->type = type;
  made->kind = *kind;
  made->name = text_attribute(type, "__module__") + ":" + text_attribute(type, "__qualname__");
  check_is_found(type, made->name);
  if (*kind == ClassKind::kDataclass || *kind == ClassKind::kDataclassDict) {
    made->fields = field_names(type);
  }
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  return (registry()[type] = std::move(made)).get();
}

const ValueClass& ValueClass::named(const std::string& name) {
  THPObjectPtr found = find(name);
  const ValueClass* known =
      PyType_Check(found.get()) != 0 ? of(reinterpret_cast<PyTypeObject*>(found.get())) : nullptr;
  PYDIST_CHECK(known != nullptr, UsageError, "a peer sent an instance of ", name,
               ", which is another kind of object here");
  return *known;
}

}  // namespace pydist
