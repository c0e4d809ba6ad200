#include "pipeline/value_codec.h"

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <cstring>

#include "base/check.h"
#include "pipeline/value_classes.h"

namespace pydist {

namespace {

enum Tag : char {
  kTensor = 'T',  // index of its slot
  kNone = 'N',
  kTrue = 't',
  kFalse = 'f',
  kInt = 'i',     // zigzag
  kBigInt = 'I',  // in hexadecimal
  kFloat = 'd',
  kComplex = 'c',
  kText = 's',
  kBytes = 'b',
  kTuple = '(',
  kList = '[',
  kDict = '{',
  kOrderedDict = 'O',
  kInstance = 'C',  // class, then by its kind
  kDtype = 'y',
  kDevice = 'v',
  kSize = 'z',
};

// Where the encoder is, from the innermost out; only errors read it.
struct Location {
  const Location* outer;
  PyObject* key;  // or null: then the index
  Py_ssize_t index;
  bool is_attribute;
};

std::string text_of(const Location& location, const char* what) {
  if (location.outer == nullptr) return what;
  const std::string outer = text_of(*location.outer, what);
  if (location.key == nullptr) return concat(outer, "[", location.index, "]");
  THPObjectPtr shown(location.is_attribute ? PyObject_Str(location.key)
                                           : PyObject_Repr(location.key));
  const char* key = shown == nullptr ? nullptr : PyUnicode_AsUTF8(shown.get());
  if (key == nullptr) PyErr_Clear();
  if (key == nullptr) key = "?";
  return location.is_attribute ? concat(outer, ".", key) : concat(outer, "[", key, "]");
}

// A list that refers to itself ends here, with RecursionError.
class Nesting {
 public:
  Nesting() {
    if (Py_EnterRecursiveCall(" in a value between stages") != 0) throw_python_error();
  }
  ~Nesting() { Py_LeaveRecursiveCall(); }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;
};

class Encoder {
 public:
  Encoder(const char* what, std::string& bytes, std::vector<Slot>& slots)
      : what_(what), bytes_(bytes), slots_(slots) {}

  void value(PyObject* object, const Location& location) {
    if (THPVariable_CheckExact(object)) return tensor(THPVariable_Unpack(object), location);
    if (object == Py_None) return tag(kNone);
    if (object == Py_True) return tag(kTrue);
    if (object == Py_False) return tag(kFalse);
    if (PyLong_CheckExact(object)) return integer(object);
    if (PyFloat_CheckExact(object)) return floating(PyFloat_AS_DOUBLE(object));
    if (PyUnicode_CheckExact(object)) return text(kText, object);
    const Nesting nesting;
    if (PyTuple_CheckExact(object)) return items(kTuple, object, location);
    if (PyList_CheckExact(object)) return list(object, location);
    if (PyDict_CheckExact(object)) return dict(kDict, object, location);
    if (Py_TYPE(object) == &PyODict_Type) return dict(kOrderedDict, object, location);
    if (!rare(object, location)) instance(object, location);
  }

 private:
  void tag(Tag tag) { bytes_.push_back(tag); }

  void number(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
    bytes_.push_back(static_cast<char>(value));
  }

  void raw(const void* data, size_t nbytes) {
    number(nbytes);
    bytes_.append(static_cast<const char*>(data), nbytes);
  }

  void tensor(const at::Tensor& tensor, const Location& location) {
    PYDIST_CHECK(tensor.layout() == at::kStrided && !tensor.is_quantized(), UsageError,
                 "a tensor of layout ", tensor.layout(), " and type ", tensor.dtype(),
                 " cannot go to the next stage (it is ", text_of(location, what_),
                 "); make it dense first");
    tag(kTensor);
    size_t index = 0;
    while (index < slots_.size() && !slots_[index].tensor.is_same(tensor)) ++index;
    if (index == slots_.size()) slots_.push_back({tensor, tensor.requires_grad()});
    number(index);
  }

