// The typed errors of the engine; bindings map them one to one to pydist.errors.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace pydist {

// The root of everything that the engine itself throws.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller passed something that no rank could accept.
class UsageError : public Error {
 public:
  using Error::Error;
};

// Ranks disagree about an operation, a layout or a model.
class MismatchError : public Error {
 public:
  using Error::Error;
};

// A peer died, raised, or left; names it.
class PeerError : public Error {
 public:
  using Error::Error;
};

// A wait outlasted its time limit; names whom it waited for.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

// Memory or another resource of the system cannot be had; names the remedy.
class ResourceError : public Error {
 public:
  using Error::Error;
};

// Concatenates anything printable.
template <class... Args>
std::string concat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

}  // namespace pydist