  void integer(PyObject* object) {
    int overflow = 0;
    const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow != 0) {
      THPObjectPtr digits(checked(PyNumber_ToBase(object, 16)));
      return text(kBigInt, digits.get());
    }
    tag(kInt);
    number((static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63));
  }

  void floating(double value) {
    tag(kFloat);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  void text(Tag kind, PyObject* object) {
    tag(kind);
    Py_ssize_t nbytes = 0;
    if (const char* utf8 = PyUnicode_AsUTF8AndSize(object, &nbytes)) return raw(utf8, nbytes);
    PyErr_Clear();  // half a surrogate pair, as names of files may have
    THPObjectPtr coded(checked(PyUnicode_AsEncodedString(object, "utf-8", "surrogatepass")));
    raw(PyBytes_AS_STRING(coded.get()), PyBytes_GET_SIZE(coded.get()));
  }

  void string(const std::string& text) { raw(text.data(), text.size()); }

  void elements(PyObject* tuple, const Location& location) {
    const Py_ssize_t size = PyTuple_GET_SIZE(tuple);
    number(size);
    for (Py_ssize_t i = 0; i < size; ++i) {
      value(PyTuple_GET_ITEM(tuple, i), {&location, nullptr, i, false});
    }
  }

  void items(Tag kind, PyObject* tuple, const Location& location) {
    tag(kind);
    elements(tuple, location);
  }

  void list(PyObject* list, const Location& location) {
    THPObjectPtr fixed(checked(PyList_AsTuple(list)));
    items(kList, fixed.get(), location);
  }

  void pairs(PyObject* dict, const Location& location) {
    // Of an OrderedDict, PyDict_Next would give another order.
    THPObjectPtr list(checked(PyMapping_Items(dict)));
    number(PyList_GET_SIZE(list.get()));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.get()); ++i) {
      PyObject* pair = PyList_GET_ITEM(list.get(), i);
      PyObject* key = PyTuple_GET_ITEM(pair, 0);
      value(key, {&location, key, 0, false});
      value(PyTuple_GET_ITEM(pair, 1), {&location, key, 0, false});
    }
  }

  void dict(Tag kind, PyObject* dict, const Location& location) {
    tag(kind);
    pairs(dict, location);
  }

  // NumPy's scalars that are Python numbers too cross as those; it is not linked, nor imported.
  static bool is_of_numpy(PyObject* object) {
    return std::strncmp(Py_TYPE(object)->tp_name, "numpy.", 6) == 0;
  }

  // What is neither common nor an instance of a user's class.
  bool rare(PyObject* object, const Location& location) {
    if (PyFloat_Check(object) && is_of_numpy(object)) {  // numpy.float64
      floating(PyFloat_AS_DOUBLE(object));
    } else if (PyBytes_CheckExact(object)) {
      tag(kBytes);
      raw(PyBytes_AS_STRING(object), PyBytes_GET_SIZE(object));
    } else if (PyComplex_CheckExact(object) ||
               (PyComplex_Check(object) && is_of_numpy(object))) {  // numpy.complex128
      const Py_complex value = PyComplex_AsCComplex(object);
      tag(kComplex);
      bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    } else if (Py_TYPE(object) == &THPSizeType) {
      items(kSize, object, location);
    } else if (THPDtype_Check(object)) {
      tag(kDtype);
      number(static_cast<uint64_t>(reinterpret_cast<THPDtype*>(object)->scalar_type));
    } else if (THPDevice_Check(object)) {
      tag(kDevice);
      string(reinterpret_cast<THPDevice*>(object)->device.str());
    } else {
      return false;
    }
    return true;
  }

  void instance(PyObject* object, const Location& location) {
    const ValueClass* known = class_of(object, location);
    tag(kInstance);
    string(known->name);
    switch (known->kind) {
      case ClassKind::kNamedTuple:
      case ClassKind::kStructSequence:
        return elements(object, location);
      case ClassKind::kDataclass:
        return attributes(object, *known, location);
      case ClassKind::kDataclassDict:
        attributes(object, *known, location);
        pairs(object, location);
    }
  }

  const ValueClass* class_of(PyObject* object, const Location& location) {
    const ValueClass* known = nullptr;
    try {
      known = THPVariable_Check(object) ? nullptr : ValueClass::of(Py_TYPE(object));
    } catch (const UsageError& error) {
      throw UsageError(concat(error.what(), " (it is ", text_of(location, what_), ")"));
    }
    PYDIST_CHECK(known != nullptr, UsageError, "a value of type ", type_name(Py_TYPE(object)),
                 " cannot go to the next stage (it is ", text_of(location, what_),
                 "). Stages may pass tensors, numbers, strings, bytes, None, torch's dtype, device "
                 "and Size, and tuples, lists, dicts, named tuples and dataclasses of these");
    return known;
  }

  // The fields that are set, then whatever else the instance's dict has.
  void attributes(PyObject* object, const ValueClass& known, const Location& location) {
    THPObjectPtr others(PyObject_GenericGetDict(object, nullptr));
    if (others == nullptr) PyErr_Clear();  // all fields are slots
    if (others != nullptr) others = checked(PyDict_Copy(others.get()));
    THPObjectPtr all(checked(PyDict_New()));
    for (PyObject* field : known.fields) {
      THPObjectPtr attribute(PyObject_GetAttr(object, field));
      if (attribute == nullptr && PyErr_ExceptionMatches(PyExc_AttributeError) == 0) {
        throw_python_error();
      }
      PyErr_Clear();
      if (attribute != nullptr) check(PyDict_SetItem(all.get(), field, attribute.get()));
    }
    if (others != nullptr) check(PyDict_Merge(all.get(), others.get(), 0));
    number(PyDict_GET_SIZE(all.get()));
    PyObject* key = nullptr;
    PyObject* attribute = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(all.get(), &position, &key, &attribute) != 0;) {
      value(key, {&location, key, 0, true});
      value(attribute, {&location, key, 0, true});
    }
  }

  static void check(int result) {
    if (result != 0) throw_python_error();
  }

  const char* what_;
  std::string& bytes_;
  std::vector<Slot>& slots_;
};

class Decoder {
 public:
  Decoder(std::string_view bytes, const std::vector<Slot>& slots) : bytes_(bytes), slots_(slots) {}

  PyObject* value() {
    switch (take(1).front()) {
      case kTensor:
        return checked(THPVariable_Wrap(slots_.at(number()).tensor));
      case kNone:
        return Py_NewRef(Py_None);
      case kTrue:
        return Py_NewRef(Py_True);
      case kFalse:
        return Py_NewRef(Py_False);
      case kInt:
        return integer();
      case kBigInt:
        return checked(PyLong_FromString(std::string(raw()).c_str(), nullptr, 16));
      case kFloat:
        return checked(PyFloat_FromDouble(plain<double>()));
      case kComplex:
        return checked(PyComplex_FromCComplex(plain<Py_complex>()));
      case kText:
        return text();
      case kBytes:
        return bytes();
      case kTuple:
        return tuple();
      case kList:
        return list();
      case kDict:
        return filled(checked(PyDict_New()));
      case kOrderedDict:
        return filled(checked(PyODict_New()));
      case kInstance:
        return instance();
      case kDtype:
        return dtype();
      case kDevice:
        return checked(THPDevice_New(at::Device(std::string(raw()))));
      case kSize:
        return called(reinterpret_cast<PyObject*>(&THPSizeType));
      default:
        throw Error("a message between stages is damaged");
    }
  }

 private:
  uint64_t number() {
    uint64_t result = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(take(1).front());
      result |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return result;
    }
  }

  std::string_view take(size_t nbytes) {
    const std::string_view found = bytes_.substr(at_, nbytes);
    PYDIST_CHECK(found.size() == nbytes, Error, "a message between stages ends too early");
    at_ += nbytes;
    return found;
  }

  std::string_view raw() { return take(number()); }

  template <class Plain>
  Plain plain() {
    Plain result{};
    std::memcpy(&result, take(sizeof result).data(), sizeof result);
    return result;
  }

  PyObject* integer() {
    const uint64_t zigzag = number();
    return checked(PyLong_FromLongLong(static_cast<int64_t>((zigzag >> 1) ^ (~(zigzag & 1) + 1))));
  }

  PyObject* text() {
    const std::string_view utf8 = raw();
    return checked(
        PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), "surrogatepass"));
  }

  PyObject* bytes() {
    const std::string_view found = raw();
    return checked(PyBytes_FromStringAndSize(found.data(), static_cast<Py_ssize_t>(found.size())));
  }

  PyObject* tuple() {
    const auto size = static_cast<Py_ssize_t>(number());
    THPObjectPtr result(checked(PyTuple_New(size)));
    for (Py_ssize_t i = 0; i < size; ++i) PyTuple_SET_ITEM(result.get(), i, value());
    return result.release();
  }

  PyObject* list() {
    THPObjectPtr items(tuple());
    return checked(PySequence_List(items.get()));
  }

  // What the type makes of a tuple.
  PyObject* called(PyObject* type) {
    THPObjectPtr items(tuple());
    return checked(PyObject_CallOneArg(type, items.get()));
  }

  PyObject* dtype() {
    auto* known = torch::getTHPDtype(static_cast<at::ScalarType>(number()));
    return Py_NewRef(reinterpret_cast<PyObject*>(known));
  }

  // Takes over the reference to `dict`, which may be of a subclass: its own methods are not called.
  PyObject* filled(PyObject* dict) {
    THPObjectPtr result(dict);
    const bool ordered = PyODict_Check(dict);
    for (uint64_t rest = number(); rest > 0; --rest) {
      THPObjectPtr key(value());
      THPObjectPtr item(value());
      const int failed = ordered ? PyODict_SetItem(dict, key.get(), item.get())
                                 : PyDict_SetItem(dict, key.get(), item.get());
      if (failed != 0) throw_python_error();
    }
    return result.release();
  }

  PyObject* instance() {
    const ValueClass& known = ValueClass::named(std::string(raw()));
    switch (known.kind) {
      case ClassKind::kNamedTuple:
        return named_tuple(known.type);
      case ClassKind::kStructSequence:
        return called(reinterpret_cast<PyObject*>(known.type));
      case ClassKind::kDataclass:
        return with_attributes(known.type, &PyBaseObject_Type);
      case ClassKind::kDataclassDict:
        return filled(with_attributes(known.type, &PyODict_Type));
    }
    return nullptr;
  }

  PyObject* named_tuple(PyTypeObject* type) {
    THPObjectPtr items(tuple());
    THPObjectPtr arguments(checked(PyTuple_Pack(1, items.get())));
    return checked(PyTuple_Type.tp_new(type, arguments.get(), nullptr));
  }

  // As copy.copy does: neither __init__ nor __setattr__ runs, so that frozen ones are no exception.
  PyObject* with_attributes(PyTypeObject* type, PyTypeObject* base) {
    THPObjectPtr nothing(checked(PyTuple_New(0)));
    THPObjectPtr result(checked(base->tp_new(type, nothing.get(), nullptr)));
    for (uint64_t rest = number(); rest > 0; --rest) {
      THPObjectPtr key(value());
      THPObjectPtr attribute(value());
      if (PyObject_GenericSetAttr(result.get(), key.get(), attribute.get()) != 0) {
        throw_python_error();
      }
    }
    return result.release();
  }

  std::string_view bytes_;
  const std::vector<Slot>& slots_;
  size_t at_ = 0;
};

}  // namespace

void encode_value(PyObject* object, const char* what, std::string& structure,
                  std::vector<Slot>& slots) {
  Encoder(what, structure, slots).value(object, {nullptr, nullptr, 0, false});
}

PyObject* decode_value(std::string_view structure, const std::vector<Slot>& slots) {
  return Decoder(structure, slots).value();
}

}  // namespace pydist
